"""`hl.profile`: what it costs, and `python -m benchmarks.profiling`: whether its times are right.

The oracle is torch.profiler with a `record_function` around each module. A module's backward is
then the sum over the nodes of autograd whose sequence number an operation of the module has.

Both measure the same steps at once. The time of one module varies from step to step: that of a GELU
of the GPT-2 in backward from 0.7 to 5.4 ms, in both tools. Medians over the steps are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, record_function
from torch.utils.flop_counter import FlopCounterMode

import hookline as hl
from benchmarks import models
from benchmarks.contenders import contender
from benchmarks.models import Case
from benchmarks.timing import Contender, Plan, Result, Session, Step, run_rounds

_BOUND = 0.1
_LEAST_SECONDS = 1e-3  # shorter times are not compared one by one
_ROOT = "(root)"
_PREFIX = "module "
_ENGINE = "autograd::engine::evaluate_function: "

Times = dict[tuple[str, str], float]


def profile_row(
    make_case: Callable[[], Case], title: str, target: float, calls: int
) -> Callable[[str, Plan], Result]:
    """A row: steps of training inside one block of `hl.profile`, against bare steps."""

    def measure(name: str, plan: Plan) -> Result:
        case = make_case()
        step = _training_step(case)
        result = Result(name, title, "bare", target, calls=calls)
        result.notes.append("a step is forward, a sum, backward, AdamW; one before the timing")
        result.notes.append("hookline counts FLOPs when they are read, which is not timed")
        with torch.enable_grad():
            case.model.train()
            try:
                return run_rounds(result, _contenders(case, step), plan)
            finally:
                case.model.eval()
                case.model.zero_grad()

    return measure


def _contenders(case: Case, step: Step) -> list[Contender]:
    warm: Callable[[Callable[[], Any]], Session] = lambda make: _warm(make, step)  # noqa: E731
    profiler = lambda: torch.profiler.profile(activities=[ProfilerActivity.CPU])  # noqa: E731
    return [
        contender("bare", "the step alone", warm(contextlib.nullcontext)),
        contender("hookline", "`with hl.profile(model)`", warm(lambda: hl.profile(case.model))),
        contender(
            "hookline, no FLOPs",
            "`with hl.profile(model, flops=False)`",
            warm(lambda: hl.profile(case.model, flops=False)),
        ),
        contender("torch.profiler", "`with torch.profiler.profile()`", warm(profiler), every=3),
        contender(
            "torch.profiler, by module",
            "with a `record_function` around each module",
            warm(lambda: _recorded(case.model, profiler())),
            every=3,
        ),
        contender(
            "torch's FLOP counter",
            "`with FlopCounterMode()`: no times",
            warm(lambda: FlopCounterMode(display=False)),
            every=3,
        ),
    ]


def _warm(make: Callable[[], Any], step: Step) -> Session:
    @contextlib.contextmanager
    def session() -> Iterator[Step]:
        with make():
            step()
            yield step

    return session


def _training_step(case: Case) -> Callable[[], None]:
    model, inputs = case.model, case.inputs
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step() -> None:
        _loss(model(inputs)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def _loss(output: Any) -> Tensor:
    tensor: Tensor = output if isinstance(output, Tensor) else output[0]
    return tensor.square().mean()


@contextlib.contextmanager
def _recorded(model: nn.Module, profiler: Any) -> Iterator[Any]:
    """Run torch's profiler with a range around each call of a module."""
    running: list[Any] = []

    def enter(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            running.append(record_function(_PREFIX + name))
            running[-1].__enter__()

        return hook

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        running.pop().__exit__(None, None, None)

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(name or _ROOT)))
        handles.append(module.register_forward_hook(leave))
    try:
        with profiler as found:
            yield found
    finally:
        for handle in handles:
            handle.remove()


def by_both(model: nn.Module, step: Step) -> tuple[Times, Times]:
    """Run a step under torch's profiler and `hl.profile`. Return the seconds by each."""
    profiler = torch.profiler.profile(activities=[ProfilerActivity.CPU])
    with _recorded(model, profiler) as found, hl.profile(model, flops=False) as prof:
        step()
    return _by_torch(found), _by_hookline(prof)


def _by_torch(found: Any) -> Times:
    """Return the seconds of each module and phase that torch's profiler has measured."""
    times: Times = {}
    chains: dict[int, list[str]] = {}
    events = sorted(found.events(), key=lambda one: one.time_range.start)
    for event in events:
        if event.name.startswith(_PREFIX):
            key = event.name.removeprefix(_PREFIX), "forward"
            times[key] = times.get(key, 0.0) + event.cpu_time_total / 1e6
        elif event.sequence_nr >= 0 and not event.name.startswith(_ENGINE):
            chain = _paths_around(event)
            if chain:
                chains[event.sequence_nr] = chain
    chain = []
    for event in events:
        if event.name.startswith(_ENGINE):
            # A node that accumulates a gradient runs just after the node that computed it.
            is_leaf = "AccumulateGrad" in event.name
            chain = chain if is_leaf else chains.get(event.sequence_nr, [])
            for path in dict.fromkeys(chain):
                key = path, "backward"
                times[key] = times.get(key, 0.0) + event.cpu_time_total / 1e6
    return times


def _paths_around(event: Any) -> list[str]:
    """Return the modules around an operation."""
    found = []
    while event is not None:
        if event.name.startswith(_PREFIX):
            found.append(event.name.removeprefix(_PREFIX))
        event = event.cpu_parent
    return found


def _by_hookline(prof: hl.Profile) -> Times:
    """Return the seconds of each module and phase that a profile has measured."""
    times: Times = {}
    for row in prof.rows:
        if row.calls:
            times[row.path or _ROOT, "forward"] = row.time.forward
            times[row.path or _ROOT, "backward"] = row.time.backward
    return times


def _zoo() -> dict[str, tuple[nn.Module, Tensor]]:
    resnet, gpt2 = models.resnet34(), models.gpt2()
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True), 4, enable_nested_tensor=False
    )
    mlp = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(6)])
    return {
        "ResNet-34": (resnet.model, resnet.inputs),
        "GPT-2": (gpt2.model, gpt2.inputs),
        "encoder": (encoder, torch.randn(8, 64, 256)),
        "MLP": (mlp, torch.randn(512, 512)),
    }


def main(arguments: list[str] | None = None) -> int:
    """Compare and print. The status is 1 if a long time is further off than a tenth."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profiling", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    return max(_compare(name, *one, options.rounds) for name, one in _zoo().items())


def _compare(name: str, model: nn.Module, x: Tensor, n_rounds: int) -> int:
    def step() -> None:
        model.zero_grad()
        _loss(model(x)).backward()  # type: ignore[no-untyped-call]

    step()
    rounds = [by_both(model, step) for _ in range(n_rounds + 1)][1:]
    ratios: Times = {}
    for key in rounds[0][0].keys() & rounds[0][1].keys():
        if statistics.median(torchs[key] for torchs, _ in rounds) >= _LEAST_SECONDS:
            ratios[key] = statistics.median(
                ours[key] / torchs[key] for torchs, ours in rounds if torchs[key]
            )
    print(f"{name}: hl.profile by torch.profiler, {n_rounds} steps")
    for phase in ("forward", "backward"):
        found = sorted(ratio for (_, one), ratio in ratios.items() if one == phase)
        if found:
            print(
                f"  {phase}: root {ratios[_ROOT, phase]:.3f}; {len(found)} modules of 1 ms or more,"
                f" median {statistics.median(found):.3f}, from {found[0]:.3f} to {found[-1]:.3f}"
            )
    wrong = [key for key, ratio in ratios.items() if abs(ratio - 1) > _BOUND]
    for path, phase in wrong:
        print(f"  further off than {_BOUND:.0%}: {path} {phase} {ratios[path, phase]:.3f}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
