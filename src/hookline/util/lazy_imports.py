"""Import the public names of a package on first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from hookline.util.preserve_python_rng import preserve_python_rng


def lazy_getattr(
    package: str, modules: Mapping[str, str], elsewhere: Mapping[str, str] | None = None
) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package whose names are imported on first use.

    >>> find = lazy_getattr("hookline.util", {"shorten": "hookline.display.text"})
    >>> find("shorten").__name__
    'shorten'

    Args:
        package: the name of the package.
        modules: the module of each public name. A name may be a module of a package.
        elsewhere: what to use in place of names that other packages have.
    """

    def find(name: str) -> Any:
        if name not in modules:
            use = (elsewhere or {}).get(name)
            advice = f".\nUse {use}." if use else ""
            raise AttributeError(f"module {package!r} has no attribute {name!r}{advice}")
        with preserve_python_rng():  # rich draws a number as it is imported
            holder = import_module(modules[name])
            is_there = hasattr(holder, name)
            value = getattr(holder, name) if is_there else import_module(f"{modules[name]}.{name}")
        setattr(sys.modules[package], name, value)
        return value

    return find
