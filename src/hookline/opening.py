"""Open what hookline has written: a recording, a store or the curves of a run."""

from __future__ import annotations

import os

from hookline.curves import Curves, is_run, open_run
from hookline.curves.run_folder import FILE
from hookline.errors import FolderError
from hookline.files.folder_or_url import LocalPlace, Place
from hookline.files.sealed_json import MANIFEST
from hookline.recordings import Recording, as_recording_place, open_recording
from hookline.stores.job_manifest import STORE
from hookline.stores.shard_file import shard_number
from hookline.stores.store import Store, open_store


def open(folder: str | os.PathLike[str], *, verify: bool = False) -> Recording | Store | Curves:
    """Open what `run.save`, `hl.extract`, or the argument `to=` of another verb wrote.

        >>> model = nn.Linear(2, 3)
        >>> with hl.record(model) as run:
        ...     _ = model(torch.zeros(1, 2))
        >>> hl.open(run.save(tmp_path / "run"))["(root)"].shape
        torch.Size([1, 3])
        >>> _ = hl.extract(model, torch.zeros(100, 2), "(root)", tmp_path / "acts")
        >>> hl.open(tmp_path / "acts")["(root)"].shape
        (100, 3)

    `run.save` writes a recording, `hl.extract` and `hl.record(..., to=)` write a store, and
    `hl.monitor(..., to=folder)` writes curves. Curves may be opened while the training goes on:
    each look-up sees the steps that were reported by then.

    Values are memory-mapped on look-up and keep their dtypes. The first look-up of a value verifies
    its checksum; in a store, the first read from a shard verifies that of the shard's column.

    If all ranks of a distributed job saved a recording, a single process can open it without a
    process group: `run.ranks[1]["fc"]`, `run.full("fc", dim=0)`, `run.reduced("fc:grad_output")`.

    A recording is saved without pickle, so some Python objects come back changed:

    - A named tuple keeps its name and fields, and has another class.
    - Dataclasses and `ModelOutput` become a dict whose keys are also attributes.
    - Subclasses of tuple, list, dict and set become their base class; `OrderedDict` becomes a dict.
    - A dict key other than None, a string, a real number, a dtype, a device or a tuple of these
      becomes a string.
    - Sparse, nested, quantized and complex32 tensors, and objects of other classes, become a
      placeholder that prints as `<not saved: ...>`.

    Do not write to the folder's files while they are open. A look-up detects changed files. If a
    file is truncated after a look-up, reading that value kills the process (SIGBUS). `run.save`
    writes new files, so it may replace the recording at any time.

    Args:
        folder: the folder that was written, or a URL of fsspec such as `s3://bucket/features`.
        verify: True verifies the checksums of all values now, which reads the whole folder. It has
            no effect on curves.

    Returns:
        A `Recording`, with the same look-ups as the saved one; a `Store`; or `Curves`.

    Raises:
        FolderError: the folder holds none of these, or one that is damaged, of another version of
            the format, or (a store) not finished.
    """
    place = as_recording_place(folder)
    if isinstance(place, LocalPlace) and is_run(place.folder):
        return open_run(place.folder)
    if not _has_store_manifest(place):
        try:
            return open_recording(place, verify=verify)
        except FolderError:
            # Its writer may have begun meanwhile; or its manifest is lost.
            if isinstance(place, LocalPlace) and is_run(place.folder):
                return open_run(place.folder)
            if not (_has_store_manifest(place) or _has_shards(place)):
                _refuse_curves(place)
                raise
    return open_store(place, verify=verify)


def _has_store_manifest(place: Place) -> bool:
    try:
        return STORE.is_format_of(place)
    except (OSError, ValueError):
        return False  # opening a recording says what is wrong


def _has_shards(place: Place) -> bool:
    return any(shard_number(name) is not None for name in _names(place))


def _refuse_curves(place: Place) -> None:
    """Say why the curves in a place cannot be opened, if there are some and no manifest."""
    try:
        place.size(FILE)
    except OSError:
        return  # the error of opening a recording says what is wrong
    if MANIFEST in _names(place):
        return
    if not isinstance(place, LocalPlace):
        raise FolderError(
            f"{place} must be a folder on a disk, because it holds a run, got a URL."
            "\nCopy the folder to a disk, and open it there."
        )
    raise FolderError(
        f"{place} is damaged: its {FILE} must be a file that begins as that of a run.\nCopy the"
        " folder again from a whole one; or, if the run has only just begun, open it again."
    )


def _names(place: Place) -> list[str]:
    try:
        return place.names()
    except FolderError:
        return []
