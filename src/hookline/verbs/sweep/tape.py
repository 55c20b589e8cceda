"""Run a model from a site on: calls that ended before the site return what an earlier run recorded.

A forward pre-hook cannot skip a module's forward. So each module that is recorded or replayed has a
function in its `__dict__` in place of its forward. Parents, masks and sums between the modules run
as ever, and hooks are called as ever. Nothing of the model's architecture needs to be known.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from typing import Any, final

import torch
from torch import Tensor, nn

from hookline.engine import (
    Site,
    has_numbers,
    hook_dict,
    hooked_operations_on,
    is_in_dual_level,
    is_wrapped,
)
from hookline.engine.pytree import tree
from hookline.verbs.shared.model_state import tensor_version
from hookline.verbs.sweep.rows_per_change import NoRowsError, repeated_dim

# The block that records or replays in this context. Other threads get the original forwards.
_running: ContextVar[object | None] = ContextVar("hookline_tape", default=None)

_MOST_DEPTH = 3  # of the containers among arguments

NamedModules = Sequence[tuple[str, nn.Module]]
Answer = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@final
@dataclass(slots=True, eq=False)
class RecordedCall:
    """One call of a module in the recorded run."""

    number: int  # its number, in the order of beginnings
    module: nn.Module  # the module
    parent: RecordedCall | None  # the call that it ran in; None for the root's
    begin: int  # the time of its beginning, in events
    end: int | None = None  # the time of its end; None if it has not returned
    # What the forward returned, if the tape keeps it; or the shapes of its tensors.
    output: Any = None
    # The numbers of the tensors among the arguments that the forward has written to, each with the
    # new values.
    writes: list[tuple[int, Tensor]] = field(default_factory=list)
    # Whether the forward has changed a container or an object that it was given.
    fills: bool = False
    # Whether the output lies in a graph or a transform of the model's own, which ends with the run.
    is_bound: bool = False

    def has_ended(self, time: int) -> bool:
        """Tell whether the call had returned at a time."""
        return self.end is not None and self.end <= time


@final
class Tape:
    """The calls of one run, which can stand in for the same calls of another run.

    Args:
        modules: the modules of the model, each with its path; the root first.
        hooked: as the attribute; None for those that have such hooks now.

    Attributes:
        hooked: the ids of the modules around hooks that do more than read. Their own forward runs,
            because a hook there may collect what the model returns, or count the calls.
        calls: the calls, in the order of their beginnings.
        unseen: the numbers of the calls to whose outputs the run has written without a new version.
    """

    def __init__(self, modules: NamedModules, hooked: set[int] | None = None) -> None:
        self._named_modules = modules
        self.hooked: set[int] = set() if hooked is None else hooked
        if hooked is None:
            _is_hooked(modules[0][1], self.hooked)
        self.calls: list[RecordedCall] = []
        self.unseen: set[int] = set()
        self._stack: list[RecordedCall] = []
        self._n_events = 0
        self._copied: Collection[int] = ()
        self._kept: Collection[int] | None = None
        self._is_over: Callable[[], bool] = bool
        self._seen: list[tuple[int, Tensor, int | None, Tensor | None]] = []
        self._copies: dict[tuple[int, int | None], tuple[Tensor, Tensor]] = {}
        self._origins: dict[int, int] = {}  # by the id of a copy, the id of what it is a copy of

    # -- recording -------------------------------------------------------------------------------

    @contextmanager
    def record_calls(
        self,
        *,
        kept: Collection[int] | None = None,
        copied: Collection[int] = (),
        is_over: Callable[[], bool] = bool,
    ) -> Iterator[None]:
        """Record the calls of the run in the block.

        Args:
            kept: the numbers of the calls whose outputs are kept; None keeps all. Of the others,
                the shapes of their tensors are kept.
            copied: the numbers of the calls whose outputs are kept as copies, because the run
                writes to them later.
            is_over: tells whether the last site has been reached. No output of a call that ends
                later is kept.
        """
        self._kept, self._copied, self._is_over = kept, copied, is_over
        with replace_forwards([module for _, module in self._named_modules], self._record_call):
            yield
        self._copies.clear()

    def _record_call(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        parent = self._stack[-1] if self._stack else None
        call = RecordedCall(len(self.calls), module, parent, self._next_time())
        self.calls.append(call)
        self._stack.append(call)
        given = _argument_tensors(args, kwargs)
        versions = list(map(tensor_version, given))
        contents = [_content_ids(value) for value in (*args, *kwargs.values())]
        try:
            output = forward(*args, **kwargs)
        finally:
            self._stack.pop()
        call.end = self._next_time()
        if self._is_over():
            return output
        if self._kept is None or call.number in self._kept:
            pairs = enumerate(zip(given, versions, strict=True))
            call.writes = [
                (n, tensor.clone()) for n, (tensor, v) in pairs if tensor_version(tensor) != v
            ]
            now = [_content_ids(value) for value in (*args, *kwargs.values())]
            call.fills = contents != now
        self._record_output(call, output)
        return output

    def _next_time(self) -> int:
        self._n_events += 1
        return self._n_events

    def _record_output(self, call: RecordedCall, output: Any) -> None:
        is_tensor = isinstance(output, Tensor)  # which most are
        tensors = [output] if is_tensor else [tensor for _, tensor in tree.tensors(output)]
        if self._kept is not None and call.number not in self._kept:
            call.output = [tensor.shape for tensor in tensors]
            return
        call.is_bound = is_in_dual_level() or any(map(_is_bound, tensors))
        if call.is_bound:
            return
        call.output = output
        if call.number in self._copied:
            call.output = tree.map_tensors(self._copy_once, output)
        elif not is_tensor:  # a cache may go on growing
            call.output = tree.map_tensors(lambda tensor: tensor, output)
        if self._kept is None:  # a first run, which tells what may be kept
            self._seen += [(call.number, t, tensor_version(t), _tensor_sum(t)) for t in tensors]

    def _copy_once(self, tensor: Tensor) -> Tensor:
        # One copy of a tensor that several calls return: a write to it is seen by all of them.
        key = id(tensor), tensor_version(tensor)
        if key not in self._copies:
            copy = tensor.clone()
            self._copies[key] = tensor, copy
            self._origins[id(copy)] = id(tensor)
        return self._copies[key][1]

    def pop_overwritten_calls(self) -> set[int]:
        """Return the calls whose outputs were written to after they had returned, and forget all.

        Outputs without a version count as written to, and the root's, which a metric may change.
        """
        numbers = {0} | {
            number
            for number, tensor, before, _ in self._seen
            if before is None or tensor_version(tensor) != before
        }
        self.unseen = {
            number
            for number, tensor, _, before in self._seen
            if number not in numbers and before is not None and not _has_same_sum(tensor, before)
        }
        self._seen.clear()
        return numbers

    def has_same_calls(self, other: Tape) -> bool:
        """Tell whether another run made the same calls in the same order."""
        calls, others = (
            [(id(call.module), call.begin, call.end) for call in tape.calls]
            for tape in (self, other)
        )
        return calls == others

    def keep_outputs_of(self, numbers: Collection[int]) -> None:
        """Keep the outputs of these calls alone, and what they wrote to their arguments."""
        for call in self.calls:
            if call.number not in numbers:
                call.output, call.writes = None, []

    def repeat(self, forms: Tape, size: int, n: int) -> Tape | None:
        """Return the tape of a batch that stands n times in a row.

        Args:
            forms: the tape of a run on such a batch, with the shapes alone.
            size: the size of the batch.
            n: how often the batch is to be repeated.

        Returns:
            The tape; None if that run made other calls, or an output has no dimension for the batch
            alone. In a dimension of tokens, too, the rows might not lie in one piece. And None if a
            call has written to its arguments.
        """
        has_writes = any(call.writes for call in self.calls if call.output is not None)
        if has_writes or not self.has_same_calls(forms):
            return None
        longer: dict[int, Tensor] = {}
        try:
            for call, known in zip(forms.calls, self.calls, strict=True):
                shapes, call.output = iter(call.output or ()), None
                if known.output is not None:
                    repeat = partial(_repeat_tensor, shapes=shapes, sizes=(size, n), known=longer)
                    call.output = tree.map_tensors(repeat, known.output)
        except NoRowsError:
            return None
        return forms

    # -- what may be left out --------------------------------------------------------------------

    def independent_until(self, site: Site, module: nn.Module) -> int:
        """Return the time up to which the run does not depend on a change at a site."""
        path = site.path
        calls = self._calls_of(module)
        number = site.call or 0
        if number < len(calls):
            time = calls[number].end if site.port == "output" else calls[number].begin
            # With a call left out that held earlier calls, the number is that of a later one.
            hidden = (call for call in calls[:number] if self._is_left_out(call.parent, time or 0))
            return next((call.begin for call in hidden), time) or 0
        by_path = dict(self._named_modules)
        while number >= len(calls) and path:  # as in torch's fast path: take the module around it
            path, number = path.rpartition(".")[0], 0
            calls = self._calls_of(by_path.get(path))
        return calls[number].begin if number < len(calls) else 0

    def _calls_of(self, module: nn.Module | None) -> list[RecordedCall]:
        return [call for call in self.calls if call.module is module]

    def runs_once(self, module: nn.Module) -> bool:
        """Tell whether the run called a module once."""
        return len(self._calls_of(module)) == 1

    def skippable_calls(self, time: int) -> list[RecordedCall]:
        """Return the calls to leave out from a time on: those that had ended, none in another."""
        return [
            call
            for call in self.calls
            if self._is_skippable(call, time)
            and not (call.parent and self._is_skippable(call.parent, time))
        ]

    def _is_left_out(self, call: RecordedCall | None, time: int) -> bool:
        """Tell whether a call, or one around it, is left out from a time on."""
        while call is not None and not self._is_skippable(call, time):
            call = call.parent
        return call is not None

    def _is_skippable(self, call: RecordedCall, time: int) -> bool:
        return call.has_ended(time) and id(call.module) not in self.hooked

    # -- replaying -------------------------------------------------------------------------------

    @contextmanager
    def replay_calls(self, time: int, copied: Collection[int]) -> Iterator[None]:
        """In the block, return recorded outputs from the calls that had ended at a time.

        Args:
            time: the time.
            copied: the numbers of the calls whose outputs are handed out as copies.
        """
        ended = {call.number: call for call in self.skippable_calls(time)}
        queues: dict[
            int, list[RecordedCall | None]
        ] = {}  # by id: a module may define == and lose its hash
        for call in self.calls:
            if call.number in ended or not call.has_ended(time):
                queues.setdefault(id(call.module), []).append(ended.get(call.number))
        endless = {key: chain(queue, repeat(None)) for key, queue in queues.items()}
        modules = {id(call.module): call.module for call in ended.values()}
        with replace_forwards(modules.values(), _Replay(endless, copied, self._origins)):
            yield


@final
@dataclass(slots=True, eq=False)
class _Replay:
    """Answer calls by recorded outputs, one by one, and repeat what they wrote to their inputs."""

    # The calls of each module, by its id; None for those that run.
    queues: Mapping[int, Iterator[RecordedCall | None]]
    copied: Collection[int]  # the numbers of the calls whose outputs are handed out as copies
    origins: dict[int, int]  # by the id of an output, the id of the tensor that it is a copy of
    # The copies that were handed out, by the ids of the tensors in the recorded run.
    copies: dict[int, Tensor] = field(default_factory=dict)

    def __call__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        call = next(self.queues[id(module)])
        if call is None:
            return forward(*args, **kwargs)
        given = _argument_tensors(args, kwargs) if call.writes else []
        for number, values in call.writes:
            given[number].copy_(values)
        is_copied = call.number in self.copied
        return tree.map_tensors(self._copy_once if is_copied else self._copied_or_same, call.output)

    def _copy_once(self, tensor: Tensor) -> Tensor:
        origin = self.origins.get(id(tensor), id(tensor))
        if origin not in self.copies:
            self.copies[origin] = tensor.clone()
        return self.copies[origin]

    def _copied_or_same(self, tensor: Tensor) -> Tensor:
        return self.copies.get(self.origins.get(id(tensor), id(tensor)), tensor)


@final
class _ReplacedForward:
    """A forward in a module's `__dict__`, which answers in the context that put it there."""

    __slots__ = ("__wrapped__", "_answer", "_module")

    def __init__(self, module: nn.Module, answer: Answer) -> None:
        self._module, self._answer = module, answer
        self.__wrapped__ = module.forward  # of which a model may ask the signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _running.get() is not self._answer:
            return self.__wrapped__(*args, **kwargs)
        return self._answer(self._module, self.__wrapped__, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model, which another thread may make, gets its own forward.
        return getattr, (self._module, "forward")


@contextmanager
def replace_forwards(modules: Iterable[nn.Module], answer: Answer) -> Iterator[None]:
    """Let a function answer the calls of modules in the block, in this context alone."""
    token = _running.set(answer)
    before: list[tuple[nn.Module, Any]] = []
    try:
        for module in modules:
            before.append((module, vars(module).get("forward")))
            vars(module)["forward"] = _ReplacedForward(module, answer)
        yield
    finally:
        for module, forward in before:
            if forward is None:
                vars(module).pop("forward", None)
            else:
                vars(module)["forward"] = forward
        _running.reset(token)


def has_active_hooks(module: nn.Module) -> bool:
    """Tell whether a module has hooks around its forward that do more than read values."""
    return any(
        getattr(getattr(hook, "__self__", None), "changes_values", True)
        for kind in ("forward_pre", "forward")
        for hook in list(hook_dict(module, kind).values())
    )


def _is_hooked(module: nn.Module, around: set[int]) -> bool:
    """Tell whether a module, or one inside, has hooks that do more than read values.

    Args:
        module: the module.
        around: gets the ids of the modules around such modules and operations.
    """
    are_hooked = [_is_hooked(inner, around) for inner in module.children()]
    if any(are_hooked) or any(map(has_active_hooks, hooked_operations_on(module))):
        around.add(id(module))
    return id(module) in around or has_active_hooks(module)


def _repeat_tensor(
    tensor: Tensor, shapes: Iterator[torch.Size], sizes: tuple[int, int], known: dict[int, Tensor]
) -> Tensor:
    """Repeat a tensor n times along the dimension in which the next shape is longer.

    A tensor that several calls return stays one tensor: a write to it is seen by all of them.
    """
    shape, (size, n) = next(shapes, None), sizes
    if shape is None:
        raise NoRowsError
    if id(tensor) not in known:
        dim = repeated_dim(shape, tensor.shape, n)
        if dim is not None and tensor.shape[dim] != size:
            raise NoRowsError
        known[id(tensor)] = tensor if dim is None else torch.cat([tensor] * n, dim)
    return known[id(tensor)]


def _argument_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments of a call, also those in its containers."""
    tensors: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, tuple | list | dict):
            tensors += [tensor for _, tensor in tree.tensors(value)]
    return tensors


def _content_ids(value: Any, depth: int = 0) -> Any:
    """Return the ids of what lies in a value, and in its containers and plain objects.

    The caches of transformers are left out: each layer reads its own part of them alone.
    """
    is_cache = type(value).__module__.startswith("transformers.")
    parts = None if is_cache or depth > _MOST_DEPTH else tree.items(value)
    if parts is None:
        return id(value)
    return id(value), [(key, _content_ids(part, depth + 1)) for key, part in parts]


def _is_bound(tensor: Tensor) -> bool:
    """Tell whether a tensor has a graph or a transform around it; sweeps run without gradients."""
    return is_wrapped(tensor) or (tensor.requires_grad and not isinstance(tensor, nn.Parameter))


def _tensor_sum(tensor: Tensor) -> Tensor | None:
    """Return the sum of a tensor, which most writes change; None of what has none."""
    has_sum = type(tensor) is Tensor and has_numbers(tensor) and tensor.layout is torch.strided
    if not has_sum or tensor.is_quantized or tensor.dtype.itemsize == 1:
        return None
    is_half = tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.sum(dtype=torch.float32 if is_half else None)


def _has_same_sum(tensor: Tensor, before: Tensor) -> bool:
    """Tell whether a tensor has the sum that it had before; NaN is NaN."""
    now = _tensor_sum(tensor)
    return now is not None and bool(((now == before) | (now.isnan() & before.isnan())).all())
