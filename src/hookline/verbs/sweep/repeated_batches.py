"""Repeat the inputs of a model, and leave out the calls of a forward whose outputs are known."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

from hookline.verbs.sweep.rows_per_change import batch_size, repeat_inputs
from hookline.verbs.sweep.tape import NamedModules, Tape


@final
@dataclass(slots=True, eq=False)
class RepeatedBatch:
    """The inputs n times in a row."""

    inputs: Any
    n: int
    # The tape of their unchanged run; None until the shapes of its outputs are known.
    tape: Tape | None = None
    n_tries: int = 0  # how often a run has shown other calls, so that there is no tape


@final
class RepeatedBatches:
    """The inputs of a model, repeated as often as changes share a forward.

    Args:
        modules: the modules of the model, each with its path.
        forward: runs the model on inputs.
        inputs: the inputs.
        tape: the tape of their unchanged run.

    Attributes:
        tape: the tape of the unchanged run.
        reuses: whether calls whose outputs are known are left out.
        is_written_unseen: whether they run because the model writes to them, as by `.data`.
    """

    def __init__(
        self, modules: NamedModules, forward: Callable[[Any], Any], inputs: Any, tape: Tape
    ) -> None:
        self._named_modules, self._forward, self._inputs = modules, forward, inputs
        self.tape = tape
        self.reuses: bool = False
        self.is_written_unseen: bool = False
        self._written = tape.pop_overwritten_calls()
        self._kept: set[int] = set()
        self._batches: dict[int, RepeatedBatch] = {}

    def keep_outputs(self, starts: Collection[int]) -> None:
        """Keep the outputs that stand in for calls, as they were before later calls wrote to them.

        Args:
            starts: the times up to which calls are left out.
        """
        kept = {call.number for time in starts for call in self.tape.skippable_calls(time)}
        self._kept = kept
        # A list that a call is given and fills would stay empty.
        calls = [self.tape.calls[number] for number in kept]
        self.reuses = bool(starts) and not any(call.fills or call.is_bound for call in calls)
        # No version tells which call writes to them, and so must run.
        self.is_written_unseen = self.reuses and bool(kept & self.tape.unseen)
        self.reuses = self.reuses and not self.is_written_unseen
        if self.reuses and kept & self._written:
            tape = self._record_tape(self._inputs)
            self.reuses = tape is not None
            self.tape = tape or self.tape
        self.tape.keep_outputs_of(kept)

    def repeat(self, n: int) -> RepeatedBatch:
        """Return the inputs n times in a row."""
        if n not in self._batches:
            inputs = repeat_inputs(self._inputs, n) if n > 1 else self._inputs
            self._batches[n] = RepeatedBatch(inputs, n, self.tape if n == 1 else None)
        batch = self._batches[n]
        if self.reuses and batch.tape is None and batch.n_tries == 1:
            # Its outputs cannot be told from its shapes: a change may have led to other calls, or
            # its hook to those that a fast path leaves out.
            batch.tape = self._record_tape(batch.inputs)
            batch.n_tries += 1
        return batch

    def clear(self) -> None:
        """Forget what forwards of repeated inputs have shown."""
        self._batches.clear()

    @contextmanager
    def skip_known_calls(self, batch: RepeatedBatch, start: int) -> Iterator[None]:
        """Leave calls out of the forward in the block, if their outputs are known.

        Args:
            batch: the inputs of the forward.
            start: the time up to which it does not depend on changes.
        """
        if not self.reuses or (batch.tape is None and batch.n_tries):
            yield
        elif batch.tape is None:
            forms = Tape(self._named_modules, self.tape.hooked)
            with forms.record_calls(kept=()):
                yield
            size = batch_size(self._inputs) or 0
            batch.tape = self.tape.repeat(forms, size, batch.n)
            batch.n_tries += 1
        else:
            with batch.tape.replay_calls(start, self._written):
                yield

    def _record_tape(self, inputs: Any) -> Tape | None:
        """Return the tape of a run on inputs; None if it makes other calls."""
        tape = Tape(self._named_modules, self.tape.hooked)
        with tape.record_calls(kept=self._kept, copied=self._written):
            self._forward(inputs)
        return tape if tape.has_same_calls(self.tape) else None
