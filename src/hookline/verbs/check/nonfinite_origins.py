"""Follow values that are not finite through the operations of one run, to the one that made them.

An operation has made such a value if its inputs were finite and its output is not. Infinities may
be meant: a mask that is filled with -inf, a buffer of -inf, the memory of `torch.empty`. These are
followed, too, and nothing is said of them, until an operation makes of them something else: a NaN
of a row that is masked out whole, a sum with memory that was never written.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hookline.display.text import name_without_torch
from hookline.engine import (
    has_process_group,
    is_in_dual_level,
    running_node_traceback,
    storage_address,
    without_function_modes,
    without_modes,
)
from hookline.statistics.finiteness import (
    NonFinite,
    count_nan_and_inf,
    is_measurable,
    is_readable,
    measure_local_moments,
    non_finite_kinds,
    union_of_kinds,
)
from hookline.verbs.check.finding import (
    MeasuredTensor,
    SourceLine,
    is_internal,
    source_line,
    user_frame,
)

_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# Operations that return memory that is not written yet; of a resized tensor, a part is.
_NEW = ("empty", "new_empty")
_EMPTY = (*_NEW, "resize")
# Operations that move numbers and compute none, by parts of their names; views, too.
_MOVING = (
    "copy", "clone", "cat", "stack", "index", "gather", "scatter", "select", "slice", "where",
    "fill", "pad", "repeat", "roll", "flip", "take", "contiguous", "resize", "detach", "lift",
    "view", "reshape", "split", "unbind", "sort", "topk", "tril", "triu",
)  # fmt: skip
# The namespaces of operations that all ranks of a job run together.
_COLLECTIVE = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")
# Operations that write a number out as it is, by parts of their names.
_FILLING = ("fill", "full", "pad", "where", "scatter", "nan_to_num", "scalar_tensor")
# Operations that make -inf of 0: the logarithm of a mask of zeros and ones.
_LOGARITHMS = frozenset({"log", "log2", "log10", "log1p", "log_", "log2_", "log10_", "log1p_"})
_TRACEBACK_LINE = 'File "'


@final
@dataclass(slots=True)
class Origin:
    """A value that was not finite, where it began."""

    # the number of the operation, in the order of the run; of values from outside, its first reader
    number: int
    kind: str  # "operation", or where the value was: "parameter", "buffer", "input", "constant"
    name: str = ""  # the name of the parameter, buffer or input
    operation: str | None = None  # the operation, such as "aten.log.default"
    function: str | None = None  # the function that was called
    line: SourceLine | None = None  # the nearest line of code outside torch
    call: int | None = None  # the number of the innermost running call of a module
    node: int | None = None  # the number of the node of the graph that ran; None in a forward
    inputs: tuple[MeasuredTensor, ...] = ()  # the inputs of the operation
    n_nan: int = 0  # the number of NaNs that it made
    n_inf: int = 0  # the number of infinities
    n_total: int = 0  # the number of elements

    def add_counts(self, tensor: Tensor) -> None:
        """Add the numbers of a tensor that it has made."""
        n_nan, n_inf = count_nan_and_inf(tensor)
        self.n_nan += n_nan
        self.n_inf += n_inf
        self.n_total += tensor.numel()

    @property
    def is_logarithm(self) -> bool:
        """Tell whether a logarithm made the value."""
        name = "" if self.operation is None else self.operation.split(".")[1]
        return self.kind == "operation" and name in _LOGARITHMS


@final
@dataclass(slots=True)
class _NonFiniteMark:
    """A tensor that is not finite; the mark holds it, so that its memory is not used again."""

    tensor: Tensor  # the tensor
    kinds: NonFinite  # what is in it
    origin: Origin | None  # where it began; None for what is meant
    is_empty: bool = False  # whether it is memory that was never written


@final
class _ExpectedKinds:
    """Tell what an operation is given that is expected.

    Memory that was never written, and a NaN that the code has written out, may be moved. A NaN that
    is computed from them is not expected.
    """

    __slots__ = ("_kinds", "is_empty")

    def __init__(self, function: Any, arguments: Any, marks: list[_NonFiniteMark]) -> None:
        name = _operation_name(function)
        is_moving = function.is_view or any(part in name for part in _MOVING)
        followed = [mark for mark in marks if is_moving or not mark.is_empty]
        self.is_empty = name.startswith(_EMPTY) or any(mark.is_empty for mark in followed)
        kinds = union_of_kinds(mark.kinds for mark in followed)
        self._kinds = (kinds if is_moving else kinds & ~NonFinite.NAN) | _expected_literal_kinds(
            name, arguments
        )

    def has_made(self, kinds: Iterable[NonFinite]) -> bool:
        """Tell whether the operation has made what is in its outputs."""
        return not self.is_empty and bool(union_of_kinds(kinds) & ~self._kinds)


@final
class OutsideTensors:
    """The tensors that a run gets from outside, by their memory."""

    __slots__ = ("_names",)

    def __init__(self) -> None:
        self._names: dict[int | None, tuple[str, str]] = {}

    def add(self, kind: str, name: str, tensor: Tensor) -> None:
        """Name a tensor; the first name of a memory counts."""
        key = storage_address(tensor)
        if key is not None:
            self._names.setdefault(key, (kind, name))

    def kind_and_name(self, tensor: Tensor) -> tuple[str, str]:
        """Return the kind and name of a tensor; "constant" without a name for others."""
        return self._names.get(storage_address(tensor), ("constant", ""))


@final
class FunctionNames(TorchFunctionMode):
    """Note the name and the arguments of the outermost function of torch that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.name: str | None = None
        self._arguments: Any = ()

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        before = self.name, self._arguments
        try:
            if self.name is None:
                self.name, self._arguments = getattr(function, "__name__", None), (args, kwargs)
            return function(*args, **(kwargs or {}))
        finally:
            self.name, self._arguments = before

    def literal_kinds(self, tensor: Tensor) -> NonFinite:
        """Return the kinds of numbers that the running call writes out, and torch made a tensor of.

        It makes one of `nan` in `x[0] = nan`. A tensor that the call was given has none.
        """
        key = storage_address(tensor)
        arguments = list(_nested_leaves(self._arguments))
        tensors = (argument for argument in arguments if isinstance(argument, Tensor))
        if any(argument is tensor or storage_address(argument) == key for argument in tensors):
            return NonFinite.NONE
        numbers = [
            _kind_of_number(argument) for argument in arguments if isinstance(argument, Real)
        ]
        return union_of_kinds(numbers)


@final
class OriginTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follow values that are not finite through the operations in a block."""

    def __init__(
        self, outside: OutsideTensors, running: Sequence[int], names: FunctionNames
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._outside = outside
        self._running = running  # the numbers of the running calls, the outermost first
        self._names = names
        self._marks: dict[int | None, list[_NonFiniteMark]] = {}
        self.count: int = 0
        self._operation: str | None = None

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with without_function_modes():  # what is looked up here is none of the model's calls
            return self._run_and_inspect(function, args, kwargs or {})

    def _run_and_inspect(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation, and look at what it wrote and returned."""
        if function.namespace in _COLLECTIVE and has_process_group():
            raise RuntimeError(f"it calls {function}, which would wait for the other ranks")
        if is_in_dual_level():
            raise RuntimeError("it uses forward-mode AD, which torch cannot inspect")
        self.count, self._operation = self.count + 1, str(function)
        inputs = _tensors_in((args, kwargs))
        written = _written_arguments(function, args, kwargs)
        # What is written to is read and copied before.
        before = {
            id(tensor): (self._mark_if_nonfinite(tensor), tensor.clone()) for tensor in written
        }
        output = function(*args, **kwargs)
        if _operation_name(function).startswith(_NEW):
            _fill_with_nan(output)
        outputs = {id(tensor): tensor for tensor in (*_tensors_in(output), *written)}
        bad = [
            (tensor, kinds) for tensor in outputs.values() if (kinds := _kinds_if_readable(tensor))
        ]
        if bad:
            self._mark_outputs(function, (args, kwargs), inputs, before, bad)
        return output

    def mark_of(self, tensor: Tensor) -> _NonFiniteMark | None:
        """Return what is known of a tensor that is not finite; None if it is finite."""
        with without_modes():  # or the look would be an operation of the model
            return self._mark_if_nonfinite(tensor)

    def _mark_if_nonfinite(self, tensor: Tensor) -> _NonFiniteMark | None:
        kinds = _kinds_if_readable(tensor)
        if not kinds:
            return None
        marks = self._marks.get(storage_address(tensor), ())
        bad = [mark for mark in marks if mark.origin is not None and mark.kinds & kinds]
        if bad:
            return _NonFiniteMark(tensor, kinds, bad[0].origin)
        if marks:
            return _NonFiniteMark(
                tensor, kinds, None, is_empty=any(mark.is_empty for mark in marks)
            )
        return self._mark_from_outside(tensor, kinds)

    def _mark_from_outside(self, tensor: Tensor, kinds: NonFinite) -> _NonFiniteMark:
        kind, name = self._outside.kind_and_name(tensor)
        by_kind = {"parameter": NonFinite.NONE, "input": NonFinite.MINUS_INF}
        allowed = by_kind.get(kind, NonFinite.INF | NonFinite.MINUS_INF)
        allowed |= self._names.literal_kinds(tensor) if kind == "constant" else NonFinite.NONE
        origin = None
        if kinds & ~allowed:
            origin = Origin(
                self.count, kind, name, self._operation, self._names.name,
                source_line(user_frame(sys._getframe())), self._innermost_call(),
            )  # fmt: skip
            origin.add_counts(tensor)
        mark = _NonFiniteMark(tensor, kinds, origin)
        self._marks_of_memory(tensor).append(mark)
        return mark

    def _marks_of_memory(self, tensor: Tensor) -> list[_NonFiniteMark]:
        key = storage_address(tensor)
        return [] if key is None else self._marks.setdefault(key, [])

    def _mark_outputs(
        self,
        function: Any,
        arguments: Any,
        inputs: list[Tensor],
        before: dict[int, tuple[_NonFiniteMark | None, Tensor]],
        bad: list[tuple[Tensor, NonFinite]],
    ) -> None:
        """Mark the outputs of an operation, and note the operation if it made what is in them.

        `before` has the marks and copies of the inputs that it has written to, by id. `bad` has the
        outputs that are not finite.
        """
        read = [before[id(t)][0] if id(t) in before else self._mark_if_nonfinite(t) for t in inputs]
        marks = [mark for mark in read if mark is not None]
        begun = [mark.origin for mark in marks if mark.origin is not None]
        origin = min(begun, key=lambda earlier: earlier.number, default=None)
        is_empty = False
        if origin is None:
            followed = _ExpectedKinds(function, arguments, marks)
            is_empty = followed.is_empty
            if followed.has_made(kinds for _, kinds in bad):
                copies = [before[id(t)][1] if id(t) in before else t for t in inputs]
                origin = self._new_origin(function, copies, [tensor for tensor, _ in bad])
        for tensor, kinds in bad:
            self._marks_of_memory(tensor).insert(0, _NonFiniteMark(tensor, kinds, origin, is_empty))

    def _new_origin(self, function: Any, inputs: list[Tensor], bad: list[Tensor]) -> Origin:
        node = running_node_traceback()
        if node is None:
            number, name, line = None, self._names.name, source_line(user_frame(sys._getframe()))
        else:
            number, name, line = *node[:2], line_from_traceback(node[2])
        parts = [measure(self._input_name(part, index), part) for index, part in enumerate(inputs)]
        origin = Origin(
            self.count, "operation", operation=str(function), function=name, line=line,
            call=self._innermost_call(), node=number, inputs=tuple(parts),
        )  # fmt: skip
        for tensor in bad:
            origin.add_counts(tensor)
        return origin

    def _innermost_call(self) -> int | None:
        return self._running[-1] if self._running else None

    def _input_name(self, tensor: Tensor, index: int) -> str:
        kind, name = self._outside.kind_and_name(tensor)
        return f"[{index}]" if kind == "constant" else f"{kind} {name}"


def measure(name: str, tensor: Tensor) -> MeasuredTensor:
    """Measure a tensor."""
    dtype = name_without_torch(tensor.dtype)
    can_measure = is_readable if tensor.dtype in _INTEGERS else is_measurable
    numbers = measure_local_moments(tensor) if can_measure(tensor) else None
    return MeasuredTensor(name, tuple(tensor.shape), dtype, numbers)


def _operation_name(function: Any) -> str:
    """Return the name of an operation without its namespace and overload, such as "add"."""
    return str(function).partition(".")[2].partition(".")[0]


def _fill_with_nan(new: Any) -> None:
    """Fill memory that was never written: what is there differs from run to run."""
    for tensor in _tensors_in(new):
        if is_measurable(tensor):
            with suppress(RuntimeError, NotImplementedError):  # a layout or a dtype without NaN
                tensor.fill_(math.nan)


def _kinds_if_readable(tensor: Tensor) -> NonFinite:
    try:
        return non_finite_kinds(tensor)
    except (RuntimeError, NotImplementedError):  # a layout or a dtype without these operations
        return NonFinite.NONE


def _nested_leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for part in value:
            yield from _nested_leaves(part)
    elif isinstance(value, dict):
        yield from _nested_leaves(list(value.values()))
    else:
        yield value


def _tensors_in(value: Any) -> list[Tensor]:
    return [part for part in _nested_leaves(value) if isinstance(part, Tensor)]


def _written_arguments(function: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the arguments that an operation writes to."""
    written: list[Tensor] = []
    for index, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            written += _tensors_in(value)
    return written


def _expected_literal_kinds(name: str, arguments: Any) -> NonFinite:
    """Return the kinds of numbers that are written out in the arguments: these are expected.

    A NaN is expected where memory is filled with it, and not where it is computed with.
    """
    kinds = union_of_kinds(
        _kind_of_number(number) for number in _nested_leaves(arguments) if isinstance(number, Real)
    )
    is_filling = any(word in name for word in _FILLING)
    return kinds if is_filling else kinds & ~NonFinite.NAN


def _kind_of_number(number: Real) -> NonFinite:
    """Return the kind of a Python number."""
    value = float(number) if isinstance(number, float | np.floating) else 0.0
    if math.isnan(value):
        return NonFinite.NAN
    if math.isinf(value):
        return NonFinite.INF if value > 0 else NonFinite.MINUS_INF
    return NonFinite.NONE


def line_from_traceback(traceback: list[str]) -> SourceLine | None:
    """Return the same line of the forward, from the traceback that anomaly mode has kept."""
    for entry in reversed(traceback):
        place, _, text = entry.strip().partition("\n")
        filename, number, function = [*place.removeprefix(_TRACEBACK_LINE).split(", "), "", ""][:3]
        filename = filename.rstrip('"')
        lineno = number.removeprefix("line ")
        if lineno.isdigit() and not is_internal(filename):
            source = (text.strip().splitlines() or [""])[0]
            return SourceLine(filename, int(lineno), function.removeprefix("in "), source)
    return None
