"""Write a recording as a folder of a JSON manifest and safetensors files, and read it.

    manifest.json            sites, passes, structures, the report; names every tensor
    values-*.safetensors     the tensors, in files of about 2 GiB

The folder is written under a temporary name beside its target and then renamed. A crash at any
moment leaves either no recording or a whole one. The manifest has checksums of itself, of each
file's header and of each tensor. Nothing is pickled, and nothing in a folder is executed.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, final

from torch import Tensor

from hookline.display.text import first_line
from hookline.engine import PORTS, Report, Site, as_written
from hookline.engine.identity import RecordedModel
from hookline.errors import FolderError
from hookline.recordings.encoding import encode
from hookline.recordings.log_entries import Contents, Entry, PartialGradients
from hookline.recordings.manifest import DAMAGE, MANIFEST, REMEDY, sync, write_manifest
from hookline.recordings.stored_values import Files, Stored
from hookline.recordings.target_folder import check_target, move_into_place, name_of_part, part
from hookline.recordings.tensor_file import write_tensors

_FILE_BYTES = 2 * 1024**3
_MOST_RUNS = 10**9  # of a key: `fc#pass999999999`
_FILE_TENSORS = 100_000  # their header takes about 8 MB


@final
class _Writer:
    """A buffer of tensors that writes a file whenever it is full."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pending: list[Tensor] = []
        self._bytes = 0
        self.sums: dict[str, list[str]] = {}
        # File names are new for each recording: an open older one must not read the new files.
        self._token = secrets.token_hex(4)
        self._file = self._file_name()
        self._known: dict[tuple[Any, ...], str] = {}
        self._alive: list[Tensor] = []  # a freed tensor's address could be reused by another

    def put(self, tensor: Tensor) -> str:
        """Store a tensor and return its name; a tensor in the same memory is stored once."""
        identity = (
            tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device,
        )  # fmt: skip
        name = self._known.get(identity)
        if name is not None and tensor.numel():
            return name
        name = self._known[identity] = f"{self._file}/{len(self._pending)}"
        self._alive.append(tensor)
        data = tensor.cpu().contiguous()
        self._pending.append(data)
        self._bytes += data.nbytes
        if self._bytes >= _FILE_BYTES or len(self._pending) >= _FILE_TENSORS:
            self.flush()
        return name

    def _file_name(self) -> str:
        return f"values-{self._token}-{len(self.sums):05}.safetensors"

    def flush(self) -> None:
        """Write the buffered tensors to a file."""
        if self._pending:
            self.sums[self._file] = write_tensors(self._folder / self._file, self._pending)
            self._file = self._file_name()
        self._pending, self._bytes, self._known, self._alive = [], 0, {}, []


def write(folder: str | os.PathLike[str], contents: Contents) -> Path:
    """Write a recording's folder and replace an older recording there.

    Returns:
        The folder's path.

    Raises:
        FolderError: the folder holds other files, or the disk is full or read-only. Nothing is
            left half-written.
    """
    check_target(folder)
    # Resolved, so that "." has a name and a symlink is followed.
    target = Path(os.path.realpath(folder))
    try:
        with part(target, name_of_part(target)) as building:
            try:
                write_contents(building, contents)
                move_into_place(building, target)
            finally:
                shutil.rmtree(building, ignore_errors=True)
    except FolderError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise FolderError(
            f"cannot write the recording {target}: {first_line(error)}."
            "\nNothing was left behind. Choose a writable folder, on a disk with free space."
        ) from error
    return target


def read(folder: str | os.PathLike[str], manifest: Mapping[str, Any]) -> Contents:
    """Parse a manifest; the values are read on look-up.

    Raises:
        FolderError: the manifest is damaged.
    """
    path = Path(folder)
    try:
        return _read_contents(path, manifest)
    except DAMAGE as error:
        raise FolderError(
            f"{path / MANIFEST} is damaged: {type(error).__name__} {first_line(error)}.\n{REMEDY}"
        ) from error


def write_contents(folder: Path, contents: Contents) -> str:
    """Write a recording into a folder that nobody reads yet, and sync it to disk.

    Returns:
        The manifest's checksum.

    Raises:
        OSError, ValueError, RecursionError: the recording cannot be written.
    """
    writer = _Writer(folder)
    lost: list[str] = list(contents.lost)
    notes = [partial(_note, lost, str(site)) for site in contents.sites]
    passes = []
    for number, failed, entries in contents.passes:
        encoded = []
        for entry in entries:
            value, note = entry.value, notes[entry.site]
            if isinstance(value, Stored | PartialGradients):
                value = value.load()
            weight = None if entry.weight is None else float(entry.weight)
            origin = [] if entry.call is None else [entry.call, entry.backward, weight]
            encoded.append([entry.site, encode(value, writer.put, note), *origin])
        passes.append({"number": number, "failed": failed, "values": encoded})
    writer.flush()
    contents.lost[:] = dict.fromkeys(lost)  # saving an opened recording reports its losses again
    report = contents.report
    manifest = {
        "model": report.model_type,
        "sites": [
            {
                "path": site.path, "port": site.port, "leaf": list(site.leaf), "call": site.call,
                "aliases": list(site.aliases), "type": site.module_type,
            }
            for site in contents.sites
        ],
        "modules": [list(row) for row in contents.modules],
        "report": {
            "name": report.name, "passes": report.passes, "other_contexts": report.other_contexts,
            "fired": [count for _, count in report.fired],
            "why": {str(site): text for site, text in report.why.items()},
            "excused": [str(site) for site in report.excused],
        },
        "identity": None if contents.model is None else contents.model.as_json(),
        "lost": contents.lost,
        "checksums": writer.sums,
        "passes": passes,
    }  # fmt: skip
    found = write_manifest(folder, manifest)
    sync(folder)
    return found


def _note(lost: list[str], site: str, what: str) -> None:
    lost.append(f"{site}: {what}")


def _read_contents(folder: Path, manifest: Mapping[str, Any]) -> Contents:
    by_text: dict[str, Site] = {}
    for site in map(_read_site, manifest["sites"]):
        text = str(site)
        if text in by_text:
            raise ValueError(f"each site must be listed once, got {text!r} twice")
        by_text[text] = site
    sites = tuple(by_text.values())
    files = Files(folder, manifest["checksums"])
    passes = []
    for row in manifest["passes"]:
        if row["failed"] not in (None, True, False):
            raise ValueError("the failed state of a pass must be null, true or false")
        entries = [_read_entry(files, sites, *value) for value in row["values"]]
        passes.append((_number(row["number"]), row["failed"], entries))
    kept = manifest["report"]
    report = Report(
        name=str(kept["name"]),
        model_type=str(manifest["model"]),
        passes=int(kept["passes"]),
        other_contexts=int(kept["other_contexts"]),
        ended=True,
        fired=tuple(zip(sites, map(int, kept["fired"]), strict=True)),
        why={_named(text, by_text): str(why) for text, why in kept["why"].items()},
        excused=frozenset(_named(text, by_text) for text in kept["excused"]),
    )
    modules = tuple((str(p), str(t)) for p, t in manifest["modules"])
    lost = [str(item) for item in manifest["lost"]]
    model = RecordedModel.from_json(manifest.get("identity"))
    return Contents(report, sites, passes, lost, modules, model)


def _named(text: str, by_text: Mapping[str, Site]) -> Site:
    """Return the site with a text; hookline before 0.1.0 wrote the root as `:output`."""
    return by_text[text if text in by_text else as_written(text)]


def _read_entry(
    files: Files, sites: tuple[Site, ...], number: int, data: Any, *origin: Any
) -> Entry:
    call, backward, weight = origin or (None, None, None)
    if number < 0:
        raise ValueError("a value must be of a site that is listed")
    return Entry(
        int(number),
        Stored(files, data, sites[number]),
        None,
        None if call is None else _number(call),
        None if backward is None else int(backward),
        None if weight is None else float(weight),
    )


def _number(value: Any) -> int:
    """Return the number of a pass or of a call, as a key may have it.

    Raises:
        ValueError: it is not such a number.
    """
    if type(value) is not int or not 0 <= value < _MOST_RUNS:
        raise ValueError(f"the number of a pass or call must be from 0 up, got {value!r:.80}")
    return value


def _read_site(row: Mapping[str, Any]) -> Site:
    leaf, aliases, call = row["leaf"], row["aliases"], row["call"]
    texts = [row["path"], row["type"], *aliases]
    is_sound = (
        all(isinstance(text, str) for text in texts)
        and all(isinstance(key, str | int) for key in leaf)
        and (call is None or _number(call) == call)
        and row["port"] in PORTS
    )
    if not is_sound:
        raise ValueError(f"not a site: {row!r:.80}")
    return Site(row["path"], row["port"], tuple(leaf), call, tuple(aliases), row["type"])
