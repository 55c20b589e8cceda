"""The two products of an attention, `q @ k.T` and `pattern @ v`, in each form that models write.

A form gives the operands of a product by head: queries and keys of shape [batch, head, position,
width]. It also takes them back.
"""

from __future__ import annotations

from typing import Any, NamedTuple, final

from torch import Tensor, nn

from hookline.engine.operations.names import Function, argument_names, functions, name_of

_PRODUCTS = ("matmul", "bmm", "baddbmm", "einsum")


def products() -> list[Function]:
    """Return the functions of torch by which models multiply queries by keys."""
    return [function for name in _PRODUCTS for function in functions()[name]]


class Form(NamedTuple):
    """The form of one product: the operands of a call, and their layout."""

    first: Tensor
    second: Tensor
    layout: Matrices | Letters


@final
class Product:
    """A function that multiplies matrices.

    Args:
        function: the function.
    """

    def __init__(self, function: Function) -> None:
        name = name_of(function)
        self.is_einsum: bool = name == "einsum"
        self.place = 1 if name == "baddbmm" else 0
        names = argument_names(function).names
        self.first: str = ""
        self.second: str = ""
        if not self.is_einsum:
            self.first, self.second = names[self.place : self.place + 2]

    def form(self, args: Any, kwargs: Any, n_heads: int | None) -> Form | None:
        """Return the form of a call; None for a product that no attention makes.

        A product with a parameter is a projection. One over a single number makes the angles of
        rotary embeddings.

        Args:
            args: the arguments of the call.
            kwargs: its keyword arguments.
            n_heads: the number of heads of the module; None if not known.
        """
        if self.is_einsum:
            return _form_of_einsum(args)
        at = self.place
        first = args[at] if len(args) > at else kwargs.get(self.first)
        second = args[at + 1] if len(args) > at + 1 else kwargs.get(self.second)
        if not isinstance(first, Tensor) or not isinstance(second, Tensor):
            return None
        if isinstance(first, nn.Parameter) or isinstance(second, nn.Parameter):
            return None
        if first.dim() < 3 or second.dim() < 3 or first.shape[-1] == 1:
            return None
        return Form(first, second, Matrices(at, self.first, self.second, n_heads))


def _form_of_einsum(args: Any) -> Form | None:
    equation, *operands = args
    if len(operands) != 2 or not isinstance(equation, str):
        return None
    letters = Letters.of(equation.replace(" ", ""))
    if letters is None or any(isinstance(operand, nn.Parameter) for operand in operands):
        return None
    return Form(operands[0], operands[1], letters)


@final
class Matrices:
    """The layout of `matmul`, `bmm` and `baddbmm`.

    Args:
        place: the place of the first operand among the arguments.
        first_name: its name.
        second_name: the name of the second operand.
        n_heads: the number of heads, where the first dimension is batch · head; None if not known.
    """

    def __init__(self, place: int, first_name: str, second_name: str, n_heads: int | None) -> None:
        self.place: int = place
        self.n_heads: int | None = n_heads
        self.first_name: str = first_name
        self.second_name: str = second_name

    def _by_head(self, value: Tensor) -> Tensor:
        heads = self.n_heads
        if value.dim() != 3 or heads is None or value.shape[0] % heads:
            return value
        return value.view(-1, heads, *value.shape[1:])

    def query(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the queries by head."""
        return self._by_head(first)

    def key(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the keys by head."""
        return self._by_head(second).transpose(-2, -1)

    def value(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the values by head, of the second product."""
        return self._by_head(second)

    def output(self, result: Tensor) -> Tensor:
        """Return the result of the second product by head."""
        return self._by_head(result)

    def put_query(self, query: Tensor, form: Form) -> Form:
        """Return the form with other queries."""
        return form._replace(first=_like(query, form.first))

    def put_key(self, key: Tensor, form: Form) -> Form:
        """Return the form with other keys."""
        return form._replace(second=_like(key.transpose(-2, -1), form.second))

    def put_value(self, value: Tensor, form: Form) -> Form:
        """Return the form with other values."""
        return form._replace(second=_like(value, form.second))

    def put_output(self, output: Tensor, result: Tensor) -> Tensor:
        """Return the result of the second product, changed by head."""
        return _like(output, result)

    def arguments(self, form: Form, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of the call with the operands of a form."""
        at = self.place
        args, kwargs = list(args), dict(kwargs)
        for place, name, operand in (
            (at, self.first_name, form.first), (at + 1, self.second_name, form.second),
        ):  # fmt: skip
            if len(args) > place:
                args[place] = operand
            else:
                kwargs[name] = operand
        return tuple(args), kwargs


def _like(value: Tensor, before: Tensor) -> Tensor:
    """Return a value by head in the number of dimensions that the operand had."""
    return value.flatten(0, 1) if value.dim() > before.dim() else value


@final
class Letters:
    """The layout of an `einsum`, by the places of its letters.

    Args:
        is_key_first: whether the operand without the letter of the queries comes first.
        order_q: the dimensions of that operand's partner as [batch, head, position, width].
        order_k: those of the operand of keys, or of values.
        order_out: those of the result as [batch, head, position, width]: of the second product.
    """

    def __init__(
        self,
        is_key_first: bool,
        order_q: tuple[int, ...],
        order_k: tuple[int, ...],
        order_out: tuple[int, ...],
    ) -> None:
        self.is_key_first = is_key_first
        self.order_q: tuple[int, ...] = order_q
        self.order_k: tuple[int, ...] = order_k
        self.order_out: tuple[int, ...] = order_out

    @staticmethod
    def of(equation: str) -> Letters | None:
        """Return the layout of an equation; None if it is no product of matrices by head."""
        operands, _, out = equation.partition("->")
        first, _, second = operands.partition(",")
        width, row, column = (_within(*sets) for sets in (
            (first, second, out), (first, out, second), (second, out, first),
        ))  # fmt: skip
        if "." in equation or len(out) < 3 or not len(width) == len(row) == len(column) == 1:
            return None
        batch = "".join(letter for letter in out if letter in first and letter in second)
        # The last letter of the result is that of the keys, or of the width of the values.
        is_key_first = row == out[-1]
        if is_key_first:
            first, second, row, column = second, first, column, row
        return Letters(
            is_key_first,
            _places(batch + row + width, first),
            _places(batch + column + width, second),
            _places(batch + row + column, out),
        )

    def query(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the queries by head."""
        return (second if self.is_key_first else first).permute(self.order_q)

    def key(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the keys by head."""
        return (first if self.is_key_first else second).permute(self.order_k)

    def value(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the values by head, of the second product."""
        return self.key(first, second).transpose(-2, -1)

    def output(self, result: Tensor) -> Tensor:
        """Return the result of the second product by head."""
        return result.permute(self.order_out)

    def put_query(self, query: Tensor, form: Form) -> Form:
        """Return the form with other queries."""
        operand = query.permute(_inverse(self.order_q))
        return form._replace(second=operand) if self.is_key_first else form._replace(first=operand)

    def put_key(self, key: Tensor, form: Form) -> Form:
        """Return the form with other keys."""
        operand = key.permute(_inverse(self.order_k))
        return form._replace(first=operand) if self.is_key_first else form._replace(second=operand)

    def put_value(self, value: Tensor, form: Form) -> Form:
        """Return the form with other values."""
        return self.put_key(value.transpose(-2, -1), form)

    def put_output(self, output: Tensor, result: Tensor) -> Tensor:
        """Return the result of the second product, changed by head."""
        return output.permute(_inverse(self.order_out))

    def arguments(self, form: Form, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of the call with the operands of a form."""
        return (args[0], form.first, form.second), kwargs


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(order.index(place) for place in range(len(order)))


def _within(first: str, second: str, without: str) -> str:
    """Return the letters of two texts that a third does not have."""
    return "".join(letter for letter in first if letter in second and letter not in without)


def _places(letters: str, text: str) -> tuple[int, ...]:
    return tuple(text.index(letter) for letter in letters)
