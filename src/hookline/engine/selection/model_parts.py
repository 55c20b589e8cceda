"""Names of a model's parts in selectors, `.resid_post`: no path of a module begins with a dot."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from hookline.engine.selection.site import PORTS
from hookline.errors import SelectionError
from hookline.util.weak_map import WeakIdentityMap

# Returns the texts of the sites of a part, in one layer or in all.
PartSites = Callable[[str, int | None], Iterable[str]]

_parts: WeakIdentityMap[PartSites] = WeakIdentityMap()
# Tells whether the parts of a model have been found.
has_parts: Callable[[nn.Module], bool] = _parts.__contains__


def register_parts(model: nn.Module, sites: PartSites) -> None:
    """Let selectors of a model name its parts by a function, which must not keep it alive."""
    _parts[model] = sites


def sites_of_part(model: nn.Module, selector: str) -> list[str]:
    """Return the sites of a text such as `.resid_post`, `.pattern.3` or `.z.-1:grad_output`."""
    sites = _parts.get(model)
    if sites is None:
        raise SelectionError(
            f"{selector!r} names a part of the model, and its parts must be found first."
            "\nCall parts = hl.anatomy(model)."
        )
    text, _, port = selector[1:].partition(":")
    name, _, layer = text.rpartition(".")
    has_layer = bool(name) and layer.removeprefix("-").isdecimal()
    names = sites(name, int(layer)) if has_layer else sites(text, None)
    return [_with_port(site, port, selector) for site in names] if port else list(names)


def _with_port(site: str, port: str, selector: str) -> str:
    """Return the site of a part's gradient."""
    if port not in PORTS or not port.startswith("grad_"):
        raise SelectionError(
            f"the port of a part must be grad_output or grad_input, got {selector!r}."
            f"\nWrite {selector.partition(':')[0]}:grad_output for its gradient."
        )
    text, sign, call = site.partition("#")
    path, colon, own = text.partition(":")
    return f"{path}:{f'grad_{own}' if colon else port}{sign}{call}"
