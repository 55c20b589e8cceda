"""Where and when: sites and selections, lines and taps, passes, and what fired.

Nothing here knows what a hook means. Files in the order in which they build on one another:
regime_internals, torch_internals, everywhere_internals, compile_internals, compile_marks,
identity, checkpoint_internals, distributed_internals, regime, meeting, tree, opaque, outlines,
memory, read_only, local, globs, site, modules, ground, no_match, select, calls, passes, recompute,
arguments, traced, taps, raw_taps, returns, values, flow, graph_gradients, gradient_tap,
gradient_taps, backward_taps, saved_taps, fast_paths, attachment, placing, compile_notes, compiled,
ending, handle, report, inventory, blame, line, everywhere, hooks_on_modules, hooks_on_tensors,
hooks_on_events, attach.
"""

from hookline.engine.attach import RawLine as RawLine
from hookline.engine.attach import attach as attach
from hookline.engine.blame import Blame as Blame
from hookline.engine.blame import blame as blame
from hookline.engine.checkpoint_internals import aside as aside
from hookline.engine.compile_internals import while_tracing as while_tracing
from hookline.engine.distributed_internals import full_value as full_value
from hookline.engine.distributed_internals import gathered as gathered
from hookline.engine.distributed_internals import is_dtensor as is_dtensor
from hookline.engine.distributed_internals import is_grouped as is_grouped
from hookline.engine.distributed_internals import local_part as local_part
from hookline.engine.distributed_internals import reshard as reshard
from hookline.engine.distributed_internals import split_over as split_over
from hookline.engine.distributed_internals import split_parameters as split_parameters
from hookline.engine.gradient_tap import Crossing as Crossing
from hookline.engine.gradient_tap import OnGradient as OnGradient
from hookline.engine.gradient_tap import guarded as guarded
from hookline.engine.gradient_taps import GradOutputTap as GradOutputTap
from hookline.engine.ground import EVERYWHERE as EVERYWHERE
from hookline.engine.ground import Everywhere as Everywhere
from hookline.engine.ground import Ground as Ground
from hookline.engine.inventory import HookEntry as HookEntry
from hookline.engine.inventory import Inventory as Inventory
from hookline.engine.inventory import inventory as inventory
from hookline.engine.line import Bound as Bound
from hookline.engine.line import Line as Line
from hookline.engine.line import ports_for as ports_for
from hookline.engine.local import local as local
from hookline.engine.meeting import TIMEOUT_S as TIMEOUT_S
from hookline.engine.meeting import meet as meet
from hookline.engine.meeting import ranks_of as ranks_of
from hookline.engine.meeting import say_by_rank as say_by_rank
from hookline.engine.memory import LINE as LINE
from hookline.engine.memory import Untold as Untold
from hookline.engine.memory import is_freed as is_freed
from hookline.engine.memory import makes_new_memory as makes_new_memory
from hookline.engine.modules import Node as Node
from hookline.engine.opaque import every as every_tensor
from hookline.engine.opaque import holder as tensor_holder
from hookline.engine.passes import Pass as Pass
from hookline.engine.passes import Passes as Passes
from hookline.engine.passes import Sink as Sink
from hookline.engine.read_only import call_read_only as call_read_only
from hookline.engine.recompute import same_draws as same_draws
from hookline.engine.recompute import stop_all as stop_all
from hookline.engine.regime import has_numbers as has_numbers
from hookline.engine.regime import innermost as innermost
from hookline.engine.regime import is_transformed as is_transformed
from hookline.engine.regime import plain as plain
from hookline.engine.regime import without_autocast as without_autocast
from hookline.engine.report import Report as Report
from hookline.engine.select import Selection as Selection
from hookline.engine.select import Selector as Selector
from hookline.engine.select import as_written as as_written
from hookline.engine.select import check_ports as check_ports
from hookline.engine.select import parse_site as parse_site
from hookline.engine.select import select as select
from hookline.engine.site import PORTS as PORTS
from hookline.engine.site import ROOT as ROOT
from hookline.engine.site import Site as Site
from hookline.engine.site import path_text as path_text
from hookline.engine.taps import OutputTap as OutputTap
from hookline.engine.taps import Rank as Rank
from hookline.engine.taps import unused as unused
from hookline.engine.torch_internals import PYTHON_NODE as PYTHON_NODE
from hookline.engine.torch_internals import at_end_of_backward as at_end_of_backward
from hookline.engine.torch_internals import backward_number as backward_number
from hookline.engine.torch_internals import outer_backward as outer_backward
from hookline.engine.traced import Halves as Halves
from hookline.engine.traced import Run as Run
from hookline.engine.traced import See as See
from hookline.engine.traced import defaults_by_name as defaults_by_name
from hookline.engine.traced import graph_snapshot as graph_snapshot
from hookline.engine.traced import snapshot as snapshot
from hookline.engine.values import Arrival as Arrival
from hookline.engine.values import hook_value as hook_value
from hookline.util.hidden import hides as hides

__all__ = [
    "EVERYWHERE",
    "LINE",
    "PORTS",
    "PYTHON_NODE",
    "ROOT",
    "TIMEOUT_S",
    "Arrival",
    "Blame",
    "Bound",
    "Crossing",
    "Everywhere",
    "GradOutputTap",
    "Ground",
    "Halves",
    "HookEntry",
    "Inventory",
    "Line",
    "Node",
    "OnGradient",
    "OutputTap",
    "Pass",
    "Passes",
    "Rank",
    "RawLine",
    "Report",
    "Run",
    "See",
    "Selection",
    "Selector",
    "Sink",
    "Site",
    "Untold",
    "as_written",
    "aside",
    "at_end_of_backward",
    "attach",
    "backward_number",
    "blame",
    "call_read_only",
    "check_ports",
    "defaults_by_name",
    "every_tensor",
    "full_value",
    "gathered",
    "graph_snapshot",
    "guarded",
    "has_numbers",
    "hides",
    "hook_value",
    "innermost",
    "inventory",
    "is_dtensor",
    "is_freed",
    "is_grouped",
    "is_transformed",
    "local",
    "local_part",
    "makes_new_memory",
    "meet",
    "outer_backward",
    "parse_site",
    "path_text",
    "plain",
    "ports_for",
    "ranks_of",
    "reshard",
    "same_draws",
    "say_by_rank",
    "select",
    "snapshot",
    "split_over",
    "split_parameters",
    "stop_all",
    "tensor_holder",
    "unused",
    "while_tracing",
    "without_autocast",
]  # fmt: skip
