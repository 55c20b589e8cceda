"""The job of a store: a pure function of model, sites, data and range of rows; and its manifest.

Equal jobs give equal stores, whoever does them, in however many starts. So the manifest describes
the job before the first shard is written, and a store of another job is refused. After the last
shard, the manifest is written once more, with all shards. Until then the shards describe
themselves.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, final

import torch
from xxhash import xxh3_128_hexdigest

from hookline.display.text import first_line
from hookline.engine.provenance import flags_here, versions_here
from hookline.errors import FolderError
from hookline.files.folder_or_url import Place
from hookline.files.sealed_json import MANIFEST, FolderFormat, seal_json, verify_seal
from hookline.files.unreadable_or_damaged import DAMAGE, convert_read_errors
from hookline.statistics import merge_moments_by_key
from hookline.stores.check_manifest import check_manifest
from hookline.stores.shard_file import BatchRows, ColumnForm, Shard

SHARD_BYTES = 32 * 2**20  # large enough that syncing a file costs little, small enough to redo
LOOP = "passes of a loop"  # the kind of data that cannot be run again
UNKNOWN = "unknown"  # the kind of data of a store whose manifest was lost
_EXACT = ("type", "structure", "weights")
STORE = FolderFormat("hookline-store", 1, "a store", "hl.extract", "extract it again")
_REMEDY = "Make it again from the shards: hookline store repair"


@final
@dataclass(frozen=True)
class Job:
    """Describe what a store holds, in terms that another process can compare."""

    model: Mapping[str, Any]  # the model's type, structure and weights, as fingerprints
    sites: Sequence[str]  # the sites, as they are written
    options: Mapping[str, Any]  # what is kept of each value: `keep`, `dtype`, `mask`, `inputs`
    data: Mapping[str, Any]  # the identity of the data, its first batch included
    batch_size: int  # the items of a batch
    n_items: int | None  # the items in all; None for data without a length
    shard_batches: int = 0  # the batches of a shard
    columns: Sequence[ColumnForm] = field(default_factory=tuple)  # the form of each column
    # The values of the first batch in a few numbers; None if it did not run.
    first_batch: Mapping[str, Any] | None = None

    @property
    def n_batches(self) -> int | None:
        """The number of batches; None for data without a length."""
        return None if self.n_items is None else -(-self.n_items // self.batch_size)

    @property
    def n_shards(self) -> int | None:
        """The number of shards; None for data without a length."""
        return None if self.n_batches is None else -(-self.n_batches // self.shard_batches)

    @property
    def digest(self) -> str:
        """Return a checksum of the job, by which its shards are told from those of another.

        Processes on other machines have the same checksum: it leaves out the fields that rounding
        or code may change.
        """
        return xxh3_128_hexdigest(
            json.dumps(identity_fields(self.as_json()), sort_keys=True).encode()
        )

    def batch_range(self, shard: int) -> range:
        """Return the numbers of a shard's batches."""
        start = shard * self.shard_batches
        stop = start + self.shard_batches
        return range(start, stop if self.n_batches is None else min(stop, self.n_batches))

    def as_json(self) -> dict[str, Any]:
        """Return the job as the manifest holds it."""
        row: dict[str, Any] = json.loads(json.dumps(asdict(self)))  # lists, no tuples
        if self.first_batch is None:
            del row["first_batch"]
        return row

    @staticmethod
    def from_json(row: Mapping[str, Any]) -> Job:
        """Read what `as_json` made.

        Raises:
            KeyError, TypeError: it is not a job.
        """
        columns = tuple(ColumnForm.from_json(column) for column in row["columns"])
        return Job(**{**row, "columns": columns})

    def differences(self, other: Job) -> list[str]:
        """Name what differs between this job and the one that a store was begun with."""
        job, stored = identity_fields(self.as_json()), identity_fields(other.as_json())
        texts = []
        for key in ("model", "sites", "options", "data", "batch_size", "n_items"):
            if isinstance(job[key], Mapping):
                texts += [
                    _difference_text(f"{key}.{name}", stored[key].get(name), job[key].get(name))
                    for name in {**job[key], **stored[key]}
                    if job[key].get(name) != stored[key].get(name)
                ]
            elif job[key] != stored[key]:
                texts.append(_difference_text(key, stored[key], job[key]))
        return texts

    def column_differences(self, other: Job) -> list[str]:
        """Name the columns whose form differs from that in a store."""
        forms, stored = ({form.name: form for form in job.columns} for job in (self, other))
        return [
            _difference_text(name, str(stored.get(name, "none")), str(forms.get(name, "none")))
            for name in {**stored, **forms}
            if forms.get(name) != stored.get(name)
        ]

    def model_differences(self, other: Job) -> list[str]:
        """Name differences of the models besides weights: in code, plain attributes and hooks.

        These explain why values differ. They may also differ where the values are the same.
        """
        texts = []
        attributes, stored = (job.model.get("attributes", {}) for job in (self, other))
        for name in sorted({*attributes, *stored}):
            was, now = stored.get(name, "none"), attributes.get(name, "none")
            if was != now:
                texts.append(f"{name}: {was} in the store, now {now}")
        codes, stored = (job.model.get("code", {}) for job in (self, other))
        for name in sorted({*codes, *stored}):
            if codes.get(name) != stored.get(name):
                texts.append(f"code of {name}: another one than in the store")
        hooks, stored = (job.model.get("hooks", []) for job in (self, other))
        texts += [
            f"{hook}: not there when the store was begun" for hook in hooks if hook not in stored
        ]
        texts += [f"{hook}: there when the store was begun" for hook in stored if hook not in hooks]
        return texts


def identity_fields(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a manifest's job that equal jobs have alike.

    The values of the first batch may differ by rounding. Code may change and do the same.
    """
    model = {key: value for key, value in job["model"].items() if key in _EXACT}
    return {key: value for key, value in {**job, "model": model}.items() if key != "first_batch"}


def batches_per_shard(chunk: BatchRows, shard_bytes: int) -> int:
    """Return how many batches like this one a shard holds: it depends on nothing else."""
    n_bytes = sum(tensor.nbytes for tensor in chunk.columns.values())
    return max(1, shard_bytes // max(n_bytes, 1))


def _difference_text(name: str, was: Any, now: Any) -> str:
    return f"{name}: {was!r} in the store, now {now!r}"


def compared_environment() -> dict[str, Any]:
    """Return what decides the bits of a result besides the job.

    These are the versions, the processor, the threads, and what this process has set in torch.
    """
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": _processor_text(),
        "threads": torch.get_num_threads(),
        "autocast": [f"{kind} {torch.get_autocast_dtype(kind)}" for kind in kinds],
        "matmul_precision": torch.get_float32_matmul_precision(),
        # Asked only if CUDA is in use: the question would start it.
        "gpu": torch.cuda.get_device_name() if in_use else "none",
    }


def environment_with_origin() -> dict[str, Any]:
    """Return the compared environment, and what a manifest tells of its origin besides.

    The origin is not compared when a store is resumed: a seed may differ, and each package that
    was imported is named.
    """
    return {
        **compared_environment(),
        "origin": {"versions": versions_here(), "flags": flags_here()},
    }


@cache
def _processor_text() -> str:
    """Return the type of the processor, and the vector instructions that torch uses."""
    try:
        model = re.search(
            r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE
        )
    except OSError:  # no Linux
        model = None
    name = platform.processor() if model is None else model[1]
    kind = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return f"{kind} {name}".rstrip()


def write_manifest(
    place: Place,
    job: Mapping[str, Any],
    origin: Mapping[str, Any],
    shards: Sequence[Shard] | None = None,
) -> None:
    """Write a store's manifest, durably; an older one is replaced.

    `job` is `Job.as_json`, and `origin` is `environment_with_origin`. `shards` has all shards, in
    order; None for a store that is not finished.

    Raises:
        FolderError: it cannot be written.
    """
    # Sorted: the job of a rank has come as JSON with sorted keys, that of one process has not.
    described = json.loads(json.dumps({"environment": origin, "job": job}, sort_keys=True))
    body: dict[str, Any] = {**described, "shards": None}
    if shards is not None:
        # A list for each field: 10,000 shards are read in a fifth of the time of as many objects.
        body["shards"] = {
            "batches": [shard.batches[1] for shard in shards],
            "items": [shard.items for shard in shards],
            "rows": [shard.rows for shard in shards],
            "sizes": [shard.size for shard in shards],
            "seals": [shard.seal for shard in shards],
        }
        statistics = merge_moments_by_key(shard.statistics for shard in shards)
        body["statistics"] = {name: moments.as_json() for name, moments in statistics.items()}
        body["skipped"] = [list(item) for shard in shards for item in shard.skipped]
    place.write(MANIFEST, [seal_json({**STORE.first_keys(), **body})])


def is_store_finished(place: Place) -> bool:
    """Tell whether a place holds a store that has all its shards.

    Raises:
        FolderError: as `read_manifest`.
    """
    manifest = read_manifest(place)
    return manifest is not None and manifest["shards"] is not None


def read_manifest(place: Place) -> dict[str, Any] | None:
    """Read a store's manifest and verify its checksum; None if there is none.

    Raises:
        FolderError: it is of another version, damaged, or not a store's.
        UnreadableError: it cannot be read now.
    """
    try:
        with convert_read_errors(f"{place}/{MANIFEST}"):
            data = place.read(MANIFEST)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise FolderError(
            f"{place} cannot be read: {first_line(error)}.\nRemove that. {_REMEDY} {place}"
        ) from error
    try:
        manifest: dict[str, Any] = json.loads(data)
        STORE.check_format(manifest, place)
        verify_seal(data)
        check_manifest(manifest)
    except FolderError:
        raise
    except DAMAGE as error:
        raise FolderError(
            f"{place} is damaged: its {MANIFEST}: {first_line(error)}.\n{_REMEDY} {place}"
        ) from error
    return manifest
