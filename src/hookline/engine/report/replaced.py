"""Notice selected modules and parameters that the model no longer holds where a line found them.

A hook stays on the object that it was registered on. After `model[0] = other`, a
`load_state_dict(assign=True)` or a parametrization, the hook is on an object that the path no
longer leads to. Each pass begins with a look at the selected paths.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple, final

from torch import Tensor, nn

from hookline.display.text import plural
from hookline.engine.selection.module_tree import (
    ModuleNode,
    ModuleTree,
    ParameterNode,
    module_tree,
)
from hookline.engine.selection.site import Site, path_text
from hookline.engine.taps.base import Tap
from hookline.engine.torch_private.distributed import sharding
from hookline.engine.torch_private.modules import (
    children,
    in_functional_call,
    parameters,
    table_of,
    unwrapping,
    value_address,
)
from hookline.errors import warn
from hookline.util.locks import fork_safe_lock

Node = ModuleNode | ParameterNode
# The attributes of a module, the name of one of its tables, and the names and objects expected
# there. The table is fetched at each look, because `del sequential[1]` puts a new one in its place.
_Links = list[tuple[dict[str, Any], str, list[tuple[str, Any]]]]


class Lapse(NamedTuple):
    """The consequence of a replacement for the work of a verb, as parts of a sentence.

    Attributes:
        gone: for an object that has left the model. `{sites}` stands for the sites, `{kind}` for
            "module" or "parameter".
        moved: for an object that is still in the model. `{now}` stands for its sites there.
    """

    gone: str = "the values of {sites} are those of the old {kind}"
    moved: str = "the values of {sites} are those of {now}"


class Loss(NamedTuple):
    """A site whose module or parameter was replaced.

    Attributes:
        site: the site.
        kind: "module" or "parameter": the kind of what was replaced.
        path: the path at which it was, as written: that of the site, or of a module above.
        event: the event, with the classes before and now.
        now: the site at which the object of the site still is in the model, if it is.
    """

    site: Site
    kind: str
    path: str
    event: str
    now: Site | None

    @property
    def remark(self) -> str:
        """Return the event, and the place where the object of the site is now."""
        text = f"the {self.kind} {self.path} was {self.event} {_SINCE}"
        return f"{text}; it is now at {self.now}" if self.now else text


@final
class Originals:
    """The selected modules and parameters of a line, as it found them.

    Args:
        name: the verb of the line.
        root: the model of the line; None for a line without one.
        taps: the taps of the line; the list grows.
        nodes: the taps' modules and parameters, by the tap's id.

    Attributes:
        lapse: the consequence that a warning names.
        told: the losses that `look` has warned of, by site.
    """

    __slots__ = (
        "_further", "_has_parameters", "_links", "_lock", "_n_linked", "_name", "_nodes", "_root",
        "_taps", "_tensors", "lapse", "told",
    )  # fmt: skip

    def __init__(
        self, name: str, root: nn.Module | None, taps: list[Tap], nodes: dict[int, Node]
    ) -> None:
        self.lapse = Lapse()
        self.told: dict[Site, Loss] = {}
        self._name = name
        self._root = root
        self._taps = taps
        self._nodes = nodes
        self._further: list[tuple[Site, Node]] = []
        # FSDP1 puts other tensors in the parameters' places, and back.
        self._has_parameters = True
        self._lock = fork_safe_lock()
        # Two lists of links, of modules and of parameters; and the parameters with the addresses
        # of their values. They are made at the first look.
        self._links: tuple[_Links, _Links] = ([], [])
        self._tensors: list[tuple[Tensor, int]] = []
        self._n_linked = -1  # the number of taps when they were made

    def add(self, places: Iterable[tuple[Site, Node]]) -> None:
        """Add sites that have no tap of their own."""
        self._further += places
        self._n_linked = -1

    def end(self) -> None:
        """Release the model."""
        self._root, self._nodes, self._further = None, {}, []
        self._links, self._tensors = ([], []), []

    def look(self) -> None:
        """Warn of the sites that were replaced since the last look. Called when a pass begins."""
        if self._n_linked == len(self._taps) and self._are_in_place():
            return
        with self._lock:
            losses = self._find()
            self.told.update((loss.site, loss) for loss in losses)
            if losses:
                self._n_linked = -1  # without the told sites, so that the next look is quick again
        if losses:
            warn(self._warning(losses))

    def losses(self) -> dict[Site, Loss]:
        """Return all losses: those that were told, and those since."""
        if self._root is None:
            return self.told
        with self._lock:
            return self.told | {loss.site: loss for loss in self._find()}

    # -- the quick look ----------------------------------------------------------------------------

    def _are_in_place(self) -> bool:
        return (
            _lead_to(self._links[0])
            and (_lead_to(self._links[1]) or in_functional_call())
            and all(value_address(tensor) == address for tensor, address in self._tensors)
        )

    def _places(self) -> Iterator[tuple[Site, Node]]:
        """Yield the sites that are on the model and not told yet."""
        for tap in list(self._taps):
            node = self._nodes.get(id(tap))
            if node is not None and not tap.is_removed and tap.site not in self.told:
                yield tap.site, node
        for site, node in self._further:
            if site not in self.told:
                yield site, node

    def _link(self, search: _Search | None = None) -> None:
        """Note where each object must be found: at its first path, or where a search has seen it.

        Args:
            search: a search that has lost nothing.
        """
        tables = _Table("_modules"), _Table("_parameters")
        tensors: dict[int, tuple[Tensor, int]] = {}
        seen = set()
        n_taps = len(self._taps)
        for _, node in self._places():
            if not self._can_lose(node):
                continue
            above = node if search is None else search.now(node) or node
            if isinstance(above, ParameterNode):
                if id(above.tensor) in tensors or above.holder is None:
                    continue
                tensors[id(above.tensor)] = above.tensor, above.address
                tables[1].add(above.holder.module, above.path, above.tensor, search)
                above = above.holder
            while above.parent is not None and id(above) not in seen:
                seen.add(id(above))
                tables[0].add(above.parent.module, above.path, above.module, search)
                above = above.parent
        if self._root is not None:
            tables[0].add_wrapped(self._root)
        self._links = tables[0].links(), tables[1].links()
        self._tensors = list(tensors.values())
        self._n_linked = n_taps

    # -- the search --------------------------------------------------------------------------------

    def _find(self) -> list[Loss]:
        """Find the sites that were replaced and not told yet."""
        if self._root is None:
            return []
        if self._n_linked != len(self._taps):
            self._link()
        if self._are_in_place():
            return []
        self._has_parameters = sharding(self._root) != "FSDP1"
        search = _Search(module_tree(self._root))
        places = [place for place in self._places() if self._can_lose(place[1])]
        losses = list(filter(None, [search.loss(*place) for place in places]))
        if not losses:  # wrapped by torch, or held at another path
            self._link(search)
        return losses

    def _can_lose(self, node: Node) -> bool:
        """Tell whether the model holds the object of a node under its path all the time."""
        if isinstance(node, ModuleNode):
            return True
        return self._has_parameters and node.holder is not None and not node.is_sharded

    def _warning(self, losses: list[Loss]) -> str:
        groups: dict[tuple[str, str, bool], list[Loss]] = {}
        for loss in losses:
            groups.setdefault((loss.kind, loss.event, loss.now is None), []).append(loss)
        parts = []
        for (kind, event, is_gone), group in list(groups.items())[:3]:
            places = list(dict.fromkeys(loss.path for loss in group))
            many = len(places) > 1
            text = self.lapse.gone if is_gone else self.lapse.moved
            outcome = text.format(
                sites=_listed([str(loss.site) for loss in group]),
                now=_listed([str(loss.now) for loss in group]),
                kind=kind + "s" * many,
            )
            subject = f"the {kind}{'s' * many} {_listed(places)} {'were' if many else 'was'}"
            parts.append(f"{subject} {event} {_SINCE}, so {outcome}")
        more = sum(map(len, list(groups.values())[3:]))
        rest = f"; and {plural(more, 'more site')}" if more else ""
        return (
            f"hl.{self._name}: {'; '.join(parts)}{rest}."
            f"\nEnd the line, and call hl.{self._name} again after the model has changed."
        )


def _lead_to(links: _Links) -> bool:
    """Tell whether each name still leads to its object."""
    try:
        for attributes, name, expected in links:
            table = attributes[name]
            for key, part in expected:
                if table[key] is not part:
                    return False
    except KeyError:
        return False
    return True


_SINCE = "after the line was attached"


def _listed(texts: list[str]) -> str:
    return ", ".join(texts[:3]) + f" and {len(texts) - 3} more" * (len(texts) > 3)


@final
class _Table:
    """The objects that modules must hold in one of their tables, by module."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._parts: dict[int, tuple[dict[str, Any], list[tuple[str, Any]]]] = {}

    def links(self) -> _Links:
        """Return the links."""
        return [(attributes, self._name, expected) for attributes, expected in self._parts.values()]

    def add(self, module: nn.Module, path: str, part: Any, search: object = None) -> None:
        """Add an object that a module must hold.

        Args:
            module: the module.
            path: the path of the object; it ends in its name.
            part: the object.
            search: given if the module surely holds the object, perhaps by a name with a dot.
        """
        entry = self._parts.get(id(module))
        if entry is None:
            entry = self._parts[id(module)] = table_of(module, self._name), []
        attributes, expected = entry
        name, table = path.rpartition(".")[2], attributes[self._name]
        held = table[name] if name in table else None
        if held is not part and search is not None:
            names = [key for key, other in table.items() if _inside(other) is part]
            name = names[0] if names else name
            held = table[name] if names else None
        if held is not part and isinstance(held, nn.Module) and _inside(held) is part:
            expected.append((name, held))
            self.add_wrapped(held)
        else:
            expected.append((name, part))

    def add_wrapped(self, held: nn.Module) -> None:
        """Add the modules inside of torch's wrappers."""
        for wrapper, inner in pairwise(unwrapping(held)):
            names = [name for name, child in children(wrapper).items() if child is inner]
            self.add(wrapper, names[0], inner)


def _inside(held: Any) -> Any:
    return unwrapping(held)[-1] if isinstance(held, nn.Module) else held


@final
class _Search:
    """A search for lost objects in the model as it is now."""

    def __init__(self, tree: ModuleTree) -> None:
        self._tree = tree
        self._nodes = {id(node.module): node for node in tree.nodes}
        self._by_path = {path: node for node in tree.nodes for path in node.paths}
        self._is_functional = in_functional_call()
        self._tensors: dict[int, ParameterNode] | None = None

    def now(self, node: Node) -> Node | None:
        """Return the node that an object has now; None for an object that has left the model."""
        if isinstance(node, ModuleNode):
            return self._nodes.get(id(node.module))
        if self._tensors is None:
            self._tensors = {id(other.tensor): other for other in self._tree.tensors}
        return self._tensors.get(id(node.tensor))

    def loss(self, site: Site, node: Node) -> Loss | None:
        """Return the loss of a site; None for a site whose object is at one of its paths."""
        if isinstance(node, ParameterNode):
            return self._loss_of_parameter(site, node)
        if self._is_there(node):
            return None
        return self._loss_above(site, node, self.now(node))

    def _is_there(self, node: Node) -> bool:
        now = self.now(node)
        return now is not None and not set(now.paths).isdisjoint(node.paths)

    def _loss_above(self, site: Site, node: ModuleNode, now: Node | None) -> Loss:
        """Return the loss of a site by the outermost module that was replaced on its path."""
        outermost, above = node, node.parent
        while above is not None:
            if not self._is_there(above):
                outermost = above
            above = above.parent
        held = self._by_path.get(outermost.path)
        event = "removed" if held is None else _replaced(outermost.type_name, held.type_name)
        return Loss(site, "module", path_text(outermost.path), event, _moved(site, now))

    def _loss_of_parameter(self, site: Site, node: ParameterNode) -> Loss | None:
        if self._is_functional or node.holder is None:
            return None
        now = self.now(node)
        if self._is_there(node):
            if value_address(node.tensor) == node.address:
                return None
            return Loss(site, "parameter", node.path, "swapped (torch.utils.swap_tensors)", None)
        if not self._is_there(node.holder):
            return self._loss_above(site, node.holder, now)
        held = dict(parameters(node.holder.module).items()).get(node.path.rpartition(".")[2])
        event = "unregistered"  # a parametrization leaves an attribute of the same name
        if held is not None:
            event = _replaced(type(node.tensor).__name__, type(held).__name__)
        return Loss(site, "parameter", node.path, event, _moved(site, now))


def _replaced(before: str, now: str) -> str:
    return f"replaced ({'another ' + now if now == before else before + ' before, ' + now} now)"


def _moved(site: Site, now: Node | None) -> Site | None:
    return None if now is None else replace(site, path=now.path)
