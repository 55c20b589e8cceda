"""Explain a selector that matches nothing, with close matches and the model's paths."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from hookline.display.text import listed, plural
from hookline.engine.names_elsewhere import call_named_elsewhere, part_named_elsewhere
from hookline.engine.pytree.describe import in_words
from hookline.engine.selection.infer_output_parts import may_return_part
from hookline.engine.selection.module_tree import ModuleNode, ModuleTree
from hookline.engine.selection.site import ROOT, SiteText, glob_to_regex, path_text
from hookline.errors import SelectionError

_MOST_CLOSE = 4


@dataclass(frozen=True, slots=True)
class SelectorParts:
    """A selector that matched nothing, in parts."""

    selector: Any  # the selector
    text: SiteText  # the parts of the selector, if it is a text
    matched: list[ModuleNode]  # the modules that it matches, none of which has one of the ports
    ports: tuple[str, ...]  # the ports
    # Tells whether another selector would match, at the ports that the verb was given or at another
    # one; only such selectors are proposed.
    works: Callable[..., bool]

    @property
    def rest(self) -> str:
        """Return the text after the path, as in `:grad`."""
        written = self.selector if isinstance(self.selector, str) else ""
        return written[len(self.text.path) :] if written.startswith(self.text.path) else ""

    def matching(self, *candidates: str) -> list[str]:
        """Return the candidates that match something."""
        return [candidate for candidate in candidates if self.works(candidate)]


def explain_no_match(tree: ModuleTree, query: SelectorParts) -> str:
    """Return the message for a selector that matches nothing, or nothing with a wanted port."""
    selector = query.selector
    if query.matched:
        return _explain_missing_port(query)
    if isinstance(selector, Tensor):
        return (
            f"a tensor as a selector must be a parameter of {tree.name}, got {in_words(selector)}"
            f"{' (it was computed, as a parametrized weight is)' if selector.grad_fn else ''}."
            "\nInputs go to the model, and a selector names modules. For the gradient of a tensor:"
            " hl.attach(), line.grad(tensor, fn)."
        )
    name = repr(selector) if isinstance(selector, str | re.Pattern) else _selector_text(selector)
    is_grad = query.ports == ("grad",)
    nodes: list[Any] = list(tree.tensors if is_grad else tree.nodes)
    noun = "parameter" if is_grad and tree.nodes else "module" if tree.nodes else "tensor"
    message = f"{name} matches no {noun} of {tree.name}."
    if isinstance(selector, str):
        message += _suggest_for_path(tree, query, nodes)
    elif isinstance(selector, type | nn.Module):
        message += _suggest_for_object(tree, query)
    return f"{message}\n{_list_names(query, nodes, noun)}"


def _explain_missing_port(query: SelectorParts) -> str:
    """Say why a matched module has no value at a wanted port."""
    node, kind = query.matched[0], query.matched[0].type_name
    path = path_text(node.path)
    if query.ports == ("grad",):
        output = query.matching(f"{path}:grad_output")
        advice = "Select a parameter, or a module that has one."
        if output:
            advice = f"For the gradient of its output: {output[0]!r}."
        return f"{kind} at {path!r} has no parameters.\n{advice}"
    inside = [".".join(map(str, query.text.leaf))] * bool(query.text.leaf)  # as in `h[0]`
    names = (*inside, "*", "**")
    children = query.matching(*(f"{node.path}.{name}" if node.path else name for name in names))
    trained = query.matching(f"{path}:grad")
    if children:
        advice = f"Select a module inside it: {children[0]!r}."
    elif trained:
        advice = f"Select the gradients of the parameters that it holds: {trained[0]!r}."
    else:
        advice = "Select a module that has a forward: it holds none."
    noun = "parameters" if trained and not children else "other modules"
    return f"nothing flows through {path!r}: {kind} only holds {noun} and has no forward.\n{advice}"


def _list_names(query: SelectorParts, nodes: list[Any], noun: str) -> str:
    """List the model's first modules, parameters or tensors."""
    paths = [path for node in nodes for path in node.paths if path]
    if not nodes and noun == "parameter":
        gradients = query.matching(":grad_output", "**:grad_output")
        hint = f"Select a module's gradient, as in {gradients[0]!r}: it" if gradients else "It"
        return f"{hint} has no parameters."
    if not nodes:
        return "Give tensors by name, as in hl.attach({'x': x}): it has none."
    if not paths:
        advice = "select it with ''" if query.works("") else "give a model with a forward"
        return f"Its only module is the root, {nodes[0].type_name}: {advice}."
    first = listed(paths, 8)
    n_named = sum(bool(node.path) for node in nodes)  # the root has no name
    return f"Its {plural(n_named, noun)} begin{'s' if n_named == 1 else ''}: {first}."


def _suggest_for_object(tree: ModuleTree, query: SelectorParts) -> str:
    """Name the types of the model for a type; for a module, as a slice of a list, its own."""
    kind = query.selector
    if not isinstance(kind, type):
        nodes = [tree.modules_by_id.get(id(part)) for part in kind.children()]
        held = query.matching(*(node.path for node in nodes if node))
        return f" Give what it holds as a list: {listed([*map(repr, held)], 4)}." if held else ""
    types = {type(node.module) for node in tree.nodes}
    full = {other: f"{other.__module__}.{other.__qualname__}" for other in types}
    kinds = sorted(full[k] if k.__name__ == kind.__name__ else k.__name__ for k in types)
    return f" Its types: {listed(kinds, 12)}."


def _suggest_for_path(tree: ModuleTree, query: SelectorParts, nodes: list[Any]) -> str:
    name, rest = query.text.path, query.rest
    paths = [path for node in nodes for path in node.paths if path]
    if deeper := query.matching(f"**.{name}{rest}"):
        return f" Did you mean {deeper[0]!r}, at any depth?"
    kind = next((type(node.module) for node in tree.nodes if node.type_name == name), None)
    if kind is not None and query.works(kind, query.text.port):
        kind_name = f"nn.{name}" if getattr(nn, name, None) is kind else name
        port = f", ports={query.text.port!r}" if query.text.port else ""
        return f" For every {name}, give the type itself: {kind_name}{port}, not its name."
    if any(name in node.paths for node in tree.tensors):
        gradient = query.matching(f"{name}:grad")
        return f" It is a parameter; its gradient is {gradient[0]!r}." if gradient else ""
    helpful = _suggest_source_parameters(tree, query) or _suggest_deeper(tree, query)
    near = helpful or _suggest_inside(query, paths) or _suggest_close(query, paths)
    return near if helpful else f"{near}{call_named_elsewhere(name, tree.by_path)}"


def _suggest_deeper(tree: ModuleTree, query: SelectorParts) -> str | None:
    """Propose a selector for a name that follows the path of a module."""
    above, _, last = query.text.path.rpartition(".")
    deeper = query.matching(f"{above}.**.{last}{query.rest}") if above else []
    if deeper:
        return f" Did you mean {deeper[0]!r}, at any depth?"
    if part := _suggest_output_part(tree, query):
        return f" Part of an output is written {part!r}."
    return part_named_elsewhere(query.text.path, query.rest)


def _suggest_inside(query: SelectorParts, paths: list[str]) -> str | None:
    """Propose the parts of the modules in which the last name of the path was looked for."""
    above, _, last = query.text.path.rpartition(".")
    for holder in (above, f"**.{above}") if above.strip("*.") else ():
        try:
            matches = glob_to_regex(holder).fullmatch
        except SelectionError:  # a brace that the dot has cut
            return None
        pairs = (path.rpartition(".") for path in paths)
        parts = list(dict.fromkeys(part for held_by, _, part in pairs if matches(held_by)))
        near = difflib.get_close_matches(last, parts, n=_MOST_CLOSE, cutoff=0.5)
        selectors = (f"{holder}.{part}{query.rest}" for part in dict.fromkeys([*near, *parts]))
        if working := list(islice(filter(query.works, selectors), _MOST_CLOSE + 1)):
            names = ", ".join(map(repr, working[:_MOST_CLOSE]))
            more = ", …" * (len(working) > _MOST_CLOSE)
            return f" Did you mean {names}?" if near else f" {holder!r} has {names}{more}."
    return None


def _suggest_close(query: SelectorParts, paths: list[str]) -> str:
    """Propose the paths that are closest to the given path."""
    near = difflib.get_close_matches(query.text.path, paths, n=2 * _MOST_CLOSE, cutoff=0.5)
    close = query.matching(*(f"{path}{query.rest}" for path in near))[:_MOST_CLOSE]
    return f" Did you mean {', '.join(map(repr, close))}?" if close else ""


def _suggest_output_part(tree: ModuleTree, query: SelectorParts) -> str | None:
    """Propose a part of the output of `block` for a path such as `block.logits`."""
    above, dot, name = query.text.path.rpartition(".")
    holder = "" if above == ROOT else above
    node = tree.by_path.get(holder)
    is_output = "output" in query.ports and not query.rest and name.isidentifier()
    if not dot or node is None or not is_output or not may_return_part(node.module, name):
        return None
    return next(iter(query.matching(f"{path_text(holder)}:output.{name}")), None)


def _suggest_source_parameters(tree: ModuleTree, query: SelectorParts) -> str | None:
    """Propose the parameters from which a module computes the requested weight."""
    above, _, name = query.text.path.rpartition(".")
    node = tree.by_path.get(above)
    if node is None or not name:
        return None
    paths = [tensor.path for tensor in tree.tensors]
    if is_parametrized(node.module, name):
        value = f"{above}.parametrizations.{name}".removeprefix(".")
        computed = query.matching(value, f"{value}:grad_output")
        inside = [path for path in paths if path.startswith(f"{value}.")]
        gradients = _matching_gradients(query, inside)
        if len(computed) == 2:
            return (
                f" It is computed by a parametrization: select {computed[0]!r} for the computed"
                f" value, {computed[1]!r} for its gradient"
                f"{gradients and f', or for those of the parameters: {gradients}'}."
            )
    if isinstance(node.module.__dict__.get(name), Tensor):  # computed by a hook, as in pruning
        computed_from = [path for path in paths if path.startswith(f"{query.text.path}_")]
        if gradients := _matching_gradients(query, computed_from):
            return (
                " It is computed before each call; the gradients of its parameters are"
                f" {gradients}."
            )
    return None


def _matching_gradients(query: SelectorParts, paths: list[str]) -> str:
    return ", ".join(map(repr, query.matching(*(f"{path}:grad" for path in paths))))


def _selector_text(selector: Any) -> str:
    if isinstance(selector, nn.Module):
        return f"this {type(selector).__name__}"
    name = getattr(selector, "__name__", type(selector).__name__)
    return f"the predicate {name}" if not isinstance(selector, type) else str(name)
