"""Run the batches of a job, and return their rows shard by shard."""

from __future__ import annotations

import inspect
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor, nn

from hookline.data.data_source import DataSource, NumberedBatch
from hookline.data.seeding import seeded
from hookline.data.tokens_by_mask import BatchAndInputs, MaskOption, find_tokens
from hookline.engine import Site, sharding_kind
from hookline.engine.pytree import describe, tree
from hookline.errors import InputError, NotRecordedError
from hookline.recordings import PassRecord
from hookline.stores.batch_columns import CpuOffload, extract_columns
from hookline.stores.first_batch_summary import ComputePrecision, summarize_columns
from hookline.stores.job_manifest import Job
from hookline.stores.shard_file import BatchRows, ColumnForm
from hookline.verbs.extract.padding_check import PaddingCheck
from hookline.verbs.record.partial_forward import PartialForward
from hookline.verbs.shared.refused_weights import execution_device
from hookline.verbs.shared.run_model import binding_error, signature_of

_MOST_AHEAD = 2  # batches that wait for the device


@final
class Worker:
    """Run the batches of a job, and return their rows.

    Args:
        runner: runs the model as far as the last selected site.
        source: the data.
        inputs: a function of a batch that returns the model's inputs; None gives the whole batch.
        mask: the mask of the tokens of a batch, as in `hl.extract`.
        padding: finds out whether `keep=` reads padding.
        gather: makes of each value what is stored, where ranks have parts of it: a collective.

    Attributes:
        forward: runs the model on a batch, and returns the sites that it did not reach.
        offload: brings values to the CPU.
        forms: the form of each column, once a batch was run.
    """

    def __init__(
        self,
        runner: PartialForward,
        source: DataSource,
        inputs: Any,
        mask: MaskOption,
        padding: PaddingCheck,
        gather: Callable[[Any], Any] | None,
    ) -> None:
        self._runner = runner
        self.forward: Callable[[Any], list[Site]] = runner.run
        # A model on meta is refused where its values come.
        self._accelerators = {
            device for device in runner.devices() if device.type not in ("cpu", "meta")
        }
        self._gather = gather
        self._padding = padding
        self.source = source
        self._inputs = inputs
        self._mask = mask
        config = getattr(runner.modules[0], "config", None)
        self._has_decoder: bool = getattr(config, "is_encoder_decoder", False) is True
        self._device = _first_parameter_device(runner)
        self.offload: CpuOffload = CpuOffload(self._device)
        self._ahead: deque[Callable[[], None]] = deque()
        self.forms: dict[str, ColumnForm] | None = None
        self._first_chunk: BatchRows | None = None
        self._first_copy: NumberedBatch | None = None

    @cached_property
    def first_batch(self) -> NumberedBatch:
        """The first batch of the data. An iterator does not give it again."""
        return next(self.source.batches([0]))

    @property
    def sites(self) -> Sequence[Site]:
        """The selected sites."""
        return self._runner.sites

    def run_first(self) -> BatchRows:
        """Run the model on the first batch, and keep its rows for later.

        The rows show the forms of the values that a store will hold. The model runs to its end, so
        that a module which runs several times is noticed.
        """
        self._first_copy = self.first_batch._replace(
            data=tree.map_tensors(self._copy_for_rerun, self.first_batch.data)
        )
        self._first_chunk = self._run_whole_forward(self.first_batch)
        return self._first_chunk

    def _copy_for_rerun(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the first batch for `rerun_first`: a copy if a run may write to it."""
        has_functions = self._inputs is not None or callable(self._mask.value)
        return tensor.clone() if has_functions or tensor.device == self._device else tensor

    def rerun_first(self) -> BatchRows:
        """Run the model once more on the first batch, and return its rows."""
        assert self._first_copy is not None
        return self._run_whole_forward(self._first_copy)

    def summarise(self, chunk: BatchRows) -> dict[str, Any]:
        """Return the rows of a batch in a few numbers, by which another model is noticed."""
        kind, model = self._device.type, self._runner.modules[0]
        dtypes = {parameter.dtype for parameter in model.parameters()}
        if torch.is_autocast_enabled(kind):
            dtypes.add(torch.get_autocast_dtype(kind))
        self.offload.make_waiter()()
        is_split = sharding_kind(model) == "split"
        return summarize_columns(
            chunk.columns, ComputePrecision.from_dtypes(kind, dtypes, is_split=is_split)
        )

    def _run_whole_forward(self, batch: NumberedBatch) -> BatchRows:
        with self._runner.whole_forward():
            return self._run_with_seed(batch)

    def run_batch(self, batch: NumberedBatch) -> BatchRows:
        """Run the model on a batch, unless that was done already, and return its rows.

        The tensors may still be on their way from a device: `offload.make_waiter()` waits for them.

        Raises:
            NotRecordedError: the model did not reach a site.
            StructureError: a value does not have a row for each item or token.
        """
        first_chunk, self._first_chunk, self._first_copy = self._first_chunk, None, None
        return (
            first_chunk
            if first_chunk is not None and batch.number == 0
            else self._run_with_seed(batch)
        )

    def _run_with_seed(self, batch: NumberedBatch) -> BatchRows:
        with seeded(batch.number, self._accelerators):
            chunk = self._make_chunk(batch)
        # A batch holds pinned memory until the device has it.
        self._ahead.append(self.offload.make_waiter())
        if len(self._ahead) > _MOST_AHEAD:
            self._ahead.popleft()()
        return chunk

    def _make_chunk(self, batch: NumberedBatch) -> BatchRows:
        if not batch.items:
            forms = self.forms or {}
            columns = {name: form.empty() for name, form in forms.items()}
            has_tokens = any(form.per == "token" for form in forms.values())
            return BatchRows(
                batch.number, [], columns, [] if has_tokens else None, None, batch.skipped
            )
        data = self._model_inputs(batch)
        whole = data if self._inputs is None else batch.data
        given = BatchAndInputs(data, whole, len(batch.items), self._has_decoder)
        tokens = find_tokens(given, self._mask)
        with torch.no_grad(), self._padding.check_batch(tokens):
            missing = self._forward_with_hint(tree.map_tensors(self._to_device, data))
        passes = self._runner.recording.pop_passes()
        _check_sites_reached(missing, passes, batch.number)
        if len(passes) != 1:
            raise InputError(
                f"the model must run once a batch, got {len(passes)} runs."
                "\nGive as `model` the module that is called once."
            )
        record = passes[0] if self._gather is None else _GatheredRecord(passes[0], self._gather)
        columns, forms = extract_columns(record, self.sites, len(batch.items), tokens, self.forms)
        self.forms = forms if self.forms is None else self.forms
        per_token = tokens if any(form.per == "token" for form in self.forms.values()) else None
        return BatchRows(
            batch.number,
            batch.items,
            {name: self.offload(tensor) for name, tensor in columns.items()},
            None if per_token is None else per_token.lengths,
            None if per_token is None else per_token.ids,
            batch.skipped,
        )

    def _forward_with_hint(self, data: Any) -> list[Site]:
        try:
            return self.forward(data)
        except TypeError as error:
            if self._inputs is None:
                _suggest_inputs(self._runner.modules[0], data, error)
            raise

    def first_inputs(self) -> Any:
        """Return what the model takes of the first batch."""
        return tree.map_tensors(self._to_device, self._model_inputs(self.first_batch))

    def drop_recorded(self) -> None:
        """Forget what the model gave since the last batch."""
        self._runner.recording.pop_passes()

    def _model_inputs(self, batch: NumberedBatch) -> Any:
        """Return the model's inputs from a batch."""
        data = (
            _unwrap_single_tensor(batch.data) if self._inputs is None else self._inputs(batch.data)
        )
        if isinstance(data, list):
            raise InputError(
                "a batch must hold only the model's inputs, got"
                f" {describe.in_words(data)}.\nGive inputs=, a function that returns these, such"
                " as inputs=lambda batch: batch[0]."
            )
        first = next((tensor for _, tensor in tree.tensors(data)), None)
        if first is None or first.ndim == 0 or len(first) != len(batch.items):
            raise InputError(
                f"a batch must hold tensors of {len(batch.items)} items, got"
                f" {describe.in_words(data)}.\nGive inputs=, a function of a batch that returns"
                " the model's inputs."
            )
        return data

    def _to_device(self, tensor: Tensor) -> Tensor:
        # To the CPU, torch would return before the numbers are there.
        return tensor.to(self._device, non_blocking=self._device.type != "cpu")


@final
@dataclass(frozen=True)
class _GatheredRecord:
    """A pass whose values are gathered from all ranks when they are looked up."""

    record: PassRecord
    gather: Callable[[Any], Any]

    def calls(self, key: Site) -> list[Any]:
        """Return the value of each call at a site."""
        return [self.gather(value) for value in self.record.calls_with_dtensors(key)]


def run_shards(
    worker: Worker, job: Job, shards: Iterable[int]
) -> Iterator[tuple[int, list[BatchRows]]]:
    """Yield the rows of shards, one shard after the other.

    Args:
        worker: runs the batches.
        job: the job.
        shards: the numbers of the shards, in order; endless for data without a length.
    """
    batch_numbers = itertools.chain.from_iterable(map(job.batch_range, shards))
    pending: list[BatchRows] = []
    for batch in _load_batches(worker, batch_numbers):
        pending.append(worker.run_batch(batch))
        shard = batch.number // job.shard_batches
        if batch.number == job.batch_range(shard)[-1]:
            yield shard, pending
            pending = []
    if pending:  # data without a length ended within a shard
        yield pending[0].batch // job.shard_batches, pending


def _load_batches(worker: Worker, numbers: Iterator[int]) -> Iterator[NumberedBatch]:
    """Load batches; the first one of the data once."""
    number = next(numbers, None)
    if number == 0:
        yield worker.first_batch
    elif number is not None:
        numbers = itertools.chain([number], numbers)
    yield from worker.source.batches(numbers)


def _unwrap_single_tensor(data: Any) -> Any:
    """Return the tensor of a list of one, as a DataLoader makes of a TensorDataset."""
    if isinstance(data, list) and len(data) == 1 and isinstance(data[0], Tensor):
        return data[0]
    return data


def _suggest_inputs(model: nn.Module, data: Any, error: TypeError) -> None:
    """Add a note to the error of a call that forward's signature refuses, with a way that it takes.

    Args:
        model: the model.
        data: the batch: a tuple of arguments, a mapping of keyword arguments, or one argument.
        error: the error of the call.
    """
    signature = signature_of(model)
    if signature is None or binding_error(signature, data) is None:
        return  # the error is of the model's code
    for code, part in _batch_parts_with_code(signature, data):
        if binding_error(signature, part) is None:
            error.add_note(
                "hookline: the model's forward does not take all of the batch."
                f"\nGive what it takes: inputs=lambda batch: {code}."
            )
            return


def _batch_parts_with_code(signature: inspect.Signature, data: Any) -> Iterator[tuple[str, Any]]:
    """Yield parts of a batch, the largest first, each with the code that takes it of the batch."""
    if isinstance(data, tuple):
        for n in range(len(data) - 1, 1, -1):
            yield f"batch[:{n}]", data[:n]
        yield from (("batch[0]", part) for part in data[:1])
    elif isinstance(data, Mapping):
        keys = [key for key in data if key in signature.parameters]
        if keys:
            dict_code = f"{{key: batch[key] for key in {tuple(keys)!r}}}"
            yield dict_code, {key: data[key] for key in keys}
        for key, value in data.items():
            if isinstance(value, Tensor):
                yield f"batch[{key!r}]", value
                return


def _check_sites_reached(
    missing: Sequence[Site], passes: Sequence[PassRecord], number: int
) -> None:
    """Check that the model reached each site."""
    if missing and number:
        raise NotRecordedError(
            f"{missing[0]} must have a value for each batch, got none for batch {number}."
            "\nhl.doctor(model, batch, selector) tells why."
        )
    for site in missing:
        passes[-1][site]  # raises, and says why


_CPU = torch.device("cpu")


def _first_parameter_device(runner: PartialForward) -> torch.device:
    """Return the device of the model's first parameter; the CPU if it has none."""
    model = runner.modules[0]
    first = next(model.parameters(), None)
    if first is not None and first.is_meta:  # accelerate loads it as its module runs
        return execution_device(model) or first.device
    return _CPU if first is None else first.device
