"""Write the numbers of a sweep to a folder as they are measured, and go on from there."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, final

from torch import nn

from hookline.data.fingerprints import fingerprint
from hookline.display.text import first_line
from hookline.engine.model_fingerprint import function_identity, model_identity
from hookline.errors import FolderError
from hookline.files.folder_or_url import as_place
from hookline.files.sealed_json import MANIFEST, FolderFormat, seal_json, verify_seal
from hookline.files.unreadable_or_damaged import DAMAGE, convert_read_errors
from hookline.verbs.sweep.grid import ChangeEntry

FORMAT = FolderFormat(
    "hookline sweep", 1, "a sweep", "hl.sweep(..., to=)", "measure it again in a new folder"
)
Results = dict[tuple[int, ...], tuple[float, bool]]


def fingerprint_sweep(
    model: nn.Module, inputs: Any, clean: Any, metric: Any, entries: Sequence[ChangeEntry]
) -> dict[str, Any]:
    """Identify what a sweep measures, so that another sweep does not go on with its numbers."""
    return {
        "model": fingerprint(model_identity(model)),
        "inputs": fingerprint(inputs),
        "clean inputs": fingerprint(clean),
        "metric": function_identity(metric),
        "changes": fingerprint([_entry_texts(entry) for entry in entries]),
    }


def _entry_texts(entry: ChangeEntry) -> list[Any]:
    """Return the sites, labels and functions of changes, as texts."""
    sites = [str(site) for site, _ in entry.places]
    return [sites, [(repr(label), *map(function_identity, functions))
                    for label, functions in entry.changes.items()]]  # fmt: skip


@final
class SweepFolder:
    """The folder of a sweep.

    Args:
        to: the folder, or a URL.
        job: what the sweep measures, as JSON.

    Raises:
        FolderError: the folder holds another sweep or other files, or is damaged.
    """

    def __init__(self, to: str | os.PathLike[str], job: Mapping[str, Any]) -> None:
        self._place = as_place(to)
        self._job = json.loads(json.dumps(job))
        self.results: Results = {}
        if MANIFEST in self._place.names():
            self._read()
        elif self._place.names():
            raise FolderError(
                f"{self._place} must be empty or hold a sweep, got other files.\nGive a new folder."
            )

    def _read(self) -> None:
        try:
            with convert_read_errors(f"{self._place}/{MANIFEST}"):
                data = self._place.read(MANIFEST)
            manifest = json.loads(data)
            FORMAT.check_format(manifest, self._place)
            verify_seal(data)
            job = dict(manifest["job"])
            self.results = dict(map(_parse_row, manifest["results"]))
        except FolderError:
            raise
        except (FileNotFoundError, *DAMAGE) as error:  # a link that leads nowhere
            raise FolderError(
                f"{self._place} is damaged: {first_line(error)}.\nMeasure the sweep again in a new"
                " folder."
            ) from error
        for name, value in self._job.items():
            if job.get(name) != value:
                raise FolderError(
                    f"{self._place} must hold this sweep, got one with other {name}."
                    "\nGive a new folder for this one."
                )

    def write(self, results: Results) -> None:
        """Write the numbers that are there.

        Raises:
            FolderError: they cannot be written.
        """
        rows = [(index, number.hex(), has_moved) for index, (number, has_moved) in results.items()]
        manifest = {**FORMAT.first_keys(), "job": self._job, "results": rows}
        self._place.write(MANIFEST, [seal_json(manifest)])


def _parse_row(row: Any) -> tuple[tuple[int, ...], tuple[float, bool]]:
    """Return the index, the number and whether it has moved, of a row that `write` wrote."""
    index, number, has_moved = row
    if not {*map(type, index)} <= {int} or type(has_moved) is not bool:
        raise ValueError(f"a row of numbers must have an index, got {row!r:.80}")
    return tuple(index), (float.fromhex(number), has_moved)
