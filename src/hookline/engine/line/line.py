"""A line: taps attached together for a while.

Attaching is all or nothing. However a line ends, also by an exception while it attaches, nothing of
it stays on the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Never, Self, final

from torch.compiler import is_dynamo_compiling
from torch.jit import ScriptModule
from torch.optim import Optimizer

from hookline.display.text import type_and_line
from hookline.engine.compile.graph_capture import BlockwiseCallback, Callback, SplitCallback
from hookline.engine.distributed.rendezvous import publish_failure
from hookline.engine.gradients.gradient_tap import GradientCallback
from hookline.engine.gradients.port_taps import (
    GradInputTap,
    GradOutputTap,
    ParameterTap,
    RootAliasTap,
)
from hookline.engine.line.attachment import Attachment, retry_interrupted
from hookline.engine.line.compile_support import CompileSupport, refuse_in_compiled
from hookline.engine.line.handle import CallHooks, HookHandle
from hookline.engine.line.registration import Node, Registrations
from hookline.engine.passes.checkpointing import forget_checkpoints, watch_checkpoints
from hookline.engine.passes.passes import Passes
from hookline.engine.pytree import describe
from hookline.engine.report.error_notes import add_error_notes
from hookline.engine.report.known_faults import warn_of_known_faults
from hookline.engine.report.replaced_parts import Originals
from hookline.engine.report.report import Report
from hookline.engine.report.why_silent import SilentTap, explain_silence, shared_pass_warning
from hookline.engine.selection.module_tree import (
    ModuleNode,
    ModuleTree,
    OperationNode,
    ParameterNode,
)
from hookline.engine.selection.selectors import Selection, Selector, select_in
from hookline.engine.selection.site import Site
from hookline.engine.selection.targets import Everywhere, Target, target_tree
from hookline.engine.taps.base import GRADIENT_ORDERS, Order, RootTap, Tap
from hookline.engine.taps.fast_path import FastPaths
from hookline.engine.taps.forward import InputTap, OutputTap
from hookline.engine.torch_private.modules import is_scripted
from hookline.errors import AttachError, RanksError, UserLine, user_line, warn, warn_at
from hookline.util.fork_safe_lock import fork_safe_lock
from hookline.util.hide_from_dir import hide_from_dir

Bound = Callback | SplitCallback | BlockwiseCallback | Tap | GradientCallback


@final
@dataclass(slots=True)
class LineOptions:
    """The settings of a line's messages at its end."""

    quiet: bool = False  # give no warnings, because the verb gives its own
    lenient: bool = False  # everything was selected, so some sites may well never fire
    remark: Callable[[], str | None] | None = None  # returns the verb's own note for the end


@hide_from_dir(
    "add_tap", "attach_taps", "attached", "fast_paths", "is_everywhere", "module_tree",
    "new_handle", "nodes", "options", "originals", "passes", "register_taps", "root", "select",
    "taps", "undo_on_error",
)  # fmt: skip
class Line:
    """Hooks that were attached together, and are removed together.

        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> with hl.edit(model, "1", hl.edits.scale(0.0)) as line:
        ...     _ = model(torch.ones(1, 2))
        >>> line
        hl.edit on Sequential: 1 site, 1 pass, 1 fired, 0 never; ended

    `hl.edit` returns a `Line`. The line of `hl.attach` is a `RawLine`, which has more methods. The
    hooks are removed at the end of the `with` block, or by `remove()`. At the end, a warning names
    the selected sites that never fired.

    Args:
        model: the model, or its tree, which several lines can share. Or tensors by name, of which
            only gradients can be seen. Or `hl.EVERYWHERE`, for all modules that run in this thread
            or async task. None is for hooks on tensors alone.
        name: the name of the function that made the line, for the report and the messages.
        every_thread: True sees runs in every thread and async task. False sees only those in the
            thread or task that made the line.
        lenient: whether every module was selected, so that some may well never fire.

    Raises:
        AttachError: the line is entered a second time, after its end, or in another thread or task
            than the one that made it.
    """

    def __init__(
        self,
        model: Target | ModuleTree | Everywhere | None,
        *,
        name: str = "attach",
        every_thread: bool = False,
        lenient: bool = False,
    ) -> None:
        if is_dynamo_compiling():
            refuse_in_compiled(name)
        if not isinstance(every_thread, bool):
            raise AttachError(
                f"every_thread= must be True or False, got {describe.in_words(every_thread)}."
                "\nGive every_thread=True to see every thread and async task."
            )
        warn_of_known_faults()
        self.name = name
        self.options: LineOptions = LineOptions(lenient=lenient)
        self.passes: Passes = Passes(every_thread=every_thread)
        self._registering = fork_safe_lock()
        self.taps: list[Tap] = []
        self.module_tree: ModuleTree = target_tree(model, name)
        self._nodes: dict[int, ModuleNode | ParameterNode] = {}
        self.root = self.module_tree.root
        self.is_everywhere: bool = isinstance(model, Everywhere)
        self._is_entered = False
        self._registrations = Registrations()
        self.fast_paths: FastPaths = FastPaths(
            self.module_tree, self.passes, self._registrations.register_taps
        )
        self._compiled = CompileSupport(self.passes, self.root, self.taps, self._nodes)
        self.originals: Originals = Originals(
            name, self.root, self.module_tree, self.taps, self._nodes
        )
        self.attached: list[Attachment] = [self._registrations, self._compiled]
        self._had_handles = False
        # Weak keys: a line need not know a handle that nobody holds.
        self._handles: weakref.WeakKeyDictionary[HookHandle, CallHooks] = (
            weakref.WeakKeyDictionary()
        )
        self._note_in_warning: str | None = None  # the note that the warning may repeat
        # The final report; the line no longer changes once it has ended.
        self._last: Report | None = None
        # Nobody could end a line that is no longer referenced, so its finalizer ends it.
        parts = self.attached, self.passes
        self._drop = weakref.finalize(self, _end_unreferenced, name, user_line(), *parts)
        self._drop.atexit = False
        self.passes.bind_to_context()  # last: after this the line must be ended

    # -- the interface for verbs ----------------------------------------------------------------

    @property
    def nodes(self) -> list[ModuleNode]:
        """Return the modules of the line's model, in registration order."""
        return self.module_tree.nodes

    def select(self, selector: Selector, ports: tuple[str, ...] = ("output",)) -> Selection:
        """Return the sites that a selector matches in the line's model.

        Raises:
            AttachError: the line has no model, or is attached to `hl.EVERYWHERE`.
        """
        if self.is_everywhere:
            raise AttachError(
                f"hl.{self.name} needs a model; hl.EVERYWHERE goes with hl.attach and raw hooks."
            )
        if self.root is None and not self.module_tree.tensors:
            raise AttachError(
                "this line has no model to select from.\nGive it one, hl.attach(model), or give the"
                " tensor itself: line.grad(tensor, fn)."
            )
        return select_in(self.module_tree, selector, ports)

    def attach_taps(
        self, selection: Selection, bind: Callable[[Site], Bound], order: Order
    ) -> None:
        """Attach a tap to each site, all or none.

        Args:
            selection: the sites.
            bind: returns the callback of a site. For an input or an output, a function of the pass
                and the value; for a gradient, a `GradientCallback`. A verb that must be as fast as
                a hand-written hook may return a tap of its own.
            order: the order of the taps among the hooks of a module.
        """
        places = selection.places
        sites, nodes = [site for site, _ in places], [node for _, node in places]
        with self.undo_on_error():
            if self.root is not None and "grad_input" in {site.port for site in sites}:
                self._registrations.register_taps(
                    [(RootAliasTap(self.passes), ModuleNode("", self.root, 0))]
                )
            taps = [
                bound if isinstance(bound, Tap) else self._make_tap(site, bound, order)
                for site, bound in zip(sites, map(bind, sites), strict=True)
            ]
            self.register_taps(list(zip(taps, nodes, strict=True)))

    def register_taps(self, taps: Sequence[tuple[Tap, Node]], *, prepend: bool = False) -> None:
        """Place the hooks of taps on their nodes, and list the taps in the report.

        Args:
            taps: the taps, each with its node.
            prepend: place each hook before the hooks of its order.
        """
        self.taps += [tap for tap, _ in taps]
        self.fast_paths.watch(
            node for tap, node in taps if isinstance(node, ModuleNode) and tap.is_on_calls
        )
        types = self.module_tree.kinds
        may_skip = self.options.lenient and any(issubclass(kind, ScriptModule) for kind in types)
        # Most taps are on modules alone: a look at the kinds of nodes saves one at each node.
        kinds = {type(node) for _, node in taps}
        self.originals.kinds |= kinds
        is_plain = not may_skip and kinds == {ModuleNode}
        nodes: dict[int, Any] = self._nodes
        nodes.update(
            {id(tap): node for tap, node in taps if is_plain or not isinstance(node, Optimizer)}
        )
        if not is_plain:
            taps = [pair for pair in taps if self._is_hookable(*pair)]
        self._registrations.register_taps(taps, prepend=prepend)

    def _is_hookable(self, tap: Any, node: Node) -> bool:
        """Tell whether a node takes hooks. If the line skips a node, the report says why."""
        if isinstance(node, ModuleNode):
            # Selecting a scripted module by name is an error.
            return not (self.options.lenient and is_scripted(node.owner))
        if isinstance(node, Optimizer) or node.tensor.requires_grad or node.parent is None:
            return True
        tap.off += 1  # a frozen parameter
        return False

    def _make_tap(self, site: Site, bound: Any, order: Order) -> Tap:
        if isinstance(bound, GradientCallback):
            kinds = {"grad_input": GradInputTap, "grad_output": GradOutputTap}
            return kinds.get(site.port, ParameterTap)(
                site, self.passes, bound, GRADIENT_ORDERS[order]
            )
        if isinstance(bound, BlockwiseCallback):
            tap = self._make_tap(site, bound.bound, order)
            tap.takes_blocks = not site.leaf
            return tap
        if isinstance(bound, SplitCallback):
            tap = self._make_tap(site, bound.callback, order)
            tap.halves = bound
            return tap
        kind = InputTap if site.port == "input" else OutputTap
        return kind(site, self.passes, bound, order)

    # -- the beginning ---------------------------------------------------------------------------

    def add_tap(self, tap: Tap) -> None:
        """Add a tap without a node to the line and its report."""
        self.taps.append(tap)

    @contextmanager
    def new_handle(self, kind: str) -> Iterator[HookHandle]:
        """Register the hooks of one call, all or none, and yield their handle."""
        # Threads that share a line register one after the other, since each call has its own
        # handle.
        with self._registering, self.undo_on_error() as registrations:
            n_taps, n_entries = len(self.taps), len(registrations.entries)
            registration = CallHooks(registrations, self.attached, self._registering)
            handle = HookHandle(kind, registration)
            self._handles[handle] = registration
            self._had_handles = True
            yield handle
            taps = self.taps[n_taps:]
            registration.store_hooks(taps, registrations.entries_of(taps, n_entries))

    @contextmanager
    def undo_on_error(self) -> Iterator[Registrations]:
        """Attach everything that the block attaches, or nothing if the block raises."""
        n_entries, n_taps = len(self._registrations.entries), len(self.taps)
        try:
            self._register_root_hooks(is_first=not n_entries)
            yield self._registrations
            if self._compiled.border is not None:
                self._compiled.add_taps(self.taps[n_taps:])
        except BaseException:
            self._registrations.remove(n_entries)
            del self.taps[n_taps:]
            self.fast_paths.taps.clear()
            if not n_entries:
                self._compiled.end()
                forget_checkpoints(self.passes)
            raise

    def _register_root_hooks(self, *, is_first: bool) -> None:
        """Register the hooks that begin and end a pass on the root, before the first hook."""
        if self.passes.closed:
            raise AttachError(f"this hl.{self.name} line has ended; make a new one.")
        self._refuse_other_context()
        watch_checkpoints(self.passes)
        if self.root is not None and is_first:
            self._registrations.register_taps(
                [(RootTap(self.passes), ModuleNode("", self.root, 0))]
            )
            self.passes.compiler = self._compiled
            self.passes.at_border = self.originals.warn_of_replaced
            self._compiled.enable_if_dynamo_loaded(self.module_tree.compiled)

    def _refuse_other_context(self) -> None:
        if not self.passes.sees_this_context():
            raise AttachError(
                f"an hl.{self.name} line must be entered, and given its hooks, in the thread or"
                " async task that made it, got another one.\nMake it in this one, or with"
                " every_thread=True."
            )

    # -- the end --------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self.passes.closed or self._is_entered:
            state = "has ended" if self.passes.closed else "is on already"
            raise AttachError(f"this hl.{self.name} line {state}; make a new one for each block.")
        self._refuse_other_context()
        try:
            self._is_entered = True
            return self
        # Ctrl-C here means that no block will run, so no __exit__ removes the hooks.
        except BaseException:
            self._end()
            raise

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        was_on = not self.passes.closed  # else removed inside the block, which has warned already
        retry_interrupted(self._end)
        if isinstance(error, Exception) and not isinstance(error, RanksError):  # of another rank
            publish_failure(type_and_line(error))
            add_error_notes(self.name, self.taps, error)
        elif error is None and was_on:
            self._warn_at_end()

    def remove(self) -> None:
        """End the line and remove its hooks; a second call does nothing.

            >>> model = nn.Linear(2, 2)
            >>> line = hl.edit(model, "(root)", hl.edits.scale(2.0))
            >>> _ = model(torch.ones(1, 2))
            >>> line.remove()
            >>> len(hl.inventory(model))
            0

        A `HooklineWarning` names the selected sites that never fired. Any thread may end the line.
        """
        if self.passes.closed:
            return
        self._end()
        self._warn_at_end()

    def _end(self) -> None:
        _remove_all(self.attached, self.passes)
        try:
            # The report outlives the line and must not keep the model alive.
            if self._last is None:
                self._last = self._make_report(ended=True)
        finally:
            self.passes.end_all()
            self._drop.detach()
        if self._last.passes != self.passes.started:  # another thread has begun a pass meanwhile
            self._last = self._make_report(ended=True)
        self._handles.clear()
        self.originals.end()
        self._nodes, self.root = {}, None
        self.fast_paths.end()
        self.module_tree = ModuleTree(self.module_tree.name, [])

    def __repr__(self) -> str:
        return str(self.report()).partition("\n")[0]

    def __reduce__(self) -> Never:
        raise TypeError(
            f"an hl.{self.name} line cannot be copied or pickled: its hooks are on the model of"
            " this process.\nKeep it out of the model and of what is copied; its results can be:"
            " its report(), its recording, or its table if it is a profile."
        )

    def report(self) -> Report:
        """Return a report: the line's sites, how often each fired, and why some never did.

            >>> model = nn.Linear(2, 2)
            >>> with hl.edit(model, "(root)", hl.edits.scale(2.0)) as line:
            ...     _ = model(torch.ones(1, 2))
            ...     print(line.report().passes, line.report().ended)
            1 False

        Returns:
            The report as of now: print it, or read its attributes.
        """
        return self._make_report(ended=False) if self._last is None else self._last

    def _make_report(self, *, ended: bool) -> Report:
        taps, passes = self.taps, self.passes
        silent = [tap for tap in taps if not tap.fired]
        met = {self._operation_glob(tap) for tap in taps if silent and tap.fired} - {""}
        # Only raw hooks have handles that can remove taps.
        removed = [k for k, tap in enumerate(taps) if tap.is_removed] if self._had_handles else []
        return Report(
            name=self.name,
            model_type=self.module_tree.name,
            passes=passes.started,
            other_contexts=passes.other_contexts,
            outside_root=passes.outside_root,
            ended=ended,
            sites=tuple([tap.site for tap in taps]),
            counts=tuple([tap.fired for tap in taps]),
            why=self._explain_silent(silent) if silent else {},
            excused=frozenset(
                [
                    tap.site
                    for tap in silent
                    if tap.may_stay_silent or self._operation_glob(tap) in met
                ]
            ),
            notes=self._report_notes(),
            removed=tuple(removed),
            replaced={
                site: replacement.remark for site, replacement in self.originals.told.items()
            },
        )

    def _operation_glob(self, tap: Tap) -> str:
        """Return the glob of operations that selected a tap's site; "" for other sites."""
        node = self._nodes.get(id(tap))
        return node.glob if isinstance(node, OperationNode) else ""

    def _explain_silent(self, silent: list[Tap]) -> dict[Site, str]:
        reasons = (attachment.why_silent() for attachment in self.attached)
        elsewhere = next(filter(None, reasons), None)
        replacements = self.originals.replacements()
        why = {}
        for tap in silent:
            if not tap.is_removed:
                replacement = replacements.get(tap.site)
                reason = f"{replacement.remark}; attach after that" if replacement else elsewhere
                silence = SilentTap(tap, self._nodes.get(id(tap)), self.passes)
                why[tap.site] = reason or explain_silence(silence)
        return why

    def _shared_pass_warning(self) -> str | None:
        """Write the warning that several runs of modules share one pass, where passes matter."""
        if self.passes.outside_root < self.passes.started:
            return None
        keeps_passes = self.passes.sink is not None or any(tap.site.call for tap in self.taps)
        if not keeps_passes:
            return None
        nodes = [self._nodes.get(id(tap)) for tap in self.taps if max(tap.fired, tap.ran) > 1]
        return shared_pass_warning(
            self.name, self.module_tree.name, [n.path for n in nodes if isinstance(n, ModuleNode)]
        )

    def _report_notes(self) -> tuple[str, ...]:
        remark = self.options.remark
        notes = [self.fast_paths.warning_text(self.name)]
        notes += [attachment.note for attachment in self.attached]
        self._note_in_warning = self._shared_pass_warning()
        notes += [self._note_in_warning, remark and remark()]
        return tuple([note for note in notes if note is not None])

    def _warn_at_end(self) -> None:
        if self.options.quiet:
            return
        report = self.report()
        # A failed pass, or a selection of everything, may well leave sites out.
        some = any(report.counts)
        excused = self.passes.failed > 0 or (self.options.lenient and some)
        # With hl.EVERYWHERE, no module is known that should have run.
        message = None if excused or self.is_everywhere else report.warning()
        for note in report.notes:
            if note != self._note_in_warning or message is None:
                warn(note)
        if message:
            warn(message)


def _remove_all(attached: list[Attachment], passes: Passes) -> None:
    """Remove all hooks of a line. Idempotent."""
    for attachment in attached:
        attachment.end()
    forget_checkpoints(passes)


def _end_unreferenced(
    name: str, made_at: UserLine, attached: list[Attachment], passes: Passes
) -> None:
    """End a line that nobody references; warn at the place that made the line, if it had hooks."""
    had_hooks = any(attachment.has_hooks for attachment in attached)
    _remove_all(attached, passes)
    passes.end_all()
    if had_hooks:
        warn_at(
            made_at,
            f"an hl.{name} line was dropped while its hooks were on; they are off now."
            f"\nUse it in a block, with hl.{name}(...): ..., or keep it and call its remove().",
        )
