"""Verify a store, and mend what can be mended from its shards alone."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from hookline.display.text import first_line, plural
from hookline.errors import FolderError
from hookline.files.folder_or_url import Place, as_place, locked
from hookline.files.sealed_json import MANIFEST
from hookline.files.unreadable_or_damaged import (
    DAMAGE,
    DamagedError,
    UnreadableError,
    convert_read_errors,
)
from hookline.stores.job_manifest import LOOP, UNKNOWN, Job, read_manifest, write_manifest
from hookline.stores.shard_file import (
    LENGTH,
    OWN,
    ColumnForm,
    Shard,
    read_shard,
    shard_file_name,
    shard_number,
)
from hookline.stores.store import NAMES

_GONE = "it is gone"


class Damage(NamedTuple):
    """A file of a store that is damaged or gone, or a shard that does not belong to the store.

    Args:
        name: the name of the file.
        what: what is wrong, in words.
    """

    name: str
    what: str

    def __str__(self) -> str:
        return f"{self.name}: {self.what}"


class Repair(NamedTuple):
    """Name what a repair has done.

    Args:
        removed: the damaged shards that were removed, or were gone.
        manifest: whether the manifest was made again from the shards.
    """

    removed: list[Damage]
    manifest: bool

    def __str__(self) -> str:
        head = "The manifest was made again from the shards. " if self.manifest else ""
        if not self.removed:
            return head + ("The store is whole." if head else "Nothing is damaged.")
        return (
            f"{head}{plural(len(self.removed), 'damaged shard')} removed or gone. Start the same"
            " hl.extract again: it makes them."
        )


def verify(where: str | os.PathLike[str] | Place) -> list[Damage]:
    """Read a whole store, and list its damaged and missing files.

        >>> from hookline.stores import verify
        >>> verify(tmp_path / "features")
        []

    A store that is not finished does not count as damaged. `repair` removes damaged shards (files
    with rows of the store).

    Args:
        where: the folder or URL.

    Returns:
        A `Damage` for each file of the store that is damaged or gone, and for each shard that does
        not belong to it. It has the `name` of the file, and `what` is wrong, in words.

    Raises:
        FolderError: it holds no store, or one of another version; or a file cannot be read now, so
            that nothing is known of it.
    """
    place = as_place(where)
    manifest, damage = _read_manifest_and_damage(place)
    shards, damaged = _read_shards_and_damage(place, manifest)
    if manifest is None and not shards and not damaged:
        raise FolderError(
            f"{place} is not a store: it has no {MANIFEST} and no shards."
            "\nGive the folder that hl.extract wrote."
        )
    return [*damage, *damaged, *_verify_names_file(place)]


def repair(where: str | os.PathLike[str] | Place) -> Repair:
    """Mend a store: remove damaged shards, make a missing manifest again, end a killed loop.

        >>> from hookline.stores import repair
        >>> print(repair(tmp_path / "features"))
        Nothing is damaged.

    A shard is a file with rows of the store. To make the removed shards again, start the same
    `hl.extract`. The manifest is the list of the shards. If it is missing or damaged, and all
    shards are whole, it is made from the descriptions in the shards. A store whose manifest was
    made again can be read, but `hl.extract` cannot resume it, because its job is not known any
    more. `repair` cannot notice then that the last shards are missing, too.

    A store of `hl.record(to=)` whose process was killed can be read afterwards: it has the passes
    of the complete shards.

    Args:
        where: the folder or URL.

    Returns:
        What was done: print it. `removed` lists the damaged and missing shards. `manifest` is True
            if the manifest was made again.

    Raises:
        FolderError: the folder holds no store, or one of another version. A file cannot be read
            now. Or what is damaged cannot be made again: both the manifest and a shard, or a shard
            of `hl.record(..., to=folder)`. Nothing is changed.
    """
    place = as_place(where)
    # The lock would leave a file in a folder that holds something else.
    if not any(name == MANIFEST or shard_number(name) is not None for name in place.names()):
        raise _no_whole_shard_error(place)
    _read_manifest_and_damage(place)  # refuses what something else has written
    with locked(place):
        manifest, _ = _read_manifest_and_damage(place)
        shards, damaged = _read_shards_and_damage(place, manifest)
        if manifest is None and not shards:
            raise _no_whole_shard_error(place)
        if manifest is None:
            _check_no_gap(place, shards, damaged)
            write_manifest(place, _infer_job(shards).as_json(), {}, shards)
            return Repair([], manifest=True)
        is_loop = manifest["job"]["data"].get("kind") == LOOP
        if damaged:
            if is_loop:
                raise FolderError(
                    f"{place} was recorded in a loop that cannot be run again, and is damaged:"
                    f" {damaged[0]}.\nRead the other shards: hl.open reads all that are whole."
                )
            _remove_damaged(place, damaged)
            write_manifest(place, manifest["job"], manifest["environment"])
        elif is_loop and manifest["shards"] is None and shards:  # its process was killed
            _check_no_gap(place, shards, damaged)
            write_manifest(place, manifest["job"], manifest["environment"], shards)
            return Repair([], manifest=True)
        return Repair(damaged, manifest=False)


def _remove_damaged(place: Place, damaged: list[Damage]) -> None:
    for name in [name for name, fault in damaged if fault != _GONE]:
        place.remove(name)


def _no_whole_shard_error(place: Place) -> FolderError:
    return FolderError(f"{place} is not a store, or no shard of it is whole.\nExtract it again.")


def _read_manifest_and_damage(place: Place) -> tuple[dict[str, Any] | None, list[Damage]]:
    """Read the manifest; a damaged one is None, like a missing one."""
    try:
        manifest = read_manifest(place)
    except FolderError as error:
        # Damage has the error that was met as its cause; another version has none.
        if isinstance(error, UnreadableError) or not isinstance(error.__cause__, DAMAGE):
            raise
        return None, [Damage(MANIFEST, f"it is damaged: {first_line(error.__cause__)}")]
    return manifest, [Damage(MANIFEST, _GONE)] if manifest is None else []


def _read_shards_and_damage(
    place: Place, manifest: Mapping[str, Any] | None
) -> tuple[list[Shard], list[Damage]]:
    """Read all shards: those that are whole, and those that are damaged or gone."""
    written = None if manifest is None else manifest["shards"]
    names = {name for name in place.names() if shard_number(name) is not None}
    expected = (
        set() if written is None else {shard_file_name(k) for k in range(len(written["seals"]))}
    )
    whole, damaged = [], []
    for name in sorted(names | expected):
        try:
            shard = read_shard(place, name, verify=True)
            if written is not None:
                _check_against_manifest(shard, name, written)
            if shard_file_name(shard.number) != name:
                raise DamagedError(f"it must hold shard {shard_number(name)}, got {shard.number}")
        except FileNotFoundError:
            damaged.append(Damage(name, _GONE))
        except DamagedError as error:
            damaged.append(Damage(name, f"it is damaged: {first_line(error)}"))
        else:
            whole.append(shard)
    return whole, damaged


def _check_against_manifest(shard: Shard, name: str, written: Mapping[str, Any]) -> None:
    """Compare a shard with what the manifest says of it."""
    number = shard_number(name) or 0
    if number >= len(written["seals"]):
        raise DamagedError("the manifest does not list it")
    if shard.seal != written["seals"][number]:
        raise DamagedError(f"its seal must be {written['seals'][number]}, got {shard.seal}")


def _verify_names_file(place: Place) -> list[Damage]:
    try:
        with convert_read_errors(f"{place}/{NAMES}"):
            data = place.read(NAMES)
        names = json.loads(data)
    except FileNotFoundError:
        return []
    except DAMAGE as error:
        return [Damage(NAMES, f"it is damaged: {first_line(error)}")]
    return [] if isinstance(names, list) else [Damage(NAMES, "it is damaged: it is not a list")]


def _check_no_gap(place: Place, shards: Sequence[Shard], damaged: Sequence[Damage]) -> None:
    """Check that shards are whole, and one behind the other."""
    why = str(damaged[0]) if damaged else ""
    stop = 0
    for number, shard in enumerate(shards):
        if not why and (shard.number != number or shard.batches[0] != stop):
            why = f"{shard_file_name(number)}: it is gone"
        if not why and shard.job != shards[0].job:
            why = f"{shard_file_name(number)}: it is of another job"
        stop = shard.batches[1]
    if why:
        raise FolderError(
            f"{place} cannot be mended: its {MANIFEST} is gone or damaged, and a shard is: {why}."
            "\nCopy either from another copy of the store, or extract it again to a new folder."
        )


def _infer_job(shards: Sequence[Shard]) -> Job:
    """Return what the shards themselves say of their job."""
    is_ragged = LENGTH in shards[0].spans
    n_rows = sum(shard.rows for shard in shards)
    columns = []
    for name in sorted(set(shards[0].spans) - set(OWN)):
        spans = [shard.spans[name] for shard in shards if name in shard.spans]
        per_token = is_ragged and sum(span.shape[0] for span in spans) == n_rows
        per: Literal["item", "token"] = "token" if per_token else "item"
        columns.append(ColumnForm(name, spans[0].dtype, spans[0].shape[1:], per))
    n_items = sum(shard.items for shard in shards)
    sites = [column.name for column in columns]
    return Job({}, sites, {}, {"kind": UNKNOWN}, 0, n_items, 0, columns)
