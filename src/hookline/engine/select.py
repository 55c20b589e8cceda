"""Selection: the sites that a selector matches in one model. Imports site, modules, errors.

A selector is a glob on paths, a compiled regex, a module type, a module, a predicate
`(path, module) -> bool`, a selection, or a list of these; None is every module.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final

from torch import Tensor, nn

from hookline.engine.errors import SelectionError
from hookline.engine.modules import Node, walk
from hookline.engine.site import PORTS, Site, SiteText, parse
from hookline.engine.torch_internals import has_forward, unwrap

Selector = (
    Any  # str | re.Pattern | type | nn.Module | predicate | Selection | a list of these | None
)


@final
class Selection:
    """The sites that a selector matches in one model, in registration order.

    Selections of one model combine: `|` (either), `&` (both), `-` (the first without the second).
    The other side may be any selector. Iterate for the sites; pass it wherever a selector goes.
    """

    __slots__ = ("_found", "_nodes")

    def __init__(self, nodes: list[Node], found: Iterable[tuple[Site, Node]]) -> None:
        self._nodes = nodes
        ordered = sorted(found, key=lambda pair: (pair[1].index, PORTS.index(pair[0].port)))
        self._found: dict[Site, Node] = dict(ordered)

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites, in registration order."""
        return tuple(self._found)

    def places(self) -> Iterable[tuple[Site, Node]]:
        """Each site with the module it is at."""
        return self._found.items()

    def __iter__(self) -> Iterator[Site]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, site: object) -> bool:
        return (parse_site(site) if isinstance(site, str) else site) in self._found

    def __or__(self, other: Selector) -> Selection:
        return Selection(self._nodes, [*self.places(), *self._coerce(other).places()])

    def __and__(self, other: Selector) -> Selection:
        mine, theirs = _Cover(self), _Cover(self._coerce(other))
        both = [pair for pair in self.places() if theirs.covers(pair[0])]
        finer = [pair for pair in theirs.selection.places() if mine.covers(pair[0])]
        return Selection(self._nodes, [*both, *finer])

    def __sub__(self, other: Selector) -> Selection:
        drop = _Cover(self._coerce(other))
        return Selection(self._nodes, [pair for pair in self.places() if not drop.covers(pair[0])])

    def _coerce(self, other: Selector) -> Selection:
        ports = tuple(dict.fromkeys(site.port for site in self)) or ("output",)
        return select_nodes(self._nodes, other, ports)

    def __repr__(self) -> str:
        lines = [f"{site}  ({site.module_type})" for site in itertools.islice(self, 60)]
        if len(self) > 60:
            lines.append(f"… and {len(self) - 60} more; iterate for all")
        return "\n".join([f"{len(self)} site{'s' * (len(self) != 1)}", *lines])


@final
class _Cover:
    """Which sites a selection covers: a whole value covers its leaves, every call each call."""

    def __init__(self, selection: Selection) -> None:
        self.selection = selection
        self._by_place: dict[tuple[str, str], list[Site]] = {}
        for site in selection:
            self._by_place.setdefault((site.path, site.port), []).append(site)

    def covers(self, site: Site) -> bool:
        return any(
            site.leaf[: len(mine.leaf)] == mine.leaf and mine.call in (None, site.call)
            for mine in self._by_place.get((site.path, site.port), ())
        )


def select(
    model: nn.Module, selector: Selector = None, ports: str | Sequence[str] = "output"
) -> Selection:
    """Find the sites that a selector matches in a model.

        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> [str(site) for site in select(model, nn.Linear)]
        ['0']

    Args:
        model: the model to look in. It is not run, and not changed.
        selector: a glob on paths (`*` within a segment, `**` across segments, `{a,b}`; `:port`,
            `[leaf]` and `#call` may follow), a compiled regex (searched anywhere in the path), a
            module type, a module, a predicate `(path, module) -> bool`, a selection, or a list of
            these. None is every module that can be called, the root included.
        ports: "input", "output" or both, for selectors that name no port themselves.

    Raises:
        SelectionError: the selector is malformed, or it (or one of a list) matches nothing; the
            message shows close matches and what is there.
    """
    return select_nodes(walk(model), selector, check_ports(ports))


def check_ports(ports: str | Sequence[str]) -> tuple[str, ...]:
    """The ports as a tuple.

    Raises:
        SelectionError: one of them is unknown, or there is none.
    """
    names = (ports,) if isinstance(ports, str) else tuple(ports)
    for name in names:
        if name not in PORTS:
            raise SelectionError(f"unknown port {name!r}: the ports are {', '.join(PORTS)}.")
    if not names:
        raise SelectionError(f"no port given: the ports are {', '.join(PORTS)}.")
    return names


def select_nodes(nodes: list[Node], selector: Selector, ports: tuple[str, ...]) -> Selection:
    """`select` on a model already walked."""
    return Selection(nodes, _match(nodes, selector, ports))


def parse_site(text: str) -> Site:
    """One written site (not a glob) as a Site."""
    parts = parse(text)
    return Site(parts.path, parts.port or "output", parts.leaf, parts.call)


def _match(
    nodes: list[Node], selector: Selector, ports: tuple[str, ...]
) -> Iterable[tuple[Site, Node]]:
    if isinstance(selector, Selection):
        if selector._nodes[0].module is not nodes[0].module:
            raise SelectionError(
                "this selection was made in another model; select again in this one:"
                " hl.select(model, ...)."
            )
        if not len(selector):
            raise SelectionError("the selection is empty; print it, and its parts, before use.")
        here = {(node.path, id(node.module)) for node in nodes}
        for site, node in selector.places():
            if (node.path, id(node.module)) not in here:
                raise SelectionError(
                    f"{site} is no longer there: the model changed since it was selected."
                    "\nSelect again: hl.select(model, ...)."
                )
        return selector.places()
    if isinstance(selector, list | tuple | set | frozenset):
        if not selector:
            raise SelectionError("the list of selectors is empty; name at least one site.")
        return [pair for part in selector for pair in _match(nodes, part, ports)]
    text = SiteText("", None, (), None)
    if isinstance(selector, str):
        text, matched = _match_text(nodes, selector)
    else:
        matched = list(filter(_matcher(selector), nodes))
    callable_ones = [node for node in matched if has_forward(node.module)]
    if not callable_ones:
        raise SelectionError(_nothing(nodes, selector, matched))
    wanted = ports if text.port is None else (text.port,)
    return [
        (_site(node, port, text), node) for node in callable_ones for port in wanted
    ]  # fmt: skip


def _site(node: Node, port: str, text: SiteText) -> Site:
    return Site(
        node.path, port, text.leaf, text.call, tuple(node.aliases), type(node.module).__name__
    )


def _match_text(nodes: list[Node], selector: str) -> tuple[SiteText, list[Node]]:
    # A ModuleDict may hold names such as "a:b": what is a path as it stands is that path.
    exact = [node for node in nodes if node.path == selector or selector in node.aliases]
    if exact:
        return SiteText(selector, None, (), None), exact
    text = parse(selector)
    matches = glob(text.path).fullmatch
    # `*` is one segment, and the root's path has none.
    below = nodes if text.path in ("", "**") else nodes[1:]
    return text, [
        node
        for node in below
        if matches(node.path) or (node.aliases and any(map(matches, node.aliases)))
    ]


def _matcher(selector: Selector) -> Callable[[Node], bool]:
    if selector is None:
        return lambda node: True
    if isinstance(selector, re.Pattern):
        if isinstance(selector.pattern, bytes):
            raise SelectionError("paths are text: compile the regex from a str, not from bytes.")
        return lambda node: any(selector.search(path) for path in node.paths)
    if isinstance(selector, type):
        if not issubclass(selector, nn.Module):
            raise SelectionError(
                f"{selector.__name__} is not a module type; select by a subclass of nn.Module."
            )
        return lambda node: isinstance(node.module, selector)
    if isinstance(selector, nn.Module):
        wanted = unwrap(selector)
        return lambda node: node.module is wanted
    if isinstance(selector, Tensor):
        raise SelectionError(
            "a tensor is not a place in this model; name the module whose input or output it is."
        )
    if callable(selector):
        return lambda node: bool(selector(node.path, node.module))
    raise SelectionError(
        f"{type(selector).__name__} is no selector: give a glob such as 'layer4.*', a compiled"
        " regex, a module type, a module, a predicate (path, module) -> bool, or a list of these."
    )


_GLOB = re.compile(r"\*\*\.|\.\*\*|\*\*|\*|\{[^{}]*\}|[{}]|[^*{}.]+|\.")


def glob(pattern: str) -> re.Pattern[str]:
    """A path glob as a regex: `*` within a segment, `**` across segments, `{a,b}` for either.

    `a.**` is everything below `a`; `**.b` is every `b` at any depth; `**` alone is every path.

    Raises:
        SelectionError: a brace is not closed.
    """
    out = []
    position = 0
    for token in _GLOB.findall(pattern):
        at_start, at_end = position == 0, position + len(token) == len(pattern)
        position += len(token)
        if token in "{}":
            raise SelectionError(
                f"malformed glob {pattern!r}: braces hold names and commas, {{a,b}}, are closed"
                " and do not nest."
            )
        if token == "**." and (at_start or pattern[position - 4] == "."):
            out.append(r"(?:.*\.)?")
        elif token == ".**":
            out.append(r"\..+" if at_end else r"(?:\..*)?")
        elif token in ("**", "**."):
            out.append(".*" + re.escape(token[2:]))
        elif token == "*":
            out.append(r"[^.]*")
        elif token[0] == "{":
            options = token[1:-1].split(",")
            out.append("(?:" + "|".join(glob(option).pattern for option in options) + ")")
        else:
            out.append(re.escape(token))
    return re.compile("".join(out))


def _nothing(nodes: list[Node], selector: Selector, matched: list[Node]) -> str:
    shown = repr(selector) if isinstance(selector, str | re.Pattern) else _name(selector)
    root = type(nodes[0].module).__name__
    if matched:
        node = matched[0]
        return (
            f"nothing flows through {node.path!r}: {type(node.module).__name__} only holds other"
            f" modules and has no forward.\nSelect what it holds: '{node.path}.*'."
        )
    paths = [path for node in nodes for path in node.paths if path]
    first = ", ".join(paths[:8]) + (", …" if len(paths) > 8 else "")
    message = f"{shown} matches no module of {root}."
    if isinstance(selector, str):
        message += _suggestion(nodes, parse(selector).path, paths)
    elif isinstance(selector, type):
        kinds = sorted({type(node.module).__name__ for node in nodes})
        message += f" Its types: {', '.join(kinds[:12])}{', …' if len(kinds) > 12 else ''}."
    return message + f"\nIts {len(nodes)} modules begin: {first or '(no submodules)'}."


def _suggestion(nodes: list[Node], asked: str, paths: list[str]) -> str:
    if any(path.endswith("." + asked) for path in paths):
        return f" Did you mean {'**.' + asked!r}, at any depth?"
    kinds = {type(node.module).__name__ for node in nodes}
    if asked in kinds:
        return f" For every {asked}, give the type itself: nn.{asked}, not its name."
    close = difflib.get_close_matches(asked, paths, n=4, cutoff=0.5)
    return f" Did you mean {', '.join(map(repr, close))}?" if close else ""


def _name(selector: Selector) -> str:
    if isinstance(selector, nn.Module):
        return f"this {type(selector).__name__}"
    name = getattr(selector, "__name__", type(selector).__name__)
    return f"the predicate {name}" if not isinstance(selector, type) else str(name)
