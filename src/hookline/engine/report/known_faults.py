"""Warn once of versions of other packages that are known to be wrong.

`KNOWN_FAULTS` is the one place for them. An entry needs a measurement, or a rule of the project.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import final

from hookline.errors import warn
from hookline.util.optional_imports import module_if_imported


@final
@dataclass(frozen=True)
class KnownFault:
    """A fault of the versions of a package before one that is right."""

    package: str  # the name of the package, which is that of its module
    right: tuple[int, int]  # the first version that is right, as (major, minor)
    wrong: str  # what is wrong, after the package and its version

    @property
    def fix(self) -> str:
        """Return the command that installs a version that is right."""
        return f"pip install '{self.package}>={'.'.join(map(str, self.right))}'"

    def affects(self, version: str) -> bool:
        """Tell whether a version has the fault."""
        numbers = re.match(r"(\d+)\.(\d+)", version)
        return numbers is not None and tuple(map(int, numbers.groups())) < self.right


_UNTESTED = "is older than the versions that hookline is tested with"
KNOWN_FAULTS = (
    KnownFault("torch", (2, 11), _UNTESTED),
    # Measured on 4.57.1, which makes its masks under vmap: NotImplementedError.
    # Up to 5.2 the blocks of GPT-2 return tuples, and hidden states leave out an edit.
    KnownFault("transformers", (5, 3), f"{_UNTESTED}: hl.anatomy fails on models before 5.0"),
)


def known_faults_here() -> Iterator[tuple[KnownFault, str]]:
    """Yield the faults of the packages that are imported, each with the package's version."""
    for fault in KNOWN_FAULTS:
        version = getattr(module_if_imported(fault.package), "__version__", None)
        if version is not None and fault.affects(str(version)):
            yield fault, str(version)


def warn_of_known_faults() -> None:
    """Warn of each fault of a package that is imported, once in a process."""
    for fault, version in known_faults_here():
        _warn_once(fault, version)


@cache
def _warn_once(fault: KnownFault, version: str) -> None:
    warn(f"{fault.package} {version} {fault.wrong}.\nRun {fault.fix}.")
