"""Follow values that are not finite through the operations of one run, to the one that made them.

An operation has made such a value if its inputs were finite and its output is not. Infinities may
be meant: a mask that is filled with -inf, a buffer of -inf, the memory of `torch.empty`. These are
followed, too, and nothing is said of them, until an operation makes of them something else: a NaN
of a row that is masked out whole, a sum with memory that was never written.
"""

from __future__ import annotations

import linecache
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hookline.engine import is_grouped
from hookline.engine.torch_private.graph.dispatch import storage_address, without_dispatch_modes
from hookline.engine.torch_private.graph.nodes import traced_node
from hookline.verbs.check.finding import Measured, SourceLine
from hookline.verbs.check.finiteness import (
    Kind,
    all_kinds,
    counted,
    is_measurable,
    kinds_in,
    moments,
)

# Folders whose frames are of no user: torch, hookline.
_OURS = str(Path(__file__).parents[2])
_TORCHS = str(Path(torch.nn.__file__).parents[1])
# Operations whose memory is not written yet.
_EMPTY = ("empty", "new_empty", "resize")
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
    """A value that was not finite, where it began.

    Args:
        number: the number of the operation, in the order of the run; -1 for values from outside.
        kind: "operation", or where the value was: "parameter", "buffer", "input", "constant".
        name: the name of the parameter, buffer or input.
        operation: the operation, such as "aten.log.default".
        function: the function that was called.
        line: the nearest line of code outside torch.
        frames: the running calls of modules, the outermost first.
        node: the number of the node of the graph that ran; None in a forward.
        inputs: the inputs of the operation.
        n_nan: the number of NaNs that it made.
        n_inf: the number of infinities.
        n_total: the number of elements.
    """

    number: int
    kind: str
    name: str = ""
    operation: str | None = None
    function: str | None = None
    line: SourceLine | None = None
    frames: tuple[Any, ...] = ()
    node: int | None = None
    inputs: tuple[Measured, ...] = ()
    n_nan: int = 0
    n_inf: int = 0
    n_total: int = 0

    @property
    def is_logarithm(self) -> bool:
        """Tell whether a logarithm made the value."""
        name = "" if self.operation is None else self.operation.split(".")[1]
        return self.kind == "operation" and name in _LOGARITHMS


@final
@dataclass(slots=True)
class _Mark:
    """A tensor that is not finite; the mark holds it, so that its memory is not used again.

    Args:
        tensor: the tensor.
        kinds: what is in it.
        origin: where it began; None for what is meant.
        is_empty: whether it is memory that was never written.
    """

    tensor: Tensor
    kinds: Kind
    origin: Origin | None
    is_empty: bool = False


@final
class _Followed:
    """Tell what an operation is given that is meant.

    Memory that was never written, and a NaN that the code has written out, may be moved. A NaN that
    is computed from them is not meant.

    Args:
        function: the operation.
        arguments: its arguments.
        known: what is known of those that are not finite.

    Attributes:
        is_empty: whether its output holds memory that was never written.
    """

    __slots__ = ("_meant", "is_empty")

    def __init__(self, function: Any, arguments: Any, known: list[_Mark]) -> None:
        name = str(function).partition(".")[2].partition(".")[0]
        is_moving = function.is_view or any(part in name for part in _MOVING)
        followed = [mark for mark in known if is_moving or not mark.is_empty]
        self.is_empty = name.startswith(_EMPTY) or any(mark.is_empty for mark in followed)
        kinds = all_kinds(mark.kinds for mark in followed)
        self._meant = (kinds if is_moving else kinds & ~Kind.NAN) | _scalars(name, arguments)

    def is_made(self, kinds: Iterable[Kind]) -> bool:
        """Tell whether the operation has made what is in its outputs."""
        return not self.is_empty and bool(all_kinds(kinds) & ~self._meant)


@final
@dataclass(slots=True)
class Outside:
    """The tensors that a run gets from outside, by their memory: kind and name."""

    names: dict[int, tuple[str, str]] = field(default_factory=dict)

    def add(self, kind: str, name: str, tensor: Tensor) -> None:
        """Name a tensor; the first name of a memory counts."""
        key = storage_address(tensor)
        if key is not None:
            self.names.setdefault(key, (kind, name))


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

    def written_out(self, tensor: Tensor) -> Kind:
        """Return the kinds of numbers that the running call writes out, and torch made a tensor of.

        Args:
            tensor: the tensor that torch made, as of `nan` in `x[0] = nan` and `torch.tensor(nan)`.

        Returns:
            Nothing if the call was given the tensor.
        """
        key = storage_address(tensor)
        arguments = list(_flat(self._arguments))
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        if any(argument is tensor or storage_address(argument) == key for argument in tensors):
            return Kind.NONE
        numbers = [_kind_of(argument) for argument in arguments if isinstance(argument, Real)]
        return all_kinds(numbers)


@final
class Origins(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follow values that are not finite through the operations in a block.

    Args:
        outside: the names of parameters, buffers and inputs.
        frames: returns the running calls of modules.
        names: notes the name of the running function.

    Attributes:
        count: the number of operations so far.
    """

    def __init__(
        self, outside: Outside, frames: Callable[[], tuple[Any, ...]], names: FunctionNames
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._outside = outside
        self._frames = frames
        self._names = names
        self._marks: dict[int, list[_Mark]] = {}
        self.count = 0
        self._operation: str | None = None
        self.found: list[Origin] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function.namespace in _COLLECTIVE and is_grouped():
            raise RuntimeError(f"it calls {function}, which would wait for the other ranks")
        self.count, self._operation = self.count + 1, str(function)
        given = [one for one in _flat((args, kwargs)) if isinstance(one, Tensor)]
        written = _written(function, args, kwargs)
        # What is written to is read and copied before.
        before = {id(one): (self._read(one), one.clone()) for one in written}
        output = function(*args, **kwargs)
        made = {id(one): one for one in _flat(output) if isinstance(one, Tensor)}
        made.update((id(one), one) for one in written)
        self._look(function, (args, kwargs), given, before, list(made.values()))
        return output

    def mark_of(self, tensor: Tensor) -> _Mark | None:
        """Return what is known of a tensor that is not finite; None if it is finite."""
        with without_dispatch_modes():  # or the look would be an operation of the model
            return self._read(tensor)

    def _read(self, tensor: Tensor) -> _Mark | None:
        kinds = _kinds(tensor)
        if not kinds:
            return None
        key = storage_address(tensor)
        known = self._marks.get(-1 if key is None else key, ())
        bad = [mark for mark in known if mark.origin is not None and mark.kinds & kinds]
        if bad:
            return _Mark(tensor, kinds, bad[0].origin)
        if known:
            return _Mark(tensor, kinds, None, is_empty=any(mark.is_empty for mark in known))
        return self._from_outside(tensor, key, kinds)

    def _from_outside(self, tensor: Tensor, key: int | None, kinds: Kind) -> _Mark:
        kind, name = self._outside.names.get(-1 if key is None else key, ("constant", ""))
        meant = {"parameter": Kind.NONE, "input": Kind.MINUS_INF}
        allowed = meant.get(kind, Kind.INF | Kind.MINUS_INF)
        allowed |= self._names.written_out(tensor) if kind == "constant" else Kind.NONE
        is_meant = not kinds & ~allowed
        origin = None if is_meant else _counted(Origin(-1, kind, name), tensor)
        if origin is not None:
            origin.operation, origin.function = self._operation, self._names.name
            origin.line = _line_of_code()
            origin.frames = self._frames()
            origin.number = self.count
            self.found.append(origin)
        mark = _Mark(tensor, kinds, origin)
        if key is not None:
            self._marks.setdefault(key, []).append(mark)
        return mark

    def _look(
        self,
        function: Any,
        arguments: Any,
        given: list[Tensor],
        before: dict[int, tuple[_Mark | None, Tensor]],
        made: list[Tensor],
    ) -> None:
        """Mark the outputs of an operation, and note the operation if it made what is in them."""
        bad = [(tensor, kinds) for tensor in made if (kinds := _kinds(tensor))]
        if not bad:
            return
        known = self._known(given, before)
        origin, is_empty = _first_origin(known), False
        if origin is None:
            followed = _Followed(function, arguments, known)
            is_empty = followed.is_empty
            if followed.is_made(kinds for _, kinds in bad):
                was = [before[id(one)][1] if id(one) in before else one for one in given]
                origin = self._new(function, was, [one for one, _ in bad])
        for tensor, one in bad:
            key = storage_address(tensor)
            if key is not None:
                mark = _Mark(tensor, one, origin, is_empty)
                self._marks.setdefault(key, []).insert(0, mark)

    def _known(
        self, given: list[Tensor], before: dict[int, tuple[_Mark | None, Tensor]]
    ) -> list[_Mark]:
        marks = [before[id(one)][0] if id(one) in before else self._read(one) for one in given]
        return [mark for mark in marks if mark is not None]

    def _new(self, function: Any, given: list[Tensor], bad: list[Tensor]) -> Origin:
        node = traced_node()
        origin = Origin(
            self.count,
            "operation",
            operation=str(function),
            function=self._names.name if node is None else node[1],
            line=_line_of_code() if node is None else line_of_forward(node[2]),
            frames=self._frames(),
            node=None if node is None else node[0],
            inputs=tuple(measured(self._name_of(one, k), one) for k, one in enumerate(given)),
        )
        for tensor in bad:
            _counted(origin, tensor)
        self.found.append(origin)
        return origin

    def _name_of(self, tensor: Tensor, index: int) -> str:
        key = storage_address(tensor)
        kind, name = self._outside.names.get(-1 if key is None else key, ("", ""))
        return f"{kind} {name}" if kind else f"[{index}]"


def measured(name: str, tensor: Tensor) -> Measured:
    """Measure a tensor."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    numbers = moments(tensor) if is_measurable(tensor) else None
    return Measured(name, tuple(tensor.shape), dtype, numbers)


def _counted(origin: Origin, tensor: Tensor) -> Origin:
    n_nan, n_inf = counted(tensor)
    origin.n_nan += n_nan
    origin.n_inf += n_inf
    origin.n_total += tensor.numel()
    return origin


def _kinds(tensor: Tensor) -> Kind:
    try:
        return kinds_in(tensor)
    except (RuntimeError, NotImplementedError):  # a layout or a dtype without these operations
        return Kind.NONE


def _first_origin(marks: list[_Mark]) -> Origin | None:
    return next((mark.origin for mark in marks if mark.origin is not None), None)


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for part in value:
            yield from _flat(part)
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))
    else:
        yield value


def _written(function: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the arguments that an operation writes to."""
    found: list[Tensor] = []
    for index, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found += [one for one in _flat(value) if isinstance(one, Tensor)]
    return found


def _scalars(name: str, arguments: Any) -> Kind:
    """Return the kinds of numbers that are written out in the arguments: these are meant.

    A NaN is meant where memory is filled with it, and not where it is computed with.
    """
    kinds = all_kinds(_kind_of(number) for number in _flat(arguments) if isinstance(number, Real))
    is_filling = any(word in name for word in _FILLING)
    return kinds if is_filling else kinds & ~Kind.NAN


def _kind_of(number: Real) -> Kind:
    """Return the kind of a Python number."""
    value = float(number) if isinstance(number, float | np.floating) else 0.0
    if math.isnan(value):
        return Kind.NAN
    if math.isinf(value):
        return Kind.INF if value > 0 else Kind.MINUS_INF
    return Kind.NONE


def is_ours(filename: str) -> bool:
    """Tell whether a file is of torch or hookline."""
    return filename.startswith((_OURS, _TORCHS, "<"))


def _line_of_code() -> SourceLine | None:
    """Return the nearest line up the stack that is outside torch and hookline."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not is_ours(code.co_filename):
            text = linecache.getline(code.co_filename, frame.f_lineno).strip()
            return SourceLine(code.co_filename, frame.f_lineno, code.co_name, text)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def line_of_forward(traceback: list[str]) -> SourceLine | None:
    """Return the same line of the forward, from the traceback that anomaly mode has kept."""
    for entry in reversed(traceback):
        place, _, text = entry.strip().partition("\n")
        filename, number, function = [*place.removeprefix(_TRACEBACK_LINE).split(", "), "", ""][:3]
        filename = filename.rstrip('"')
        lineno = number.removeprefix("line ")
        if lineno.isdigit() and not is_ours(filename):
            source = (text.strip().splitlines() or [""])[0]
            return SourceLine(filename, int(lineno), function.removeprefix("in "), source)
    return None
