"""The job of a store: a pure function of model, sites, data and range of rows.

Equal jobs give equal stores, whoever does them, in however many starts. So a job is written down
before its first shard, and a store whose job is another one is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, final

from xxhash import xxh3_128_hexdigest

from hookline.stores.batch_columns import ColumnForm
from hookline.stores.shard_file import Chunk

SHARD_BYTES = 32 * 2**20  # large enough that syncing a file costs little, small enough to redo
_EXACT = ("type", "structure", "weights")


@final
@dataclass(frozen=True)
class Job:
    """Describe what a store holds, in terms that another process can compare.

    Args:
        model: the model's type, structure and weights, as fingerprints.
        sites: the sites, as they are written.
        options: what is kept of each value: `keep`, `dtype`, `mask`, `inputs`.
        data: the identity of the data, its first batch included.
        batch_size: the items of a batch.
        n_items: the items in all; None for data without a length.
        shard_batches: the batches of a shard.
        columns: the form of each column.
        first_batch: the values of the first batch in a few numbers; None if it did not run.
    """

    model: Mapping[str, Any]
    sites: Sequence[str]
    options: Mapping[str, Any]
    data: Mapping[str, Any]
    batch_size: int
    n_items: int | None
    shard_batches: int = 0
    columns: Sequence[ColumnForm] = field(default_factory=tuple)
    first_batch: Mapping[str, Any] | None = None

    @property
    def n_batches(self) -> int | None:
        """The number of batches; None for data without a length."""
        return None if self.n_items is None else -(-self.n_items // self.batch_size)

    @property
    def n_shards(self) -> int | None:
        """The number of shards; None for data without a length."""
        return None if self.n_batches is None else -(-self.n_batches // self.shard_batches)

    def planned(
        self,
        shard_batches: int,
        columns: Sequence[ColumnForm],
        first_batch: Mapping[str, Any] | None = None,
    ) -> Job:
        """Return the job with the plan that the first batch has shown."""
        return replace(self, shard_batches=shard_batches, columns=columns, first_batch=first_batch)

    @property
    def digest(self) -> str:
        """Return a checksum of the job, by which its shards are told from those of another.

        Processes on other machines have the same checksum: it leaves out the fields that rounding
        or code may change.
        """
        return xxh3_128_hexdigest(json.dumps(exact(self.as_json()), sort_keys=True).encode())

    def batches_of(self, shard: int) -> range:
        """Return the numbers of a shard's batches."""
        start = shard * self.shard_batches
        stop = start + self.shard_batches
        return range(start, stop if self.n_batches is None else min(stop, self.n_batches))

    def as_json(self) -> dict[str, Any]:
        """Return the job as the manifest holds it."""
        row = {**asdict(self), "columns": [column.as_json() for column in self.columns]}
        if self.first_batch is None:
            del row["first_batch"]
        found: dict[str, Any] = json.loads(json.dumps(row))  # as it will be read: lists, no tuples
        return found

    @staticmethod
    def from_json(row: Mapping[str, Any]) -> Job:
        """Read what `as_json` made.

        Raises:
            KeyError, TypeError: it is not a job.
        """
        columns = tuple(ColumnForm.from_json(one) for one in row["columns"])
        return Job(**{**row, "columns": columns})

    def differences(self, other: Job) -> list[str]:
        """Name what differs between this job and the one that a store was begun with."""
        job, stored = exact(self.as_json()), exact(other.as_json())
        found = []
        for key in ("model", "sites", "options", "data", "batch_size", "n_items"):
            if job[key] == stored[key]:
                continue
            if isinstance(job[key], Mapping):
                found += [
                    _differ(f"{key}.{name}", stored[key].get(name), job[key].get(name))
                    for name in {**job[key], **stored[key]}
                    if job[key].get(name) != stored[key].get(name)
                ]
            else:
                found.append(_differ(key, stored[key], job[key]))
        return found

    def column_differences(self, other: Job) -> list[str]:
        """Name the columns whose form differs from that in a store."""
        forms, stored = ({form.name: form for form in job.columns} for job in (self, other))
        return [
            _differ(name, _form_text(stored.get(name)), _form_text(forms.get(name)))
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


def exact(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a manifest's job that equal jobs have alike.

    The values of the first batch may differ by rounding. Code may change and do the same.
    """
    model = {key: value for key, value in job["model"].items() if key in _EXACT}
    return {key: value for key, value in {**job, "model": model}.items() if key != "first_batch"}


def batches_per_shard(chunk: Chunk, shard_bytes: int) -> int:
    """Return how many batches like this one a shard holds: it depends on nothing else."""
    n_bytes = sum(tensor.nbytes for tensor in chunk.columns.values())
    return max(1, shard_bytes // max(n_bytes, 1))


def _form_text(form: ColumnForm | None) -> str:
    return "none" if form is None else f"{list(form.shape)} {form.dtype} an {form.per}"


def _differ(name: str, was: Any, now: Any) -> str:
    return f"{name}: {was!r} in the store, now {now!r}"
