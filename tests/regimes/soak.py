"""Threads and async tasks that record, edit and run one model at once: are values ever mixed?

    python tests/regimes/soak.py 1000000

Every number is a small integer in float64, so each pass has one right result, to the last bit.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import threading
import time
import traceback
from collections import Counter

import torch
from torch import nn

import hookline as hl


class Doubled(nn.Module):
    """Twice the input: a module whose gradient is a number, too."""

    def forward(self, x):
        return x * 2


def make_model() -> nn.Module:
    return nn.Sequential(nn.Identity(), Doubled(), nn.Identity(), Doubled())


class Soak:
    """Counts passes, and the values that were not the ones of their own thread and task."""

    def __init__(self, n_passes: int, seed: int) -> None:
        self.model = make_model()
        self.seed = seed
        self.done: list[tuple[str, int]] = []
        self.mixed: list[str] = []
        self.errors: list[str] = []
        self._left = iter(range(n_passes))
        self._values = itertools.count(1)

    def take(self, n: int) -> int:
        """How many of n passes are still wanted."""
        return len(list(itertools.islice(self._left, n)))

    def value(self) -> torch.Tensor:
        """A batch that no other pass has."""
        return torch.full((1, 2), float(next(self._values)), dtype=torch.float64)

    def expect(self, kind: str, found: torch.Tensor, x: torch.Tensor, factor: float) -> None:
        if not torch.equal(found, x.detach() * factor):
            self.mixed.append(f"{kind}: {found.tolist()} for {x.tolist()} x {factor}")

    # -- what a thread or task does; each yields where others may come between ---------------------

    def plain(self, n, draw):
        for _ in range(n):
            x = self.value()
            self.expect("plain", self.model(x), x, 4)
            yield
            self.expect("plain part", self.model[1](x), x, 2)

    def record(self, n, draw):
        with hl.record(self.model, ["0", "2"]) as run:
            xs = []
            for _ in range(n):
                xs.append(self.value())
                yield
                self.model(xs[-1])
        yield
        self._compare("record", run, xs)

    def record_without_a_block(self, n, draw):
        line = hl.record(self.model, ["0", "2"])
        xs = []
        for _ in range(n):
            xs.append(self.value())
            yield
            self.model(xs[-1])
        yield
        line.remove()
        self._compare("record, no block", line.recording, xs)

    def _compare(self, kind, run, xs):
        if len(run.passes) != len(xs):
            self.mixed.append(f"{kind}: {len(run.passes)} passes, {len(xs)} were run")
        for one, x in zip(run.passes, xs, strict=False):
            self.expect(kind, one["0"], x, 1)
            self.expect(kind, one["2"], x, 2)

    def edit(self, n, draw):
        factor = float(draw.randrange(3, 9))
        with hl.edit(self.model, draw.choice("0123"), hl.edits.scale(factor)):
            yield
            for _ in range(n):
                x = self.value()
                self.expect("edit", self.model(x), x, 4 * factor)
                yield

    def edit_without_a_block(self, n, draw):
        factor = float(draw.randrange(3, 9))
        line = hl.edit(self.model, "2:input", hl.edits.scale(factor))
        yield
        for _ in range(n):
            x = self.value()
            self.expect("edit, no block", self.model(x), x, 4 * factor)
            yield
        line.remove()

    def gradients(self, n, draw):
        factor = float(draw.randrange(3, 9))
        with (
            hl.edit(self.model, "2:grad_output", lambda g: g * factor),
            hl.record(self.model, "0", ports="grad_output") as run,
        ):
            for _ in range(n):
                x = self.value().requires_grad_()
                y = self.model(x)
                yield
                (grad,) = torch.autograd.grad(y, x, x.detach())
                self.expect("gradient", grad, x, 4 * factor)
                self.expect("recorded gradient", run.passes[-1]["0:grad_output"], x, 4 * factor)

    def plain_gradients(self, n, draw):
        for _ in range(n):
            x = self.value().requires_grad_()
            y = self.model(x)
            yield
            (grad,) = torch.autograd.grad(y, x, x.detach())
            self.expect("plain gradient", grad, x, 4)

    def everywhere(self, n, draw):
        seen = []
        with hl.attach(hl.EVERYWHERE) as line:
            line.forward(Doubled, lambda module, args, output: seen.append(output) or output + 0)
            for _ in range(n):
                x = self.value()
                yield
                self.expect("everywhere", self.model(x), x, 4)
                self.expect("everywhere, first", seen[-2], x, 2)
                self.expect("everywhere, last", seen[-1], x, 4)
        if len(seen) != 2 * n:
            self.mixed.append(f"everywhere: {len(seen)} calls, {2 * n} were made")

    # -- who does it ------------------------------------------------------------------------------

    def _work(self, draw):
        """Endless: one kind of work after another, until no pass is left."""
        kinds = [
            self.plain, self.record, self.record_without_a_block, self.edit, self.gradients,
            self.edit_without_a_block, self.plain_gradients, self.everywhere,
        ]  # fmt: skip
        while n := self.take(draw.randrange(1, 12)):
            kind = draw.choice(kinds)
            yield from kind(n, draw)
            self.done.append((kind.__name__, n))

    def _guarded(self, draw):
        try:
            yield from self._work(draw)
        except Exception:
            self.errors.append(traceback.format_exc())

    def in_thread(self, number: int) -> None:
        for _ in self._guarded(random.Random(f"{self.seed} {number}")):
            pass

    def in_tasks(self, number: int, n_tasks: int) -> None:
        async def one(task):
            draw = random.Random(f"{self.seed} {number} {task}")
            for _ in self._guarded(draw):
                if draw.random() < 0.5:
                    await asyncio.sleep(0)

        async def all_of_them():
            await asyncio.gather(*map(one, range(n_tasks)))

        asyncio.run(all_of_them())

    def run(self) -> dict[str, object]:
        began, interval = time.perf_counter(), sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            threads = [threading.Thread(target=self.in_thread, args=(k,)) for k in range(3)]
            threads += [threading.Thread(target=self.in_tasks, args=(k, 4)) for k in (3, 4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(interval)
        hooks, by_kind = len(hl.inventory(self.model)), Counter()
        for kind, n in self.done:
            by_kind[kind] += n
        return {
            "passes": by_kind.total(), "mixed": len(self.mixed), "errors": len(self.errors),
            "hooks left": hooks, "seconds": round(time.perf_counter() - began),
            "by kind": dict(by_kind), "first": [*self.mixed[:3], *self.errors[:3]],
        }  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    numbers = [int(text) for text in sys.argv[1:]]
    print(json.dumps(Soak(*numbers, *[20_000, 0][len(numbers) :]).run(), indent=1))
