"""The modules and parameters of a model, each once, with all its paths. Imports the internals.

Linear in the number of paths; wrapper prefixes are left out, shared modules carry their aliases,
and a module that holds itself does not hang the walk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, final

from torch import Tensor, nn

from hookline.engine.distributed_internals import sharded_parameters
from hookline.engine.torch_internals import children, parameters, unwrap


@dataclass(slots=True, eq=False)
class Node:
    """One module of a model: its first path, its place in registration order, its other paths."""

    path: str
    module: nn.Module
    index: int
    aliases: list[str] = field(default_factory=list)
    parent: Node | None = None

    @property
    def paths(self) -> tuple[str, ...]:
        """All paths of the module, the first one first."""
        return (self.path, *self.aliases)

    @property
    def type_name(self) -> str:
        """The name of the module's class."""
        return type(self.module).__name__

    @property
    def position(self) -> tuple[int, int]:
        """Its place in registration order: by module, then within it."""
        return self.index, 0


@dataclass(slots=True, eq=False)
class TensorNode:
    """One parameter of a model, or a tensor that was given by name: tied ones have aliases.

    Of a parameter that FSDP2 shards, `is_sharded`, the tensor is this rank's shard, at all times.
    """

    path: str
    tensor: Tensor
    position: tuple[int, int]
    type_name: str
    aliases: list[str] = field(default_factory=list)
    is_sharded: bool = False

    @property
    def paths(self) -> tuple[str, ...]:
        """All paths of the tensor, the first one first."""
        return (self.path, *self.aliases)


@final
class Layout:
    """What a line can select from: the modules of a model, and its parameters when asked for."""

    __slots__ = ("_tensors", "kinds", "name", "nodes")

    def __init__(
        self,
        name: str,
        nodes: list[Node],
        tensors: list[TensorNode] | None = None,
        kinds: frozenset[type] = frozenset(),
    ) -> None:
        self.name = name
        self.nodes = nodes
        self.kinds = kinds  # the types of the modules
        self._tensors = tensors

    @property
    def tensors(self) -> list[TensorNode]:
        """The parameters, in registration order."""
        if self._tensors is None:
            self._tensors = _parameters(self.nodes)
        return self._tensors


def layout(model: nn.Module) -> Layout:
    """The layout of a model: every module is looked at once."""
    kinds: set[type] = set()
    nodes = walk(model, kinds)
    return Layout(type(model).__name__, nodes, None, frozenset(kinds))


def layout_of_tensors(named: Mapping[str, Tensor]) -> Layout:
    """The layout of tensors that were given by name."""
    nodes: dict[int, TensorNode] = {}
    for number, (name, tensor) in enumerate(named.items()):
        if id(tensor) in nodes:
            nodes[id(tensor)].aliases.append(name)
        else:
            nodes[id(tensor)] = TensorNode(name, tensor, (0, number), type(tensor).__name__)
    return Layout("tensors", [], list(nodes.values()))


def walk(model: nn.Module, kinds: set[type] | None = None) -> list[Node]:
    """Every module of a model, in registration order, the root first; their types into `kinds`."""
    nodes: dict[int, Node] = {}  # by id: a module may define == and lose its hash
    _visit(model, "", None, nodes, set(), _Kinds(set(), set() if kinds is None else kinds))
    return list(nodes.values())


class _Kinds(NamedTuple):
    """The types known not to be wrappers: asking each type once halves the walk; and all types."""

    bare: set[type]
    met: set[type]


def _visit(
    module: nn.Module,
    path: str,
    parent: Node | None,
    nodes: dict[int, Node],
    above: set[int],
    kinds: _Kinds,
) -> None:
    kind = type(module)
    if kind not in kinds.bare:
        inner_module = unwrap(module)
        kinds.met.add(type(inner_module))
        if inner_module is module:
            kinds.bare.add(kind)
        module = inner_module
    key = id(module)
    node = nodes.get(key)
    if node is None:
        node = nodes[key] = Node(path, module, len(nodes), parent=parent)
    elif key in above:
        return
    else:
        node.aliases.append(path)
    inner = children(module)
    if inner:
        above.add(key)
        prefix = f"{path}." if path else ""
        for name, child in inner.items():
            if child is None:
                continue
            # Most modules are leaves that are met once: a call of a function less for each.
            if type(child) in kinds.bare and not children(child) and id(child) not in nodes:
                nodes[id(child)] = Node(prefix + name, child, len(nodes), parent=node)
            else:
                _visit(child, prefix + name, node, nodes, above, kinds)
        above.discard(key)


def _parameters(nodes: list[Node]) -> list[TensorNode]:
    found: dict[int, TensorNode] = {}
    shards: dict[int, Tensor] = {}
    for node in nodes:
        for shard, whole in sharded_parameters(node.module):
            shards[id(shard)] = shard
            if whole is not None:
                shards[id(whole)] = shard
    for node in nodes:
        for number, (name, held) in enumerate(parameters(node.module).items()):
            if held is None:
                continue
            tensor = shards.get(id(held), held)
            paths = [f"{path}.{name}" if path else name for path in node.paths]
            if id(tensor) in found:
                found[id(tensor)].aliases += paths
                continue
            found[id(tensor)] = TensorNode(
                paths[0],
                tensor,
                (node.index, number),
                f"{node.type_name}.{name}",
                paths[1:],
                id(held) in shards,
            )
    return list(found.values())
