"""Write a recording as a JSON manifest and safetensors files, and read it.

    manifest.json                    sites, passes, structures, the report; names every tensor
    values-TOKEN-NUMBER.safetensors  the tensors, in files of about 2 GiB

The recordings of several ranks are folders with such files, and a manifest beside them:

    manifest.json                    names the ranks' folders, each with its manifest's checksum
    rank0-TOKEN/, rank1-TOKEN/, …    one recording each

The manifest is written last: a crash at any moment leaves either no recording or a whole one. It
has checksums of itself, of each file's header and of each tensor. Nothing is pickled, and nothing
in a folder is executed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from hookline.display.text import first_line, listed
from hookline.engine import (
    PORTS,
    Report,
    Site,
    format_by_rank,
    gather_json,
    group_ranks,
    has_process_group,
    normalize_root,
)
from hookline.engine.model_fingerprint import RecordedModel
from hookline.engine.run_settings import Settings
from hookline.errors import FolderError, RanksError
from hookline.files.folder_or_url import LocalPlace, Place
from hookline.files.safetensors_file import encode_tensors
from hookline.files.sealed_json import MANIFEST, seal_json, stored_checksum, verify_seal
from hookline.files.unreadable_or_damaged import DAMAGE, convert_read_errors
from hookline.recordings.atomic_replace import (
    RANK,
    RECORDING,
    RecordingDraft,
    check_target,
    resolve_links,
)
from hookline.recordings.encoding import Lost, encode
from hookline.recordings.log_entries import Entry, FolderContents, PartialGradients, PassContents
from hookline.recordings.stored_values import REMEDY, StoredValue, TensorFiles

_MOST_RUNS = 10**9  # of a key: `fc#pass999999999`
_FILE_TENSORS = 100_000  # their header takes about 8 MB


@final
class _TensorWriter:
    """A buffer of tensors that writes a file whenever it is full.

    The names of the files have the token of the draft in them: an open older recording must not
    read the new files.
    """

    def __init__(self, place: Place, token: str) -> None:
        self._place, self._token = place, token
        self._pending: list[Tensor] = []
        self._bytes = 0
        self.sums: dict[str, list[str]] = {}
        self._names: dict[tuple[Any, ...], str] = {}
        self._alive: list[Tensor] = []  # a freed tensor's address could be reused by another

    def add_tensor(self, tensor: Tensor) -> str:
        """Store a tensor and return its name; a tensor in the same memory is stored once."""
        identity = (
            tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device,
        )  # fmt: skip
        name = self._names.get(identity)
        if name is not None and tensor.numel():
            return name
        name = self._names[identity] = f"{self._file_name()}/{len(self._pending)}"
        self._alive.append(tensor)
        data = tensor.cpu().contiguous()
        self._pending.append(data)
        self._bytes += data.nbytes
        if self._bytes >= self._place.most_bytes or len(self._pending) >= _FILE_TENSORS:
            self.flush()
        return name

    def _file_name(self) -> str:
        return f"values-{self._token}-{len(self.sums):05}.safetensors"

    def flush(self) -> None:
        """Write the buffered tensors to a file."""
        if self._pending:
            chunks, sums = encode_tensors(self._pending)
            name = self._file_name()
            self._place.write_new(name, chunks)
            self.sums[name] = sums
        self._pending, self._bytes, self._names, self._alive = [], 0, {}, []


def write_recording(folder: str | os.PathLike[str], contents: FolderContents) -> Path | str:
    """Write a recording, replace an older one there, and return the folder's path or URL.

    Raises:
        FolderError: the folder holds other files, or the disk is full or read-only. Nothing is
            left half-written.
    """
    place = resolve_links(folder)
    try:
        with RecordingDraft(place) as draft:
            draft.commit(write_tensor_files(place, draft.token, contents))
    except FolderError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise FolderError(
            f"cannot write the recording {place_to_path_or_url(place)}: {first_line(error)}."
            "\nNothing was left behind. Choose a writable folder, on a disk with free space."
        ) from error
    return place_to_path_or_url(place)


def place_to_path_or_url(place: Place) -> Path | str:
    """Return the path of a folder, or its URL."""
    return place.folder if isinstance(place, LocalPlace) else str(place)


def parse_manifest(place: Place, manifest: Mapping[str, Any]) -> FolderContents:
    """Parse a manifest; the values are read on look-up."""
    try:
        return _parse_contents(place, manifest)
    except DAMAGE as error:
        raise FolderError(
            f"{place}/{MANIFEST} is damaged: {type(error).__name__} {first_line(error)}.\n{REMEDY}"
        ) from error


def write_tensor_files(place: Place, token: str, contents: FolderContents) -> bytes:
    """Write a recording's tensors to files that no manifest names yet, and return the manifest.

    The names of the files have the token in them.

    Raises:
        OSError, ValueError, RecursionError: the recording cannot be written.
    """
    writer = _TensorWriter(place, token)
    lost: list[str] = list(contents.lost)
    notes = [partial(_append_loss, lost, str(site)) for site in contents.sites]
    passes = []
    settings: list[Settings | None] = []
    for number, failed, entries, of_pass in contents.passes:
        encoded = []
        for entry in entries:
            weight = None if entry.weight is None else float(entry.weight)
            origin = [] if entry.call is None else [entry.call, entry.backward, weight]
            value = _encode_value(entry.value, writer, notes[entry.site])
            encoded.append([entry.site, value, *origin])
        if of_pass not in settings:
            settings.append(of_pass)
        row = {"number": number, "failed": failed, "settings": settings.index(of_pass)}
        passes.append({**row, "values": encoded})
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
        "modules": list(contents.modules.items()),
        "report": {
            "name": report.name, "passes": report.passes, "other_contexts": report.other_contexts,
            "fired": list(report.counts),
            "why": {str(site): text for site, text in report.why.items()},
            "excused": [str(site) for site in report.excused],
        },
        "identity": None if contents.model is None else contents.model.as_json(),
        "settings": [None if row is None else row.as_json() for row in settings],
        "lost": contents.lost,
        "checksums": writer.sums,
        "passes": passes,
    }  # fmt: skip
    return encode_manifest(manifest)


def _encode_value(value: Any, writer: _TensorWriter, lost: Lost) -> Any:
    if isinstance(value, StoredValue):  # what it has lost is known
        return value.encode(writer.add_tensor)
    if isinstance(value, PartialGradients):
        value = value.load()
    return encode(value, writer.add_tensor, lost)


def encode_manifest(body: Mapping[str, Any]) -> bytes:
    """Return the bytes of a manifest with these keys after those that all manifests have."""
    return seal_json({**RECORDING.first_keys(), "torch": str(torch.__version__), **body})


def read_manifest(place: Place) -> dict[str, Any]:
    """Read the manifest of a place and verify its checksum.

    Raises:
        FileNotFoundError: the manifest does not exist.
        FolderError: it has another version, is damaged, cannot be read now, or belongs to another
            program.
    """
    path = f"{place}/{MANIFEST}"
    try:
        with convert_read_errors(path):
            data = place.read(MANIFEST)
        manifest: dict[str, Any] = json.loads(data, object_hook=_SeenSites().refuse_repeat)
    except DAMAGE as error:
        raise FolderError(f"{path} cannot be read: {first_line(error)}.\n{REMEDY}") from error
    RECORDING.check_format(manifest, place)
    try:
        verify_seal(data)
    except ValueError as error:
        raise FolderError(f"{path} is damaged: {error}.\n{REMEDY}") from error
    return manifest


class _SeenSites:
    """The set of sites that a manifest has listed so far.

    Duplicates are refused while parsing: a file that repeats a site 300,000 times takes seconds.
    """

    def __init__(self) -> None:
        self._sites: set[Any] = set()

    def refuse_repeat(self, row: dict[str, Any]) -> dict[str, Any]:
        """Note the site of a JSON object; other objects are returned unchanged."""
        if "path" in row and "port" in row:
            leaf = tuple(row.get("leaf", ()))
            site = row["path"], row["port"], leaf, row.get("call")
            if site in self._sites:
                raise ValueError(f"each site must be listed once, got {str(Site(*site))!r} twice")
            self._sites.add(site)
        return row


def _append_loss(lost: list[str], site: str, part: str) -> None:
    lost.append(f"{site}: {part}")


def _parse_contents(place: Place, manifest: Mapping[str, Any]) -> FolderContents:
    by_text: dict[str, Site] = {}
    for site in map(_read_site, manifest["sites"]):
        text = str(site)
        if text in by_text:
            raise ValueError(f"each site must be listed once, got {text!r} twice")
        by_text[text] = site
    sites = tuple(by_text.values())
    files = TensorFiles(place, manifest["checksums"])
    passes = []
    settings = [
        None if row is None else Settings.from_json(row) for row in manifest.get("settings", ())
    ]
    for row in manifest["passes"]:
        if row["failed"] not in (None, True, False):
            raise ValueError("the failed state of a pass must be null, true or false")
        entries = [_read_entry(files, sites, *value) for value in row["values"]]
        # hookline before 0.2.0 wrote no settings
        of_pass = settings[_check_run_number(row["settings"])] if settings else None
        passes.append(
            PassContents(_check_run_number(row["number"]), row["failed"], entries, of_pass)
        )
    fields = manifest["report"]
    report = Report(
        name=str(fields["name"]),
        model_type=str(manifest["model"]),
        passes=int(fields["passes"]),
        other_contexts=int(fields["other_contexts"]),
        ended=True,
        sites=sites,
        counts=tuple(int(count) for _, count in zip(sites, fields["fired"], strict=True)),
        why={_find_site(text, by_text): str(why) for text, why in fields["why"].items()},
        excused=frozenset(_find_site(text, by_text) for text in fields["excused"]),
    )
    modules = {str(path): str(kind) for path, kind in manifest["modules"]}
    lost = [str(item) for item in manifest["lost"]]
    model = RecordedModel.from_json(manifest.get("identity"))
    return FolderContents(report, sites, passes, lost, modules, model)


def _find_site(text: str, by_text: Mapping[str, Site]) -> Site:
    """Return the site with a text; hookline before 0.1.0 wrote the root as `:output`."""
    return by_text[text if text in by_text else normalize_root(text)]


def _read_entry(
    files: TensorFiles, sites: tuple[Site, ...], number: int, data: Any, *origin: Any
) -> Entry:
    call, backward, weight = origin or (None, None, None)
    if number < 0:
        raise ValueError("a value must be of a site that is listed")
    return Entry(
        int(number),
        StoredValue(files, data, sites[number]),
        None,
        None if call is None else _check_run_number(call),
        None if backward is None else int(backward),
        None if weight is None else float(weight),
    )


def _check_run_number(value: Any) -> int:
    """Return the number of a pass or of a call, as a key may have it."""
    if type(value) is not int or not 0 <= value < _MOST_RUNS:
        raise ValueError(f"the number of a pass or call must be from 0 up, got {value!r:.80}")
    return value


def _read_site(row: Mapping[str, Any]) -> Site:
    leaf, aliases, call = row["leaf"], row["aliases"], row["call"]
    texts = [row["path"], row["type"], *aliases]
    is_sound = (
        all(isinstance(text, str) for text in texts)
        and all(isinstance(key, str | int) for key in leaf)
        and (call is None or _check_run_number(call) == call)
        and row["port"] in PORTS
    )
    if not is_sound:
        raise ValueError(f"not a site: {row!r:.80}")
    return Site(row["path"], row["port"], tuple(leaf), call, tuple(aliases), row["type"])


def has_several_ranks(group: Any) -> bool:
    """Return whether this process is one of several ranks of a group."""
    return has_process_group() and dist.get_world_size(group) > 1


def write_ranks(
    folder: str | os.PathLike[str],
    get_contents: Any,
    sites: tuple[Site, ...],
    group: Any,
    timeout: float,
) -> tuple[Path | str, FolderContents]:
    """Write this rank's recording into the folder of all ranks. A collective.

    `get_contents` returns this rank's recording as plain data, or raises. `sites` are those that
    this rank selected.

    Raises:
        RanksError: a rank is missing, or named another folder, or selected other sites.
        FolderError: a rank could not write. Nothing is left behind.
    """
    question = f"run.save({os.fspath(folder)!r})"
    rank_group = _RankGroup(question, group_ranks(group, question), timeout)
    place = resolve_links(folder)
    draft = RecordingDraft(place, leads=dist.get_rank() == rank_group.ranks[0])
    contents: FolderContents

    def begin() -> dict[str, Any]:
        nonlocal contents
        check_target(folder)
        contents = get_contents()
        texts = [str(site) for site in sites]
        modules = json.dumps(list(contents.modules.items())).encode()
        model = hashlib.sha256(modules).hexdigest()[:12]
        return {"sites": texts, "model": model, "token": draft.token}

    answers = rank_group.gather_results(begin)
    _check_same_sites(rank_group, answers)
    draft.token = answers[0]["token"]
    with ExitStack() as stack:

        def write_part() -> dict[str, Any]:
            stack.enter_context(draft)
            part = place / _rank_folder_name(dist.get_rank(), draft)
            manifest = write_tensor_files(part, draft.token, contents)
            part.write(MANIFEST, [manifest])
            return {"checksum": stored_checksum(manifest)}

        sums = [answer["checksum"] for answer in rank_group.gather_results(write_part)]
        # The first rank writes the manifest of all parts; all ranks learn whether that worked.
        rank_group.gather_results(
            partial(_commit_ranks_manifest, rank_group.ranks, draft, place, sums)
        )
    return place_to_path_or_url(place), contents


@final
@dataclass(frozen=True)
class _RankGroup:
    """The global ranks that save one folder together, and the call as code, for messages."""

    question: str
    ranks: list[int]
    timeout: float

    def gather_results(self, work: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        """Exchange what each rank's work returns; raise on all if one raises. A collective."""
        error = None
        try:
            answer = {**work(), "error": None}
        except Exception as caught:
            answer, error = {"error": first_line(caught)}, caught
        answers = gather_json(self.question, answer, self.ranks, self.timeout, is_of_a_step=True)
        if any(answer["error"] for answer in answers):
            texts = [answer["error"] or "is ready" for answer in answers]
            raise FolderError(
                f"{self.question}: nothing was written. {format_by_rank(self.ranks, texts)}."
                "\nFix the error named above, or save one rank's recording only: alone=True."
            ) from error
        return answers


def _commit_ranks_manifest(
    ranks: Sequence[int], draft: RecordingDraft, place: Place, sums: list[str]
) -> dict[str, Any]:
    """Write the manifest of all parts, on the first rank."""
    if dist.get_rank() == ranks[0]:
        parts = dict(zip([_rank_folder_name(rank, draft) for rank in ranks], sums, strict=True))
        unseen = [name for name in parts if name not in place.names()]
        if unseen:
            raise FolderError(
                f"rank {ranks[0]} does not see the folders of other ranks"
                f" ({listed(unseen, 4)}): the folder must be on a disk that all ranks share"
            )
        draft.commit(encode_manifest({"ranks": parts}))
    return {}


def _rank_folder_name(rank: int, draft: RecordingDraft) -> str:
    return f"rank{rank}-{draft.token}"


def _check_same_sites(rank_group: _RankGroup, answers: list[dict[str, Any]]) -> None:
    """Check that ranks with the same model selected the same sites; pipeline stages may differ."""
    if (
        len({answer["model"] for answer in answers}) == 1
        and len({tuple(answer["sites"]) for answer in answers}) > 1
    ):
        texts = [listed(answer["sites"], 8) for answer in answers]
        raise RanksError(
            f"{rank_group.question}: the ranks selected different sites of the same model:"
            f" {format_by_rank(rank_group.ranks, texts)}.\nSelect the same sites on every rank, or"
            " save one rank's recording only: alone=True."
        )


def read_rank_checksums(place: Place, manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of the ranks' folders, each with its manifest's checksum."""
    ranks = manifest["ranks"]
    if not isinstance(ranks, dict) or not ranks or not all(map(RANK.fullmatch, ranks)):
        raise FolderError(
            f"{place} is damaged: ranks must be the folders of one rank or more, got {ranks!r:.80}."
            f"\n{REMEDY}"
        )
    return ranks
