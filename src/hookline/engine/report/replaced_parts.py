"""Notice selected modules and parameters that the model no longer holds where a line found them.

A hook stays on the object that it was registered on. After `model[0] = other`, a
`load_state_dict(assign=True)` or a parametrization, the hook is on an object that the path no
longer leads to. Each pass begins with a look at the selected paths.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import starmap
from operator import is_
from typing import Any, NamedTuple, final

from torch import nn

from hookline.display.text import plural
from hookline.engine.selection.module_tree import ModuleNode, ModuleTree, ParameterNode, module_tree
from hookline.engine.selection.site import Site, path_text
from hookline.engine.taps.base import Tap
from hookline.engine.torch_private.distributed import sharding_kind
from hookline.engine.torch_private.modules import (
    in_functional_call,
    own_parameters,
    table_holder,
    unwrap,
    value_address,
)
from hookline.errors import warn
from hookline.util.fork_safe_lock import fork_safe_lock

Node = ModuleNode | ParameterNode


class Consequence(NamedTuple):
    """Name the consequence of a replacement for the work of a verb, as parts of a sentence."""

    # For an object that has left the model. `{sites}` stands for the sites, `{kind}` for "module"
    # or "parameter".
    gone: str = "the values of {sites} are those of the old {kind}"
    # For an object that is still in the model. `{now}` stands for its sites there.
    moved: str = "the values of {sites} are those of {now}"


class Replacement(NamedTuple):
    """Describe a site whose module or parameter was replaced."""

    site: Site  # the site
    kind: str  # "module" or "parameter", whichever was replaced
    path: str  # the path at which it was, as written: that of the site, or of a module above
    event: str  # the event, with the classes before and now
    now: Site | None  # the site at which the object of the site still is in the model, if it is

    @property
    def remark(self) -> str:
        """Return the event, and the place where the object of the site is now."""
        text = f"the {self.kind} {self.path} was {self.event} {_SINCE}"
        return f"{text}; it is now at {self.now}" if self.now else text


@final
@dataclass(slots=True, eq=False)
class Originals:
    """Keep the selected modules and parameters of a line, as the line found them.

    Args:
        name: the verb of the line.
        root: the model of the line; None for a line without one.
        tree: the modules of the model.
        taps: the taps of the line; the list grows.
        nodes: the taps' modules and parameters, by the tap's id.

    Attributes:
        kinds: the kinds of the taps' nodes.
        consequence: the consequence that a warning names.
        told: the replacements that `warn_of_replaced` has warned of, by site.
    """

    _name: str
    _root: nn.Module | None
    _tree: ModuleTree | None  # None after the first look
    _taps: list[Tap]
    _nodes: dict[int, Node]
    kinds: set[type] = field(default_factory=set)
    consequence: Consequence = field(default_factory=Consequence)
    told: dict[Site, Replacement] = field(default_factory=dict)
    _core: nn.Module | None = field(init=False)
    _further: list[tuple[Site, Node]] = field(default_factory=list)
    # FSDP1 puts other tensors in the parameters' places, and back.
    _has_parameters: bool = True
    _lock: threading.RLock = field(default_factory=fork_safe_lock)
    # Made at the second look: each module on a selected path, with its name and the attributes of
    # its parent, where wrappers may be around it; each selected parameter, with its name and the
    # attributes of its module. Attributes, not their tables: `del sequential[1]` makes a new table.
    _linked: list[tuple[dict[str, Any], str, nn.Module]] = field(default_factory=list)
    _tensors: list[tuple[dict[str, Any], str, ParameterNode]] = field(default_factory=list)
    _n_linked: int = -1  # the number of taps when they were made

    def __post_init__(self) -> None:
        self._core = None if self._root is None else unwrap(self._root)

    def add_sites(self, places: Iterable[tuple[Site, Node]]) -> None:
        """Add sites that have no tap of their own."""
        self._further += places
        self._n_linked = -1

    def end(self) -> None:
        """Release the model."""
        self._root = self._core = self._tree = None
        self._nodes, self._further = {}, []
        self._linked, self._tensors = [], []

    def warn_of_replaced(self) -> None:
        """Warn of the sites that were replaced since the last look. Called when a pass begins."""
        # Most lines see one pass. For that, comparing all modules takes less time than noting
        # which of them matter.
        tree, self._tree = self._tree, None
        if tree is not None and self._is_tree_unchanged(tree):
            return
        if self._n_linked == len(self._taps) and self._are_linked_in_place():
            return
        with self._lock:
            replacements = self._find_replaced()
            self.told.update((replacement.site, replacement) for replacement in replacements)
        if replacements:
            warn(self._warning(replacements))

    def replacements(self) -> dict[Site, Replacement]:
        """Return all replacements: those that were told, and those since."""
        if self._root is None:
            return self.told
        with self._lock:
            return self.told | {
                replacement.site: replacement for replacement in self._find_replaced()
            }

    # -- the quick look ----------------------------------------------------------------------------

    def _is_tree_unchanged(self, tree: ModuleTree) -> bool:
        """Tell whether every module of the model is where it was when the line was attached."""
        root = self._root
        if root is None or unwrap(root) is not self._core:
            return root is None
        if self._further or ParameterNode in self.kinds:
            return False
        parents = [node for node in tree.nodes if node.children]
        return all(
            _holds_children(table_holder(node.module, "_modules"), node.children)
            for node in parents
        )

    def _are_linked_in_place(self) -> bool:
        root = self._root  # another thread may end the line meanwhile
        if root is None or unwrap(root) is not self._core:
            return root is None
        for attributes, name, module in self._linked:
            table = attributes["_modules"]
            if name not in table:
                return False
            if table[name] is not module and unwrap(table[name]) is not module:
                return False
        return all(starmap(_is_held, self._tensors)) or in_functional_call()

    def _link_nodes(self, nodes: list[Node]) -> None:
        """Note the places of the modules and parameters of some nodes."""
        above = {node.parent for node in nodes}
        waiting = list(above)
        for node in waiting:
            if node is not None and node.parent not in above:
                above.add(node.parent)
                waiting.append(node.parent)
        self._linked = [
            (table_holder(node.parent.module, "_modules"), _last_path_part(node), node.module)
            for node in {*nodes, *above}
            if type(node) is ModuleNode and node.parent is not None
        ]
        self._tensors = [
            (table_holder(node.parent.module, "_parameters"), _last_path_part(node), node)
            for node in nodes
            if isinstance(node, ParameterNode) and node.parent and self._stays_in_model(node)
        ]

    # -- the search --------------------------------------------------------------------------------

    def _untold_nodes(self) -> Iterator[tuple[Site, Node]]:
        """Yield the sites that are on the model and not told yet."""
        for tap in list(self._taps):
            node = self._nodes.get(id(tap))
            if node is not None and not tap.is_removed and tap.site not in self.told:
                yield tap.site, node
        for site, node in self._further:
            if site not in self.told:
                yield site, node

    def _find_replaced(self) -> list[Replacement]:
        """Find the sites that were replaced and not told yet."""
        root, n_taps = self._root, len(self._taps)
        if self._n_linked != n_taps:
            self._link_nodes([*self._nodes.values(), *(node for _, node in self._further)])
            self._n_linked = n_taps
        if root is None or self._are_linked_in_place():
            return []
        self._has_parameters = sharding_kind(root) != "FSDP1"
        tree = module_tree(root)
        search = _Search(tree)
        replacements, nodes = [], []
        for site, node in self._untold_nodes():
            replacement = search.find(site, node) if self._stays_in_model(node) else None
            if replacement is None:
                nodes.append(node.find_in(tree) or node)
            else:
                replacements.append(replacement)
        if not replacements:
            # The next look is quick again: it knows the wrappers and the other paths.
            self._core = unwrap(root)
            self._link_nodes(nodes)
        return replacements

    def _stays_in_model(self, node: Node) -> bool:
        """Tell whether the model holds the object of a node under its path all the time."""
        if isinstance(node, ModuleNode):
            return True
        return self._has_parameters and node.parent is not None and not node.is_sharded

    def _warning(self, replacements: list[Replacement]) -> str:
        groups: dict[tuple[str, str, bool], list[Replacement]] = {}
        for new in replacements:
            groups.setdefault((new.kind, new.event, new.now is None), []).append(new)
        parts = []
        for (kind, event, is_gone), group in list(groups.items())[:3]:
            places = list(dict.fromkeys(new.path for new in group))
            many = len(places) > 1
            text = self.consequence.gone if is_gone else self.consequence.moved
            outcome = text.format(
                sites=_list_first_three([str(new.site) for new in group]),
                now=_list_first_three([str(new.now) for new in group]),
                kind=kind + "s" * many,
            )
            subject = (
                f"the {kind}{'s' * many} {_list_first_three(places)} {'were' if many else 'was'}"
            )
            parts.append(f"{subject} {event} {_SINCE}, so {outcome}")
        more = sum(map(len, list(groups.values())[3:]))
        remainder = f"; and {plural(more, 'more site')}" if more else ""
        return (
            f"hl.{self._name}: {'; '.join(parts)}{remainder}."
            f"\nEnd the line, and call hl.{self._name} again after the model has changed."
        )


def _last_path_part(node: Node) -> str:
    """Return the name under which a module holds a node's object."""
    return node.path.rpartition(".")[2]


def _holds_children(attributes: dict[str, Any], children: tuple[nn.Module | None, ...]) -> bool:
    """Tell whether a module still holds the same children."""
    now = tuple(attributes["_modules"].values())
    return len(now) == len(children) and all(map(is_, now, children))


def _is_held(attributes: dict[str, Any], name: str, node: ParameterNode) -> bool:
    """Tell whether a module still holds a parameter, with the same value."""
    table, tensor = attributes["_parameters"], node.tensor
    return name in table and table[name] is tensor and value_address(tensor) == node.address


_SINCE = "after the line was attached"


def _list_first_three(texts: list[str]) -> str:
    return ", ".join(texts[:3]) + f" and {len(texts) - 3} more" * (len(texts) > 3)


@final
class _Search:
    """Search for lost objects in the model as it is now."""

    def __init__(self, tree: ModuleTree) -> None:
        self._tree = tree
        self._is_functional = in_functional_call()

    def find(self, site: Site, node: Node) -> Replacement | None:
        """Return the replacement of a site; None for a site whose object is at one of its paths."""
        if isinstance(node, ParameterNode):
            return self._find_parameter(site, node)
        if self._is_at_own_path(node):
            return None
        return self._find_replaced_above(site, node, node.find_in(self._tree))

    def _is_at_own_path(self, node: Node) -> bool:
        now = node.find_in(self._tree)
        return now is not None and not set(now.paths).isdisjoint(node.paths)

    def _find_replaced_above(self, site: Site, node: ModuleNode, now: Node | None) -> Replacement:
        """Return the replacement of a site: of the outermost replaced module on its path."""
        outermost, above = node, node.parent
        while above is not None:
            if not self._is_at_own_path(above):
                outermost = above
            above = above.parent
        successor, event = self._tree.by_path.get(outermost.path), "removed"
        if successor is not None:
            event = _replaced_event(outermost.type_name, successor.type_name)
        return Replacement(
            site, "module", path_text(outermost.path), event, _site_in_model(site, now)
        )

    def _find_parameter(self, site: Site, node: ParameterNode) -> Replacement | None:
        if self._is_functional or node.parent is None:
            return None
        now = node.find_in(self._tree)
        if self._is_at_own_path(node):
            if value_address(node.tensor) == node.address:
                return None
            event = "swapped (torch.utils.swap_tensors)"
            return Replacement(site, "parameter", node.path, event, None)
        if not self._is_at_own_path(node.parent):
            return self._find_replaced_above(site, node.parent, now)
        successor = dict(own_parameters(node.parent.module).items()).get(_last_path_part(node))
        event = "unregistered"  # a parametrization leaves an attribute of the same name
        if successor is not None:
            event = _replaced_event(type(node.tensor).__name__, type(successor).__name__)
        return Replacement(site, "parameter", node.path, event, _site_in_model(site, now))


def _replaced_event(before: str, now: str) -> str:
    return f"replaced ({'another ' + now if now == before else before + ' before, ' + now} now)"


def _site_in_model(site: Site, now: Node | None) -> Site | None:
    return None if now is None else replace(site, path=now.path)
