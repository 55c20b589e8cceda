"""The two products of an attention, `q @ k.T` and `pattern @ v`, in each form that models write.

A layout gives the operands of a product by head: queries or the pattern on the left, keys or values
on the right, all of shape [batch, head, position, width]. It also takes them back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

from torch import Tensor, nn

from hookline.engine.function_names import (
    Function,
    argument_names,
    functions_by_name,
    selector_name,
)

_PRODUCTS = ("matmul", "bmm", "baddbmm", "einsum")


def product_functions() -> list[Function]:
    """Return the functions of torch by which models multiply queries by keys."""
    return [function for name in _PRODUCTS for function in functions_by_name()[name]]


class Operands(NamedTuple):
    """The two operands of a product, and their layout."""

    first: Tensor
    second: Tensor
    layout: MatmulLayout | EinsumLayout

    @property
    def query(self) -> Tensor:
        """The queries by head; of the second product, the pattern."""
        return self.layout.query(self)


@final
class Product:
    """A function that multiplies matrices.

    Args:
        function: the function.
    """

    def __init__(self, function: Function) -> None:
        name = selector_name(function)
        self.is_einsum: bool = name == "einsum"
        self.place = 1 if name == "baddbmm" else 0
        self.names: tuple[str, ...] = argument_names(function).names[self.place : self.place + 2]

    def operands(self, args: Any, kwargs: Any, n_heads: int | None) -> Operands | None:
        """Return the operands of a call; None for a product that is none of matrices by head.

        Args:
            args: the arguments of the call.
            kwargs: its keyword arguments.
            n_heads: the number of heads of the module; None if not known.
        """
        if self.is_einsum:
            return _einsum_operands(args)
        first, second = [
            args[place] if len(args) > place else kwargs.get(name)
            for place, name in enumerate(self.names, self.place)
        ]
        if not isinstance(first, Tensor) or not isinstance(second, Tensor):
            return None
        if first.dim() < 3 or second.dim() < 3:
            return None
        return Operands(first, second, MatmulLayout(self.place, self.names, n_heads))


def _einsum_operands(args: Any) -> Operands | None:
    equation, *tensors = args
    if len(tensors) != 2 or not isinstance(equation, str):
        return None
    letters = EinsumLayout.of(equation.replace(" ", ""))
    return None if letters is None else Operands(tensors[0], tensors[1], letters)


def may_be_query_key_product(operands: Operands, weights: Sequence[Tensor]) -> bool:
    """Tell whether a product can be that of queries and keys.

    A product with a parameter is a projection, also where another tensor stands for it, as in
    `torch.func.functional_call` or `weight.to(dtype)`: it has no dimension for the batch. A product
    over a single number makes the angles of rotary embeddings.

    Args:
        operands: the operands of the product.
        weights: the parameters of the module in whose forward it is.
    """
    for operand in (operands.first, operands.second):
        if isinstance(operand, nn.Parameter) or any(operand is weight for weight in weights):
            return False
    if isinstance(
        operands.layout, EinsumLayout
    ):  # both operands have the letters of batch and head
        return True
    query, key = operands.first.shape, operands.second.shape
    return len(query) == len(key) and (key[0] != 1 or query[0] == 1) and query[-1] > 1


class Layout:
    """The base of the layouts: the operands of a product by head.

    Attributes:
        left, right: "first" or "second": the operands of queries or the pattern, and of values.
    """

    left, right = "first", "second"
    _by_head: Callable[[Tensor, int], Tensor]  # gives an operand, or the result, by head
    _undo_by_head: Callable[[Tensor, Tensor, int], Tensor]  # gives it back as it was before

    def query(self, operands: Operands) -> Tensor:
        """Return the queries by head."""
        return self._by_head(getattr(operands, self.left), _LEFT)

    def value(self, operands: Operands) -> Tensor:
        """Return the values by head, of the second product; of the first one, transposed keys."""
        return self._by_head(getattr(operands, self.right), _RIGHT)

    def output(self, result: Tensor) -> Tensor:
        """Return the result of the second product by head."""
        return self._by_head(result, _RESULT)

    def put_query(self, query: Tensor, operands: Operands) -> Operands:
        """Return the operands with other queries."""
        changed: Any = {self.left: self._undo_by_head(query, getattr(operands, self.left), _LEFT)}
        return operands._replace(**changed)

    def put_value(self, value: Tensor, operands: Operands) -> Operands:
        """Return the operands with other values, or transposed keys."""
        changed: Any = {
            self.right: self._undo_by_head(value, getattr(operands, self.right), _RIGHT)
        }
        return operands._replace(**changed)

    def put_output(self, output: Tensor, result: Tensor) -> Tensor:
        """Return the result of the second product, changed by head."""
        return self._undo_by_head(output, result, _RESULT)


_LEFT, _RIGHT, _RESULT = range(3)


@final
class MatmulLayout(Layout):
    """The layout of `matmul`, `bmm` and `baddbmm`.

    Args:
        place: the place of the first operand among the arguments.
        names: the names of both operands.
        n_heads: the number of heads, where the first dimension is batch · head; None if not known.
        is_swapped: whether the product is `v.T @ pattern.T`, as where channels come first.
    """

    def __init__(
        self, place: int, names: tuple[str, ...], n_heads: int | None, *, is_swapped: bool = False
    ) -> None:
        self.place: int = place
        self.names: tuple[str, ...] = names
        self.n_heads: int | None = n_heads
        self.is_swapped: bool = is_swapped
        if is_swapped:
            self.left, self.right = "second", "first"

    def with_sides_swapped(self) -> MatmulLayout:
        """Return the layout with the pattern on the other side."""
        return MatmulLayout(self.place, self.names, self.n_heads, is_swapped=not self.is_swapped)

    def key_dim(self, scores: Tensor) -> int | None:
        """Return the dimension of the keys in scores."""
        return scores.dim() - 1

    def _by_head(self, value: Tensor, which: int) -> Tensor:
        if self.is_swapped:
            value = value.transpose(-2, -1)
        heads = self.n_heads
        if value.dim() != 3 or heads is None or value.shape[0] % heads:
            return value
        return value.reshape(-1, heads, *value.shape[1:])

    def _undo_by_head(self, value: Tensor, before: Tensor, which: int) -> Tensor:
        value = value.flatten(0, 1) if value.dim() > before.dim() else value
        return value.transpose(-2, -1) if self.is_swapped else value

    def put_operands(self, operands: Operands, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of the call with these operands."""
        args, kwargs = list(args), dict(kwargs)
        named = zip(self.names, (operands.first, operands.second), strict=True)
        for place, (name, operand) in enumerate(named, self.place):
            if len(args) > place:
                args[place] = operand
            else:
                kwargs[name] = operand
        return tuple(args), kwargs


@final
class EinsumLayout(Layout):
    """The layout of an `einsum`, by the places of its letters.

    Args:
        left, right: "first" or "second": the operands of queries or the pattern, and of values.
        orders: the dimensions of the left operand, of the right one and of the result as [batch,
            head, position, width].
    """

    def __init__(self, left: str, right: str, orders: Sequence[tuple[int, ...]]) -> None:
        self.left, self.right = left, right
        self.orders: Sequence[tuple[int, ...]] = orders

    @staticmethod
    def of(equation: str) -> EinsumLayout | None:
        """Return the layout of an equation; None if it is no product of matrices by head."""
        operands, _, out = equation.partition("->")
        first, _, second = operands.partition(",")
        width, row, column = (_shared_letters(*sets) for sets in (
            (first, second, out), (first, out, second), (second, out, first),
        ))  # fmt: skip
        if "." in equation or len(out) < 3 or not len(width) == len(row) == len(column) == 1:
            return None
        batch = "".join(letter for letter in out if letter in first and letter in second)
        left, right = "first", "second"
        if row == out[-1]:  # the letter of the keys, or of the width of the values, comes last
            left, right = right, left
            first, second, row, column = second, first, column, row
        of_left = _letter_indices(batch + row + width, first)
        of_right = _letter_indices(batch + width + column, second)
        return EinsumLayout(
            left, right, (of_left, of_right, _letter_indices(batch + row + column, out))
        )

    def with_sides_swapped(self) -> EinsumLayout:
        """Return the layout with the pattern on the other side."""
        left, right, result = self.orders
        orders = [(*order[:-2], order[-1], order[-2]) for order in (right, left, result)]
        return EinsumLayout(self.right, self.left, orders)

    def key_dim(self, scores: Tensor) -> int | None:
        """Return the dimension of the keys in scores; None if the scores were reshaped."""
        order = self.orders[_RESULT]
        return order[-1] if scores.dim() == len(order) else None

    def _by_head(self, value: Tensor, which: int) -> Tensor:
        return value.permute(self.orders[which])

    def _undo_by_head(self, value: Tensor, before: Tensor, which: int) -> Tensor:
        order = self.orders[which]
        return value.permute([order.index(place) for place in range(len(order))])

    def put_operands(self, operands: Operands, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of the call with these operands."""
        return (args[0], operands.first, operands.second), kwargs


def _shared_letters(first: str, second: str, excluding: str) -> str:
    """Return the letters of two texts that a third does not have."""
    return "".join(letter for letter in first if letter in second and letter not in excluding)


def _letter_indices(letters: str, text: str) -> tuple[int, ...]:
    return tuple(text.index(letter) for letter in letters)
