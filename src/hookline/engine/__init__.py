"""Where and when: sites and selections, lines and taps, passes, and what fired.

Nothing here knows what a hook means. Files in the order in which they build on one another:
errors, torch_internals, tree, site, modules, select, passes, taps, returns, placing, everywhere,
report, inventory, blame, attach.
"""

from hookline.engine.attach import Line as Line
from hookline.engine.attach import attach as attach
from hookline.engine.blame import Blame as Blame
from hookline.engine.blame import blame as blame
from hookline.engine.everywhere import EVERYWHERE as EVERYWHERE
from hookline.engine.everywhere import Everywhere as Everywhere
from hookline.engine.inventory import HookEntry as HookEntry
from hookline.engine.inventory import Inventory as Inventory
from hookline.engine.inventory import inventory as inventory
from hookline.engine.passes import Pass as Pass
from hookline.engine.passes import Passes as Passes
from hookline.engine.passes import Sink as Sink
from hookline.engine.passes import stop_all as stop_all
from hookline.engine.report import Report as Report
from hookline.engine.select import Selection as Selection
from hookline.engine.select import Selector as Selector
from hookline.engine.select import check_ports as check_ports
from hookline.engine.select import parse_site as parse_site
from hookline.engine.select import select as select
from hookline.engine.site import PORTS as PORTS
from hookline.engine.site import Site as Site
from hookline.engine.taps import OutputTap as OutputTap
from hookline.engine.taps import Rank as Rank
from hookline.engine.taps import See as See

__all__ = [
    "EVERYWHERE", "PORTS", "Blame", "Everywhere", "HookEntry", "Inventory", "Line", "OutputTap",
    "Pass", "Passes", "Rank", "Report", "See", "Selection", "Selector", "Sink", "Site", "attach",
    "blame", "check_ports", "inventory", "parse_site", "select", "stop_all",
]  # fmt: skip
