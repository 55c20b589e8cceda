"""The engine: sites and selections, lines and taps, passes, reports.

Nothing here knows what a hook means. Code outside the engine imports the names below, and the
modules that `OPEN` names. docs/architecture.md draws the rooms.
"""

# fmt: off
# isort: off
from hookline.engine.attention.pattern import QueryBlocks
from hookline.engine.autograd.view_hooks import GradHook, hook_value
from hookline.engine.compile.compiled_modules import (
    Borders, inside_compiled, is_compiled, uncompiled,
)
from hookline.engine.compile.graph_callback import (
    Callback, InBlocks, SplitCallback, defaults_by_name, graph_snapshot, snapshot,
)
from hookline.engine.compile.runs import CompiledRun
from hookline.engine.distributed.parallel_ranks import (
    gathered, split_parameters, split_ranks, summed,
)
from hookline.engine.distributed.rendezvous import (
    TIMEOUT_S, failures_of, gather_json, has_come, note_failure, ranks_of, say_by_rank,
)
from hookline.engine.distributed.whole_weights import joined, whole_weights
from hookline.engine.gradients.port_taps import GradInputTap, GradOutputTap, ParameterTap
from hookline.engine.gradients.tap import (
    GradientCallback, GradientTap, NO_BACKWARD, PendingGradient, guarded,
)
from hookline.engine.line.attachment import AtEnd, Attachment, surely
from hookline.engine.line.handle import HookHandle
from hookline.engine.line.line import Bound, Line
from hookline.engine.line.registration import Node, Registrations
from hookline.engine.memory.read_only import call_read_only, call_to_measure
from hookline.engine.memory.unversioned import LINE, Unversioned, is_freed, makes_new_memory
from hookline.engine.operations.attention_parts import PARTS
from hookline.engine.operations.call_list import CallList, FunctionCall
from hookline.engine.operations.mode import operations_on
from hookline.engine.operations.operation import Operation
from hookline.engine.passes.as_recomputation import as_recomputation
from hookline.engine.passes.calls import Calls
from hookline.engine.passes.checkpointing import same_draws, stop_all
from hookline.engine.passes.modes import (
    has_numbers, innermost, is_transformed, plain, without_autocast,
)
from hookline.engine.passes.passes import ELSEWHERE, Pass, Passes
from hookline.engine.pytree.call_arguments import Arguments
from hookline.engine.pytree.hidden_tensors import every_tensor, tensor_holder
from hookline.engine.pytree.tree import local_shards
from hookline.engine.report.replaced_parts import Lapse
from hookline.engine.report.report import Report, facts
from hookline.engine.selection.model_parts import has_parts, register_parts, sites_of_part
from hookline.engine.selection.module_tree import (
    ModuleNode, ModuleTree, OperationNode, ParameterNode, module_tree, require_model,
)
from hookline.engine.selection.selectors import (
    Selection, Selector, SitedNode, as_written, check_ports, parse_site, ports_for, select,
    select_in,
)
from hookline.engine.selection.site import PORTS, ROOT, Site, glob, path_text, paths_above
from hookline.engine.selection.targets import EVERYWHERE, Everywhere, Target
from hookline.engine.taps.base import (
    AroundCall, HookSpec, Order, RootTap, Tap, call_frame, foreign_hooks, is_inert, is_reading,
    no_callback, walked_over,
)
from hookline.engine.taps.forward import OutputTap
from hookline.engine.taps.operations import ModeTap
from hookline.engine.taps.optimizer_steps import OptimizerSteps, closure_of, parameter_ids
from hookline.engine.torch_private.autograd import (
    at_end_of_backward, backward_number, hook_gradient, hook_node, hook_node_before,
    outer_backward, pop_saved_tensors_hooks, push_saved_tensors_hooks, version_counter,
)
from hookline.engine.torch_private.distributed import (
    calls_of_sharded, clone_locally, default_store, fsdp1_parts, full_value,
    is_dtensor, is_flat, is_grouped, is_split, is_summand, layout_of, local_part, reshard, sharding,
    split_over, unwrapped, waiting_gradients,
)
from hookline.engine.torch_private.dynamo import (
    TracingAttachError, dynamo_config, has_compiled, while_tracing,
)
from hookline.engine.torch_private.graph.checkpoint import aside, is_recomputing
from hookline.engine.torch_private.graph.dispatch import (
    storage_address, without_function_modes, without_modes,
)
from hookline.engine.torch_private.graph.foreach import copy_all, subtract_from_all
from hookline.engine.torch_private.graph.function_modes import is_exported
from hookline.engine.torch_private.graph.nodes import (
    at_end_of_inner_backward, kept_by, memory_of, next_number, nodes_below, nodes_of_loss,
    number_of, running_node, saved_by, traced_node, workspace_of,
)
from hookline.engine.torch_private.graph.operations import ON_NESTED, OperationCounter
from hookline.engine.torch_private.graph.shapes_only import (
    ShapesOnly, flags_of, is_sharded, why_no_shapes,
)
from hookline.engine.torch_private.hooks import (
    HOOK_DICTS, discard_hook, discard_hooks_of, global_hooks, hook_dict, tensor_hook_dict,
    tensor_hooks,
)
from hookline.engine.torch_private.inductor import compile_graph
from hookline.engine.torch_private.modes import (
    is_of_older_vmap, is_ordinary, is_wrapped, without_older_vmap,
)
from hookline.engine.torch_private.modules import (
    PYTHON_NODE, buffers, has_forward, holds_compiled_call, is_leaf, is_scripted, parameters,
    unwrap,
)
from hookline.util.hidden import hides

# The modules that other rooms import by their own names.
OPEN = (
    "autograd.aliases", "autograd.module_backward", "functions", "model_fingerprint", "provenance",
    "pytree.describe", "pytree.leaves", "pytree.outlines", "pytree.tree",
    "report.known_faults", "report.why_silent", "run_settings", "taps.fast_path",
)
