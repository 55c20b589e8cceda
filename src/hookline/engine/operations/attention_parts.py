"""The parts of a module's attention, by names that hold for every implementation.

`q`, `k`, `v`, `scores`, `pattern` and `z` are operations. Their values are taken from the calls of
`scaled_dot_product_attention`, or of the products and the softmax by which a module computes
attention step by step.
"""

from __future__ import annotations

import functools
import threading
import weakref
from dataclasses import dataclass
from types import FrameType, FunctionType
from typing import Any, NoReturn, Protocol, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.multiprocessing.reductions import StorageWeakRef

from hookline.engine.attention.pattern import (
    KernelArguments,
    QueryBlocks,
    compute_pattern,
    compute_scores,
    repeat_key_heads,
)
from hookline.engine.attention.products import (
    EinsumLayout,
    MatmulLayout,
    Operands,
    Product,
    may_be_query_key_product,
    product_functions,
)
from hookline.engine.function_names import (
    Function,
    argument_names,
    functions_by_name,
    selector_name,
)
from hookline.engine.operations.operation import Operation, make_traceable
from hookline.errors import AttachError

PARTS = ("q", "k", "v", "scores", "pattern", "z")
Memory = StorageWeakRef  # of a tensor, as long as its numbers exist

_KERNEL = F.scaled_dot_product_attention
MULTIHEAD = F.multi_head_attention_forward


class Call(Protocol):
    """The interface of what stands for a function while a module is watched."""

    def call(self, args: Any, kwargs: Any) -> Any:
        """Call the function."""


@final
class PlainCall:
    """A function without an operation."""

    def __init__(self, function: Function) -> None:
        self.function: Function = make_traceable(function)

    def call(self, args: Any, kwargs: Any) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)


@final
@dataclass(slots=True, eq=False)
class CallProgress:
    """Track the step that a call has reached, in a module that computes attention stepwise."""

    step: int = 0  # 0 before the scores, 1 before the softmax, 2 before the product with the values
    n_keys: int = 0  # the number of keys
    n_scores: int = 0  # the number of scores
    # The layout of the product that gave the scores.
    layout: MatmulLayout | EinsumLayout | None = None
    # The memory of the scores and, from the softmax on, that of the pattern.
    memory: Memory | None = None


class _Stack(threading.local):
    """The running calls of a module in each thread."""

    def __init__(self) -> None:
        self.calls: list[CallProgress] = []


@final
class Attention:
    """The parts of the attention in one module's own forward.

    Args:
        module: the module.

    Attributes:
        parts: the operations of the parts that have hooks, by name.
        path: the path of the module, for messages.
        n_heads: the number of heads; None if the module does not tell.
        n_groups: the number of heads of queries for each head of keys.
        squares: the operations of scores and pattern that have hooks.
        takes_blocks: whether all hooks on scores and pattern take these in blocks of queries.
        traced: the progress of a call that is compiled.
    """

    def __init__(self, module: nn.Module) -> None:
        self.parts: dict[str, Operation] = {}
        self.path = ""
        self.n_heads: int | None = _n_heads(module)
        self.n_groups: int = getattr(module, "num_key_value_groups", 1)
        self.squares: list[Operation] = []
        self.takes_blocks: bool = False
        self.traced: CallProgress = CallProgress()
        self._here = _Stack()
        is_none = next(module.parameters(recurse=False), None) is None
        self._module: weakref.ref[nn.Module] | None = None if is_none else weakref.ref(module)

    def own_parameters(self) -> list[Tensor]:
        """List the module's own parameters, which other tensors may stand for at present."""
        module = None if self._module is None or is_dynamo_compiling() else self._module()
        return [] if module is None else list(module.parameters(recurse=False))

    def set_parts(self, parts: dict[str, Operation]) -> None:
        """Take the parts that have hooks at present."""
        self.parts = parts
        self.squares = [parts[name] for name in ("scores", "pattern") if name in parts]
        self.takes_blocks = all(operation.takes_blocks for operation in self.squares)

    def needs_graph(self) -> bool:
        """Tell whether a hook needs the graph to pass through scores or pattern in this thread."""
        if is_dynamo_compiling():
            return any(operation.needs_graph for operation in self.squares)
        return any(operation.needs_graph_in_thread() for operation in self.squares)

    def replacement_calls(self, inner: dict[Function, Operation]) -> dict[Function, Call]:
        """Return what stands for the functions of which attention consists.

        Args:
            inner: the operations of functions that have hooks of their own.
        """
        calls: dict[Function, Call] = {}
        for function in product_functions():
            calls[function] = ProductCall(
                self, Product(function), _operation_or_plain(inner, function)
            )
        for function in functions_by_name()["softmax"]:
            calls[function] = SoftmaxCall(self, function, _operation_or_plain(inner, function))
        calls[_KERNEL] = KernelCall(self, _operation_or_plain(inner, _KERNEL))
        return calls

    # -- the running call --------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a call of the module."""
        if is_dynamo_compiling():
            self.traced.step = 0
        else:
            self._here.calls.append(CallProgress())

    def end(self, *, is_whole: bool) -> None:
        """End a call of the module.

        Args:
            is_whole: whether the module has returned.

        Raises:
            AttachError: the module multiplied what seemed to be queries and keys, and took no
                softmax of the result.
        """
        if is_dynamo_compiling():
            step = self.traced.step
            self.traced.step, self.traced.layout = 0, None
        else:
            step = self._here.calls.pop().step if self._here.calls else 0
        if step == 1 and is_whole:
            self._refuse_product("it takes no softmax of its first product over what would be keys")

    def restart(self, progress: CallProgress) -> None:
        """Begin anew at a product that takes what the first one has made: that was a projection.

        Raises:
            AttachError: the projection's factors were shown as queries and keys.
        """
        self._refuse_product("its first product is a factor of another one")
        progress.step = 0

    def _refuse_product(self, why: str) -> None:
        if "q" in self.parts or "k" in self.parts:
            raise AttachError(
                f"{self.path} has no attention whose parts are known: {why}.\nSelect a product"
                f" itself, '{self.path}@matmul:input', or leave the module out."
            )

    def refuse(self, function: Function, kind: type[AttachError] = AttachError) -> NoReturn:
        """Refuse the parts of an attention that a function computes and does not show.

        Args:
            function: the function.
            kind: the class of the error.

        Raises:
            AttachError: always.
        """
        name = next(iter(self.parts))
        raise kind(
            f"{self.path}@{name}: {selector_name(function)} computes this attention, and shows none"
            " of its parts.\nBuild the model with another attention; of transformers:"
            f" attn_implementation='sdpa'. Or select the module itself, {self.path or '(root)'!r}."
        )

    @property
    def progress(self) -> CallProgress:
        """Return the progress of the running call."""
        if is_dynamo_compiling():
            return self.traced
        calls = self._here.calls
        return calls[-1] if calls else CallProgress()

    # -- values ------------------------------------------------------------------------------------

    def call_hooks(self, name: str, value: Tensor | QueryBlocks) -> Any:
        """Hand the value of a part to the hooks on it, and return what they made of it."""
        return self.parts[name](value) if name in self.parts else value

    def is_packed(self, query: Tensor, key: Tensor) -> bool:
        """Tell whether the queries of one token are packed: [batch, key head, group, width]."""
        groups = self.n_groups
        return (
            groups > 1
            and query.dim() == 4
            and query.shape[2] == groups
            and query.shape[1] == key.shape[1]
            and self.n_heads is not None
            and query.shape[1] * groups == self.n_heads
        )


def _n_heads(module: nn.Module) -> int | None:
    names = "num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads"
    for holder in (module, getattr(module, "config", None)):
        for name in names:
            number = getattr(holder, name, None)
            if isinstance(number, int) and number > 0:
                return number
    return None


def _operation_or_plain(inner: dict[Function, Operation], function: Function) -> Call:
    return inner.get(function) or PlainCall(function)


@final
class ProductCall:
    """A product: of queries and keys, of pattern and values, or of something else."""

    def __init__(self, attention: Attention, product: Product, inner: Call) -> None:
        self.attention: Attention = attention
        self.product: Product = product
        self.inner: Call = inner

    def call(self, args: Any, kwargs: Any) -> Any:
        """Call the function."""
        of = self.attention
        progress = of.progress
        operands = self.product.operands(args, kwargs, of.n_heads)
        if operands is None:
            return self.inner.call(args, kwargs)
        if progress.step == 1 and any(
            _is_memory_of(progress.memory, operand) for operand in (operands.first, operands.second)
        ):
            of.restart(progress)
        if progress.step == 0 and may_be_query_key_product(operands, of.own_parameters()):
            return self._call_query_key_product(progress, operands, args, kwargs)
        of_pattern = _with_pattern_on_left(operands, progress) if progress.step == 2 else None
        if of_pattern is None:
            return self.inner.call(args, kwargs)  # another product
        return self._call_pattern_value_product(progress, of_pattern, args, kwargs)

    def _call_query_key_product(
        self, progress: CallProgress, operands: Operands, args: Any, kwargs: Any
    ) -> Any:
        of, layout = self.attention, operands.layout
        if "q" in of.parts:
            operands = layout.put_query(of.call_hooks("q", layout.query(operands)), operands)
        if "k" in of.parts:
            key = of.call_hooks("k", layout.value(operands).transpose(-2, -1))
            operands = layout.put_value(key.transpose(-2, -1), operands)
        args, kwargs = layout.put_operands(operands, args, kwargs)
        scores = self.inner.call(args, kwargs)
        progress.step, progress.layout, progress.memory = 1, layout, _memory_of(scores)
        dim = layout.key_dim(scores)
        progress.n_keys = scores.shape[-1 if dim is None else dim]
        progress.n_scores = scores.numel()
        return scores

    def _call_pattern_value_product(
        self, progress: CallProgress, operands: Operands, args: Any, kwargs: Any
    ) -> Any:
        of, layout = self.attention, operands.layout
        progress.step = 0
        if "v" in of.parts:
            operands = layout.put_value(of.call_hooks("v", layout.value(operands)), operands)
            args, kwargs = layout.put_operands(operands, args, kwargs)
        result = self.inner.call(args, kwargs)
        if "z" in of.parts:
            result = layout.put_output(of.call_hooks("z", layout.output(result)), result)
        return result


def _with_pattern_on_left(operands: Operands, progress: CallProgress) -> Operands | None:
    """Return the operands of the product with the values, laid out with the pattern on the left.

    Models whose channels come first multiply the values by the transposed pattern. Where both
    operands have its size, it is the one in its memory or, after a dropout or a cast, the one
    without negative numbers.
    """
    fits = _has_size_of_scores(operands.query, progress)
    if fits and (is_dynamo_compiling() or _is_memory_of(progress.memory, operands.query)):
        return operands
    swapped = operands._replace(layout=operands.layout.with_sides_swapped())
    if not _has_size_of_scores(swapped.query, progress):
        return operands if fits else None
    if not fits or _is_memory_of(progress.memory, swapped.query):
        return swapped
    is_swapped = _is_nonnegative(swapped.query) and not _is_nonnegative(operands.query)
    return swapped if is_swapped else operands


def _has_size_of_scores(value: Tensor, progress: CallProgress) -> bool:
    return value.numel() == progress.n_scores and value.shape[-1] == progress.n_keys


def _memory_of(value: Tensor) -> Memory | None:
    """Return a weak reference to a value's memory; None where it cannot be known."""
    if is_dynamo_compiling():
        return None
    try:
        return StorageWeakRef(value.untyped_storage())  # type: ignore[no-untyped-call]
    except (RuntimeError, NotImplementedError):  # of vmap, of a subclass without memory
        return None


def _is_memory_of(memory: Memory | None, value: Tensor) -> bool:
    # While the weak reference exists, no other memory has its number.
    return memory is not None and _memory_of(value) == memory


def _is_nonnegative(value: Tensor) -> bool:
    """Tell whether no number is negative; False where the numbers cannot be read, as in vmap."""
    try:
        return bool((value.detach() >= 0).all())
    except RuntimeError:
        return False


@final
class SoftmaxCall:
    """A softmax, of scores or of something else.

    Args:
        attention: the attention.
        function: the function.
        inner: what stands for it otherwise.
    """

    def __init__(self, attention: Attention, function: Function, inner: Call) -> None:
        self.attention: Attention = attention
        self.index_of_dim: int = _index_of_dim(function)
        self.inner: Call = inner

    def call(self, args: Any, kwargs: Any) -> Any:
        """Call the function."""
        of = self.attention
        progress = of.progress
        scores = args[0] if args else kwargs["input"]
        dim = args[self.index_of_dim] if len(args) > self.index_of_dim else kwargs.get("dim")
        layout = progress.layout
        if progress.step != 1 or layout is None or not _are_scores(scores, dim, progress, layout):
            return self.inner.call(args, kwargs)
        progress.step = 2
        if "scores" in of.parts:
            scores = _call_hooks_by_head(of, "scores", scores, progress, layout)
            args, kwargs = (
                ((scores, *args[1:]), kwargs) if args else (args, {**kwargs, "input": scores})
            )
        pattern = self.inner.call(args, kwargs)
        if "pattern" in of.parts:
            pattern = _call_hooks_by_head(of, "pattern", pattern, progress, layout)
        progress.memory = _memory_of(pattern)
        return pattern


@functools.cache
def _index_of_dim(function: Function) -> int:
    return argument_names(function).names.index("dim")


def _are_scores(
    value: Tensor, dim: int | None, progress: CallProgress, layout: MatmulLayout | EinsumLayout
) -> bool:
    """Tell whether a softmax is over a column for each key or one more, in a row for each query."""
    if value.dim() < 3 or dim is None or dim % value.dim() != layout.key_dim(value):
        return False
    n_keys, n_columns = progress.n_keys, value.shape[dim]
    has_rows = value.numel() * n_keys == progress.n_scores * n_columns  # also without keys
    return n_columns - n_keys in (0, 1) and has_rows


def _call_hooks_by_head(
    of: Attention,
    name: str,
    value: Tensor,
    progress: CallProgress,
    layout: MatmulLayout | EinsumLayout,
) -> Tensor:
    """Show scores or pattern by head, without the column of a sink, which is no key."""
    n_keys, dim = progress.n_keys, layout.key_dim(value)
    if dim is None or value.shape[dim] == n_keys:
        return layout.put_output(of.call_hooks(name, layout.output(value)), value)
    keys, sink = torch.split(value, [n_keys, 1], dim)
    return torch.cat([layout.put_output(of.call_hooks(name, layout.output(keys)), keys), sink], dim)


@final
class KernelCall:
    """A call of `scaled_dot_product_attention`, which hides its pattern."""

    def __init__(self, attention: Attention, inner: Call) -> None:
        self.attention: Attention = attention
        self.inner: Call = inner

    def call(self, args: Any, kwargs: Any) -> Any:
        """Call the function."""
        of = self.attention
        of.progress.step = 0
        arguments = KernelArguments(*args, **kwargs)
        query, key, value = arguments.query, arguments.key, arguments.value
        is_packed = of.is_packed(query, key)
        if "q" in of.parts:
            query = _pack_heads(
                of.call_hooks("q", _unpack_heads(query, is_packed)), query, is_packed
            )
        key, value = of.call_hooks("k", key), of.call_hooks("v", value)
        result = None
        if "scores" in of.parts or "pattern" in of.parts:
            arguments = KernelArguments(query, key, value, *arguments[3:])
            if not of.takes_blocks or not _call_hooks_on_blocks(of, arguments):
                result = _call_hooks_and_attend(of, arguments, is_packed)
        if result is None:
            result = self.inner.call((query, key, value, *args[3:]), _kwargs_without_qkv(kwargs))
        if "z" in of.parts:
            result = _pack_heads(
                of.call_hooks("z", _unpack_heads(result, is_packed)), result, is_packed
            )
        return result


def _call_hooks_on_blocks(of: Attention, arguments: KernelArguments) -> bool:
    """Show scores and pattern in blocks of queries, if there are several. Tell whether it is so."""
    # A graph would hold the calls of each block.
    if is_dynamo_compiling() or not QueryBlocks(arguments, is_pattern=True).has_several_blocks:
        return False
    sources = [
        part for part in (arguments.query, arguments.key, arguments.attn_mask) if part is not None
    ]
    if of.needs_graph() and torch.is_grad_enabled() and any(s.requires_grad for s in sources):
        return False
    for name in ("scores", "pattern"):
        of.call_hooks(name, QueryBlocks(arguments, is_pattern=name == "pattern"))
    return True


def _call_hooks_and_attend(
    of: Attention, arguments: KernelArguments, is_packed: bool
) -> Tensor | None:
    """Show scores and pattern. Return the result, if a hook has changed them or needs the graph.

    Otherwise torch's own function gives the result, to the same bits as without hooks.
    """
    query = arguments.query
    scores = _unpack_heads(compute_scores(arguments), is_packed)
    shown = of.call_hooks("scores", scores)
    may_lack_keys = arguments.attn_mask is not None or shown is not scores
    pattern = compute_pattern(shown, query.dtype, may_lack_keys=may_lack_keys)
    new = of.call_hooks("pattern", pattern)
    if new is pattern and shown is scores and not (new.requires_grad and of.needs_graph()):
        return None
    weights = _pack_heads(new, query, is_packed)
    if arguments.dropout_p:
        weights = F.dropout(weights, arguments.dropout_p)
    return weights @ repeat_key_heads(arguments.value, query.shape[-3])


def is_computing_for_readers(frame: FrameType) -> bool:
    """Tell whether a frame computes a pattern for hooks that only read: not for the model."""
    if frame.f_code is not _call_hooks_and_attend.__code__:
        return False
    of: Attention = frame.f_locals["of"]
    return not of.needs_graph() and not any(part.may_change for part in of.parts.values())


def _kwargs_without_qkv(kwargs: Any) -> Any:
    """Return the keyword arguments other than query, key and value."""
    return {name: kwargs[name] for name in kwargs if name not in ("query", "key", "value")}


def _unpack_heads(value: Tensor, is_packed: bool) -> Tensor:
    return value.flatten(1, 2).unsqueeze(2) if is_packed else value


def _pack_heads(value: Tensor, before: Tensor, is_packed: bool) -> Tensor:
    return value.squeeze(2).view(*before.shape[:3], -1) if is_packed else value


@final
class MultiheadCall:
    """A call of `multi_head_attention_forward`, which calls further functions of torch."""

    def __init__(self, mode: Any, inner: Operation | None) -> None:
        self.mode = mode
        self.function: Function | Operation = (
            _see_through if inner is None else inner.with_function(_see_through)
        )

    def call(self, args: Any, kwargs: Any) -> Any:
        """Call the function, and watch for the functions that it calls."""
        self.mode.turn_on()
        try:
            return self.function(*args, **kwargs)
        finally:
            self.mode.turn_off()


def _multihead_without_dispatch() -> Function:
    """Copy torch's function such that it does not hand itself to a function mode."""
    names = {**MULTIHEAD.__globals__, "has_torch_function": lambda arguments: False}
    names.pop("__name__")
    copy = FunctionType(MULTIHEAD.__code__, names, MULTIHEAD.__name__, MULTIHEAD.__defaults__)
    copy.__kwdefaults__ = MULTIHEAD.__kwdefaults__
    return copy


_see_through = _multihead_without_dispatch()


@functools.lru_cache(maxsize=1 << 12)
def hides_attention(function: Function) -> bool:
    """Tell whether a function computes attention in a way of its own."""
    name = getattr(function, "__name__", "").lower()
    return "attention" in name or "attn" in name
