"""Recomputation: hooks while torch recomputes a checkpointed region of a pass.

The first run counts: hooks that only read do nothing in the recomputation. Hooks that change values
must change them alike in both runs, or the gradients would match neither run. For this the
recomputation restores the pass, the call numbers and the random draws. Where the first run had no
gradients (`use_reentrant=True`), the line waits for the gradients of the recomputation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from hookline.engine.passes.modes import unwrap_all_transforms
from hookline.engine.passes.passes import THREAD, Pass, Passes, substitute_passes
from hookline.engine.passes.running_calls import RunningCalls
from hookline.engine.pytree import tree
from hookline.engine.torch_private.graph.checkpoint import CheckpointPatch, outside_checkpoint
from hookline.errors import AttachError
from hookline.util.fork_safe_lock import fork_safe_lock

# The number of elements, and of partial sums, kept of a changed value for the comparison.
_N_SAMPLES = 64


class Change(NamedTuple):
    """Describe a change of a value, with fingerprints to compare the two runs."""

    where: str  # the hook's site
    before: list[Tensor]  # the fingerprint of the value that the hook got
    # That of the value that it returned; None if it left the value as it was.
    after: list[Tensor] | None


class _Changes:
    """The record of what hooks did in a run of a region; the two runs must do the same.

    The device is not synchronised before the runs are compared.

    Attributes:
        changes: the changes of values, in order, and the hooks that left theirs as it was.
    """

    __slots__ = ("__weakref__", "changes")

    def __init__(self) -> None:
        self.changes: list[Change] = []

    def record_change(self, where: str, value: Any, new: Any) -> None:
        """Record that a hook changed a value."""
        self.add_change(Change(where, _fingerprint(value), _fingerprint(new)))

    def record_no_change(self, where: str) -> None:
        """Record that a hook left a value as it was."""
        self.add_change(Change(where, [], None))

    def add_change(self, change: Change) -> None:
        """Keep a change."""
        self.changes.append(change)


@final
class CheckpointedRegion(_Changes):
    """The record of one line's first run of a checkpointed region.

    Args:
        passes: the line's passes.
        current: the pass.
        is_reentrant: whether the first run has no gradients.
        by_root: None where the pass began before the region; else whether a run of the root began
            the pass.

    Attributes:
        calls: how often each tap that counts calls had run when the region began.
        first: returns the pass; None if it has been freed.
        first_run_hooks: the tensors that came from outside and got their hooks in the first run, by
            tap and call.
        runs: the numbers of the compiled code's runs; gradients come back under these numbers.
        at_late: functions to call when the recomputation comes after the line's end.
    """

    __slots__ = (
        "at_late", "by_root", "calls", "first", "first_run_hooks", "is_reentrant", "number",
        "outer", "passes", "runs",
    )  # fmt: skip

    def __init__(
        self, passes: Passes, current: Pass, *, is_reentrant: bool, by_root: bool | None
    ) -> None:
        super().__init__()
        again = current.recomputation
        self.passes: Passes = passes
        self.is_reentrant: bool = is_reentrant
        self.by_root: bool | None = by_root
        self.number: int = current.number
        self.outer: Any = current.region
        self.calls: dict[Any, int] = dict(current.calls) if by_root is None else {}
        # A copy: a tensor that is hooked in this first run was not hooked in the outer region's.
        self.first_run_hooks: dict[tuple[Any, int], Any] = (
            {} if again is None else {**again.region.first_run_hooks}
        )
        self.at_late: set[Callable[[], None]] = set()
        self.runs: list[Tensor] = []
        # A weak reference: the graph holds the region, and recorded values may hold the graph.
        real = current if again is None else again.region.first() or current
        self.first: Callable[[], Pass | None] = weakref.ref(real)

    def number_compiled_run(self, number: Tensor) -> Tensor:
        """Keep and return the number of a compiled run that begins."""
        number = number if self.outer is None else self.outer.number_compiled_run(number)
        self.runs.append(number)
        return number

    def add_change(self, change: Change) -> None:
        """Keep a change for this region and for each region around it."""
        super().add_change(change)
        if self.outer is not None:
            self.outer.add_change(change)


@final
class Recomputation(_Changes):
    """The second run of a region, for one line.

    Args:
        region: the record of the first run.
        rest: the runs whose passes later runs of the root begin, if the region contains any.

    Attributes:
        has_gradients: whether gradients will flow through the recomputed values.
        roots: the running calls of the root.
    """

    __slots__ = ("_has_run", "_runs", "current", "has_gradients", "region", "rest", "roots")
    is_repetition = False
    is_reentrant = False  # only a first run has no gradients

    def __init__(self, region: CheckpointedRegion, rest: list[Recomputation]) -> None:
        super().__init__()
        self.region: CheckpointedRegion = region
        self.rest: list[Recomputation] = rest
        self.has_gradients: bool = region.is_reentrant
        self._has_run = False
        self._runs = iter(region.runs)
        current = Pass(region.number)
        self.current: Pass = current
        current.calls = dict(region.calls)
        current.recomputation = current.region = self
        self.roots: RunningCalls = current.roots

    @property
    def awaits_root_run(self) -> bool:
        """Tell whether the run of the root that began this pass has not been recomputed yet."""
        return bool(self.region.by_root) and not self._has_run

    def gradient_pass(self) -> Pass:
        """Return the pass that gradients belong to.

        Returns:
            The pass of the first run if gradients flow only in the second; else the stand-in pass.
        """
        return (self.region.first() if self.has_gradients else None) or self.current

    def first_run_hooks(self, tap: Any, call: int) -> Any:
        """Return the tensors of a call that got their hooks in the first run; None without any."""
        return self.region.first_run_hooks.get((tap, call))

    def pass_of_root(self) -> Pass:
        """Return the pass that this run of the root had in the first run."""
        recomputation = self
        if self.rest and not self.roots and not self.awaits_root_run:
            recomputation = self.rest.pop(0)
        recomputation._has_run = True
        return recomputation.current

    def number_compiled_run(self, number: Tensor) -> Tensor:
        """Return the number of a compiled run that begins.

        If gradients flow in the first run, this is the number of that run: torch gives the first
        run's backward the tensors that the second run saves.
        """
        return number if self.has_gradients else next(self._runs, number)

    def close(self) -> None:
        """End the recomputation and compare its changes with those of the first run.

        Raises:
            AttachError: a hook returned other values than in the first run.
        """
        self.current.call_end_functions()
        self.current.recomputation = None  # break the reference cycle
        self.rest.clear()
        # Where the two runs took different paths, torch stopped one early or raises an error
        # itself.
        for first, second in zip(self.region.changes, self.changes, strict=False):
            if first.where == second.where and _changed_differently(first, second):
                raise AttachError(
                    f"the hook at {first.where or 'the root'} gave another value when torch"
                    " computed this checkpointed region again than it gave in the forward: the"
                    " gradients would be wrong.\nMake it depend on the value alone, or draw by"
                    " hl.edits.noise or torch's own generator; or turn checkpointing off."
                )


def _changed_differently(first: Change, second: Change) -> bool:
    """Tell whether a hook changed the same value differently in the second run.

    A value that already differs before the hook is not the hook's fault.
    """
    if first.after is None or second.after is None:
        return first.after is not second.after
    if not _have_same_shapes(first.before, second.before) or not all(
        torch.equal(old.nan_to_num(), now.nan_to_num())
        for old, now in zip(first.before, second.before, strict=True)
    ):
        return False
    return not _have_same_shapes(first.after, second.after) or not all(
        torch.allclose(old, now, rtol=1e-3, atol=1e-12, equal_nan=True)
        for old, now in zip(first.after, second.after, strict=True)
    )


def _fingerprint(value: Any) -> list[Tensor]:
    """Compute some elements and partial sums of each tensor, without synchronising the device."""
    tensors = []
    with torch.no_grad(), outside_checkpoint(True):
        for _, wrapped in tree.tensors(value):
            tensor = unwrap_all_transforms(wrapped)
            if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
                continue
            if not tensor.numel():
                continue
            flat = _as_summable(tensor.detach()).reshape(-1)
            step = max(1, flat.numel() // _N_SAMPLES)
            whole = flat[: step * (flat.numel() // step)].view(-1, step)
            wide = torch.float64 if flat.dtype is torch.float64 else torch.float32
            rest = flat[whole.numel() :].sum(dtype=wide).reshape(1)
            tensors.append(torch.cat([whole[:, 0].to(wide), whole.sum(1, dtype=wide), rest]))
    return tensors


def _as_summable(tensor: Tensor) -> Tensor:
    """Convert a tensor to numbers that can be summed."""
    if tensor.is_quantized:
        return tensor.dequantize()
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    is_narrow = tensor.is_floating_point() and tensor.dtype.itemsize == 1
    return tensor.float() if is_narrow else tensor


def _have_same_shapes(first: list[Tensor], second: list[Tensor]) -> bool:
    return [part.shape for part in first] == [part.shape for part in second]


@final
class _Checkpoint:
    """A region that torch will recompute, with each line's record of the first run.

    Calling the object recomputes the region.
    """

    __slots__ = ("_draws", "_is_reentrant", "_recompute", "_regions", "_running", "_thread")

    def __init__(self, recompute: Callable[..., Any], is_reentrant: bool) -> None:
        self._recompute = recompute
        self._is_reentrant = is_reentrant
        self._regions: list[CheckpointedRegion] = []
        self._running: list[tuple[Pass, CheckpointedRegion, Callable[..., None]]] = []
        self._draws: list[Tensor] = []
        for passes in _WATCH.lines:
            current = passes.in_thread.running
            again = None if current is None else current.recomputation
            # In a repeated run, the recomputation is a part of the repetition.
            if current is not None and (again is None or not again.is_repetition):
                # The run of the root that begins this pass may itself be part of the region.
                awaits_root_run = again is not None and again.awaits_root_run
                self.add_pass(passes, current, by_root=True if awaits_root_run else None)
        THREAD.checkpoints = (*THREAD.checkpoints, self)

    def add_pass(self, passes: Passes, current: Pass, *, by_root: bool | None) -> None:
        """Add a pass that begins inside the region; with None, one that began before it."""
        region = CheckpointedRegion(
            passes, current, is_reentrant=self._is_reentrant, by_root=by_root
        )
        self._regions.append(region)
        self._running.append((current, region, current.log_entry))
        current.region = region
        if self._is_reentrant:
            current.log_entry = partial(_log_detached, current.log_entry)

    def end(self) -> None:
        """End the first run."""
        THREAD.checkpoints = tuple(other for other in THREAD.checkpoints if other is not self)
        while self._running:
            current, region, log_entry = self._running.pop()
            current.region, current.log_entry = region.outer, log_entry

    def save_generator_state(self, generator: torch.Generator) -> None:
        """Save the state of a generator that a hook is about to draw from."""
        self._draws.append(generator.get_state())

    def __call__(self, *args: Any) -> Any:
        passes_now: dict[Any, Pass] = {}
        recomputations: list[Recomputation] = []
        for passes in dict.fromkeys(region.passes for region in self._regions):
            regions = [region for region in self._regions if region.passes is passes]
            if passes.closed:
                _refuse_lost_changes(regions)
            else:
                passes_now[passes.in_thread] = _stand_in_pass(regions, recomputations)
        checkpoints, THREAD.checkpoints = THREAD.checkpoints, ()
        draws, THREAD.draws = THREAD.draws, iter(self._draws)
        try:
            with substitute_passes(passes_now):
                return self._recompute(*args)
        finally:
            THREAD.checkpoints, THREAD.draws = checkpoints, draws
            for recomputation in recomputations:
                recomputation.close()


def _log_detached(log_entry: Callable[..., None], entry: Any) -> None:
    # The region's outputs have no graph yet; torch gives these same tensors a graph when it
    # returns.
    log_entry((entry[0], tree.map_tensors(Tensor.detach, entry[1]), *entry[2:]))


def _stand_in_pass(regions: list[CheckpointedRegion], recomputations: list[Recomputation]) -> Pass:
    """Return the stand-in for a line's pass while its regions are recomputed.

    The stand-in is the first pass that no run of the root began. Each run of the root then takes
    the next of the remaining passes.
    """
    rest: list[Recomputation] = []
    runs = [Recomputation(region, rest) for region in regions]
    recomputations += runs
    start = next((run for run in runs if not run.region.by_root), runs[0])
    rest += [run for run in runs if run is not start and run.region.by_root]
    return start.current


def _refuse_lost_changes(regions: list[CheckpointedRegion]) -> None:
    for region in regions:
        for late in region.at_late:
            late()
        for change in region.changes:
            if change.after is None:
                continue
            raise AttachError(
                f"{change.where or 'the root'} was changed in the forward, but its line ended"
                " before this backward, in which torch computes that checkpointed region again,"
                " without the change: the gradients would be wrong."
                "\nCall backward() inside the block."
            )


def repeatable_generator(generator: torch.Generator) -> torch.Generator:
    """Return a generator whose draws a recomputation repeats.

        >>> bool(torch.randn(2, generator=repeatable_generator(torch.Generator())).isfinite().all())
        True

    Args:
        generator: a generator of the caller; torch itself restores its default generators.

    Returns:
        The generator. During a recomputation, a generator in the state of the first run.
    """
    if THREAD.draws is not None:
        state = next(THREAD.draws, None)
        if state is not None:
            generator = torch.Generator(generator.device)
            generator.set_state(state)
    for checkpoint in THREAD.checkpoints:
        checkpoint.save_generator_state(generator)
    return generator


@final
class _CheckpointWatch:
    """The notifications of torch's checkpoints, on as long as any line needs them."""

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self.lines: tuple[Passes, ...] = ()  # the passes of all lines that are on
        self._patch: CheckpointPatch | None = None

    def start(self, passes: Passes) -> None:
        """Turn the notifications on for a line that begins. Idempotent."""
        with self._lock:
            if passes in self.lines:
                return
            self.lines = (*self.lines, passes)
            if self._patch is None:
                self._patch = CheckpointPatch(_begin_checkpoint)
                self._patch.start()

    def stop(self, passes: Passes) -> None:
        """Turn the notifications off for a line that ends. Idempotent."""
        with self._lock:
            self.lines = tuple(line for line in self.lines if line is not passes)
            if not self.lines and self._patch is not None:
                self._patch.stop()
                self._patch = None


def _begin_checkpoint(
    recompute: Callable[..., Any], is_reentrant: bool
) -> tuple[Callable[..., Any], Callable[[], None]]:
    checkpoint = _Checkpoint(recompute, is_reentrant)
    return checkpoint, checkpoint.end


_WATCH = _CheckpointWatch()
watch_checkpoints: Callable[[Passes], None] = _WATCH.start
forget_checkpoints: Callable[[Passes], None] = _WATCH.stop


def end_thread_passes() -> None:
    """End this thread's passes of all lines after a deliberate early exit."""
    for passes in _WATCH.lines:
        passes.end_early()
