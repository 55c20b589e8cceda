"""The modules and parameters of a model, each once, with all its paths.

The walk is linear in the number of paths. It leaves out wrapper prefixes, gives shared modules
their aliases, and ends for a module that contains itself.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from torch import Tensor, nn

from hookline.engine.operations.operation_mode import operation_mode
from hookline.engine.selection.site import path_text
from hookline.engine.torch_private.distributed import fsdp2_parameter_pairs
from hookline.engine.torch_private.modules import own_parameters, unwrap_to_children, value_address
from hookline.errors import AttachError


@dataclass(slots=True, eq=False)
class ModuleNode:
    """Describe one module of a model: its first path, its registration index, its other paths.

    `children` have torch's wrappers around them, as the module holds them.
    """

    path: str
    module: nn.Module
    index: int
    aliases: tuple[str, ...] = ()
    parent: ModuleNode | None = None
    children: tuple[nn.Module | None, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        """Return all paths of the module, the first path first."""
        return (self.path, *self.aliases)

    @property
    def owner(self) -> nn.Module:
        """Return the module of the model that the node belongs to."""
        return self.module

    @property
    def type_name(self) -> str:
        """Return the name of the module's class."""
        return type(self.module).__name__

    @property
    def position(self) -> tuple[int, int]:
        """Return the sort key in registration order: the module's index, then 0."""
        return self.index, 0

    def find_in(self, tree: ModuleTree) -> ModuleNode | None:
        """Return the node of the module in a tree; None if the module has left the model."""
        return tree.modules_by_id.get(id(self.module))


@final
@dataclass(slots=True, eq=False)
class OperationNode(ModuleNode):
    """Describe the calls of one function in a module's own forward: an operation.

    `module` is the operation, and `parent` the node of the module. No tree lists operations.
    """

    # The selector, if it matched several modules. Some of them may not call the function.
    glob: str = ""

    @classmethod
    def of(cls, parent: ModuleNode, name: str, glob: str = "") -> OperationNode:
        """Return the node of an operation of a module."""
        first, *aliases = (f"{path}@{name}" for path in parent.paths)
        mode = operation_mode(parent.module)
        mode.attention.path = path_text(parent.path)
        return cls(first, mode.operation(name), parent.index, tuple(aliases), parent, (), glob)

    @property
    def host(self) -> ModuleNode:
        """Return the node of the module whose forward calls the function."""
        assert self.parent is not None
        return self.parent

    @property
    def name(self) -> str:
        """Return the name of the function."""
        return self.path.rpartition("@")[2]

    @property
    def owner(self) -> nn.Module:
        """Return the module whose forward calls the function."""
        return self.host.module

    @property
    def type_name(self) -> str:
        """Return the name of the module's class, and that of the function."""
        return f"{self.host.type_name}@{self.name}"

    @property
    def position(self) -> tuple[int, int]:
        """Return the sort key in registration order: after the module itself."""
        return self.index, 1

    def find_in(self, tree: ModuleTree) -> ModuleNode | None:
        """Return the node of the operation in a tree; None if the module has left the model."""
        host = self.host.find_in(tree)
        return None if host is None else OperationNode.of(host, self.name, self.glob)


@dataclass(slots=True, eq=False)
class ParameterNode:
    """One parameter of a model, or a tensor that was given by name; tied parameters have aliases.

    For a parameter that FSDP2 shards (`is_sharded`), the tensor is always this rank's shard. The
    parent is the module of the first path; None for tensors that no model holds. The address is of
    the tensor's value (`value_address`), to which the hooks on its gradient belong.
    """

    path: str
    tensor: Tensor
    position: tuple[int, int]
    type_name: str
    aliases: tuple[str, ...] = ()
    is_sharded: bool = False
    parent: ModuleNode | None = None
    address: int = 0

    @property
    def paths(self) -> tuple[str, ...]:
        """Return all paths of the tensor, the first path first."""
        return (self.path, *self.aliases)

    def find_in(self, tree: ModuleTree) -> ParameterNode | None:
        """Return the node of the tensor in a tree; None if the tensor has left the model."""
        return tree.tensors_by_id.get(id(self.tensor))


@final
@dataclass(eq=False)
class ModuleTree:
    """The modules of a model, and its parameters when asked for, from which a line selects."""

    name: str  # the class of the model
    nodes: list[ModuleNode]  # the modules, in registration order
    kinds: frozenset[type] = frozenset()  # the types of the modules
    # The modules that hold their compiled call.
    compiled: list[nn.Module] = field(default_factory=list)
    # The model, with torch's wrappers around it; None for tensors by name.
    root: nn.Module | None = None

    @functools.cached_property
    def tensors(self) -> list[ParameterNode]:
        """Return the parameters, in registration order."""
        return _parameter_nodes(self.nodes)

    @functools.cached_property
    def by_path(self) -> dict[str, ModuleNode]:
        """Return the nodes of the modules by each of their paths."""
        nodes = {node.path: node for node in self.nodes}
        shared = [node for node in self.nodes if node.aliases]  # few: most modules have one path
        return nodes | {path: node for node in shared for path in node.aliases}

    @functools.cached_property
    def modules_by_id(self) -> dict[int, ModuleNode]:
        """Return the nodes of the modules by the modules' ids."""
        return {id(node.module): node for node in self.nodes}

    @functools.cached_property
    def tensors_by_id(self) -> dict[int, ParameterNode]:
        """Return the nodes of the parameters by the parameters' ids."""
        return {id(node.tensor): node for node in self.tensors}


def module_tree(model: nn.Module) -> ModuleTree:
    """Return the module tree of a model, looking at every module once."""
    walked = _Walk()
    walked.visit(model, "", None)
    nodes = list(walked.nodes.values())
    kinds = frozenset(walked.kinds)
    return ModuleTree(type(model).__name__, nodes, kinds, walked.compiled, model)


def tree_of_tensors(named: Mapping[str, Tensor]) -> ModuleTree:
    """Return the module tree of tensors that were given by name."""
    nodes: dict[int, ParameterNode] = {}
    for number, (name, tensor) in enumerate(named.items()):
        if id(tensor) in nodes:
            nodes[id(tensor)].aliases += (name,)
        else:
            nodes[id(tensor)] = ParameterNode(name, tensor, (0, number), type(tensor).__name__)
    tree = ModuleTree("tensors", [])
    tree.tensors = list(nodes.values())
    return tree


def require_model(model: object, call: str) -> None:
    """Raise an error unless this object is a model.

    Args:
        model: the object.
        call: the call as a user would type it: "hl.summary(model, x)".

    Raises:
        AttachError: the object is not an `nn.Module`.
    """
    if not isinstance(model, nn.Module):
        verb = call.partition("(")[0]
        raise AttachError(
            f"{verb} must be given a model (an nn.Module), got {type(model).__name__}."
            f"\nGive the model {place_of_model(model)}, not a function that calls it: {call}."
        )


def place_of_model(target: object) -> str:
    """Continue "Give the model ..." for an object that is none: `load_model` returns its holder."""
    if isinstance(target, type) and issubclass(target, nn.Module):
        return f"of this class, {target.__name__}(...)"
    holds_model = isinstance(getattr(target, "model", None), nn.Module)
    return "in its attribute .model" if holds_model else "itself"


@final
@dataclass(slots=True)
class _Walk:
    """A walk over the modules of a model."""

    # The nodes by the ids of the modules: a module may define == and lose its hash.
    nodes: dict[int, ModuleNode] = field(default_factory=dict)
    # The ids of the modules around the one that is visited.
    above: set[int] = field(default_factory=set)
    bare: set[type] = field(default_factory=set)  # the types that are not wrappers
    kinds: set[type] = field(default_factory=set)  # the types of the modules
    # The modules that hold their compiled call, wrappers included.
    compiled: list[nn.Module] = field(default_factory=list)

    def visit(self, module: nn.Module, path: str, parent: ModuleNode | None) -> None:
        nodes, bare = self.nodes, self.bare
        module, compiled, inner = unwrap_to_children(module, bare)
        self.compiled += compiled
        self.kinds.add(type(module))
        key = id(module)
        node = nodes.get(key)
        if node is None:
            node = nodes[key] = ModuleNode(path, module, len(nodes), parent=parent)
        elif key in self.above:
            return
        else:
            node.aliases += (path,)
        node.children = tuple(inner.values())
        self.above.add(key)
        prefix = f"{path}." if path else ""
        for name, child in inner.items():
            if child is None:
                continue
            # Most modules are unshared leaves. Asking here what `is_uncompiled_leaf` asks saves two
            # function calls for each.
            attributes, child_key = child.__dict__, id(child)
            if (
                type(child) in bare
                and child_key not in nodes
                and not attributes.get("_modules", True)
                and "_compiled_call_impl" not in attributes
            ):
                nodes[child_key] = ModuleNode(prefix + name, child, len(nodes), (), node)
            else:
                self.visit(child, prefix + name, node)
        self.above.discard(key)


def _parameter_nodes(nodes: list[ModuleNode]) -> list[ParameterNode]:
    nodes_by_id: dict[int, ParameterNode] = {}
    pairs = [pair for node in nodes for pair in fsdp2_parameter_pairs(node.module)]
    shards = {id(part): pair[0] for pair in pairs for part in pair if part is not None}
    for node in nodes:
        for number, (name, parameter) in enumerate(own_parameters(node.module).items()):
            if parameter is None:
                continue
            tensor = shards.get(id(parameter), parameter)
            paths = tuple([f"{path}.{name}" if path else name for path in node.paths])
            if id(tensor) in nodes_by_id:
                nodes_by_id[id(tensor)].aliases += paths
                continue
            nodes_by_id[id(tensor)] = ParameterNode(
                paths[0],
                tensor,
                (node.index, number),
                f"{node.type_name}.{name}",
                paths[1:],
                id(parameter) in shards,
                node,
                value_address(tensor),
            )
    return list(nodes_by_id.values())
