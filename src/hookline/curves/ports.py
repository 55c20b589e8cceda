"""Ports of a monitored site, and the order in which a step reaches them."""

from __future__ import annotations

import re

# The ports in the order in which a step reaches them.
PORTS = ("value", "input", "output", "grad_output", "grad_input", "grad", "update")
# The parts of a step, in turn. The weights are those before the forward.
STAGES = {
    "value": 0, "input": 1, "output": 1, "grad_output": 2, "grad_input": 2, "grad": 3, "update": 4,
}  # fmt: skip
_SITE = re.compile(rf"(?P<path>.*?)(?::(?P<port>{'|'.join(PORTS)})(?P<leaf>[.\[#].*)?)?", re.DOTALL)


def path_and_port(site: str) -> tuple[str, str]:
    """Split a site into its path and its port.

    >>> path_and_port("h.0:output[1]"), path_and_port("fc")
    (('h.0', 'output'), ('fc', 'output'))
    """
    match = _SITE.fullmatch(site)
    assert match is not None
    return match["path"], match["port"] or "output"
