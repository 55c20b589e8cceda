"""Line: hooks attached together for a while.

Imports select, taps, passes, placing, everywhere, report. Attaching is all or nothing; whatever
ends a line, an exception half-way included, nothing of it is left on the model.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, final

from torch import nn

from hookline.engine.errors import AttachError, SelectionError, warn
from hookline.engine.everywhere import DISPATCHER, Catch, Everywhere
from hookline.engine.modules import Node, walk
from hookline.engine.passes import Passes, Sink
from hookline.engine.placing import Placements
from hookline.engine.report import Report, explain
from hookline.engine.returns import check_forward, check_forward_pre
from hookline.engine.select import Selection, Selector, select_nodes
from hookline.engine.site import Site
from hookline.engine.taps import InputTap, OutputTap, Rank, RawTap, RootTap, See, Tap
from hookline.engine.torch_internals import is_scripted

Hook = Callable[..., Any]


@final
class Line:
    """Hooks attached together for a while: a context manager, or ended by `remove()`.

    In a `with` block the line sees only its own thread and async task. Without one it sees every
    thread until `remove()` is called.

        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> with Line(model) as line:
        ...     line.forward(nn.ReLU, lambda module, args, output: print(tuple(output.shape)))
        ...     _ = model(torch.zeros(3, 2))
        (3, 2)

    Args:
        model: the model, or `hl.EVERYWHERE` for the modules of any model that run in this context.
        name: what the report and the inventory call this line.
        sink: told when passes begin and end.
    """

    def __init__(
        self,
        model: nn.Module | Everywhere,
        *,
        name: str = "attach",
        sink: Sink | None = None,
    ) -> None:
        if not isinstance(model, nn.Module | Everywhere):
            raise AttachError(
                f"{name} needs a model (an nn.Module), or hl.EVERYWHERE with hl.attach;"
                f" got {type(model).__name__}."
            )
        self.name = name
        self.passes = Passes(sink)
        self.taps: list[Tap] = []
        self.quiet = False  # no warnings at the end: the verb says itself what is wrong
        self.lenient = False  # everything was chosen, so some of it may well never fire
        self.model_type = type(model).__name__
        self._nodes: list[Node] = []
        self._root: nn.Module | None = None
        self._is_everywhere = isinstance(model, Everywhere)
        self._placements = Placements()
        self._catch = Catch()
        self._why: dict[Site, str] | None = None
        if isinstance(model, nn.Module):
            self._nodes = walk(model)
            self._root = model

    # -- what verbs use -------------------------------------------------------------------------

    @property
    def nodes(self) -> list[Node]:
        """The modules of the line's model, in registration order."""
        return self._nodes

    def select(self, selector: Selector, ports: tuple[str, ...] = ("output",)) -> Selection:
        """The sites that a selector matches in the line's model.

        Raises:
            AttachError: the line has no model: it is everywhere.
        """
        if self._is_everywhere:
            raise AttachError(
                f"hl.{self.name} needs a model; hl.EVERYWHERE goes with hl.attach and raw hooks."
            )
        return select_nodes(self._nodes, selector, ports)

    def tap(
        self, selection: Selection, bind: Callable[[Site], See | OutputTap], rank: Rank
    ) -> None:
        """Put a tap on each site: what `bind(site)` returns is called with the pass and the value.

        Where a verb must be as fast as a hand-written hook, `bind` may give a tap of its own. All
        are attached, or none.
        """
        placed, n_taps = len(self._placements), len(self.taps)
        try:
            self._start()
            for site, node in selection.places():
                is_input = site.port == "input"
                tap: OutputTap | InputTap
                bound = bind(site)
                if isinstance(bound, OutputTap):
                    tap = bound
                else:
                    tap = (InputTap if is_input else OutputTap)(site, self.passes, bound, rank)
                self.taps.append(tap)
                if self.lenient and is_scripted(node.module):
                    continue  # it is said in the report; naming such a module is an error
                self._placements.place(
                    node.module,
                    "forward_pre" if is_input else "forward",
                    tap.fire,
                    rank,
                    with_kwargs=is_input,
                )
        except BaseException:
            self._placements.take_off(placed)
            del self.taps[n_taps:]
            raise

    # -- raw hooks ------------------------------------------------------------------------------

    def forward_pre(
        self, selector: Selector, hook: Hook, *, with_kwargs: bool = False, prepend: bool = False
    ) -> None:
        """Call `hook(module, args)` before each selected module runs.

        Returning None changes nothing; a tuple replaces the arguments, and any other single value
        becomes the only one. With `with_kwargs`, it is `hook(module, args, kwargs)`, and returns
        None or `(args, kwargs)`.

            >>> model = nn.Linear(2, 2)
            >>> with Line(model) as line:
            ...     line.forward_pre("", lambda module, args: (args[0] * 0,))
            ...     bool((model(torch.ones(1, 2)) == model.bias).all())
            True

        Args:
            selector: which modules; as in `hl.select`, without a port or a leaf.
            hook: the function.
            with_kwargs: also pass, and expect back, the keyword arguments.
            prepend: before the hooks that are there, not after them.

        Raises:
            SelectionError: the selector matches nothing, or names a port or a leaf.
            StructureError: (when the model runs) the hook returned what cannot be arguments.
            AttachError: `with_kwargs` with `hl.EVERYWHERE`, which torch does not offer.
        """
        if self._is_everywhere and with_kwargs:
            raise AttachError(
                "torch passes no keyword arguments to process-wide pre-hooks."
                "\nUse line.forward(..., with_kwargs=True), or attach to a model."
            )
        self._raw("forward_pre", selector, hook, check_forward_pre(with_kwargs), prepend=prepend,
                  with_kwargs=with_kwargs)  # fmt: skip

    def forward(
        self,
        selector: Selector,
        hook: Hook,
        *,
        with_kwargs: bool = False,
        prepend: bool = False,
        always_call: bool = False,
    ) -> None:
        """Call `hook(module, args, output)` after each selected module has run.

        Returning None changes nothing; anything else replaces the output. With `with_kwargs`, it
        is `hook(module, args, kwargs, output)`.

            >>> model = nn.Linear(2, 2)
            >>> with Line(model) as line:
            ...     line.forward("", lambda module, args, output: torch.zeros_like(output))
            ...     model(torch.ones(1, 2)).tolist()
            [[0.0, 0.0]]

        Args:
            selector: which modules; as in `hl.select`, without a port or a leaf.
            hook: the function.
            with_kwargs: also pass the keyword arguments.
            prepend: before the hooks that are there, not after them.
            always_call: also when the module raises; the output is then None.

        Raises:
            SelectionError: the selector matches nothing, or names a port or a leaf.
            StructureError: (when the model runs) the hook returned what cannot be an output.
        """
        self._raw("forward", selector, hook, check_forward, prepend=prepend,
                  with_kwargs=with_kwargs, always_call=always_call)  # fmt: skip

    def _raw(
        self,
        kind: str,
        selector: Selector,
        hook: Hook,
        check: Callable[..., Any],
        *,
        prepend: bool,
        with_kwargs: bool = False,
        always_call: bool = False,
    ) -> None:
        if not callable(hook):
            raise AttachError(f"line.{kind} needs a function, got {type(hook).__name__}.")
        if self._is_everywhere:
            if always_call:
                raise AttachError("always_call is not offered with hl.EVERYWHERE.")
            tap = RawTap(Site("", module_type="any"), self.passes, hook, check)
            self._catch.add(kind, selector, tap, with_kwargs=with_kwargs, prepend=prepend)
            self.taps.append(tap)
            self._start()
            return
        placed, n_taps = len(self._placements), len(self.taps)
        try:
            self._start()
            for site, node in self.select(selector).places():
                if site.port != "output" or site.leaf:
                    raise SelectionError(
                        f"line.{kind} hooks modules, and {site} is a part of one."
                        f"\nSelect {site.path!r}, or use hl.record or hl.edit for ports and leaves."
                    )
                tap = RawTap(site, self.passes, hook, check)
                self._placements.place(node.module, kind, tap.fire, Rank.HOOK, prepend=prepend,
                            with_kwargs=with_kwargs, always_call=always_call)  # fmt: skip
                self.taps.append(tap)
        except BaseException:
            self._placements.take_off(placed)
            del self.taps[n_taps:]
            raise

    def _start(self) -> None:
        """Before the first hook: learn when the root begins and ends. Nothing is attached sooner,
        so that a selector that matches nothing leaves nothing behind."""
        if self.passes.closed:
            raise AttachError(f"this hl.{self.name} line has ended; make a new one.")
        if self._is_everywhere:
            DISPATCHER.add(self._catch)
        if self._root is not None and not len(self._placements):
            begin, end = RootTap(self.passes, Rank.BEGIN), RootTap(self.passes, Rank.END)
            self._placements.place(self._root, "forward_pre", begin.begin, Rank.BEGIN)
            self._placements.place(self._root, "forward", end.end, Rank.END, always_call=True)

    # -- the end --------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self.passes.closed or self.passes.bound:
            state = "has ended" if self.passes.closed else "is on already"
            raise AttachError(f"this hl.{self.name} line {state}; make a new one for each block.")
        if not self._is_everywhere:
            self.passes.enter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._end()
        except BaseException:
            self._end()
            raise
        if error is None:
            self._warn()

    def remove(self) -> None:
        """End the line: take its hooks off. Removing twice is no mistake."""
        if self.passes.closed:
            return
        self._end()
        self._warn()

    def _end(self) -> None:
        self._placements.take_off()
        if self._is_everywhere:
            DISPATCHER.discard(self._catch)
        try:
            if self._why is None:
                self._why = self._explain()
        finally:
            self.passes.leave()
        # The report outlives the line; the model must not be kept alive by it.
        self._nodes, self._root = [], None

    def _may_leave_out(self) -> bool:
        return self.lenient or self.passes.failed > 0

    def report(self) -> Report:
        """What was matched and attached, how often each site fired, and why some never did."""
        why = self._explain() if self._why is None else self._why
        return Report(
            name=self.name,
            model_type=self.model_type,
            passes=self.passes.started,
            elsewhere=self.passes.elsewhere,
            ended=self.passes.closed,
            fired=tuple((tap.site, tap.fired) for tap in self.taps),
            why=why,
        )

    def _explain(self) -> dict[Site, str]:
        silent = [tap for tap in self.taps if not tap.fired]
        if not silent or self._root is None:
            return {}
        by_path = {node.path: node for node in self._nodes}
        return {
            tap.site: explain(tap, by_path[tap.site.path], self.passes, self._root)
            for tap in silent
        }

    def _warn(self) -> None:
        if self.quiet or self._is_everywhere:
            return
        report = self.report()
        # A pass that failed, or a choice of everything there is, may well leave sites out.
        message = None if report.passes and self._may_leave_out() else report.warning()
        if message:
            warn(message)


def attach(model: nn.Module | Everywhere) -> Line:
    """Attach raw hooks to a model, or everywhere, for as long as the line lasts.

        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> with attach(model) as line:
        ...     line.forward("*", lambda module, args, output: print(type(module).__name__))
        ...     _ = model(torch.zeros(1, 2))
        Linear
        ReLU

    Args:
        model: the model; or `hl.EVERYWHERE`: every module of every model that runs in this context
            (thread, async task), selected by type, module, predicate or None.

    Returns:
        A line; `line.forward` and `line.forward_pre` add hooks to it.

    Raises:
        AttachError: what was given is no model, or one that torch never calls hooks on.
    """
    return Line(model)
