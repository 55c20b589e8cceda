"""Refuse ports that a verb would leave out, because the sites of a selection have theirs."""

from __future__ import annotations

from collections.abc import Sequence

from hookline.engine import Selection, Selector, check_ports, path_text
from hookline.errors import SelectionError


def refuse_ignored_ports(ports: str | Sequence[str], selector: Selector) -> None:
    """Refuse a selection none of whose sites is at the ports, unless these are the default.

    Raises:
        SelectionError: there is one, as of outputs for `ports="grad_output"`; or a port is unknown.
    """
    names = check_ports(ports)
    for part in selector if isinstance(selector, list | tuple) else [selector]:
        sites = [*part] if isinstance(part, Selection) and "output" not in names else []
        if sites and all(site.port not in names for site in sites):
            raise SelectionError(
                f"ports={ports!r} must come with a selector that names no port, got a selection of"
                f" the {sites[0].port} of {path_text(sites[0].path)}.\nSelect again:"
                f" hl.select(model, ..., ports={ports!r}). Of a part of hl.anatomy, write"
                " '.resid_post:grad_output'."
            )
