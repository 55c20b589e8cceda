"""The arguments of a model, and changes of them that must not change the result of a row."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import Parameter, Signature
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from hookline.display.text import plural
from hookline.engine import is_exported
from hookline.engine.pytree import tree
from hookline.verbs.shared.casting import dtype_after_cast
from hookline.verbs.shared.run_model import args_and_kwargs, signature_of

IDS, MASK, POSITIONS = "input_ids", "attention_mask", "position_ids"
DECODED = "decoder_input_ids"
_N_PADDED = 3  # tokens
_IGNORED_LABEL = -100  # of torch's cross entropy
_MOST_POSITIONS = ("max_position_embeddings", "n_positions")

Side = Literal["left", "right"]


class CheckNotApplicable(Exception):
    """A check cannot be made of this model and batch; the text says why."""


@final
@dataclass(frozen=True)
class Batch:
    """The arguments of a model, by name as far as its forward has names."""

    args: tuple[Any, ...]  # the arguments without a name
    named: Mapping[str, Any]  # the arguments by name
    ids: str  # the name of the ids of tokens; empty if the model is not given any
    accepted: frozenset[str]  # the names that the forward accepts
    # The id for padding that the model's config names; None if it names none.
    pad_id: int | None = None
    n_positions: int | None = None  # the most tokens that the model has positions for

    @property
    def inputs(self) -> Any:
        """The inputs as the verbs take them; a model with both kinds of arguments has no names."""
        return dict(self.named) if self.named else self.args

    # -- rows -----------------------------------------------------------------------------------

    @property
    def n_rows(self) -> int:
        """The number of rows.

        Raises:
            CheckNotApplicable: the inputs do not tell it.
        """
        values = list(itertools.chain(self.args, self.named.values()))
        first = next((value for value in values if any(tree.tensors(value))), None)
        if not isinstance(first, Tensor) or not first.ndim:
            raise CheckNotApplicable("the first argument must be a tensor with rows")
        return len(first)

    def require_several_rows(self) -> int:
        """Return the number of rows.

        Raises:
            CheckNotApplicable: there is one row, or the inputs do not tell.
        """
        if self.n_rows < 2:
            raise CheckNotApplicable(
                f"the batch has {plural(self.n_rows, 'row')}: give two or more"
            )
        return self.n_rows

    def select_rows(self, numbers: Sequence[int]) -> Batch:
        """Return the arguments of some rows, in an order.

        Raises:
            CheckNotApplicable: it is not clear which dimension of an argument has the rows.
        """
        n_rows = self.n_rows

        def pick(tensor: Tensor) -> Tensor:
            shape = tuple(tensor.shape)
            if shape == (n_rows, n_rows) or (len(shape) > 2 and shape[0] != n_rows == shape[1]):
                raise CheckNotApplicable(f"the rows of an argument of shape {shape} are not known")
            return tensor[list(numbers)] if shape and shape[0] == n_rows else tensor

        return self._map_arguments(lambda value: tree.map_tensors(pick, value))

    def with_other_rows_changed(self) -> Batch:
        """Return the arguments with other contents in each row but the first, and one row more.

        The additional row tells `hl.compare` that rows must be matched by their contents.
        """
        n_rows = self.n_rows
        contents = self.named.get(self.ids)
        more = self.select_rows([*range(n_rows), n_rows - 1])

        def change(value: Any, longer: Any) -> Any:
            is_content = value is contents if self.ids else value is not longer
            if not is_content or not isinstance(value, Tensor):
                return longer
            others = longer[1:].flip(-1) if longer.ndim > 1 else longer[1:]
            others = -2 * others if others.is_floating_point() else others
            return torch.cat([longer[:1], others])

        args = tuple(map(change, self.args, more.args))
        named = {name: change(value, more.named[name]) for name, value in self.named.items()}
        return replace(self, args=args, named=named)

    # -- tokens ---------------------------------------------------------------------------------

    @property
    def n_tokens(self) -> int:
        """The number of tokens of a row.

        Raises:
            CheckNotApplicable: the model is given no ids of tokens.
        """
        if not self.ids:
            raise CheckNotApplicable("the inputs must be ids of tokens")
        return int(self.named[self.ids].shape[1])

    @property
    def positions(self) -> Tensor:
        """The numbers of the tokens in their rows, `(rows, tokens)`."""
        numbers = torch.arange(self.n_tokens, device=self.named[self.ids].device)
        return numbers.expand(self.n_rows, -1)

    @property
    def with_decoder_ids(self) -> Batch:
        """The arguments with the ids of the decoder as the ids; those of a lone decoder as is."""
        return replace(self, ids=DECODED) if isinstance(self.named.get(DECODED), Tensor) else self

    @property
    def mask(self) -> Tensor:
        """Return the mask of the tokens, ones where none is given; shape `(rows, tokens)`.

        Raises:
            CheckNotApplicable: it has another shape.
        """
        ids: Tensor = self.named[self.ids]
        mask = self.named.get(MASK)
        if not isinstance(mask, Tensor):
            return torch.ones_like(ids)
        if mask.shape != ids.shape:
            raise CheckNotApplicable(f"the {MASK} must have the shape of the ids to be padded")
        return mask

    def padded(self, side: Side, *, has_positions: bool = False) -> Batch:
        """Return the arguments with three tokens of padding on a side.

        Raises:
            CheckNotApplicable: the model takes no mask, or has no positions left.
        """
        n_tokens = self.n_tokens
        if MASK not in self.accepted:
            raise CheckNotApplicable(f"the forward takes no {MASK}")
        if has_positions and POSITIONS not in self.accepted:
            raise CheckNotApplicable(f"the forward takes no {POSITIONS}")
        n_free = _N_PADDED if self.n_positions is None else self.n_positions - n_tokens
        if n_free < 1:
            raise CheckNotApplicable(f"the model has no positions for more than {n_tokens} tokens")
        fills = {self.ids: self.pad_id or 0, "labels": _IGNORED_LABEL}
        added: dict[str, Any] = {MASK: self.mask}
        if has_positions and POSITIONS not in self.named:
            added[POSITIONS] = self.positions
        shape = self.named[self.ids].shape

        def pad(name: str, value: Any) -> Any:
            if not isinstance(value, Tensor) or value.shape != shape:
                return value
            size = (shape[0], min(_N_PADDED, n_free))
            parts = [value.new_full(size, fills.get(name, 0)), value]
            return torch.cat(parts if side == "left" else parts[::-1], 1)

        named = {name: pad(name, value) for name, value in {**self.named, **added}.items()}
        return replace(self, named=named)

    def with_arguments(self, **named: Any) -> Batch:
        """Return the arguments with others beside them."""
        return replace(self, named={**self.named, **named})

    def without_argument(self, name: str) -> Batch:
        """Return the arguments but for one."""
        return replace(self, named={key: part for key, part in self.named.items() if key != name})

    def with_mask(self) -> Batch:
        """Return the arguments with a mask: that which is given, or else by the id of padding."""
        ids: Tensor = self.named[self.ids]
        if isinstance(self.named.get(MASK), Tensor) or self.pad_id is None:
            return self.with_arguments(**{MASK: self.mask})
        is_other = (ids != self.pad_id).long()
        is_real = (is_other.cumsum(1) > 0) & (is_other.flip(1).cumsum(1).flip(1) > 0)
        return self.with_arguments(**{MASK: is_real.long()})

    def unpadded_rows(self) -> Iterator[Batch]:
        """Yield each padded row alone, without its padding.

        Raises:
            CheckNotApplicable: no row has padding at its ends.
        """
        n_tokens, real = self.n_tokens, self.with_mask().mask.bool()
        rows = [
            (row, int(marks.nonzero()[0]), int(marks.nonzero()[-1]) + 1)
            for row, marks in enumerate(real)
            if bool(marks.any())
        ]
        padded = [(row, start, end) for row, start, end in rows if end - start < n_tokens]
        if not padded:
            raise CheckNotApplicable("no row is padded")
        for row, start, end in padded:
            yield self.select_rows([row]).cut_tokens(start, end)

    def cut_tokens(self, start: int, end: int) -> Batch:
        """Return the arguments of a range of tokens."""
        shape = self.named[self.ids].shape

        def part(value: Any) -> Any:
            is_of_tokens = isinstance(value, Tensor) and value.shape[:2] == shape
            return value[:, start:end] if is_of_tokens else value

        return self._map_arguments(part)

    def token_inputs(self) -> dict[str, Any] | None:
        """Return what tells `hl.compare` the tokens; None for inputs without ids."""
        if not self.ids:
            return None
        told = {IDS: self.named[self.ids], MASK: self.mask}
        return told | {name: self.named[name] for name in (POSITIONS,) if name in self.named}

    # -- kinds of numbers -----------------------------------------------------------------------

    def to(self, target: torch.dtype | torch.device) -> Batch:
        """Return the arguments with floating tensors in a dtype, or all on a device."""

        def move(tensor: Tensor) -> Tensor:
            if isinstance(target, torch.device):
                return tensor.to(target)
            return tensor.to(dtype_after_cast(tensor, target))

        return self._map_arguments(lambda value: tree.map_tensors(move, value))

    def _map_arguments(self, change: Callable[[Any], Any]) -> Batch:
        named = {name: change(value) for name, value in self.named.items()}
        return replace(self, args=tuple(map(change, self.args)), named=named)


def batch_from_inputs(model: nn.Module, inputs: Any) -> Batch:
    """Return the arguments that inputs give to a model."""
    args, kwargs = args_and_kwargs(inputs)
    signature = signature_of(model)
    # A program of torch.export takes arguments as it was exported with them.
    named = {} if is_exported(model) else _name_positional_arguments(signature, args)
    if named:
        args, kwargs = (), named
    config = getattr(model, "config", None)
    pad_id = getattr(config, "pad_token_id", None)
    most = (getattr(config, name, None) for name in _MOST_POSITIONS)
    return Batch(
        args,
        kwargs,
        _token_ids_name(kwargs),
        frozenset() if signature is None else frozenset(signature.parameters),
        pad_id if type(pad_id) is int else None,
        next((number for number in most if type(number) is int), None),
    )


def _name_positional_arguments(
    signature: Signature | None, args: tuple[Any, ...]
) -> dict[str, Any]:
    """Return positional arguments by name; none if some have no name."""
    parameters = {} if signature is None else signature.parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    is_named = not kinds & {Parameter.VAR_POSITIONAL, Parameter.POSITIONAL_ONLY}
    if not is_named or len(args) > len(parameters):  # which the model itself refuses
        return {}
    return dict(zip(parameters, args, strict=False))


def _token_ids_name(named: Mapping[str, Any]) -> str:
    first = next((name for name, value in named.items() if isinstance(value, Tensor)), "")
    name = IDS if isinstance(named.get(IDS), Tensor) else first
    value = named.get(name)
    if isinstance(value, Tensor) and value.ndim == 2 and value.dtype in (torch.int64, torch.int32):
        return name
    return ""
