"""Explain why a site was silent, as far as hooks can tell.

Each cause has its own function, which returns None if the cause does not apply. The first cause
that applies is reported. hl.doctor uses some of these functions, too, beside causes that need a run
of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from hookline.display.text import escape_invisible, listed
from hookline.engine.compile.compiled_modules import may_lack_guards
from hookline.engine.function_names import functions_by_name
from hookline.engine.operations.attention_parts import PARTS
from hookline.engine.passes.passes import Passes
from hookline.engine.selection.module_tree import ModuleNode, OperationNode, ParameterNode
from hookline.engine.selection.site import path_text, paths_above
from hookline.engine.taps.base import Tap
from hookline.engine.torch_private.modules import is_scripted


class Why(NamedTuple):
    """A reason, and its remedy."""

    why: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.why}; {self.remedy}" if self.remedy else self.why


class SilentTap(NamedTuple):
    """A tap that has not fired, with its line's state."""

    tap: Tap  # the tap
    node: ModuleNode | ParameterNode | None  # the module or parameter that the tap is on
    passes: Passes  # the passes of the line


NOT_RUN = Why("the model has not run")
OTHER_CONTEXT = Why(
    "the model ran in another thread or async task, and a line sees the one that made it",
    "copy the context where the line is made and run the model in the copy,"
    " pool.submit(contextvars.copy_context().run, model, x), or attach with every_thread=True",
)
BYPASSED = Why("not reached in this forward, or its .forward was called directly")
_NOT_IN_CODE = Why(
    f"{BYPASSED.why}, or compiled code that is older than the line ran, without the guards that"
    " notice a line (guard_filter_fn)",
    "attach before the first call, or compile without that option",
)
_NO_TOKEN = Why(
    "no token was routed to this expert in this forward, or its .forward was called directly"
)
RAISED = Why("the forward raised before this had finished")
UNKNOWN = Why("the event that it waits for did not happen")
_NOT_ITSELF = Why(
    "the model itself was not called, only modules inside it (by hand, by generate() of an inner"
    " model, by torch.fx.Interpreter, by a copy that torch.fx traced)",
    "attach to the one that is called",
)


def explain_silence(silent: SilentTap) -> str:
    """Say why a tap has not fired."""
    causes = (cause(silent) for cause in _CAUSES)
    return str(next(filter(None, causes), UNKNOWN))


def never_called_reason(node: ModuleNode) -> Why | None:
    """Say why no hook on a module is ever called, whatever its inputs; None if hooks are called."""
    if is_scripted(node.module):
        return Why(
            "a ScriptModule: torch refuses hooks on its modules, or never calls them",
            "hook the Python model, before torch.jit.script or torch.jit.trace",
        )
    parent = None if node.parent is None else node.parent.module
    if isinstance(parent, nn.MultiheadAttention) and node.path.endswith("out_proj"):
        return Why(
            "MultiheadAttention uses out_proj's weights without calling it",
            "select its parent, the attention itself: its output[0] is the output of out_proj",
        )
    return None


def custom_call_reason(node: ModuleNode, instead: str) -> Why:
    """Say that a module's own `__call__` does not call its hooks.

    Args:
        node: the module.
        instead: continues the sentence: what that `__call__` does instead.
    """
    kind = node.type_name
    return Why(
        f"{kind} has a __call__ of its own{instead}",
        f"have {kind}.__call__ end in super().__call__(...), or select the modules that it calls",
    )


def _tap_reason(silent: SilentTap) -> Why | None:
    reason = silent.tap.why_silent()
    return None if reason is None else Why(reason)


def _not_run_reason(silent: SilentTap) -> Why | None:
    if silent.passes.started:
        return None
    return OTHER_CONTEXT if silent.passes.other_contexts else NOT_RUN


def _all_raised_reason(silent: SilentTap) -> Why | None:
    return RAISED if silent.passes.failed == silent.passes.started else None


def _bypassed_hooks_reason(silent: SilentTap) -> Why | None:
    node = silent.node
    if not isinstance(node, ModuleNode):
        return None
    always = never_called_reason(node)
    if always is not None:
        return always
    call = type(node.module).__call__
    # torch's own end in that of nn.Module, as of a GraphModule.
    if call is not nn.Module.__call__ and not str(call.__module__).startswith("torch."):
        return custom_call_reason(node, ", and hooks are called by nn.Module's")
    if node.parent is not None and "ao.nn" in type(node.parent.module).__module__:
        return Why("a quantised module holds its weights there, and does not call it",
                   "select its parent")  # fmt: skip
    return None


def uncalled_operation_reason(node: OperationNode, other_causes: str = "") -> Why:
    """Say that a module does not itself call the function of an operation.

    Args:
        node: the operation.
        other_causes: continues the sentence, where there may be another reason.
    """
    path = path_text(node.host.path)
    what = f"calls no `{node.name}` itself"
    if node.name in PARTS:
        what = "itself computes no attention whose parts are known"
    fix = f"hl.operations(model, x, {path!r}) lists what it calls"
    if f"{node.name}_" in functions_by_name():
        fix += f"; in place, it is '{node.host.path}@{node.name}_'"
    if any(child is not None for child in node.host.children):
        inside = f"{node.host.path}.**" if node.host.path else "**"
        fix += f"; '{inside}@{node.name}' matches the modules inside"
    return Why(f"{path} {what}{other_causes}", fix)


def _uncalled_operation_reason(silent: SilentTap) -> Why | None:
    node = silent.node
    if not isinstance(node, OperationNode):
        return None
    return uncalled_operation_reason(node, ", took another branch, or did not run")


def _uncalled_module_reason(silent: SilentTap) -> Why | None:
    node, passes = silent.node, silent.passes
    if not isinstance(node, ModuleNode):
        return None
    if passes.outside_root < passes.started:
        # By this name, models call the list of experts in a mixture, which a router chooses from.
        if "experts" in node.path.split(".")[:-1]:
            return _NO_TOKEN
        return _NOT_IN_CODE if _has_fewer_guards(node) else BYPASSED
    return _NOT_ITSELF if node.parent is None else Why(f"not called; {_NOT_ITSELF}")


def _has_fewer_guards(node: ModuleNode | None) -> bool:
    while node is not None and not may_lack_guards(node.module):
        node = node.parent
    return node is not None


_CAUSES: tuple[Callable[[SilentTap], Why | None], ...] = (
    _tap_reason, _not_run_reason, _all_raised_reason, _bypassed_hooks_reason,
    _uncalled_operation_reason, _uncalled_module_reason,
)  # fmt: skip


def shared_pass_warning(name: str, model_type: str, paths: list[str]) -> str | None:
    """Write the warning where the model itself was never called, but its modules were.

    Args:
        name: the verb.
        model_type: the class of the model.
        paths: the modules that were called more than once.
    """
    called = set(paths)
    outermost = [path for path in dict.fromkeys(paths) if called.isdisjoint(paths_above(path))]
    if not outermost:
        return None
    names = listed([repr(path) for path in outermost], 3)
    first = escape_invisible(outermost[0])
    # What has called a module further inside is not known.
    such_as = "" if "." in first else f" such as model.get_submodule({first!r}),"
    return (
        f"hl.{name}: {model_type} itself was not called, only modules inside it ({names}), so all"
        f" their runs are one pass.\nGive the module that is called,{such_as} or call the model."
    )
