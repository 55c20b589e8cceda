"""What it takes for torch.compile to honour a line.

Compiled code is reused as long as its guards hold, and by default they look at no hook that comes
where none was. So each hooked module carries a mark that code compiled before is guarded against
(`compile/guards.py`). When the mark goes with the line, the old code serves again.

No Python of ours runs inside a graph. So at the border of compiled code, where a compiled module is
called, the line is switched on and passes begin; and when the code has run, what it has left on the
taps is seen.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from types import FrameType, FunctionType
from typing import Any, final

from torch import nn

from hookline.engine.compile.compiled_modules import Borders, compiled_within, inside_compiled
from hookline.engine.compile.guards import forward_of, mark, renew, unmark
from hookline.engine.compile.in_graph import CompiledRun, flush_before_reads, stop_settling
from hookline.engine.gradients.tap import GradientTap
from hookline.engine.line.attachment import Attachment
from hookline.engine.line.compile_messages import note_on, refuse_reversed, stale_forward
from hookline.engine.passes.passes import Pass, Passes
from hookline.engine.selection.module_tree import ModuleNode, ParameterNode
from hookline.engine.selection.site import GRADIENT_PORTS, Site
from hookline.engine.taps.base import RootTap, Tap
from hookline.engine.torch_private.dynamo import (
    OLD_DYNAMO,
    Settings,
    TracingAttachError,
    dynamo_config,
    has_compiled,
    not_alone,
    while_tracing,
)
from hookline.errors import AttachError
from hookline.util.locks import fork_safe_lock
from hookline.util.weak_map import WeakIdentityMap

# Under which a pass keeps the run of compiled code that has no border.
_NO_BOUNDARY = object()

# Models in which something is compiled that has no border.
_with_gaps: WeakIdentityMap[bool] = WeakIdentityMap()

# What compiled code sees: taps, and the pass that it runs in.
ActiveTaps = tuple[list[Tap], Pass | None]


@final
class _CompiledCall:
    """One call of a compiled module, and what has been done for it so far."""

    __slots__ = ("before", "frame", "is_locked", "is_on", "settings")

    def __init__(self, frame: FrameType) -> None:
        self.frame = frame
        self.is_locked = False
        self.before: ActiveTaps = [], None
        self.settings = Settings()
        self.is_on = False


class _CallStack(threading.local):
    """The calls of compiled modules that are under way in a thread."""

    def __init__(self) -> None:
        self.visits: list[_CompiledCall] = []


@final
class Compiled(Attachment):
    """What one line needs of torch.compile, from when dynamo is there until the line ends.

    Args:
        passes: the line's, begun and ended at the border of the compiled model.
        root: the line's model, if it has one.
        taps: the line's, which grow.
        nodes: where they are, by id.
    """

    __slots__ = (
        "_around_root", "_borders", "_forwards", "_has_gradients", "_here", "_kinds", "_lock",
        "_marked", "_members", "_new", "_nodes", "_of_one_call", "_on", "_parts", "_passes",
        "_root", "_run", "_taps", "_traced", "is_on",
    )  # fmt: skip

    def __init__(
        self,
        passes: Passes,
        root: nn.Module | None,
        taps: list[Tap],
        nodes: dict[int, ModuleNode | ParameterNode],
    ) -> None:
        self._passes = passes
        self._root = root
        self._taps = taps
        self.is_on = False
        self._nodes = nodes
        self._marked: dict[int, nn.Module] = {}
        # What these were when last looked at: the class of each, and the forward of each class.
        self._kinds: list[type] = []
        self._forwards: dict[type, Any] = {}
        self._borders: Borders | None = None
        self._here = _CallStack()
        self._members: set[int] | None = None  # the modules of the model, by id, once asked for
        self._parts: dict[int, list[Tap]] = {}
        self._of_one_call: list[Tap] = []
        self._on: ActiveTaps = [], None  # the taps that compiled code is to see now, and its pass
        self._run: CompiledRun | None = None
        self._new: list[Tap] = []  # that code compiled before knows nothing of
        self._has_gradients = False
        self._traced: Site | None = None

    # -- the beginning ---------------------------------------------------------------------------

    def enable_if_dynamo_loaded(self, compiled: list[nn.Module] | None = None) -> None:
        """Unless it is done: if dynamo is loaded by now, have it look at hooks.

        As long as it is not, nothing can be compiled.

        Args:
            compiled: the modules that hold their compiled call; None is to look for them.
        """
        if self.is_on or self._root is None or dynamo_config() is None:
            return
        self.is_on = True
        not_alone(_hooks_of((Tap, RootTap)))
        self._root = inside_compiled(self._root)
        # The switch is one for all threads, so compiled code runs in one of them at a time.
        self._lock = fork_safe_lock()
        self._around_root: WeakIdentityMap[bool] = WeakIdentityMap()
        self._borders = Borders(self)
        self._borders.open()
        self._find_borders(compiled)
        if self._taps:
            self.hooked(self._taps)

    def _find_borders(self, compiled: list[nn.Module] | None = None) -> None:
        if self._borders is None or self._root is None:
            return
        if compiled is None:
            self._members, compiled = compiled_within(self._root)
        for module in compiled:
            self._borders.watch(module)

    def hooked(self, taps: list[Tap]) -> None:
        """Modules have got hooks."""
        self._parts.clear()
        self._new += taps
        self._of_one_call += [tap for tap in taps if tap.site.call is not None]
        gradients = [tap for tap in taps if tap.site.port in GRADIENT_PORTS]
        self._has_gradients = self._has_gradients or bool(gradients)
        if has_compiled():
            self._make_ready()
        else:
            for tap in gradients:
                tap.prepare()

    def drop(self, taps: Iterable[Tap]) -> None:
        """Modules have lost hooks. Where none of the line's is left, the mark goes, too."""
        if not self.is_on:
            return
        gone = set(map(id, taps))
        self._parts.clear()
        self._new = [tap for tap in self._new if id(tap) not in gone]
        self._of_one_call = [tap for tap in self._of_one_call if id(tap) not in gone]
        hooked = {self._place_of(tap) for tap in self._taps if not tap.is_removed}
        for number in {self._place_of(tap) for tap in taps} - hooked:
            module = None if number is None else self._marked.get(number)
            if module is not None and module is not self._root:
                unmark(module, self)
                self._marked.pop(id(module), None)

    def _make_ready(self) -> None:
        """Code is compiled by now, or is about to be: that compiled before is not to serve while
        the line lasts. In whatever pieces it was compiled, each that a hook belongs to is about
        the module that has it.

        What code reads has to be there before it is called, or its guards would fail."""
        if self._new and self._root is not None:
            self._mark(self._root)
        for tap in self._new:
            tap.prepare()
            node = self._nodes.get(id(tap))
            if isinstance(node, ModuleNode):
                self._mark(node.module)
        self._new.clear()

    def _mark(self, module: nn.Module) -> None:
        self._marked[id(module)] = module  # first: from here on an interrupt takes it off, too
        mark(module, self)

    def _renew(self) -> list[nn.Module]:
        """Have each mark stand for the forward that the class has now; list those that did not."""
        kinds = list(map(type, self._marked.values()))
        if kinds == self._kinds and all(
            forward_of(kind) is was for kind, was in self._forwards.items()
        ):
            return []
        self._kinds, self._forwards = kinds, {kind: forward_of(kind) for kind in kinds}
        return [module for module in self._marked.values() if renew(module)]

    def refuse_stale(self, module: nn.Module) -> None:
        """Refuse a call for which torch has fetched a forward that the class has no longer.

        Told by hooks on a module that is called by hand.

        Raises:
            AttachError: it is so. The next call finds the new one.
        """
        if id(module) in self._marked and renew(module):
            raise AttachError(stale_forward(module))

    # -- passes, told by `Passes` ----------------------------------------------------------------

    def begin_pass(self, current: Pass) -> None:
        """A pass begins, in which compiled code may run."""
        self._traced = None
        if not self.is_on:
            self.enable_if_dynamo_loaded()
            if not self.is_on:
                return
        if has_compiled() and not self._here.visits:
            self._make_ready()
            for module in self._renew():
                if module is self._root:
                    raise AttachError(stale_forward(module))
        if self._root in _with_gaps:
            self._open_gap(current)

    def _open_gap(self, current: Pass) -> None:
        settings = Settings()
        current.opened[_NO_BOUNDARY] = [(settings, self._turn(self._taps, current))]
        settings.begin()

    def end_pass(self, current: Pass) -> None:
        """A pass has ended: see what compiled code has left that has no border."""
        for settings, before in current.opened.pop(_NO_BOUNDARY, ()):
            settings.end()
            self._turn(*(before if self._here.visits else ([], None)))

    def is_traced(self, tap: Tap | None) -> None:
        """Code is being compiled that calls the line's tap, or with None its root.

        Raises:
            AttachError: it is called where no pass is under way, and none can be begun; or this
                torch would call it out of its order.
        """
        passes = self._passes
        self._traced = None if tap is None else tap.site
        node = self._nodes.get(id(tap))
        if OLD_DYNAMO and isinstance(tap, GradientTap) and isinstance(node, ModuleNode):
            refuse_reversed(tap, node.module)
        if passes.switch.is_on or self._here.visits or not passes.is_here():
            return
        current = passes.lane.current
        if current is None:
            raise TracingAttachError(
                "the model runs inside a compiled function, where no pass can be told from another."
                "\nCompile the model, torch.compile(model), before the line is made; or put"
                " torch.compiler.set_stance('force_eager') around the block."
            )
        # A function within the model is compiled, or a module was since the line was made.
        self._find_borders()
        if self._root is not None:
            _with_gaps[self._root] = True
        self._open_gap(current)

    def owner_of(self, tap: Tap) -> int:
        """The module that a tap is on, as a number; 0 if it is on none."""
        return self._place_of(tap) or 0

    # -- the border, told by `Borders` -----------------------------------------------------------

    def covers(self, module: nn.Module) -> bool:
        """Whether the line has to do with a compiled module."""
        if self._members is None and self._root is not None:
            self._members, _ = compiled_within(self._root)
        return self._holds_root(module) or id(module) in (self._members or ())

    def _holds_root(self, module: nn.Module) -> bool:
        """Whether a pass is a run of this compiled module: the model, or what it is a part of."""
        if module is self._root:
            return True
        is_around = self._around_root.get(module)
        if is_around is None:
            is_around = id(self._root) in compiled_within(module)[0]
            self._around_root[module] = is_around
        return is_around

    def enter(self, module: nn.Module, frame: FrameType) -> None:
        """A compiled module is about to run."""
        visit = _CompiledCall(frame)
        self._here.visits.append(visit)  # first: `leave` undoes what of it was done
        self._lock.acquire()
        visit.is_locked = True
        if self._holds_root(module):
            self._passes.begin(frame=frame)
        self._passes.switch.is_on, self._traced = False, None
        self._make_ready()
        self._renew()
        taps = self._taps_in(module)
        current = self._pass() if taps else None
        visit.before = self._turn([] if current is None else taps, current)
        visit.is_on = True
        visit.settings.begin()

    def leave(self, module: nn.Module, frame: FrameType) -> None:
        """A compiled module has run, or failed."""
        visits = self._here.visits
        if not visits or visits[-1].frame is not frame:
            return
        visit = visits.pop()
        visit.settings.end()
        try:
            if visit.is_on:
                self._turn(*(([], None) if self._passes.closed else visit.before))
        finally:
            try:
                if self._holds_root(module):
                    self._passes.end(frame)
            finally:
                if visit.is_locked:
                    self._lock.release()

    def explain(self, error: BaseException) -> None:
        """Compiled code could not be made, or failed: say what that has to do with hooks.

        Told where that is known first: at its border, or where there is none, by the pass.
        """
        site, self._traced = self._traced, None
        note = note_on(error, site)
        if note is not None and note not in getattr(error, "__notes__", ()):
            error.add_note(note)

    def _pass(self) -> Pass | None:
        """The pass that compiled code runs in; None if it is not ours to see."""
        return self._passes.lane.current or self._passes.outside()

    def _turn(self, taps: list[Tap], current: Pass | None) -> ActiveTaps:
        """Have compiled code see these taps and no others, in this pass; see what it has left on
        those before. Gives what it saw before."""
        before = self._on
        if before[1] is not None and before[1] is not current:
            stop_settling(before[1])
        try:
            self._settle(is_over=True)
        finally:
            self._on = taps, current
            self._passes.switch.is_on = current is not None
            for tap in before[0]:
                tap.active = None
            for tap in taps:
                tap.active = tap.traced
        if current is not None:
            flush_before_reads(current, self._settle)
            self._begin_run(current)
        return before

    def _begin_run(self, current: Pass) -> None:
        again = current.again
        first = current if again is None else again.pass_of_gradients()
        self._run = run = CompiledRun(first, is_again=again is not None)
        for tap in self._of_one_call:
            tap.before_run(current)
        if self._has_gradients:
            number = run.as_tensor()
            stretch = current.stretch
            self._passes.switch.number = number if stretch is None else stretch.run_number(number)

    def _settle(self, *, is_over: bool = False) -> None:
        """See what compiled code has left so far. What it leaves from then on is another run's."""
        taps, current = self._on
        run, self._run = self._run, None  # what is seen here is not to be settled in turn
        if run is None or current is None:
            return
        is_new = False
        for tap in taps:
            if tap.traced is not None and tap.traced.caught is not None:
                tap.collect(current, run)
                is_new = True
        if is_new and not is_over:
            self._begin_run(current)
        else:
            self._run = run

    def _taps_in(self, module: nn.Module) -> list[Tap]:
        """The taps that a compiled module may call."""
        if self._holds_root(module):
            return self._taps
        found = self._parts.get(id(module))
        if found is None:
            inside = {id(part) for part in module.modules()}
            found = [tap for tap in self._taps if self._place_of(tap) in inside]
            self._parts[id(module)] = found
        return found

    def _place_of(self, tap: Tap) -> int | None:
        node = self._nodes.get(id(tap))
        return id(node.module) if isinstance(node, ModuleNode) else None

    # -- the end ---------------------------------------------------------------------------------

    def end(self) -> None:
        """Put all back."""
        self._root = None
        self._turn([], None)  # it may be ended in the midst of compiled code
        self._nodes, self._new, self._of_one_call = {}, [], []
        while self._marked:
            number = next(iter(self._marked))
            unmark(self._marked[number], self)
            del self._marked[number]
        if self._borders is not None:
            self._borders.remove()
            self._borders = None
        self.is_on = False


@while_tracing
def refuse_inside(name: str) -> None:
    """A function is being compiled in which a line is made.

    Raises:
        AttachError: always.
    """
    raise TracingAttachError(
        f"hl.{name} is called inside a compiled function, where no line can be made."
        "\nMake it around"
        f" the compiled call: with hl.{name}(model, ...): compiled(x)."
    )


@functools.cache
def _hooks_of(kinds: tuple[type, ...]) -> list[FunctionType]:
    """Find the functions that torch calls as hooks, in classes and in all below them.

    Outside of a graph, as on a compiled model, they are to run as ever. All classes are there when
    hookline has been imported, so that they are found once and not for each line.
    """
    names = ("fire", "leave", "begin", "end")
    found = [vars(kind).get(name) for kind in kinds for name in names]
    below: list[tuple[type, ...]] = [tuple(kind.__subclasses__()) for kind in kinds]
    functions = [function for function in found if isinstance(function, FunctionType)]
    return functions + [function for one in below if one for function in _hooks_of(one)]
