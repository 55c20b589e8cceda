"""Find the sites that a selector matches in one model.

A selector is a glob on paths, a compiled regex, a module type, a module, a parameter, a predicate
`(path, module) -> bool`, a selection, or a list of these; None is every module. For the port `grad`
it selects parameters: by their own paths, or all parameters of the modules that it matches.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, final

from torch import Tensor, nn

from hookline.display.results import Printout, Result
from hookline.display.text import plural
from hookline.display.text_table import Heading
from hookline.engine.pytree.describe import in_words
from hookline.engine.selection.model_parts import sites_of_part
from hookline.engine.selection.module_tree import (
    ModuleNode,
    ModuleTree,
    OperationNode,
    ParameterNode,
    module_tree,
    require_model,
)
from hookline.engine.selection.operation_names import operation_names, refuse_exported
from hookline.engine.selection.site import (
    PORTS,
    ROOT,
    Site,
    SiteText,
    glob_to_regex,
    parse_site_text,
    paths_above,
)
from hookline.engine.selection.suggestions import SelectorParts, explain_no_match
from hookline.engine.torch_private.modules import has_forward, lacks_forward, unwrap
from hookline.errors import SelectionError
from hookline.util.hide_from_dir import hide_from_dir

# str | Site | re.Pattern | type | Module | Tensor | predicate | Selection | list | None
Selector = Any
SitedNode = tuple[Site, ModuleNode | ParameterNode]

_MOST_ROWS = 60  # of a selection that is printed


def _registration_order(place: SitedNode) -> tuple[int, int, int]:
    site, node = place
    module, within = node.position
    return module, PORTS.index(site.port) if site.port in PORTS else -1, within


def _sort_sited_nodes(pairs: Iterable[SitedNode]) -> list[SitedNode]:
    """Sort places by registration order, and drop duplicates."""
    places = list(pairs)
    # Most selections are one port of modules in order; checking this costs a tenth of sorting.
    port, last = places[0][0].port if places else "", -1
    for site, node in places:
        if site.port != port or not isinstance(node, ModuleNode) or node.index <= last:
            return list(dict(sorted(places, key=_registration_order)).items())
        last = node.index
    return places


@final
@hide_from_dir("places")
class Selection(Result):
    """The sites that a selector matches in one model, in registration order.

        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        >>> linears = hl.select(model, nn.Linear)
        >>> [str(site) for site in linears - "0"]
        ['2']

    `hl.select` returns a selection. Selections of one model combine: `|` (either), `&` (both), `-`
    (the first without the second). The other side may be any selector. Iterate over a selection for
    its sites, or use it as a selector.

    Raises:
        SelectionError: by `|`, `&` and `-`: the other side is malformed, or matches nothing.
    """

    __slots__ = ("_sites", "_tree", "places")

    def __init__(self, tree: ModuleTree, places: Iterable[SitedNode]) -> None:
        self._tree = tree
        self.places: list[SitedNode] = _sort_sited_nodes(
            places
        )  # each site with its module or parameter
        self._sites = tuple([site for site, _ in self.places])

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites, in registration order."""
        return self._sites

    def __iter__(self) -> Iterator[Site]:
        return iter(self._sites)

    def __len__(self) -> int:
        return len(self._sites)

    def __contains__(self, site: object) -> bool:
        if isinstance(site, str):
            site = parse_site(site, {known.path for known in self})
        return site in self._sites

    def __or__(self, other: Selector) -> Selection:
        return Selection(self._tree, [*self.places, *self._coerce(other).places])

    def __and__(self, other: Selector) -> Selection:
        others = self._coerce(other)
        in_self, in_others = _coverage_test(self), _coverage_test(others)
        both = [pair for pair in self.places if in_others(pair[0])]
        finer = [pair for pair in others.places if in_self(pair[0])]
        return Selection(self._tree, [*both, *finer])

    def __sub__(self, other: Selector) -> Selection:
        is_dropped = _coverage_test(self._coerce(other))
        return Selection(self._tree, [pair for pair in self.places if not is_dropped(pair[0])])

    def _coerce(self, other: Selector) -> Selection:
        ports = tuple(dict.fromkeys(site.port for site in self)) or ("output",)
        return select_in(self._tree, other, ports)

    def to_dict(self) -> dict[str, Any]:
        """Return the sites as plain values: `site`, `type`, and the other paths as `also`."""
        return {"sites": self._table_rows()}

    def _table_rows(self) -> list[dict[str, Any]]:
        return [
            {"site": str(site), "type": site.module_type, "also": list(site.aliases)}
            for site in self
        ]

    def _printout(self) -> Printout:
        return Printout(
            title="Selection",
            head=f" of {plural(len(self), 'site')}",
            headings=(
                Heading("site", "path"),
                Heading("type", gives_way=1),
                Heading("also", "prose"),
            ),
            rows=[
                (str(site), site.module_type, ", ".join(site.aliases))
                for site in self._sites[:_MOST_ROWS]
            ],
            n_rows=len(self),
            more="sites; iterate for all",
            is_compact=True,
        )


def _coverage_test(selection: Selection) -> Callable[[Site], bool]:
    """Return a function that tells whether a selection covers a site.

    A whole value covers its leaves, and a site without a call covers each call.
    """
    by_place: defaultdict[tuple[str, str], list[Site]] = defaultdict(list)
    for site in selection:
        by_place[site.path, site.port].append(site)
    return lambda site: any(
        site.leaf[: len(whole.leaf)] == whole.leaf and whole.call in (None, site.call)
        for whole in by_place[site.path, site.port]
    )


def select(
    model: nn.Module, selector: Selector = None, ports: str | Sequence[str] = "output"
) -> Selection:
    """Find the sites that a selector matches in a model.

        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> [str(site) for site in hl.select(model, nn.Linear)]
        ['0']

    Args:
        model: the model to look in. It is not run, and not changed.
        selector: a glob on paths (`*`, `?` and `[0-9]` within a segment, `**` across segments,
            `{a,b}`; `@function`, `:port`, `[leaf]` and `#call` may follow), a compiled regex
            (searched anywhere in the path), a module type, a module, a parameter, a predicate
            `(path, module) -> bool`, a selection, or a list of these. None is every module that
            can be called, the root included. `@function` stands for the calls of a function of
            torch in the module's own forward: `h.3.attn@softmax`. After `hl.anatomy(model)`,
            `.resid_post` or `.pattern.3` names a part, in all layers or in one.
        ports: one or several of "input", "output", "grad_input", "grad_output" and "grad", for
            selectors that name no port themselves. "grad" selects parameters: those that the
            selector matches by their own path, and all parameters of the modules that it matches.

    Returns:
        A selection: the sites, in registration order. Print it, iterate over it, combine it with
        others by `|`, `&` and `-`, or use it as a selector.

    Raises:
        SelectionError: the selector is malformed, a port is unknown, or nothing matches the
            selector or one of a list. The message shows close matches and the model's first paths.
        AttachError: `model` is not a module.
    """
    require_model(model, "hl.select(model, selector)")
    return select_in(module_tree(model), selector, check_ports(ports))


def check_ports(ports: str | Sequence[str]) -> tuple[str, ...]:
    """Return the ports as a tuple.

    Raises:
        SelectionError: a port is unknown, or no port is given.
    """
    names = (ports,) if isinstance(ports, str) or not isinstance(ports, Iterable) else tuple(ports)
    for name in names:
        if name not in PORTS:
            raise SelectionError(
                f"ports must be of {', '.join(PORTS)}, got {name!r}.\nGive ports='output',"
                " ports=('output', 'grad_output') or the like."
            )
    if not names:
        raise SelectionError(
            f"ports must name at least one of {', '.join(PORTS)}, got none."
            "\nLeave ports out for outputs."
        )
    return names


def ports_for(model: object, ports: str | Sequence[str]) -> tuple[str, ...]:
    """Return the ports for a verb; tensors by name have the port `grad` only.

    Raises:
        SelectionError: a port is unknown, or no port is given.
    """
    names = check_ports(ports)
    return names if isinstance(model, nn.Module) or names != ("output",) else ("grad",)


def select_in(tree: ModuleTree, selector: Selector, ports: tuple[str, ...]) -> Selection:
    """Find the sites that a selector matches in a module tree.

    An event such as "state_dict" may stand for a port. Such a site belongs to the module itself,
    which then needs no forward.
    """
    return Selection(tree, _match_sites(tree, selector, ports))


def parse_site(text: str, paths: Container[str] = ()) -> Site:
    """Parse the text of one site, which is not a glob; `paths` are the known paths."""
    parts = parse_site_text(text, paths)
    return Site(parts.path, parts.port or "output", parts.leaf, parts.call)


def normalize_root(text: str) -> str:
    """Write the root's sites in the form of all output; other texts stay as they are.

    >>> normalize_root(""), normalize_root(":input"), normalize_root("(root)@tanh")
    ('(root)', '(root):input', '@tanh')
    """
    if text and not text.startswith((":", "#", "[", ROOT)):
        return text
    text, sign, run = text.partition("#")
    try:
        site = parse_site(text)
    except SelectionError:
        return text + sign + run
    return (text if site.path and site.path[0] != "@" else str(site)) + sign + run


def _match_sites(
    tree: ModuleTree, selector: Selector, ports: tuple[str, ...]
) -> Iterable[SitedNode]:
    if isinstance(selector, Selection):
        return _revalidate(tree, selector)
    if isinstance(selector, Site):
        selector = str(selector)
    if isinstance(selector, list | tuple | set | frozenset):
        if not selector:
            raise SelectionError(
                "a list of selectors must name at least one site, got an empty one."
                "\nGive None for every module."
            )
        return [pair for part in selector for pair in _match_sites(tree, part, ports)]
    if isinstance(selector, str) and selector.startswith(".") and tree.nodes:
        root, ends = tree.nodes[0].module, [""]
        if ":" not in selector:  # a part's site may name a port: that of its gradient is asked for
            ends = [f":{port}" if port.startswith("grad_") else "" for port in ports]
        sites = [s for end in dict.fromkeys(ends) for s in sites_of_part(root, selector + end)]
        return _match_sites(tree, sites, ports)
    places, query = _match_one_selector(tree, selector, ports)
    if not places:
        raise SelectionError(explain_no_match(tree, query))
    return places


def _match_one_selector(
    tree: ModuleTree, selector: Selector, ports: tuple[str, ...]
) -> tuple[list[SitedNode], SelectorParts]:
    """Find the sites that one selector matches, if any, and describe the selector for messages."""
    text = SiteText("", None, (), None)
    if isinstance(selector, Tensor):
        matched: list[ModuleNode] = []
        text = SiteText("", "grad", (), None)
    elif isinstance(selector, str):
        text, matched = _match_text(tree, selector)
    else:
        matched = list(filter(_matcher(selector), tree.nodes))
    wanted_ports = ports if text.port is None else (text.port,)
    places: list[SitedNode] = []
    module_ports = [port for port in wanted_ports if port != "grad"]
    if module_ports:
        # Events that need no forward, such as "state_dict", also occur in modules without a
        # forward.
        nodes = matched if set(PORTS).isdisjoint(module_ports) else _drop_uncallable(matched)
        places += [
            (_same_site(n.path, port, text.leaf, text.call, n.aliases, n.type_name), n)
            for n in nodes
            for port in module_ports
        ]
    if "grad" in wanted_ports:
        tensors = _match_tensors(tree, selector, text, matched)
        places += [(_gradient_site(node, text), node) for node in tensors]
    works = functools.partial(_matches_anything, tree, ports)
    return places, SelectorParts(selector, text, matched, wanted_ports, works)


def _matches_anything(
    tree: ModuleTree, ports: tuple[str, ...], selector: Selector, port: str | None = None
) -> bool:
    """Tell whether a selector matches anything; a selector with a syntax error matches nothing."""
    try:
        return bool(_match_one_selector(tree, selector, ports if port is None else (port,))[0])
    except SelectionError:
        return False


def _revalidate(tree: ModuleTree, selection: Selection) -> Iterable[SitedNode]:
    """Return the places of an earlier selection, if they still exist in this model."""
    if not len(selection):
        raise SelectionError("the selection is empty; print it, and its parts, before use.")
    nodes = selection._tree.nodes
    if not nodes or not tree.nodes or nodes[0].module is not tree.nodes[0].module:
        raise SelectionError(
            "this selection was made in another model; select again in this one:"
            " hl.select(model, ...)."
        )
    for site, node in selection.places:
        now = node.find_in(tree)
        if now is None or now.path != node.path:
            raise SelectionError(
                f"{site} is no longer there: the model changed since it was selected."
                "\nSelect again: hl.select(model, ...)."
            )
    return selection.places


def _drop_uncallable(nodes: list[ModuleNode]) -> list[ModuleNode]:
    """Leave out modules that cannot be called, such as a `ModuleList`; check each class once."""
    holders = set(filter(lacks_forward, {type(node.module) for node in nodes}))
    if not holders:
        return nodes
    return [n for n in nodes if type(n.module) not in holders or has_forward(n.module)]


def _gradient_site(node: ParameterNode, text: SiteText) -> Site:
    if text.leaf or text.call is not None:
        raise SelectionError(
            f"{node.path}:grad has no leaves and no calls: a parameter's gradient is one tensor,"
            f" the sum over all its uses.\nWrite '{node.path}:grad'."
        )
    return _same_site(node.path, "grad", (), None, node.aliases, node.type_name)


# A frozen dataclass takes 0.7 µs to make. A loop that attaches in each step makes the same sites
# again.
_same_site = functools.lru_cache(maxsize=1 << 14)(Site)


def _match_tensors(
    tree: ModuleTree, selector: Selector, text: SiteText, matched: list[ModuleNode]
) -> list[ParameterNode]:
    """Return the parameters that a selector matches, and those in the modules that it matched."""
    above = {path for node in matched for path in node.paths}
    if isinstance(selector, Tensor):
        return [node for node in tree.tensors if node.tensor is selector]
    if selector is None or "" in above:
        return list(tree.tensors)
    matches: Callable[[str], Any] = lambda path: False  # noqa: E731
    if isinstance(selector, str):
        exact = [node for node in tree.tensors if text.path in node.paths]
        if exact:
            return exact
        matches = glob_to_regex(text.path).fullmatch
    elif isinstance(selector, re.Pattern):
        matches = selector.search
    return [
        node
        for node in tree.tensors
        if any(matches(p) or not above.isdisjoint(paths_above(p)) for p in node.paths)
    ]


def _match_text(tree: ModuleTree, selector: str) -> tuple[SiteText, list[ModuleNode]]:
    # A ModuleDict may hold names such as "a:b", so a text that is a path as it stands is that path.
    if (exact := tree.by_path.get(selector)) is not None:
        return SiteText(selector, None, (), None), [exact]
    nodes = tree.nodes or tree.tensors if selector.startswith(ROOT) else ()
    paths = {path for node in nodes for path in node.paths}
    text = parse_site_text(selector, paths)
    if text.path in tree.by_path and text.path:  # a name may contain characters of the grammar
        return text, [tree.by_path[text.path]]
    host, sign, name = text.path.rpartition("@")
    if sign:
        return _match_operations(tree, text, host, name)
    matches = glob_to_regex(text.path).fullmatch
    # `*` matches one segment, and the root's path has no segment.
    below = tree.nodes if text.path in ("", "**") else tree.nodes[1:]
    return text, [
        node
        for node in below
        if matches(node.path) or (node.aliases and any(map(matches, node.aliases)))
    ]


def _match_operations(
    tree: ModuleTree, text: SiteText, host: str, name: str
) -> tuple[SiteText, list[ModuleNode]]:
    """Match operations: each of this name in the modules that `host` matches."""
    _, hosts = _match_text(tree, host)
    if not hosts or not tree.nodes:
        return replace(text, path=host), []
    names = operation_names(name, host)
    hosts = _drop_uncallable(hosts) or hosts
    is_glob = len(hosts) > 1 or len(names) > 1
    for node in (*hosts, tree.nodes[0]):
        refuse_exported(node)
    if not any(has_forward(node.module) for node in hosts):
        return text, hosts
    glob = f"{host}@{name}" if is_glob else ""
    return text, [OperationNode.of(node, name, glob) for node in hosts for name in names]


def _matcher(selector: Selector) -> Callable[[ModuleNode], bool]:
    if selector is None:
        return lambda node: True
    if isinstance(selector, re.Pattern):
        if isinstance(selector.pattern, bytes):
            raise SelectionError(
                "a regex as a selector must be compiled from a str, not from bytes."
            )
        return lambda node: any(selector.search(path) for path in node.paths)
    if isinstance(selector, type):
        if not issubclass(selector, nn.Module):
            raise SelectionError(
                f"a type as a selector must be a subclass of nn.Module, got {selector.__name__}."
                f"\n{_KINDS}"
            )
        return lambda node: (
            isinstance(node.module, selector)
            or issubclass(getattr(type(node.module), "cls_to_become", None) or type(None), selector)
        )  # a lazy module counts as the class that its first run turns it into
    if isinstance(selector, nn.Module):
        bare = unwrap(selector)
        return lambda node: node.module is bare
    if callable(selector):
        return _matcher_of_function(selector)
    raise SelectionError(f"a selector must be of a known kind, got {in_words(selector)}.\n{_KINDS}")


_KINDS = (
    "Give a glob such as 'layer4.*', a compiled regex, a module type, a module, a parameter, a"
    " function (path, module) -> bool, or a list of these, such as a dict's keys."
)


def _matcher_of_function(function: Callable[..., Any]) -> Callable[[ModuleNode], bool]:
    """Turn a function into a matcher.

    Raises:
        SelectionError: the function does not take a path and a module.
    """
    name = getattr(function, "__name__", type(function).__name__)
    refusal = f"a function as a selector must take (path, module), got {name}.\n{_KINDS}"
    try:
        inspect.signature(function).bind("", None)
    except TypeError:
        raise SelectionError(refusal) from None
    except ValueError:  # a function written in C has no signature
        pass

    def matches(node: ModuleNode) -> bool:
        try:
            return bool(function(node.path, node.module))
        except Exception as error:
            frame = error.__traceback__
            if isinstance(error, TypeError) and frame is not None and frame.tb_next is None:
                # The function does not accept these arguments.
                raise SelectionError(refusal) from error
            error.add_note(
                f"hookline: raised by {name}, which as a selector is called with (path, module),"
                f" here ({node.path!r}, {node.type_name}), and returns a bool."
            )
            raise

    return matches
