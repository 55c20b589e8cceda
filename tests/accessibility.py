"""What axe has to say against a page, and the windows in which a page is looked at."""

from __future__ import annotations

import itertools

import pytest
from axe_playwright_python.base import AXE_SCRIPT

from thoroughness import tries

# The width is that of a desk, a tablet and a phone. The scheme moves nothing, the width changes no
# colour: so in the gate each scheme is looked at once, at the widths that differ most.
at_any_width = pytest.mark.parametrize(
    ("width", "scheme"),
    tries(
        [*itertools.product([1440, 800, 390], ["light", "dark"])],
        gate=[(1440, "light"), (390, "dark")],
    ),
)

# The rules alone that are broken: all that axe finds takes the browser a while to hand over, and to
# find a selector for each element a quarter of the time.
_FAULTS = """
axe.run({resultTypes: ["violations"], selectors: false}).then(({violations}) =>
  violations.map(({id, nodes}) => [id, nodes[0].html]))
"""


def faults_of(page) -> list[tuple[str, str]]:
    """The rules that a page breaks, each with the first element that does."""
    page.evaluate(AXE_SCRIPT)
    return [tuple(fault) for fault in page.evaluate(_FAULTS)]
