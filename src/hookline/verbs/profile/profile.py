"""Measure time, FLOPs and memory of each module, forward and backward."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, final

import torch
from torch import nn

from hookline.display.results import Printout, Result, printout_of
from hookline.display.text import plural, type_and_line
from hookline.engine import (
    AtEnd,
    Line,
    ModuleNode,
    Site,
    hide_from_dir,
    holds_compiled_call,
    is_compiled,
    is_fsdp2,
    is_scripted,
    path_text,
    require_model,
)
from hookline.engine.report.why_silent import shared_pass_warning
from hookline.errors import warn
from hookline.files.atomic_text import as_path
from hookline.util.stopwatch import STOPWATCH
from hookline.verbs.profile.call_exports import nested_calls, write_trace
from hookline.verbs.profile.call_tree import (
    BACKWARD,
    CALLS,
    COLLECTIVES,
    FORWARD,
    OPTIMIZER,
    RECOMPUTE,
    CallContext,
)
from hookline.verbs.profile.clocks import clock_for
from hookline.verbs.profile.costs_by_pass import (
    ContextCosts,
    PassChoice,
    PassesOfThreads,
    slot_medians,
)
from hookline.verbs.profile.flops_and_memory import RunCounts, count_flops_and_memory
from hookline.verbs.profile.profile_hooks import (
    CompiledRegions,
    GarbageHooks,
    ProfileLanes,
    ProfileTap,
    ShardedTap,
    optimizer_step_hooks,
)
from hookline.verbs.profile.rows import (
    Row,
    interquartile_range,
    make_rows,
    median_phases,
    sum_phases,
)
from hookline.verbs.profile.runs_by_shape import RunKinds
from hookline.verbs.profile.table import ProfileTable, Total
from hookline.verbs.shared.failing_module import find_failing_module
from hookline.verbs.shared.finalizing_line import FinalizingLine
from hookline.verbs.summary import Summary, describe_modules


@final
@hide_from_dir("calls", "start")
class Profile(FinalizingLine[Line], Result):
    """The line of `hl.profile`, with the time, FLOPs and memory of each module.

        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        >>> with hl.profile(model) as prof:
        ...     model(torch.ones(4, 2)).sum().backward()
        >>> [(row.path, row.calls, row.flops.forward) for row in prof.rows]
        [('', 1, 48), ('0', 1, 48), ('1', 1, 0)]
        >>> prof["0"].time.forward > 0
        True

    The hooks are removed at the end of the `with` block, or by `remove()`. The numbers can be read
    at any time, and are final when the line has ended. `prof["0"]` is the row of the module `0`.

    A row has `path`, `depth`, `calls`, `parameters`, `time` and `self_time` (seconds), `flops` and
    `self_flops`, `activation_bytes` and `self_activation_bytes` (kept for backward), and
    `peak_bytes`. The names with `self` leave the modules inside out. Times and FLOPs have the parts
    `forward`, `backward`, `recompute` and `all`, the sum of the three.

    Attributes:
        rows: the rows of all modules, in registration order, the root first.
        total: the costs of the whole block: `time`, `optimizer`, `collectives`, `outside`,
            `failed`, `overhead`, `garbage` and `seconds` (all in seconds), `flops`,
            `activation_bytes`, `peak_bytes`, `parameters` and `passes`.
        table: the sums over the passes so far that did not fail, with `rows`, `total`, `top` and
            `fold`.
        per_pass: a table with the medians over all passes after the first, and their spread.
        first: a table with the numbers of the first pass.
        failure: the module that was running when an exception ended the block, and the exception;
            None without one.

    Raises:
        SelectionError: by `prof[path]`: the model has no module of this path.
    """

    def __init__(self, line: Line, model: nn.Module, *, flops: bool) -> None:
        super().__init__(line)
        self._model: nn.Module | None = model
        self._described: Summary = describe_modules(line, model)[0]
        modules = {node.path: node.module for node in line.nodes}
        self._kinds = RunKinds(modules[""], modules, wants_flops=flops)
        self._profile_lanes = ProfileLanes(self._kinds, partial(clock_for, _main_device(model)))
        self.failure: str | None = None
        self._tapped: set[str] = set()
        self._counted: tuple[int, RunCounts] | None = None
        self._tables: dict[PassChoice, ProfileTable] = {}  # after the end
        self._added = ""

    def __enter__(self) -> Self:
        self._line.__enter__()
        return self

    def start(self) -> None:
        """Attach the hooks."""
        line, profile_lanes, model = self._line, self._profile_lanes, self._model
        assert model is not None
        compiled = [module for module in model.modules() if is_compiled(module)]
        inside = {id(inner) for module in compiled for inner in module.modules()}
        outside = [node for node in line.nodes if id(node.module) not in inside]
        tapped = [node for node in outside if not is_scripted(node.module)]
        self._tapped = {node.path for node in tapped}
        paths = {id(node.module): node.path for node in line.nodes}
        regions = CompiledRegions(profile_lanes, line.passes, paths)
        steps = optimizer_step_hooks(profile_lanes, line.passes, set(map(id, model.parameters())))
        garbage = GarbageHooks(profile_lanes)
        with line.undo_on_error() as registrations:
            line.attached.append(AtEnd(garbage.close))
            garbage.open()
            line.attached.append(AtEnd(regions.close))
            line.attached.append(AtEnd(partial(STOPWATCH.readers.discard, id(profile_lanes))))
            STOPWATCH.readers.add(id(profile_lanes))
            regions.open([module for module in model.modules() if holds_compiled_call(module)])
            registrations.register_globally("step_pre", steps.begin_step)
            registrations.register_globally("step_post", steps.end_step)
            for node in tapped:
                site = Site(node.path, module_type=type(node.module).__name__)
                registrations.register_taps([(ProfileTap(site, line.passes, profile_lanes), node)])
                if is_fsdp2(node.module):
                    registrations.register_taps(
                        [(ShardedTap(site, line.passes, profile_lanes), node)]
                    )

    # -- the end ----------------------------------------------------------------------------------

    def _before_removal(self, error: BaseException | None) -> None:
        if error is not None and self.failure is None:
            self.failure = self._failure_text(error)
        self._profile_lanes.stop_clocks()
        if self._model is not None:
            self._added = _added_modules_text(self._model, self._line.nodes)

    def _failure_text(self, error: BaseException) -> str:
        raised = type_and_line(error)
        account = self._profile_lanes.own_lane().account
        place = None if self._model is None else find_failing_module(self._model, error)
        if account.slot in (BACKWARD, RECOMPUTE) and account.context.path is not None:
            return f"in the backward of {path_text(account.context.path)}: {raised}"
        return f"in {place}: {raised}" if place is not None else f"outside the model: {raised}"

    def _after_removal(self, error: BaseException | None) -> None:
        if self._model is None:
            return
        self._model = None
        self._profile_lanes.stop_clocks()
        self._kinds.release_model()
        if error is None:
            self._warn_at_end()

    def _warn_at_end(self) -> None:
        ran = self._ran_passes()
        if note := self._root_call_warning(
            [lane.top.context for lane in self._profile_lanes.lanes], ran
        ):
            warn(note)
        if not ran.n_passes + ran.n_failed:
            why = "\nRun the forward inside the block: with hl.profile(model): model(x)."
            if self._line.passes.other_contexts:
                why = (
                    " The model ran in another thread or async task.\nMake the profile in that one,"
                    " or give every_thread=True."
                )
            warn(f"hl.profile must see a run of the model, got none.{why}")

    def _root_call_warning(self, tops: list[CallContext], ran: PassesOfThreads) -> str | None:
        """Say that the model itself was not called, so that no pass is known to have ended."""
        passes = self._line.passes
        if passes.started == 0 or passes.outside_root < passes.started:
            return None
        sums = _total_costs(tops, ran)
        called = [context for top in tops for context in top.children.values()]
        paths = [context.path or "" for context in called if sums.costs_of([context])[0, CALLS] > 1]
        return shared_pass_warning("profile", self._described.model_type, paths)

    # -- the results ------------------------------------------------------------------------------

    @property
    def rows(self) -> list[Row]:
        """The modules, in registration order, the root first."""
        return self.table.rows

    @property
    def total(self) -> Total:
        """The costs of the whole block."""
        return self.table.total

    @property
    def table(self) -> ProfileTable:
        """Return sums over the passes so far, without those whose forward raised."""
        return self._table(PassChoice.ALL)

    @property
    def per_pass(self) -> ProfileTable:
        """Return the numbers of one pass: medians over the passes after the first, with spread.

        The first pass often takes longer, because it allocates memory or compiles code. `first` has
        its numbers. If there is one pass only, the numbers are those of this pass. Each time is a
        median of its own, so that the parts of a module need not add up to it; `spread` is the
        interquartile range. Calls are means over these passes, and FLOPs over all passes.
        """
        return self._table(PassChoice.LATER)

    @property
    def first(self) -> ProfileTable:
        """Return the times and calls of the first pass that did not fail.

        FLOPs are means over all passes.
        """
        return self._table(PassChoice.FIRST)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.table)

    def __getitem__(self, path: str) -> Row:
        """Return the row of a module.

        Raises:
            SelectionError: there is no module of this path.
        """
        return self.table[path]

    def top(self, n: int = 10, by: str = "self") -> ProfileTable:
        """Return the modules that cost most, the largest first, as a table.

            >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
            >>> with hl.profile(model) as prof:
            ...     _ = model(torch.ones(4, 2))
            >>> [row.path for row in prof.top(1, by="flops").rows]
            ['0']

        Args:
            n: the number of modules.
            by: the cost that is compared. Without the modules inside: "self" (seconds of all
                phases), "forward", "backward" or "recompute" (seconds of one phase), "flops", or
                "activations" (bytes). With the modules inside: "time" (seconds) or "peak" (bytes).

        Returns:
            A table with these rows. Its `total` is still that of the whole block.

        Raises:
            InputError: `by` is none of these, or `n` is not a positive integer.
        """
        return self.table.top(n, by)

    def fold(self, depth: int) -> ProfileTable:
        """Return the table without the modules below a depth; the rows above hold their costs.

            >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
            >>> with hl.profile(model) as prof:
            ...     _ = model(torch.ones(4, 2))
            >>> [row.path for row in prof.fold(0).rows]
            ['']

        Args:
            depth: the greatest depth that is kept. The root has depth 0, its children depth 1.

        Returns:
            A table with the rows that are left.

        Raises:
            InputError: the depth is not an integer from 0 on.
        """
        return self.table.fold(depth)

    def to_dict(self) -> dict[str, Any]:
        """Return the sums over the passes as plain values; `per_pass.to_dict()` has medians.

        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        >>> with hl.profile(model) as prof:
        ...     _ = model(torch.ones(4, 2))
        >>> prof.to_dict()["rows"][1]["flops_forward"]
        48
        """
        return self.table.to_dict()

    def _table_rows(self) -> list[dict[str, Any]]:
        return self.table._table_rows()

    def _printout(self) -> Printout:
        return printout_of(self.table)

    def trace(self, path: str | Path) -> Path:
        """Write the calls as a Chrome trace: a JSON file that opens in Perfetto.

            >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
            >>> with hl.profile(model) as prof:
            ...     _ = model(torch.ones(4, 2))
            >>> prof.trace(tmp_path / "trace.json").name
            'trace.json'

        The file has at most 200,000 events of each thread. It says how many are left out.

        Args:
            path: the file to write.

        Returns:
            The path of the file.

        Raises:
            FolderError: the file cannot be written.
        """
        self._read_clocks()
        return write_trace(as_path(path), self._profile_lanes.lanes, self._described.model_type)

    def calls(self) -> list[dict[str, Any]]:
        """Return the calls of all passes as nested plain values, for a flame graph."""
        tops = [lane.top.context for lane in self._read_clocks()]
        return nested_calls(tops, _total_costs(tops, self._ran_passes()), self._flop_counts().top)

    def __repr__(self) -> str:
        passes = plural(self._ran_passes().n_passes, "pass", "passes")
        return f"<Profile of {self._described.model_type}, {passes}>"

    def _read_clocks(self) -> list[Any]:
        for lane in self._profile_lanes.lanes:
            lane.clock.read_pending()
        return self._profile_lanes.lanes

    def _ran_passes(self) -> PassesOfThreads:
        return PassesOfThreads([lane.costs_by_pass for lane in self._profile_lanes.lanes])

    def _table(self, choice: PassChoice) -> ProfileTable:
        if choice in self._tables:
            return self._tables[choice]
        table = self._make_table(choice)
        if self._profile_lanes.ended:
            self._tables[choice] = table
        return table

    def _make_table(self, choice: PassChoice) -> ProfileTable:
        lanes = self._read_clocks()
        counted = self._flop_counts()
        tops = [lane.top.context for lane in lanes]
        ran = self._ran_passes()
        costs, n_passes = ran.costs(choice)
        measured = ContextCosts(tops, costs, adds=choice is PassChoice.ALL)
        n_counted = 1 if choice is PassChoice.ALL else max(ran.n_passes, 1)
        rows = make_rows(self._described.rows, tops, measured, counted.top, n_counted)
        around = slot_medians(measured.costs_of(tops))
        in_model = measured.costs_of(
            [context for top in tops for context in top.walk() if context.path is not None]
        )
        overhead = sum(lane.clock.overhead for lane in lanes)
        if choice is not PassChoice.ALL:
            overhead -= self._kinds.seconds  # once, in the first pass
        total = Total(
            time=median_phases(in_model),
            spread=interquartile_range(in_model),
            optimizer=around[OPTIMIZER],
            collectives=around[COLLECTIVES],
            outside=slot_medians(measured.costs_of(tops[:1]))[FORWARD],
            failed=ran.failed_seconds if choice is PassChoice.ALL else 0,
            overhead=overhead / n_counted,
            garbage=sum(lane.clock.garbage for lane in lanes) / n_counted,
            flops=sum_phases(row.self_flops for row in rows),
            activation_bytes=sum(row.self_activation_bytes for row in rows),
            peak_bytes=max(row.peak_bytes for row in rows),
            parameters=rows[0].parameters,
            passes=n_passes,
        )
        notes = self._notes(counted, tops, ran)
        if choice is PassChoice.LATER and n_passes >= _FEW:
            notes += (_MEDIANS,)
        return ProfileTable(
            self._described.model_type, rows, total, is_median=choice is not PassChoice.ALL,
            failure=self.failure, notes=notes,
        )  # fmt: skip

    def _notes(
        self, counted: RunCounts, tops: list[CallContext], ran: PassesOfThreads
    ) -> tuple[str, ...]:
        """Say what the numbers lack."""
        one_pass = (self._root_call_warning(tops, ran) or "").replace("\n", " ")
        notes = [one_pass, self._added, ran.failure_note(), counted.missing_formulas_text()]
        if counted.failure:
            notes.append(f"FLOPs and peaks are not complete: {counted.failure}.")
        elif self._kinds.wants_flops and ran.n_passes:
            sums = _total_costs(tops, ran)
            calls = {row.path: 0.0 for row in self._described.rows if row.path in self._tapped}
            for context in itertools.chain(*(top.walk() for top in tops)):
                if context.path in calls:
                    calls[context.path] += float(sums.costs_of([context])[0, CALLS])
            differing = counted.find_differing_call(calls) or self._kinds.why_not_repeated
            if differing:
                notes.append(f"FLOPs and peaks are not those of all passes: {differing}.")
        return tuple(note for note in notes if note)

    def _flop_counts(self) -> RunCounts:
        """Count the FLOPs of all runs so far."""
        n_runs = sum(kind.n_runs + kind.n_backwards for kind in self._kinds.kinds)
        if self._counted is None or self._counted[0] != n_runs:
            self._counted = n_runs, count_flops_and_memory(self._kinds)
        return self._counted[1]


def profile(model: nn.Module, *, flops: bool = True, every_thread: bool = False) -> Profile:
    """Measure time, FLOPs and memory of each module, forward and backward.

        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        >>> with hl.profile(model) as prof:
        ...     model(torch.ones(4, 2)).sum().backward()
        >>> prof["0"].calls, prof["0"].flops.forward, prof["0"].flops.backward
        (1, 48, 48)
        >>> prof["0"].self_time.backward > 0
        True
        >>> prof.total.seconds > prof.total.time.forward + prof.total.time.backward
        True

    `print(prof)` shows a table. `prof[path]` is the row of a module, and `prof.total` the sums over
    the model. Times are in seconds, and memory is in bytes. A multiply-add counts as two FLOPs.

    A module's forward time is that of its calls. Its backward time is that of the autograd
    operations that its calls have recorded. `time` includes the modules inside, and `self_time`
    does not. Forwards that checkpointing runs again are counted apart, as `recompute`. Time that
    belongs to no module is in `prof.total`: `optimizer`, `collectives`, and `outside`, such as the
    loss. All parts add up to `prof.total.seconds`.

    Times are wall time on a CPU, and times of the device's stream, by events, on an accelerator.
    They leave out hookline's own work, which is `prof.total.overhead`. They include torch's loop
    over the hooks, about 2 us a call. A time that this loop could change by more than a tenth is
    marked `~`.

    FLOPs are counted when they are first read, on a copy of the model that has shapes and no
    numbers, once for each shape of the inputs. The model's Python code runs again for that. FLOPs
    of compiled code are those of the eager operations.

    Args:
        model: the model.
        flops: False counts no FLOPs and no peak memory.
        every_thread: True measures every thread and async task. False measures the calling thread
            or task, and code that runs in a copy of its context. `prof.total.outside` is the time
            of the calling thread alone.

    Returns:
        A line that also holds the numbers. Use it in a `with` block, or end it with
        `prof.remove()`.

    Raises:
        AttachError: `model` is not a model.
    """
    require_model(model, "hl.profile(model)")
    line = Line(model, name="profile", every_thread=every_thread)
    line.options.quiet = line.options.lenient = True
    profiling = Profile(line, model, flops=flops)
    profiling.start()
    return profiling


_FEW = 3  # passes; the median of two is their mean, which adds up
_MEDIANS = (
    "Each time is a median of its own, so the parts need not add up to the whole. The middle half"
    " of the passes lies in a range as wide as the spread."
)


def _total_costs(tops: Sequence[CallContext], ran: PassesOfThreads) -> ContextCosts:
    """Return the sums of the costs over all passes."""
    return ContextCosts(tops, ran.costs(PassChoice.ALL)[0], adds=True)


def _main_device(model: nn.Module) -> torch.device:
    """Return the device on which most of a model's parameters are."""
    devices = [tensor.device for tensor in (*model.parameters(), *model.buffers())]
    return max(set(devices), key=devices.count, default=torch.device("cpu"))


def _added_modules_text(model: nn.Module, nodes: Sequence[ModuleNode]) -> str:
    """Say which modules a model has now and had not when the profile began."""
    ids = {id(node.module) for node in nodes}
    added = [path for path, module in model.named_modules() if id(module) not in ids]
    if not added:
        return ""
    return (
        f"{plural(len(added), 'module')} came into the model in the block, the first at"
        f" {path_text(added[0])}: no row has their calls, and those who call them have their times."
    )
