"""Make torch.compile honour a line.

Compiled code is reused as long as its guards hold. By default the guards notice no hook on a module
that had none. So each hooked module carries a mark, against which earlier compiled code is guarded
(`compile/guards.py`). When the mark is removed with the line, the earlier code is used again.

None of hookline's Python runs inside a graph. So hookline acts at the border of compiled code,
where a compiled module is called. There the line is switched on and passes begin. When the code has
run, the values that it has left on the taps are collected there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import final

from torch import nn

from hookline.engine.compile.compiled_modules import (
    RunSubscription,
    find_compiled_in_place,
    unwrap_compiled,
)
from hookline.engine.compile.compiled_runs import ActiveTaps, CurrentRun
from hookline.engine.compile.compiler_errors import explain_error
from hookline.engine.compile.guards import ForwardMarks
from hookline.engine.line.attachment import Attachment
from hookline.engine.passes.passes import Pass, Passes
from hookline.engine.selection.module_tree import ModuleNode, ParameterNode
from hookline.engine.selection.site import GRADIENT_PORTS, Site
from hookline.engine.taps.base import Tap, hook_functions
from hookline.engine.torch_private.dynamo import (
    DynamoSettings,
    TracingAttachError,
    dynamo_config,
    may_have_compiled,
    never_compile_alone,
    run_at_trace_time,
)
from hookline.errors import AttachError
from hookline.util.fork_safe_lock import fork_safe_lock
from hookline.util.weak_map import WeakIdentityMap

# Models that contain compiled code without a border.
_models_without_border: WeakIdentityMap[bool] = WeakIdentityMap()


@final
@dataclass(slots=True, eq=False)
class _CompiledCall:
    """One call of a compiled module, and the steps taken for it so far."""

    frame: FrameType
    is_locked: bool = False
    before: ActiveTaps = field(default_factory=lambda: ([], None))
    settings: DynamoSettings = field(default_factory=DynamoSettings)
    is_on: bool = False


class _CallStack(threading.local):
    """The running calls of compiled modules in a thread."""

    def __init__(self) -> None:
        self.calls: list[_CompiledCall] = []


@final
class _Border:
    """The calls of the compiled modules that concern a line, reported by `RunSubscription`.

    Args:
        line: switched on for each call.
        passes: the line's passes, begun and ended here where the model itself is compiled.
        root: the line's model.
    """

    __slots__ = (
        "__weakref__", "_around_root", "_here", "_line", "_lock", "_members", "_passes", "_root",
        "_subscription",
    )  # fmt: skip

    def __init__(self, line: CompileSupport, passes: Passes, root: nn.Module) -> None:
        self._line = line
        self._passes = passes
        self._root: nn.Module | None = root
        self._here = _CallStack()
        # All threads share the switch, so compiled code runs in one thread at a time.
        self._lock = fork_safe_lock()
        self._members: set[int] | None = None  # ids of the model's modules; None until first needed
        self._around_root: WeakIdentityMap[bool] = WeakIdentityMap()
        self._subscription = RunSubscription(self)

    def open(self, compiled: list[nn.Module] | None) -> None:
        """Begin to watch calls. `close` undoes this also after an interrupt."""
        self._subscription.open()
        self.watch_compiled(compiled)

    def watch_compiled(self, compiled: list[nn.Module] | None = None) -> None:
        """Watch the modules that hold their compiled call; with None, find these modules first."""
        if self._root is None:
            return
        if compiled is None:
            self._members, compiled = find_compiled_in_place(self._root)
        for module in compiled:
            self._subscription.watch_module(module)

    def close(self) -> None:
        """Stop watching calls. `leave` still runs for the calls under way."""
        self._root = None
        self._subscription.remove()

    @property
    def is_inside_compiled(self) -> bool:
        """Tell whether a compiled module runs in this thread."""
        return bool(self._here.calls)

    def covers(self, module: nn.Module) -> bool:
        """Tell whether a compiled module concerns the line."""
        if self._contains_root(module):
            return True
        if self._members is None and self._root is not None:
            self._members, _ = find_compiled_in_place(self._root)
        return id(module) in (self._members or ())

    def _contains_root(self, module: nn.Module) -> bool:
        """Tell whether a compiled module is the model or contains it, so that its run is a pass."""
        if module is self._root:
            return True
        return self._around_root.get_or_add(
            module, lambda: id(self._root) in find_compiled_in_place(module)[0]
        )

    def enter(self, module: nn.Module, frame: FrameType) -> None:
        """Switch the line on before a compiled module runs."""
        call = _CompiledCall(frame)
        self._here.calls.append(call)  # first, so that `leave` undoes the steps that were taken
        self._lock.acquire()
        call.is_locked = True
        is_whole = self._contains_root(module)
        if is_whole:
            self._passes.begin(frame)
        call.before = self._line.switch_taps_on(None if is_whole else module)
        call.is_on = True
        call.settings.begin()

    def leave(self, module: nn.Module, frame: FrameType, output: object) -> None:
        """Switch the line back after a compiled module has returned or raised."""
        calls = self._here.calls
        if not calls or calls[-1].frame is not frame:
            return
        call = calls.pop()
        call.settings.end()
        try:
            if call.is_on:
                self._line.switch_taps_back(call.before)
        finally:
            try:
                if self._contains_root(module):
                    self._passes.end(frame)
            finally:
                if call.is_locked:
                    self._lock.release()

    def add_error_note(self, error: BaseException) -> None:
        """Add a note on hooks to the error of a compiled module."""
        self._line.add_error_note(error)


@final
@dataclass(slots=True, eq=False)
class CompileSupport(Attachment):
    """The state of one line in torch.compile, from when dynamo is loaded until the line ends.

    Args:
        passes: the line's passes, begun and ended at the border of the compiled model.
        root: the line's model, if it has one.
        taps: the line's taps; the list grows.
        nodes: the taps' modules and parameters, by the tap's id.

    Attributes:
        border: watches the calls of compiled modules; None until dynamo is loaded.
    """

    _passes: Passes
    _root: nn.Module | None
    _taps: list[Tap]
    _nodes: dict[int, ModuleNode | ParameterNode]
    border: _Border | None = None
    # Held while taps and marks change: passes may begin in several threads, and the line may end in
    # another.
    _lock: threading.RLock = field(default_factory=fork_safe_lock)
    _marks: ForwardMarks = field(default_factory=ForwardMarks)
    _run: CurrentRun = field(init=False)
    _new: list[Tap] = field(default_factory=list)  # that earlier compiled code does not contain
    _parts: dict[int, list[Tap]] = field(default_factory=dict)  # by the id of a compiled module
    _traced: Site | None = None  # the site of the tap that dynamo traced last

    def __post_init__(self) -> None:
        self._run = CurrentRun(self._passes.switch)

    # -- the beginning ---------------------------------------------------------------------------

    def enable_if_dynamo_loaded(self, compiled: list[nn.Module] | None = None) -> None:
        """Make dynamo honour hooks, if dynamo is loaded. Idempotent.

        Nothing can be compiled before dynamo is loaded.

        Args:
            compiled: the modules that hold their compiled call; with None, the modules are
                searched.
        """
        if self.border is not None or self._root is None or dynamo_config() is None:
            return
        with self._lock:
            if self.border is not None or self._root is None:
                return  # another thread has enabled or ended the line meanwhile
            never_compile_alone(hook_functions)
            self._root = unwrap_compiled(self._root)
            self.border = _Border(self, self._passes, self._root)
            self.border.open(compiled)
            if self._taps:
                self.add_taps(self._taps)

    def add_taps(self, taps: list[Tap]) -> None:
        """Add taps that have been attached."""
        with self._lock:
            self._add_taps(taps)

    def _add_taps(self, taps: list[Tap]) -> None:
        self._parts.clear()
        self._new += taps
        gradients = [tap for tap in taps if tap.site.port in GRADIENT_PORTS]
        self._run.add_taps(taps, has_gradients=bool(gradients))
        if may_have_compiled():
            self._mark_new_hooks()
        else:
            for tap in gradients:
                tap.prepare_capture()

    def drop_taps(self, taps: Iterable[Tap]) -> None:
        """Forget taps that have been removed, and unmark modules that keep no tap of the line."""
        if self.border is None:
            return
        with self._lock:
            self._drop_taps_locked(list(taps))

    def _drop_taps_locked(self, taps: list[Tap]) -> None:
        ids = set(map(id, taps))
        self._parts.clear()
        self._new = [tap for tap in self._new if id(tap) not in ids]
        self._run.drop_taps(ids)
        hooked = {self.module_id_of(tap) for tap in self._taps if not tap.is_removed}
        for number in {self.module_id_of(tap) for tap in taps} - hooked - {id(self._root)}:
            self._marks.discard(number)

    def _mark_new_hooks(self) -> None:
        """Mark newly hooked modules, so that code compiled before is not used while the line lasts.

        Called when code has been compiled or is about to be. Every piece of compiled code that
        calls a hook contains the hook's module, however the model was cut into pieces. The state
        that compiled code reads must exist before the code is called, or its guards would fail.
        """
        if not self._new:
            return
        with self._lock:
            self._mark_new_locked()

    def _mark_new_locked(self) -> None:
        if self._root is None:
            return
        hooked = {id(self._root): self._root}
        for tap in self._new:
            tap.prepare_capture()
            node = self._nodes.get(id(tap))
            if isinstance(node, ModuleNode):
                hooked[id(node.owner)] = node.owner
        self._marks.mark_modules(hooked.values())
        self._new.clear()

    def refuse_stale_forward(self, module: nn.Module) -> None:
        """Refuse a call for which torch has fetched a forward that the class no longer has.

        Called by the hooks of a module that runs outside the root.

        Raises:
            AttachError: the forward is stale. The next call finds the new forward.
        """
        if self._marks.renew_if_stale(module):
            raise AttachError(stale_forward_text(module))

    # -- called by `Passes` ----------------------------------------------------------------------

    def begin_pass(self, current: Pass) -> None:
        """Prepare for a pass, in which compiled code may run."""
        self._traced = None
        if self.border is None:
            self.enable_if_dynamo_loaded()
        border = self.border
        if border is None:
            return
        if may_have_compiled() and not border.is_inside_compiled:
            self._mark_new_hooks()
            for module in self._marks.renew_all():
                if module is self._root:
                    raise AttachError(stale_forward_text(module))
        if self._root in _models_without_border:
            self._switch_taps_on_for_pass(current)

    def _switch_taps_on_for_pass(self, current: Pass) -> None:
        """Let compiled code without a border use the taps, until the pass ends."""
        settings = DynamoSettings()
        gap = settings, self._run.switch_taps(self._taps, current)
        current.at_end.insert(0, partial(self._switch_taps_off_after_pass, *gap))  # called last
        settings.begin()

    def _switch_taps_off_after_pass(self, settings: DynamoSettings, before: ActiveTaps) -> None:
        settings.end()
        is_inside = self.border is not None and self.border.is_inside_compiled
        self._run.switch_taps(*(before if is_inside else ([], None)))

    def prepare_tracing(self, tap: Tap | None) -> None:
        """Prepare for code being compiled that calls the line's tap, or with None its root.

        Raises:
            AttachError: the code runs outside any pass, and no pass can begin.
        """
        passes = self._passes
        self._traced = None if tap is None else tap.site
        is_inside = self.border is not None and self.border.is_inside_compiled
        if passes.switch.is_on or is_inside or not passes.sees_this_context():
            return
        current = passes.in_thread.current
        if current is None:
            raise TracingAttachError(
                "the model runs inside a compiled function, where no pass can be told from another."
                "\nCompile the model, torch.compile(model), before the line is made; or put"
                " torch.compiler.set_stance('force_eager') around the block."
            )
        # Either a function within the model is compiled, or a module was compiled after the line
        # was made.
        if self.border is not None:
            self.border.watch_compiled()
        if self._root is not None:
            _models_without_border[self._root] = True
        self._switch_taps_on_for_pass(current)

    def module_id_of(self, tap: Tap) -> int:
        """Return the id of the module that a tap is on; 0 if the tap is on no module."""
        node = self._nodes.get(id(tap))
        return id(node.owner) if isinstance(node, ModuleNode) else 0

    def add_error_note(self, error: BaseException) -> None:
        """Add a note to an error of compilation or of compiled code, if hooks are the reason.

        Called where the error is first known: at the border, or without a border, by the pass.
        """
        site, self._traced = self._traced, None
        note = explain_error(error, site)
        if note is not None and note not in getattr(error, "__notes__", ()):
            error.add_note(note)

    # -- called by the border --------------------------------------------------------------------

    def switch_taps_on(self, module: nn.Module | None) -> ActiveTaps:
        """Let compiled code use the taps in a module, or with None all taps.

        Returns:
            The taps and the pass that compiled code used before.
        """
        passes = self._passes
        passes.switch.is_on, self._traced = False, None
        self._mark_new_hooks()
        self._marks.renew_all()
        taps = self._taps if module is None else self._cached_taps_in(module)
        current = passes.in_thread.current or passes.pass_outside_root() if taps else None
        return self._run.switch_taps([] if current is None else taps, current)

    def switch_taps_back(self, before: ActiveTaps) -> None:
        """Let compiled code use the earlier taps again; none, if the line has ended meanwhile."""
        self._run.switch_taps(*(([], None) if self._passes.closed else before))

    def _cached_taps_in(self, module: nn.Module) -> list[Tap]:
        """Return the taps that a compiled module may call."""
        with self._lock:
            taps = self._parts.get(id(module))
            if taps is None:
                taps = self._parts[id(module)] = self._find_taps_in(module)
            return taps

    def _find_taps_in(self, module: nn.Module) -> list[Tap]:
        inside = {id(part) for part in module.modules()}
        return [tap for tap in self._taps if self.module_id_of(tap) in inside]

    # -- the end ---------------------------------------------------------------------------------

    def end(self) -> None:
        """Undo all changes."""
        with self._lock:
            self._root = None
            border, self._nodes, self._new = self.border, {}, []
        if border is None:
            return
        self._run.end()  # the line may end while compiled code runs
        with self._lock:
            self._marks.clear()
            border.close()
            self.border = None


@run_at_trace_time
def refuse_in_compiled(name: str) -> None:
    """Raise an error for a line that is made inside a function being compiled.

    Raises:
        AttachError: always.
    """
    raise TracingAttachError(
        f"hl.{name} is called inside a compiled function, where no line can be made."
        "\nMake it around"
        f" the compiled call: with hl.{name}(model, ...): compiled(x)."
    )


def stale_forward_text(module: nn.Module) -> str:
    """Say that a call would run a forward which the module's class no longer has."""
    return (
        f"{type(module).__name__} got another forward while this line is on, but torch had already"
        " fetched the old forward for this call."
        "\nCall the model again: the new forward runs from now on."
    )
