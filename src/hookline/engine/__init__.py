"""The engine: sites and selections, lines and taps, passes, reports.

Nothing here knows what a hook means. Code outside the engine imports the names below, and the
modules that `OPEN` names. docs/architecture.md draws the rooms.
"""

# fmt: off
# isort: off
from hookline.engine.attention.pattern import QueryBlocks
from hookline.engine.autograd.view_hooks import GradHook, hook_value_gradient
from hookline.engine.compile.compiled_modules import (
    RunSubscription, force_eager, is_compiled, unwrap_compiled,
)
from hookline.engine.compile.graph_capture import (
    Callback, BlockwiseCallback, SplitCallback, bind_own_defaults, snapshot_detached,
    snapshot_with_graph,
)
from hookline.engine.compile.compiled_runs import CompiledRun
from hookline.engine.distributed.tensor_parallel import (
    ShardingRanks, gather_stacked, reduce_partial, tensor_parallel_parameters,
    tensor_parallel_ranks,
)
from hookline.engine.distributed.rendezvous import (
    TIMEOUT_S, failures_by_rank, format_by_rank, gather_json, group_ranks, publish_failure,
    wait_for_keys,
)
from hookline.engine.distributed.whole_weights import (
    gather_last_dim, meet_sharding_ranks, whole_weights,
)
from hookline.engine.gradients.port_taps import GradInputTap, GradOutputTap, ParameterTap
from hookline.engine.gradients.gradient_tap import (
    GradientCallback, GradientTap, NO_BACKWARD, PendingGradient, call_gradient_function,
)
from hookline.engine.line.attachment import AtEnd, Attachment, retry_interrupted
from hookline.engine.line.handle import HookHandle
from hookline.engine.line.line import Bound, Line
from hookline.engine.line.registration import Node, Registrations
from hookline.engine.memory.read_only_calls import call_undoing_writes, call_measuring_function
from hookline.engine.memory.unversioned_memory import (
    CACHE_LINE_BITS, UnversionedMemory, is_freed, returns_new_memory,
)
from hookline.engine.operations.attention_parts import PARTS
from hookline.engine.operations.call_list import CallList, FunctionCall
from hookline.engine.operations.operation_mode import hooked_operations_on
from hookline.engine.operations.operation import Operation
from hookline.engine.passes.repeated_run import treat_runs_as_recomputation
from hookline.engine.passes.running_calls import RunningCalls
from hookline.engine.passes.checkpointing import end_thread_passes, repeatable_generator
from hookline.engine.passes.modes import (
    has_numbers, unwrap_all_transforms, is_in_transform, unwrap_ended_transforms, without_autocast,
)
from hookline.engine.passes.passes import ELSEWHERE, Pass, Passes
from hookline.engine.pytree.call_arguments import ArgumentBinder
from hookline.engine.pytree.hidden_tensors import every_tensor, hidden_tensor_holder
from hookline.engine.pytree.tree import local_shards
from hookline.engine.report.replaced_parts import Consequence
from hookline.engine.report.report import Report, header_facts
from hookline.engine.selection.model_parts import has_parts, register_parts, sites_of_part
from hookline.engine.selection.module_tree import (
    ModuleNode, ModuleTree, OperationNode, ParameterNode, module_tree, require_model,
)
from hookline.engine.selection.selectors import (
    Selection, Selector, SitedNode, normalize_root, check_ports, parse_site, ports_for, select,
    select_in,
)
from hookline.engine.selection.site import PORTS, ROOT, Site, glob_to_regex, path_text, paths_above
from hookline.engine.selection.targets import EVERYWHERE, Everywhere, Target
from hookline.engine.taps.base import (
    AroundCall, HookSpec, Order, RootTap, Tap, call_frame, do_nothing, foreign_hooks, is_inert,
    is_reading_tap_running, iterated_taps,
)
from hookline.engine.taps.forward import OutputTap
from hookline.engine.taps.mode_tap import ModeTap
from hookline.engine.taps.optimizer_steps import OptimizerSteps, closure_of, parameter_ids
from hookline.engine.torch_private.autograd import (
    at_end_of_backward, backward_number, hook_gradient, hook_node, outer_backward_number,
    pop_saved_tensors_hooks, prehook_node, push_saved_tensors_hooks, version_counter,
)
from hookline.engine.torch_private.distributed import (
    allows_uneven_inputs, clone_locally, default_store, gather_full, has_process_group, is_dtensor,
    is_flat_parameter, is_partial_dtensor, is_tensor_parallel, layout_json, local_part,
    ranks_by_fsdp1_parameter, list_fsdp2_gathers, reshard, sharding_kind, unreduced_gradients,
    unwrap_ddp,
)
from hookline.engine.torch_private.dynamo import (
    TracingAttachError, dynamo_config, may_have_compiled, run_at_trace_time,
)
from hookline.engine.torch_private.graph.checkpoint import is_recomputing, outside_checkpoint
from hookline.engine.torch_private.graph.dispatch import (
    storage_address, without_function_modes, without_modes,
)
from hookline.engine.torch_private.graph.foreach import copy_all, norms_of_each, subtract_from_all
from hookline.engine.torch_private.graph.function_modes import is_exported
from hookline.engine.torch_private.graph.nodes import (
    at_end_of_inner_backward, gradient_split_groups, memory_key_and_size, next_number,
    node_number, nodes_below, nodes_from, nodes_from_loss_to_model, raw_tensors_saved_by,
    rnn_workspace_bytes, running_node, running_node_traceback, tensors_saved_by,
)
from hookline.engine.torch_private.graph.operation_counter import ON_NESTED, OperationCounter
from hookline.engine.torch_private.graph.fake_model import (
    FakeModel, is_fsdp2, module_flags, why_not_fakeable,
)
from hookline.engine.torch_private.hooks import (
    HOOK_DICTS, discard_hook, discard_hooks_of, global_hooks, hook_dict, tensor_hook_dict,
    tensor_hooks,
)
from hookline.engine.torch_private.inductor import compile_graph
from hookline.engine.torch_private.modes import (
    is_in_dual_level, is_legacy_batched, is_plain_eager, is_wrapped, unwrap_legacy_vmap,
)
from hookline.engine.torch_private.modules import (
    PYTHON_NODE, has_forward, holds_compiled_call, is_scripted, is_uncompiled_leaf, own_buffers,
    own_parameters, unwrap,
)
from hookline.util.hide_from_dir import hide_from_dir

# The modules that other rooms import by their own names.
OPEN = (
    "autograd.aliases", "autograd.module_backward", "function_names", "model_fingerprint",
    "provenance", "pytree.describe", "pytree.leaves", "pytree.outlines", "pytree.tree",
    "report.known_faults", "report.why_silent", "run_settings", "taps.fast_path",
)
