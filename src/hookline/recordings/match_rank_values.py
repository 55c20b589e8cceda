"""Take the values of several ranks apart, compare their structures, and put them together again.

What the ranks cannot combine must be the same on all of them, or it is refused on all of them: a
rank's own value in a result of all ranks would be wrong without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from hookline.display.text import name_without_torch
from hookline.engine import format_by_rank, is_dtensor
from hookline.engine.pytree import describe, tree
from hookline.errors import RanksError
from hookline.recordings.encoding import NotSaved

Node = dict[str, Any]

_TENSORS = ("plain", "dtensor", "array")
COMBINED = (*_TENSORS, "number")
_CONSTANTS = (str, bytes, type(None), torch.Size, torch.dtype, slice, range, type, NotSaved)
_DEEPEST = 150  # levels of nesting


@final
class RankValue:
    """A value of one rank, taken apart.

    Attributes:
        nodes: the value's containers and leaves as JSON, in order.
        tensors: its tensors, and its NumPy arrays as tensors.
    """

    def __init__(self, value: Any) -> None:
        self.nodes: list[Node] = []
        self._leaves: list[tuple[Node, Any]] = []
        # By id(), each container, where it first is, and what is made of it: all are taken once.
        self._shared: dict[int, tuple[Any, str, list[Any]]] = {}
        self._make = self._disassemble(value, "", (), is_attribute=False)
        self.tensors = [
            torch.from_numpy(np.array(leaf, order="C")) if node["kind"] == "array" else leaf
            for node, leaf in self._leaves
            if node["kind"] in _TENSORS
        ]

    def _disassemble(
        self, value: Any, at: str, outer: tuple[Any, ...], *, is_attribute: bool
    ) -> Callable[[Iterator[Any]], Any]:
        """Note a value's nodes; return a function that makes the value of other leaves."""
        node = _leaf_node(value, at, is_attribute=is_attribute)
        parts = _rebuildable_parts(value, outer) if node is None else None
        if parts is None:
            node = node or _incomparable_node(value, at, is_attribute=is_attribute)
            self.nodes.append(node)
            self._leaves.append((node, value))
            return next
        if id(value) in self._shared:
            _, first, made = self._shared[id(value)]
            said = f"the {type(value).__name__} at {first}"
            self.nodes.append(_make_node(at, "same", type(value).__name__, text=said))
            return lambda _: made[-1]
        made = []
        self._shared[id(value)] = value, at, made
        self.nodes.append(_make_node(at, "container", type(value).__name__))
        is_attribute |= not tree.is_container(value)
        makers = [
            self._disassemble(
                part, at + describe.leaf_text((key,)), (*outer, value), is_attribute=is_attribute
            )
            for key, part in parts
        ]

        def make(leaves: Iterator[Any]) -> Any:
            made.append(tree.rebuild(value, [of(leaves) for of in makers], exact=False))
            return made[-1]

        return make

    def rebuild(self, tensors: Iterable[Tensor], numbers: Iterable[float | complex] = ()) -> Any:
        """Return the value with other tensors, and other numbers if there are any."""
        new_tensors, new_numbers = iter(tensors), iter(numbers)
        leaves: list[Any] = []
        for node, leaf in self._leaves:
            if node["kind"] in _TENSORS:
                tensor = next(new_tensors)
                leaves.append(tensor.numpy() if node["kind"] == "array" else tensor)
            else:
                leaves.append(next(new_numbers, leaf) if node["kind"] == "number" else leaf)
        return self._make(iter(leaves))


def _rebuildable_parts(value: Any, outer: tuple[Any, ...]) -> list[tuple[Any, Any]] | None:
    """Return the parts of a value that can be made anew of others; else None."""
    if isinstance(value, set | frozenset | NotSaved):  # a set has no order
        return None
    if len(outer) == _DEEPEST or any(value is container for container in outer):
        return None
    try:
        parts = tree.items(value)
        if parts is not None:
            tree.rebuild(value, [part for _, part in parts], exact=False)
    except Exception:  # a class's own code; the value is refused
        return None
    return parts


def _make_node(at: str, kind: str, dtype: str, **more: Any) -> Node:
    return {"at": at, "kind": kind, "dtype": dtype, "shape": [], **more}


def _leaf_node(value: Any, at: str, *, is_attribute: bool) -> Node | None:
    """Describe a leaf that ranks can combine or compare; None for other values."""
    if isinstance(value, Tensor):
        kind = "dtensor" if is_dtensor(value) else "plain"
        dtype = name_without_torch(value.dtype)
        return None if value.is_nested else {**_make_node(at, kind, dtype), "shape": [*value.shape]}
    if type(value) is np.ndarray and _has_torch_dtype(value):
        return {**_make_node(at, "array", str(value.dtype)), "shape": [*value.shape]}
    number = value.item() if isinstance(value, np.generic) else value
    if isinstance(number, int | float | complex):
        return _number_node(number, at, is_attribute=is_attribute)
    if isinstance(value, set | frozenset) and not any(
        True for _ in tree.tensors_and_opaque_parts(value)
    ):
        return _make_node(at, "same", type(value).__name__, text=str(sorted(map(repr, value))))
    if isinstance(value, _CONSTANTS) and (at or not isinstance(value, NotSaved)):
        return _make_node(at, "same", type(value).__name__, text=repr(value))
    return None


def _number_node(value: float | complex, at: str, *, is_attribute: bool) -> Node:
    if is_attribute:  # an object's settings, which are no results
        return _make_node(at, "same", "", text=repr(value))
    if isinstance(value, int):
        exact: Any = int(value)  # of a bool, too
    else:
        exact = [value.real, value.imag] if isinstance(value, complex) else float(value)
    return _make_node(at, "number", "", text=repr(value), value=exact)


def _has_torch_dtype(array: np.ndarray[Any, Any]) -> bool:
    """Tell whether torch has an array's dtype."""
    try:
        torch.from_numpy(np.empty(0, array.dtype))
    except TypeError:
        return False
    return True


def _incomparable_node(value: Any, at: str, *, is_attribute: bool) -> Node:
    """Describe what ranks can neither combine nor compare.

    In an object, such as the device of a cache, it does no harm if it holds no tensors.
    """
    is_harmless = is_attribute and next(tree.tensors(value), None) is None
    return _make_node(at, "ignored" if is_harmless else "other", type(value).__name__)


def nodes_across_ranks(nodes: Sequence[list[Node]], *kinds: str) -> list[tuple[Node, ...]]:
    """Return the nodes of some kinds (by default tensors and arrays), each on all ranks."""
    return [
        column for column in zip(*nodes, strict=True) if column[0]["kind"] in (kinds or _TENSORS)
    ]


def check_same_structure(question: str, ranks: list[int], nodes: Sequence[list[Node]]) -> None:
    """Refuse values that are not of one structure, dtype and number of dimensions."""
    for column in zip_longest(*nodes):
        if any(
            node is None or _node_structure(node) != _node_structure(column[0]) for node in column
        ):
            texts = ["nothing more" if node is None else node_text(node) for node in column]
            raise RanksError(
                f"{question}: the ranks' values are not of one kind:"
                f" {format_by_rank(ranks, texts)}."
                "\nRecord the same sites with the same options on every rank."
            )
    for node, *_ in nodes_across_ranks(nodes, "other"):
        raise RanksError(
            f"{question} combines tensors, NumPy arrays and numbers, got {node_text(node)}."
            "\nReturn tensors when recording: keep=lambda value: ...; or look the value up on each"
            " rank."
        )
    check_equal_leaves(question, ranks, nodes, "same")


def check_equal_leaves(
    question: str, ranks: list[int], nodes: Sequence[list[Node]], kind: str
) -> None:
    """Refuse leaves of a kind that are not the same on all ranks."""
    for column in nodes_across_ranks(nodes, kind):
        if any(node["text"] != column[0]["text"] for node in column):
            texts = [node["text"][:100] + _path_text(node) for node in column]
            raise RanksError(
                f"{question} needs what it does not combine to be the same on every rank, got"
                f" {format_by_rank(ranks, texts)}."
                "\nReduce numbers, run.reduced(..., op='mean'), or return tensors when recording:"
                " keep=lambda value: ..."
            )


def _node_structure(node: Node) -> tuple[Any, ...]:
    return node["at"], node["kind"], node["dtype"], len(node["shape"])


def node_text(node: Node) -> str:
    """Describe a node in a message."""
    names = {"plain": "Tensor", "dtensor": "DTensor", "array": "array"}
    if name := names.get(node["kind"]):
        return f"{name}{node['shape']} {node['dtype']}{_path_text(node)}"
    return str(node.get("text", node["dtype"]))[:100] + _path_text(node)


def _path_text(node: Node) -> str:
    return f" at {node['at']}" if node["at"] else ""
