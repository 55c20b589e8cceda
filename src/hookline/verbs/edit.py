"""edit: change the values at the selected sites. Imports engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from hookline.engine import Line, Pass, Rank, Selector, Site, check_ports, tree
from hookline.engine.errors import AttachError, StructureError


def edit(
    model: nn.Module,
    selector: Selector,
    change: Callable[[Any], Any],
    *,
    ports: str | Sequence[str] = "output",
) -> Line:
    """Change the values at the selected sites, while the block lasts.

        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> with edit(model, "1", lambda t: t + 1):
        ...     bool((model(torch.zeros(1, 2)) >= 1).all())
        True

    Edits run before all other hooks of a module, in the order in which they were made, so that
    recorders and hooks of libraries see what the next module sees.

    Args:
        model: the model.
        selector: which sites; as in `hl.select`. Select a leaf (`"h.*:output[0]"`) to change one
            part of a nested value.
        change: called with the value; what it returns takes the value's place, None leaves it.
            Give a new value: what is changed in place changes wherever else it is used, too.
            `hl.edits` holds the common ones: scale, add, replace, noise, clamp.
        ports: "output", "input" or both, for selectors that name no port.

    Returns:
        A line: a context manager, or ended by `remove()`. `line.report()` says how often it fired.

    Raises:
        SelectionError: the selector matches nothing.
        StructureError: (when the model runs) `change` returned another structure, shape, dtype or
            device; a raw hook (`hl.attach`, `line.forward`) may return anything.
    """
    if not callable(change):
        raise AttachError(
            f"hl.edit needs a function of the value, got {type(change).__name__}."
            "\nTo put a fixed value there: hl.edits.replace(value)."
        )
    line = Line(model, name="edit")
    selection = line.select(selector, check_ports(ports))
    line.tap(selection, lambda site: _checked(change, site), Rank.EDIT)
    return line


def _checked(change: Callable[[Any], Any], site: Site) -> Callable[[Pass, Any], Any]:
    where = str(site)

    def see(current: Pass, value: Any) -> Any:
        new = change(value)
        if new is None:
            return None
        found = tree.difference(value, new)
        if found:
            raise StructureError(
                f"the edit at {where or 'the root'} would change the value's structure: {found}."
                "\nReturn a value of the same form (for a part of it, select a leaf such as"
                " ':output[0]'), or use a raw hook: hl.attach(model), line.forward(...)."
            )
        return new

    return see
