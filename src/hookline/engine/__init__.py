"""The engine: sites and selections, lines and taps, passes, reports.

Nothing here knows what a hook means. docs/architecture.md draws the rooms.
"""

from hookline.engine.autograd.written_views import GradHook as GradHook
from hookline.engine.autograd.written_views import hook_value as hook_value
from hookline.engine.compile.in_graph import Callback as Callback
from hookline.engine.compile.in_graph import SplitCallback as SplitCallback
from hookline.engine.compile.in_graph import defaults_by_name as defaults_by_name
from hookline.engine.compile.in_graph import graph_snapshot as graph_snapshot
from hookline.engine.compile.in_graph import snapshot as snapshot
from hookline.engine.compile.runs import CompiledRun as CompiledRun
from hookline.engine.distributed.rendezvous import TIMEOUT_S as TIMEOUT_S
from hookline.engine.distributed.rendezvous import gather_json as gather_json
from hookline.engine.distributed.rendezvous import ranks_of as ranks_of
from hookline.engine.distributed.rendezvous import say_by_rank as say_by_rank
from hookline.engine.distributed.shards import local_shards as local_shards
from hookline.engine.gradients.ports import GradOutputTap as GradOutputTap
from hookline.engine.gradients.tap import GradientCallback as GradientCallback
from hookline.engine.gradients.tap import PendingGradient as PendingGradient
from hookline.engine.gradients.tap import guarded as guarded
from hookline.engine.line.line import Bound as Bound
from hookline.engine.line.line import Line as Line
from hookline.engine.memory.read_only import call_read_only as call_read_only
from hookline.engine.memory.unversioned import LINE as LINE
from hookline.engine.memory.unversioned import Unversioned as Unversioned
from hookline.engine.memory.unversioned import is_freed as is_freed
from hookline.engine.memory.unversioned import makes_new_memory as makes_new_memory
from hookline.engine.passes.checkpointing import same_draws as same_draws
from hookline.engine.passes.checkpointing import stop_all as stop_all
from hookline.engine.passes.modes import has_numbers as has_numbers
from hookline.engine.passes.modes import innermost as innermost
from hookline.engine.passes.modes import is_transformed as is_transformed
from hookline.engine.passes.modes import plain as plain
from hookline.engine.passes.modes import without_autocast as without_autocast
from hookline.engine.passes.passes import Pass as Pass
from hookline.engine.passes.passes import Passes as Passes
from hookline.engine.pytree.opaque import every as every_tensor
from hookline.engine.pytree.opaque import holder as tensor_holder
from hookline.engine.report.replaced import Lapse as Lapse
from hookline.engine.report.report import Report as Report
from hookline.engine.report.report import facts as facts
from hookline.engine.selection.ground import EVERYWHERE as EVERYWHERE
from hookline.engine.selection.ground import Ground as Ground
from hookline.engine.selection.selectors import Selection as Selection
from hookline.engine.selection.selectors import Selector as Selector
from hookline.engine.selection.selectors import as_written as as_written
from hookline.engine.selection.selectors import check_ports as check_ports
from hookline.engine.selection.selectors import parse_site as parse_site
from hookline.engine.selection.selectors import ports_for as ports_for
from hookline.engine.selection.selectors import select as select
from hookline.engine.selection.site import PORTS as PORTS
from hookline.engine.selection.site import ROOT as ROOT
from hookline.engine.selection.site import Site as Site
from hookline.engine.selection.site import path_text as path_text
from hookline.engine.taps.base import Order as Order
from hookline.engine.taps.base import Tap as Tap
from hookline.engine.taps.base import no_callback as no_callback
from hookline.engine.taps.forward import OutputTap as OutputTap
from hookline.engine.torch_private.autograd import at_end_of_backward as at_end_of_backward
from hookline.engine.torch_private.autograd import backward_number as backward_number
from hookline.engine.torch_private.autograd import outer_backward as outer_backward
from hookline.engine.torch_private.distributed import calls_of_sharded as calls_of_sharded
from hookline.engine.torch_private.distributed import clone_locally as clone_locally
from hookline.engine.torch_private.distributed import default_store as default_store
from hookline.engine.torch_private.distributed import full_value as full_value
from hookline.engine.torch_private.distributed import gathered as gathered
from hookline.engine.torch_private.distributed import is_dtensor as is_dtensor
from hookline.engine.torch_private.distributed import is_grouped as is_grouped
from hookline.engine.torch_private.distributed import local_part as local_part
from hookline.engine.torch_private.distributed import own_class as own_class
from hookline.engine.torch_private.distributed import reshard as reshard
from hookline.engine.torch_private.distributed import sharding as sharding
from hookline.engine.torch_private.distributed import split_over as split_over
from hookline.engine.torch_private.distributed import split_parameters as split_parameters
from hookline.engine.torch_private.distributed import unwrapped as unwrapped
from hookline.engine.torch_private.dynamo import while_tracing as while_tracing
from hookline.engine.torch_private.graph.checkpoint import aside as aside
from hookline.engine.torch_private.modes import is_of_older_vmap as is_of_older_vmap
from hookline.engine.torch_private.modes import is_wrapped as is_wrapped
from hookline.engine.torch_private.modes import without_older_vmap as without_older_vmap
from hookline.engine.torch_private.modules import PYTHON_NODE as PYTHON_NODE
from hookline.util.hidden import hides as hides

__all__ = [
    "EVERYWHERE",
    "LINE",
    "PORTS",
    "PYTHON_NODE",
    "ROOT",
    "TIMEOUT_S",
    "Bound",
    "Callback",
    "CompiledRun",
    "GradHook",
    "GradOutputTap",
    "GradientCallback",
    "Ground",
    "Lapse",
    "Line",
    "Order",
    "OutputTap",
    "Pass",
    "Passes",
    "PendingGradient",
    "Report",
    "Selection",
    "Selector",
    "Site",
    "SplitCallback",
    "Tap",
    "Unversioned",
    "as_written",
    "aside",
    "at_end_of_backward",
    "backward_number",
    "call_read_only",
    "calls_of_sharded",
    "check_ports",
    "clone_locally",
    "default_store",
    "defaults_by_name",
    "every_tensor",
    "facts",
    "full_value",
    "gather_json",
    "gathered",
    "graph_snapshot",
    "guarded",
    "has_numbers",
    "hides",
    "hook_value",
    "innermost",
    "is_dtensor",
    "is_freed",
    "is_grouped",
    "is_of_older_vmap",
    "is_transformed",
    "is_wrapped",
    "local_part",
    "local_shards",
    "makes_new_memory",
    "no_callback",
    "outer_backward",
    "own_class",
    "parse_site",
    "path_text",
    "plain",
    "ports_for",
    "ranks_of",
    "reshard",
    "same_draws",
    "say_by_rank",
    "select",
    "sharding",
    "snapshot",
    "split_over",
    "split_parameters",
    "stop_all",
    "tensor_holder",
    "unwrapped",
    "while_tracing",
    "without_autocast",
    "without_older_vmap",
]  # fmt: skip
