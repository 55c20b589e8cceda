"""A recording as a folder: a JSON manifest and safetensors files. Imports encoding, files, engine.

    manifest.json            sites, passes, structures, the report; names every tensor
    values-*.safetensors     the tensors, in files of about 2 GiB

The folder is written beside its place and renamed into it, so that a crash at any moment leaves
either no recording or a whole one. Nothing is pickled, and nothing in a folder is executed.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from hookline.engine import PORTS, Report, Site
from hookline.engine.errors import FolderError
from hookline.recordings.encoding import encode
from hookline.recordings.entries import Contents, Entry, Gathered
from hookline.recordings.files import DAMAGE, Files, Stored, first_line

FORMAT = "hookline-recording"
VERSION = 1
MANIFEST = "manifest.json"
_FILE_BYTES = 2 * 1024**3
# What may lie in a recording's folder, to be replaced with it: ours, the page included.
_OURS = re.compile(r"manifest\.json|values-[\w-]+\.safetensors|report\.html")


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
            _sync(path)
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
        _sync(building)
        _move_into_place(building, target)
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise FolderError(
            f"cannot write the recording {target}: {first_line(error)}."
            "\nNothing was left behind; choose a folder on a disk with room that you may write to."
        ) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def check_target(folder: str | os.PathLike[str]) -> None:
    """Make sure that a recording may be written here.

    Raises:
        FolderError: there is something that is not a recording.
    """
    target = Path(folder)
    try:
        os.path.realpath(target)  # a name that no file can have
        if not target.exists():
            return
        if not target.is_dir():
            raise FolderError(f"{target} is a file; name a folder for the recording.")
        held = sorted(child.name for child in target.iterdir())
        others = [name for name in held if not _OURS.fullmatch(name)]
        if MANIFEST in held and not others and not _is_manifest(target / MANIFEST):
            others = [MANIFEST]
    except FolderError:
        raise
    except (OSError, ValueError) as error:
        raise FolderError(f"{target} cannot be used: {first_line(error)}.") from error
    if others:
        raise FolderError(
            f"{target} holds something else ({', '.join(others[:3])}{', …' * (len(others) > 3)})."
            "\nName a new folder, an empty one, or an older recording to replace."
        )


def _is_manifest(path: Path) -> bool:
    try:
        return FORMAT in path.read_text("utf-8")[:200]
    except UnicodeDecodeError:
        return False


def read(folder: str | os.PathLike[str]) -> Contents:
    """Read a recording's manifest; its values are read when they are asked for.

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
        "format": FORMAT,
        "version": VERSION,
        "hookline": _version(),
        "torch": str(torch.__version__),
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
    path = folder / MANIFEST
    path.write_text(json.dumps(manifest, indent=1), "utf-8")
    _sync(path)
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


def _move_into_place(building: Path, target: Path) -> None:
    if not target.exists() or not any(target.iterdir()):
        building.replace(target)  # one rename: there or not there
        return
    old = target.with_name(f".{target.name}.{secrets.token_hex(4)}.old")
    target.replace(old)
    try:
        building.replace(target)
    except OSError:
        old.replace(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    """Push a file, or a folder's names, to the disk: the rename must not overtake them."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _version() -> str:
    try:
        return version("hookline")
    except PackageNotFoundError:
        return "unknown"
