"""What axe has to say against a page."""

from __future__ import annotations

from axe_playwright_python.base import AXE_SCRIPT

# The rules alone that are broken: all that axe finds takes the browser a while to hand over.
_FAULTS = """
axe.run({resultTypes: ["violations"]}).then(({violations}) =>
  violations.map(({id, nodes}) => [id, nodes[0].html]))
"""


def faults_of(page) -> list[tuple[str, str]]:
    """The rules that a page breaks, each with the first element that does."""
    page.evaluate(AXE_SCRIPT)
    return [tuple(fault) for fault in page.evaluate(_FAULTS)]
