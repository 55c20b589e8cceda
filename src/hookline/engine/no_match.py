"""What to say when a selector matches nothing: close matches, and what is there.

Imports modules, site, tree, torch_internals.
"""

from __future__ import annotations

import difflib
import re
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from hookline.engine.modules import Layout, Node
from hookline.engine.site import SiteText, path_text
from hookline.engine.tree import describe


def nothing(
    layout: Layout, selector: Any, text: SiteText, matched: list[Node], wanted: tuple[str, ...]
) -> str:
    """The message for a selector that matches nothing, or nothing with one of the wanted ports."""
    if matched:
        node, kind, path = matched[0], matched[0].type_name, path_text(matched[0].path)
        if wanted == ("grad",):
            return (
                f"{kind} at {path!r} has no parameters.\nFor the gradient of its output:"
                f" '{path}:grad_output'."
            )
        return (
            f"nothing flows through {path!r}: {kind} only holds other modules and has no"
            f" forward.\nSelect what it holds: {f'{node.path}.*' if node.path else '*'!r}."
        )
    if isinstance(selector, Tensor):
        return (
            f"a tensor as a selector must be a parameter of {layout.name}, got {describe(selector)}"
            f"{' (it was computed, as a parametrized weight is)' if selector.grad_fn else ''}."
            "\nFor any tensor: hl.attach(), line.grad(tensor, fn); for a module's values, name the"
            " module."
        )
    shown = repr(selector) if isinstance(selector, str | re.Pattern) else _name(selector)
    is_grad = wanted == ("grad",)
    nodes: list[Any] = list(layout.tensors if is_grad else layout.nodes)
    paths = [path for node in nodes for path in node.paths if path]
    what = "parameter" if is_grad and layout.nodes else "module" if layout.nodes else "tensor"
    first = ", ".join(paths[:8]) + (", …" if len(paths) > 8 else "")
    message = f"{shown} matches no {what} of {layout.name}."
    if isinstance(selector, str):
        message += _suggestion(layout, text.path, paths)
    elif isinstance(selector, type):
        types = {type(node.module) for node in layout.nodes}
        kinds = sorted(_full_name(k) if k.__name__ == shown else k.__name__ for k in types)
        message += f" Its types: {', '.join(kinds[:12])}{', …' if len(kinds) > 12 else ''}."
    return message + f"\nIts {len(nodes)} {what}s begin: {first or f'(no sub{what}s)'}."


def _suggestion(layout: Layout, asked: str, paths: list[str]) -> str:
    if any(path.endswith("." + asked) for path in paths):
        return f" Did you mean {'**.' + asked!r}, at any depth?"
    kinds = {node.type_name for node in layout.nodes}
    if asked in kinds:
        return f" For every {asked}, give the type itself: nn.{asked}, not its name."
    if any(asked in node.paths for node in layout.tensors):
        return f" It is a parameter; its gradient is {asked + ':grad'!r}."
    computed = _computed(layout, asked)
    if computed:
        return computed
    close = difflib.get_close_matches(asked, paths, n=4, cutoff=0.5)
    return f" Did you mean {', '.join(map(repr, close))}?" if close else ""


def _computed(layout: Layout, asked: str) -> str | None:
    """What to ask for instead of a weight that its module computes from parameters of its own."""
    above, _, name = asked.rpartition(".")
    node = next((node for node in layout.nodes if above in node.paths), None)
    if node is None or not name:
        return None
    prefix = f"{above}." if above else ""
    if is_parametrized(node.module, name):
        value = f"{prefix}parametrizations.{name}"
        own = [one.path for one in layout.tensors if one.path.startswith(f"{value}.")]
        return (
            f" It is computed by a parametrization: select {value!r} for what it computes,"
            f" {f'{value}:grad_output'!r} for the gradient of that, or its parameters:"
            f" {', '.join(map(repr, own))}."
        )
    if isinstance(node.module.__dict__.get(name), Tensor):  # by a hook, as in pruning
        own = [one.path for one in layout.tensors if one.path.startswith(f"{asked}_")]
        if own:
            return f" It is computed before each call, from {', '.join(map(repr, own))}."
    return None


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _name(selector: Any) -> str:
    if isinstance(selector, nn.Module):
        return f"this {type(selector).__name__}"
    name = getattr(selector, "__name__", type(selector).__name__)
    return f"the predicate {name}" if not isinstance(selector, type) else str(name)
