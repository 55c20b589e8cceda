"""Merge stores: parts of one job that several machines did, or stores of the same sites."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from typing import Any

from hookline.display.text import first_line, plural
from hookline.errors import FolderError, InputError, StructureError
from hookline.files.folder_or_url import LocalPlace, Place, as_place, locked
from hookline.files.safetensors_file import header_end
from hookline.files.unreadable_or_damaged import DamagedError
from hookline.stores.first_batch_summary import compare_summaries
from hookline.stores.job_manifest import (
    LOOP,
    UNKNOWN,
    identity_fields,
    read_manifest,
    write_manifest,
)
from hookline.stores.shard_file import (
    Shard,
    read_shard,
    renumber_shard,
    shard_file_name,
    shard_number,
)
from hookline.stores.store import NAMES, Store, open_store

# What stores of other data may differ in.
_OF_DATA = frozenset({"data", "n_items", "batch_size", "shard_batches"})


def merge(
    places: Sequence[str | os.PathLike[str] | Place | Store], to: str | os.PathLike[str] | Place
) -> Store:
    """Make one store of several.

        >>> from hookline.stores import merge
        >>> model = nn.Linear(2, 3)
        >>> for name, rows in [("a", torch.zeros(10, 2)), ("b", torch.ones(5, 2))]:
        ...     _ = hl.extract(model, rows, "", tmp_path / name)
        >>> len(merge([tmp_path / "a", tmp_path / "b"], tmp_path / "both"))
        15

    There are two cases. If several machines did parts of one `hl.extract` call, the stores are of
    one job. They need not be finished, but together they must hold all shards (files). The new
    store is, byte for byte, the one that a single machine would have made.

    If the stores are of different data, or of loops of `hl.record(to=)`, they must be finished, and
    have the same model, sites and options. The rows of the new store are theirs, one store behind
    the other; it has no `files` and `labels`. `hl.Store.cat` reads such stores as one without
    writing anything.

    The shards of one job become hard links if they lie on the disk of the new store. All other
    shards are copied. The checksum of each column is verified.

    Args:
        places: the folders or URLs, or the opened stores, in the order of their rows.
        to: a new folder or URL.

    Returns:
        The new store.

    Raises:
        FolderError: one is not a store, is damaged, or misses shards; `to` is not empty.
        StructureError: there is no store, or they differ in their model, sites or options.
        InputError: one place is given in place of several, or something else than a place.
    """
    if isinstance(places, str | os.PathLike | Place | Store):
        names = ", ".join(repr(str(place)) for place in _flatten_places(places))
        raise InputError(
            f"places must be a list of stores, got {names}."
            f"\nGive all that belong together: [{names}, ...]."
        )
    sources = [place for given in places for place in _flatten_places(given)]
    target = as_place(to)
    if not sources:
        raise StructureError("merge must have one or more stores, got none.\nGive their folders.")
    target.again = "Merge again, into a new folder."
    manifests = [_read_required_manifest(place) for place in sources]
    _check_alike(sources, manifests)
    with locked(target):
        if target.names():
            raise FolderError(f"{target} must be empty to merge into.\nGive a new folder.")
        job, made_on = manifests[0]["job"], manifests[0]["environment"]
        if _are_of_one_job(manifests):
            _check_first_batches(sources, [manifest["job"] for manifest in manifests])
            shards = _copy_shards_of_one_job(sources, manifests, target)
        else:
            shards = _copy_shards_renumbered(sources, manifests, target)
            parts = [manifest["job"] for manifest in manifests]
            n_items = sum(shard.items for shard in shards)
            data = {"kind": "merged", "parts": [part["data"] for part in parts]}
            job = {**job, "data": data, "n_items": n_items}
        write_manifest(target, job, made_on, shards)
    return open_store(target)


def _flatten_places(given: str | os.PathLike[str] | Place | Store) -> list[Place]:
    """Return the place of a store; of one that joins several, the places of these."""
    if isinstance(given, Store):
        return [place for part in given.parts for place in _flatten_places(part)] or [given.place]
    if isinstance(given, str | os.PathLike | Place):
        return [as_place(given)]
    raise InputError(
        f"places must be folders, URLs or stores, got {type(given).__name__}."
        "\nGive those that hl.extract wrote: ['features/a', 'features/b']."
    )


def _read_required_manifest(place: Place) -> dict[str, Any]:
    manifest = read_manifest(place)
    if manifest is None:
        raise FolderError(f"{place} is not a store.\nGive a folder that hl.extract wrote.")
    return manifest


def _check_alike(places: Sequence[Place], manifests: Sequence[Mapping[str, Any]]) -> None:
    """Check that stores are of the same model, sites and options."""
    first = _comparable_parts(manifests[0])
    for place, manifest in zip(places, manifests, strict=True):
        other = _comparable_parts(manifest)
        for key in sorted({*first, *other}):
            if first.get(key) != other.get(key):
                raise StructureError(
                    f"stores that are merged must have the same {key}, got {first.get(key)} in"
                    f" {places[0]} and {other.get(key)} in {place}."
                    "\nExtract with the same model, selector and options."
                )


def _comparable_parts(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a job, and its options one by one, that merged stores have alike."""
    parts = {
        key: part for key, part in identity_fields(manifest["job"]).items() if key not in _OF_DATA
    }
    options = parts.pop("options")
    return parts | {f"{name}=": value for name, value in options.items() if name != "shard_bytes"}


def _are_of_one_job(manifests: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether stores have shards of one job, which several machines did."""
    job = manifests[0]["job"]
    if len(manifests) > 1 and not _identifies_data(job["data"]):
        return False
    return all(
        identity_fields(manifest["job"]) == identity_fields(job) for manifest in manifests[1:]
    )


def _identifies_data(data: Mapping[str, Any]) -> bool:
    """Tell whether equal descriptions of data mean equal data: all loops are described alike."""
    return data.get("kind") not in (LOOP, UNKNOWN) and all(
        map(_identifies_data, data.get("parts", ()))
    )


def _check_first_batches(places: Sequence[Place], jobs: Sequence[Mapping[str, Any]]) -> None:
    """Check that the stores of one job have the same values for its first batch."""
    first_batches = [
        (place, job["first_batch"])
        for place, job in zip(places, jobs, strict=True)
        if "first_batch" in job
    ]
    for place, values in first_batches[1:]:
        first_place, first = first_batches[0]
        differences = compare_summaries(first, values, is_same_setup=False).far
        if differences:
            raise StructureError(
                f"stores of one job must be of one model, got other values for the first batch in"
                f" {place} than in {first_place}: {differences[0]}."
                "\nExtract with the same model, hooks and edits."
            )


def _copy_shards_of_one_job(
    places: Sequence[Place], manifests: Sequence[Mapping[str, Any]], target: Place
) -> list[Shard]:
    """Gather the shards of one job, each from the first store that has it."""
    by_number: dict[int, tuple[Place, Shard]] = {}
    for place in places:
        for name in place.names():
            number = shard_number(name)
            if number is None:
                continue
            shard = _read_verified_shard(place, name)
            _, first = by_number.setdefault(number, (place, shard))
            if first.seal != shard.seal:
                raise FolderError(
                    f"{by_number[number][0]} and {place} must hold the same {name}, got other"
                    " values.\nLeave one of the stores out. If they are of different data,"
                    " hl.Store.cat joins them."
                )
    by_number = dict(sorted(by_number.items()))
    shards = [shard for _, shard in by_number.values()]
    _check_complete(manifests, shards)
    for number, (place, _) in by_number.items():
        _link_or_copy(place, target, shard_file_name(number))
    for place in places:
        if NAMES in place.names():
            _link_or_copy(place, target, NAMES)
            break
    return shards


def _check_complete(manifests: Sequence[Mapping[str, Any]], shards: Sequence[Shard]) -> None:
    """Check that no shard of a job is missing."""
    job = manifests[0]["job"]
    counts = [
        len(manifest["shards"]["seals"]) for manifest in manifests if manifest["shards"] is not None
    ]
    if job["n_items"] is not None and not counts:
        counts = [-(-job["n_items"] // (job["batch_size"] * job["shard_batches"]))]
    if not counts:
        raise FolderError(
            "stores of data without a length must be finished to be merged, got none that is."
            "\nFinish one of them: start its hl.extract again."
        )
    missing = sorted({*range(max(counts))} - {shard.number for shard in shards})
    if missing:
        raise FolderError(
            f"stores of one job must hold all of its shards to be merged, got"
            f" {plural(len(missing), 'shard')} in none of them: {missing[:5]}."
            "\nGive the store that has them, too, or start hl.extract in one of them to make them."
        )


def _copy_shards_renumbered(
    places: Sequence[Place], manifests: Sequence[Mapping[str, Any]], target: Place
) -> list[Shard]:
    """Copy the shards of finished stores, with new numbers."""
    for place, manifest in zip(places, manifests, strict=True):
        if manifest["shards"] is None:
            raise FolderError(
                f"{place} must be finished to be merged with stores of other data."
                "\nStart the same hl.extract again: it keeps the complete shards."
            )
    shards: list[Shard] = []
    for place, manifest in zip(places, manifests, strict=True):
        before = shards[-1].batches[1] if shards else 0
        for number in range(len(manifest["shards"]["seals"])):
            name = shard_file_name(number)
            shard = _read_verified_shard(place, name)
            end = header_end(place.read(name, 0, 8))
            head, new = renumber_shard(
                place.read(name, 0, end), shard.size, len(shards), before + shard.batches[0]
            )
            target.write(shard_file_name(new.number), [head, place.view(name, end, shard.size)])
            shards.append(new)
    return shards


def _read_verified_shard(place: Place, name: str) -> Shard:
    try:
        return read_shard(place, name, verify=True)
    except (DamagedError, FileNotFoundError) as error:
        raise FolderError(
            f"{place}/{name} is gone or damaged: {first_line(error)}.\nRemove what is damaged with"
            f" `hookline store repair {place}`, then start the same hl.extract again."
        ) from error


def _link_or_copy(source: Place, target: Place, name: str) -> None:
    """Make a file of one place appear in another: as a hard link, or as a copy."""
    if isinstance(source, LocalPlace) and isinstance(target, LocalPlace):
        try:
            os.link(source.folder / name, target.folder / name)
        except OSError as error:
            # Another disk, or one that knows no links.
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK):
                raise FolderError(f"cannot write {target}/{name}: {first_line(error)}.") from error
        else:
            return
    target.write(name, [source.view(name, 0, source.size(name))])
