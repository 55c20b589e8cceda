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
    Form,
    Letters,
    Matrices,
    Product,
    may_make_scores,
    products,
)
from hookline.engine.function_names import Function, argument_names, functions_by_name, name_of
from hookline.engine.operations.operation import Operation, traceable
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
        self.function: Function = traceable(function)

    def call(self, args: Any, kwargs: Any) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)


@final
@dataclass(slots=True, eq=False)
class Progress:
    """Track the step that a call has reached, in a module that computes attention stepwise."""

    step: int = 0  # 0 before the scores, 1 before the softmax, 2 before the product with the values
    n_keys: int = 0  # the number of keys
    n_scores: int = 0  # the number of scores
    layout: Matrices | Letters | None = None  # the layout of the product that gave the scores
    # The memory of the scores and, from the softmax on, that of the pattern.
    memory: Memory | None = None


class _Stack(threading.local):
    """The running calls of a module in each thread."""

    def __init__(self) -> None:
        self.calls: list[Progress] = []


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
        self.traced: Progress = Progress()
        self._here = _Stack()
        is_none = next(module.parameters(recurse=False), None) is None
        self._module: weakref.ref[nn.Module] | None = None if is_none else weakref.ref(module)

    def weights(self) -> list[Tensor]:
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
        return any(operation.needs_graph_here() for operation in self.squares)

    def replacement_calls(self, inner: dict[Function, Operation]) -> dict[Function, Call]:
        """Return what stands for the functions of which attention consists.

        Args:
            inner: the operations of functions that have hooks of their own.
        """
        calls: dict[Function, Call] = {}
        for function in products():
            calls[function] = ProductCall(self, Product(function), _or_plain(inner, function))
        for function in functions_by_name()["softmax"]:
            calls[function] = SoftmaxCall(self, function, _or_plain(inner, function))
        calls[_KERNEL] = KernelCall(self, _or_plain(inner, _KERNEL))
        return calls

    # -- the running call --------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a call of the module."""
        if is_dynamo_compiling():
            self.traced.step = 0
        else:
            self._here.calls.append(Progress())

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

    def begin_again(self, progress: Progress) -> None:
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
            f"{self.path}@{name}: {name_of(function)} computes this attention, and shows none of"
            " its parts.\nBuild the model with another attention; of transformers:"
            f" attn_implementation='sdpa'. Or select the module itself, {self.path or '(root)'!r}."
        )

    @property
    def progress(self) -> Progress:
        """Return the progress of the running call."""
        if is_dynamo_compiling():
            return self.traced
        calls = self._here.calls
        return calls[-1] if calls else Progress()

    # -- values ------------------------------------------------------------------------------------

    def show(self, name: str, value: Tensor | QueryBlocks) -> Any:
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


def _or_plain(inner: dict[Function, Operation], function: Function) -> Call:
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
        form = self.product.form(args, kwargs, of.n_heads)
        if form is None:
            return self.inner.call(args, kwargs)
        operands = form.first, form.second
        if progress.step == 1 and any(_is_in(progress.memory, operand) for operand in operands):
            of.begin_again(progress)
        if progress.step == 0 and may_make_scores(form, of.weights()):
            return self._scores(progress, form, args, kwargs)
        of_pattern = _pattern_on_left(form, progress) if progress.step == 2 else None
        if of_pattern is None:
            return self.inner.call(args, kwargs)  # another product
        return self._output(progress, of_pattern, args, kwargs)

    def _scores(self, progress: Progress, form: Form, args: Any, kwargs: Any) -> Any:
        of, layout = self.attention, form.layout
        if "q" in of.parts:
            form = layout.put_query(of.show("q", layout.query(form)), form)
        if "k" in of.parts:
            key = of.show("k", layout.value(form).transpose(-2, -1))
            form = layout.put_value(key.transpose(-2, -1), form)
        args, kwargs = layout.arguments(form, args, kwargs)
        scores = self.inner.call(args, kwargs)
        progress.step, progress.layout, progress.memory = 1, layout, _memory(scores)
        dim = layout.key_dim(scores)
        progress.n_keys = scores.shape[-1 if dim is None else dim]
        progress.n_scores = scores.numel()
        return scores

    def _output(self, progress: Progress, form: Form, args: Any, kwargs: Any) -> Any:
        of, layout = self.attention, form.layout
        progress.step = 0
        if "v" in of.parts:
            form = layout.put_value(of.show("v", layout.value(form)), form)
            args, kwargs = layout.arguments(form, args, kwargs)
        result = self.inner.call(args, kwargs)
        if "z" in of.parts:
            result = layout.put_output(of.show("z", layout.output(result)), result)
        return result


def _pattern_on_left(form: Form, progress: Progress) -> Form | None:
    """Return the form of the product with the values, laid out with the pattern on the left.

    Models whose channels come first multiply the values by the transposed pattern. Where both
    operands have its size, it is the one in its memory or, after a dropout or a cast, the one
    without negative numbers.
    """
    fits = _has_size(form.query, progress)
    if fits and (is_dynamo_compiling() or _is_in(progress.memory, form.query)):
        return form
    turned = form._replace(layout=form.layout.turned())
    if not _has_size(turned.query, progress):
        return form if fits else None
    if not fits or _is_in(progress.memory, turned.query):
        return turned
    return turned if _is_nonnegative(turned.query) and not _is_nonnegative(form.query) else form


def _has_size(value: Tensor, progress: Progress) -> bool:
    return value.numel() == progress.n_scores and value.shape[-1] == progress.n_keys


def _memory(value: Tensor) -> Memory | None:
    """Return a weak reference to a value's memory; None where it cannot be known."""
    if is_dynamo_compiling():
        return None
    try:
        return StorageWeakRef(value.untyped_storage())  # type: ignore[no-untyped-call]
    except (RuntimeError, NotImplementedError):  # of vmap, of a subclass without memory
        return None


def _is_in(memory: Memory | None, value: Tensor) -> bool:
    # While the weak reference exists, no other memory has its number.
    return memory is not None and _memory(value) == memory


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
        self.dim_place: int = _dim_place(function)
        self.inner: Call = inner

    def call(self, args: Any, kwargs: Any) -> Any:
        """Call the function."""
        of = self.attention
        progress = of.progress
        scores = args[0] if args else kwargs["input"]
        dim = args[self.dim_place] if len(args) > self.dim_place else kwargs.get("dim")
        layout = progress.layout
        if progress.step != 1 or layout is None or not _are_scores(scores, dim, progress, layout):
            return self.inner.call(args, kwargs)
        progress.step = 2
        if "scores" in of.parts:
            scores = _show_by_head(of, "scores", scores, progress, layout)
            args, kwargs = (
                ((scores, *args[1:]), kwargs) if args else (args, {**kwargs, "input": scores})
            )
        pattern = self.inner.call(args, kwargs)
        if "pattern" in of.parts:
            pattern = _show_by_head(of, "pattern", pattern, progress, layout)
        progress.memory = _memory(pattern)
        return pattern


@functools.cache
def _dim_place(function: Function) -> int:
    return argument_names(function).names.index("dim")


def _are_scores(
    value: Tensor, dim: int | None, progress: Progress, layout: Matrices | Letters
) -> bool:
    """Tell whether a softmax is over a column for each key or one more, in a row for each query."""
    if value.dim() < 3 or dim is None or dim % value.dim() != layout.key_dim(value):
        return False
    n_keys, n_columns = progress.n_keys, value.shape[dim]
    has_rows = value.numel() * n_keys == progress.n_scores * n_columns  # also without keys
    return n_columns - n_keys in (0, 1) and has_rows


def _show_by_head(
    of: Attention, name: str, value: Tensor, progress: Progress, layout: Matrices | Letters
) -> Tensor:
    """Show scores or pattern by head, without the column of a sink, which is no key."""
    n_keys, dim = progress.n_keys, layout.key_dim(value)
    if dim is None or value.shape[dim] == n_keys:
        return layout.put_output(of.show(name, layout.output(value)), value)
    keys, sink = torch.split(value, [n_keys, 1], dim)
    return torch.cat([layout.put_output(of.show(name, layout.output(keys)), keys), sink], dim)


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
        given = KernelArguments(*args, **kwargs)
        query, key, value = given.query, given.key, given.value
        is_packed = of.is_packed(query, key)
        if "q" in of.parts:
            query = _pack(of.show("q", _unpack(query, is_packed)), query, is_packed)
        key, value = of.show("k", key), of.show("v", value)
        result = None
        if "scores" in of.parts or "pattern" in of.parts:
            given = KernelArguments(query, key, value, *given[3:])
            if not of.takes_blocks or not _show_blocks(of, given):
                result = _show_and_attend(of, given, is_packed)
        if result is None:
            result = self.inner.call((query, key, value, *args[3:]), _kwargs_without_qkv(kwargs))
        if "z" in of.parts:
            result = _pack(of.show("z", _unpack(result, is_packed)), result, is_packed)
        return result


def _show_blocks(of: Attention, given: KernelArguments) -> bool:
    """Show scores and pattern in blocks of queries, if there are several. Tell whether it is so."""
    # A graph would hold the calls of each block.
    if is_dynamo_compiling() or not QueryBlocks(given, is_pattern=True).has_several:
        return False
    sources = [part for part in (given.query, given.key, given.attn_mask) if part is not None]
    if of.needs_graph() and torch.is_grad_enabled() and any(s.requires_grad for s in sources):
        return False
    for name in ("scores", "pattern"):
        of.show(name, QueryBlocks(given, is_pattern=name == "pattern"))
    return True


def _show_and_attend(of: Attention, given: KernelArguments, is_packed: bool) -> Tensor | None:
    """Show scores and pattern. Return the result, if a hook has changed them or needs the graph.

    Otherwise torch's own function gives the result, to the same bits as without hooks.
    """
    query = given.query
    scores = _unpack(compute_scores(given), is_packed)
    shown = of.show("scores", scores)
    may_lack_keys = given.attn_mask is not None or shown is not scores
    pattern = compute_pattern(shown, query.dtype, may_lack_keys=may_lack_keys)
    new = of.show("pattern", pattern)
    if new is pattern and shown is scores and not (new.requires_grad and of.needs_graph()):
        return None
    weights = _pack(new, query, is_packed)
    if given.dropout_p:
        weights = F.dropout(weights, given.dropout_p)
    return weights @ repeat_key_heads(given.value, query.shape[-3])


def computes_for_readers(frame: FrameType) -> bool:
    """Tell whether a frame computes a pattern for hooks that only read: not for the model."""
    if frame.f_code is not _show_and_attend.__code__:
        return False
    of: Attention = frame.f_locals["of"]
    return not of.needs_graph() and not any(part.may_change for part in of.parts.values())


def _kwargs_without_qkv(kwargs: Any) -> Any:
    """Return the keyword arguments other than query, key and value."""
    return {name: kwargs[name] for name in kwargs if name not in ("query", "key", "value")}


def _unpack(value: Tensor, is_packed: bool) -> Tensor:
    return value.flatten(1, 2).unsqueeze(2) if is_packed else value


def _pack(value: Tensor, before: Tensor, is_packed: bool) -> Tensor:
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
        self.mode.begin_again()
        try:
            return self.function(*args, **kwargs)
        finally:
            self.mode.end_again()


def _copy_without_dispatch() -> Function:
    """Copy torch's function such that it does not hand itself to a function mode."""
    names = {**MULTIHEAD.__globals__, "has_torch_function": lambda arguments: False}
    names.pop("__name__")
    copy = FunctionType(MULTIHEAD.__code__, names, MULTIHEAD.__name__, MULTIHEAD.__defaults__)
    copy.__kwdefaults__ = MULTIHEAD.__kwdefaults__
    return copy


_see_through = _copy_without_dispatch()


@functools.lru_cache(maxsize=1 << 12)
def hides_attention(function: Function) -> bool:
    """Tell whether a function computes attention in a way of its own."""
    name = getattr(function, "__name__", "").lower()
    return "attention" in name or "attn" in name
