"""A recording as a folder: a JSON manifest and safetensors files. Imports encoding, files, place.

    manifest.json            sites, passes, structures, the report; names every tensor
    values-*.safetensors     the tensors, in files of about 2 GiB

The folder is written beside its place and renamed into it, so that a crash at any moment leaves
either no recording or a whole one. Nothing is pickled, and nothing in a folder is executed.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, final

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from hookline.engine import PORTS, Report, Site
from hookline.engine.errors import FolderError
from hookline.recordings.encoding import encode
from hookline.recordings.entries import Contents, Entry, Gathered
from hookline.recordings.files import DAMAGE, Files, Stored
from hookline.recordings.place import (
    FORMAT,
    MANIFEST,
    VERSION,
    check_target,
    first_line,
    head_of,
    move_into_place,
    sync,
    write_manifest,
)

_FILE_BYTES = 2 * 1024**3


@final
class _Writer:
    """Gathers tensors and writes a file whenever enough have come together."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pending: dict[str, Tensor] = {}
        self._bytes = 0
        self._files = 0
        # Every recording names its files anew: one that was opened here before must not find them.
        self._token = secrets.token_hex(4)
        self._known: dict[tuple[Any, ...], str] = {}
        self._storages: set[int] = set()
        self._alive: list[Tensor] = []  # or an address could be given to another tensor meanwhile

    def put(self, tensor: Tensor) -> str:
        """Store a tensor; one that was stored before, under the same memory, only once."""
        identity = (
            tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(),
        )  # fmt: skip
        if tensor.numel() and identity in self._known:
            return self._known[identity]
        self._alive.append(tensor)
        name = f"{self._file_name()}/{len(self._pending)}"
        data = tensor.to("cpu").contiguous()
        storage = data.untyped_storage()
        if storage.nbytes() != data.nbytes or storage.data_ptr() in self._storages:
            data = data.clone()  # safetensors refuses tensors that share memory
        self._storages.add(data.untyped_storage().data_ptr())
        self._pending[name.partition("/")[2]] = data
        self._known[identity] = name
        self._bytes += data.nbytes
        if self._bytes >= _FILE_BYTES:
            self.flush()
        return name

    def _file_name(self) -> str:
        return f"values-{self._token}-{self._files:05}.safetensors"

    def flush(self) -> None:
        """Write what has come together."""
        if self._pending:
            path = self._folder / self._file_name()
            save_file(self._pending, path)
            sync(path)
            self._files += 1
        self._pending, self._bytes, self._known, self._alive = {}, 0, {}, []
        self._storages = set()


def write(folder: str | os.PathLike[str], contents: Contents) -> Path:
    """Write a recording's folder; an older recording there is replaced.

    Returns:
        The folder's path.

    Raises:
        FolderError: the folder holds something else, or the disk is full or read-only. Nothing is
            left half-written.
    """
    check_target(folder)
    # Resolved, so that "." has a name, and a link leads to its folder.
    target = Path(os.path.realpath(folder))
    building = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        building.mkdir()
        lost = _write_contents(building, contents)
        if lost:
            contents.lost[:] = lost
        sync(building)
        move_into_place(building, target)
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise FolderError(
            f"cannot write the recording {target}: {first_line(error)}."
            "\nNothing was left behind; choose a folder on a disk with room that you may write to."
        ) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def read_manifest(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a recording's manifest.

    Raises:
        FolderError: there is no recording, it is of a newer version, or its manifest is damaged.
    """
    path = Path(folder)
    try:
        manifest = json.loads((path / MANIFEST).read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        there = "there is no such folder" if not path.exists() else f"it has no {MANIFEST}"
        there = "it is a file" if path.is_file() else there
        raise FolderError(
            f"{path} is not a recording: {there}.\nGive the folder that run.save(...) wrote."
        ) from None
    except (*DAMAGE, OSError) as error:
        raise FolderError(f"{path / MANIFEST} cannot be read: {first_line(error)}.") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise FolderError(f"{path} is not a recording: its {MANIFEST} is something else's.")
    if manifest.get("version") != VERSION:
        raise FolderError(
            f"{path} is a recording of version {manifest.get('version')}; this hookline reads"
            f" version {VERSION}.\nOpen it with the hookline that wrote it"
            f" ({manifest.get('hookline', 'unknown')}), or record it again."
        )
    return manifest


def read(folder: str | os.PathLike[str], manifest: Mapping[str, Any]) -> Contents:
    """Understand a manifest; the values are read when they are asked for.

    Raises:
        FolderError: it is damaged.
    """
    path = Path(folder)
    try:
        return _read_contents(path, manifest)
    except DAMAGE as error:
        raise FolderError(
            f"{path / MANIFEST} is damaged: {type(error).__name__} {first_line(error)}."
            "\nRecord it again."
        ) from error


def _write_contents(folder: Path, contents: Contents) -> list[str]:
    writer = _Writer(folder)
    lost: list[str] = list(contents.lost)
    passes = []
    for number, failed, entries in contents.passes:
        encoded = []
        for entry in entries:
            site = str(contents.sites[entry.site])
            value = entry.value
            if isinstance(value, Stored | Gathered):
                value = value.load()
            note = partial(_note, lost, site)
            weight = None if entry.weight is None else float(entry.weight)
            origin = [] if entry.call is None else [entry.call, entry.backward, weight]
            encoded.append([entry.site, encode(value, writer.put, note), *origin])
        passes.append({"number": number, "failed": failed, "values": encoded})
    writer.flush()
    lost = list(dict.fromkeys(lost))  # one that was opened and saved again says it once
    report = contents.report
    manifest = {
        **head_of(),
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
            "name": report.name, "passes": report.passes, "elsewhere": report.elsewhere,
            "fired": [count for _, count in report.fired],
            "why": {str(site): text for site, text in report.why.items()},
            "excused": [str(site) for site in report.excused],
        },
        "lost": lost,
        "passes": passes,
    }  # fmt: skip
    path = write_manifest(folder, manifest)
    for file in folder.iterdir():
        shutil.copymode(path, file)  # safetensors makes files that only their owner may read
    return lost


def _note(lost: list[str], site: str, what: str) -> None:
    lost.append(f"{site}: {what}")


def _read_contents(folder: Path, manifest: Mapping[str, Any]) -> Contents:
    sites = tuple(map(_read_site, manifest["sites"]))
    files = Files(folder)
    passes = []
    for row in manifest["passes"]:
        if row["failed"] not in (None, True, False):
            raise ValueError("a pass that neither failed nor did not")
        entries = [_read_entry(files, *value) for value in row["values"]]
        if any(not 0 <= entry.site < len(sites) for entry in entries):
            raise ValueError("a value of a site that is not listed")
        passes.append((int(row["number"]), row["failed"], entries))
    by_text = {str(site): site for site in sites}
    kept = manifest["report"]
    report = Report(
        name=str(kept["name"]),
        model_type=str(manifest["model"]),
        passes=int(kept["passes"]),
        elsewhere=int(kept["elsewhere"]),
        ended=True,
        fired=tuple(zip(sites, map(int, kept["fired"]), strict=True)),
        why={by_text[text]: str(why) for text, why in kept["why"].items()},
        excused=frozenset(by_text[text] for text in kept["excused"]),
    )
    modules = tuple((str(p), str(t)) for p, t in manifest["modules"])
    return Contents(report, sites, passes, [str(item) for item in manifest["lost"]], modules)


def _read_entry(files: Files, site: int, data: Any, *origin: Any) -> Entry:
    call, backward, weight = origin or (None, None, None)
    return Entry(
        int(site),
        Stored(files, data),
        None,
        None if call is None else int(call),
        None if backward is None else int(backward),
        None if weight is None else float(weight),
    )


def _read_site(row: Mapping[str, Any]) -> Site:
    leaf, aliases, call = row["leaf"], row["aliases"], row["call"]
    texts = [row["path"], row["type"], *aliases]
    is_sound = (
        all(isinstance(text, str) for text in texts)
        and all(isinstance(key, str | int) for key in leaf)
        and (call is None or isinstance(call, int))
        and row["port"] in PORTS
    )
    if not is_sound:
        raise ValueError(f"not a site: {row!r:.80}")
    return Site(row["path"], row["port"], tuple(leaf), call, tuple(aliases), row["type"])
