"""Lines on compiled models: each against the same model compiled without hooks.

Every contender has a copy of the model of its own, with a class and a forward of its own: torch
keeps compiled code by the function that it was compiled from, and tries all that it has, so one
would pay for the guards of the others. What is compiled is compiled before the first round.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import hookline as hl
from benchmarks.models import Case
from benchmarks.timing import Contender, Plan, Result, Session, Step, measure_session, run_rounds

Attach = Callable[[nn.Module, Case], contextlib.AbstractContextManager[Any]]
Compare = Callable[[Any, nn.Module, Case], None]


def statistics(value: Tensor) -> Tensor:
    """Four numbers of a value: mean, deviation, largest magnitude, share of zeros."""
    zeros = (value == 0).to(value.dtype)
    return torch.stack([value.mean(), value.std(), value.abs().amax(), zeros.mean()])


def _record(model: nn.Module, case: Case) -> Any:
    return hl.record(model, case.selector)


def _statistics(model: nn.Module, case: Case) -> Any:
    return hl.record(model, case.selector, keep=statistics)


def _both(model: nn.Module, case: Case) -> Any:
    return hl.record(model, case.selector, ports=("output", "grad_output"))


def _edit(model: nn.Module, case: Case) -> Any:
    return hl.edit(model, case.paths[len(case.paths) // 2], hl.edits.scale(0.5))


@contextlib.contextmanager
def _line_in_other_context(model: nn.Module, case: Case) -> Iterator[None]:
    """A line that is on, and in another context than the one that runs the model."""
    line = hl.record(model, case.selector)
    context = contextvars.copy_context()
    context.run(line.__enter__)
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it saw nothing: that is the point
            line.remove()


class _Store:
    """What a careful person writes by hand: a plain attribute of an object of its own."""

    def __init__(self) -> None:
        self.value: Any = None

    def keep(self, module: nn.Module, args: Any, output: Any) -> None:
        self.value = _first(output).detach()


def _first(output: Any) -> Tensor:
    found: Tensor = output if isinstance(output, Tensor) else output[0]
    return found


def _with_own_class(model: nn.Module) -> nn.Module:
    """The model, with a class and a forward of its own."""
    kind = type(model)
    forward = _in_order if kind is nn.Sequential else kind.forward
    own = types.FunctionType(
        forward.__code__.replace(),  # another object, all else alike
        forward.__globals__,
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    own.__kwdefaults__ = forward.__kwdefaults__
    model.__class__ = type(
        kind.__name__, (kind,), {"forward": functools.update_wrapper(own, forward)}
    )
    return model


def _in_order(self: nn.Sequential, value: Any) -> Any:
    # Torch's own is compiled from a function that all compiled models of torch's classes share.
    for part in self:
        value = part(value)
    return value


def _contender(name: str, how: str, case: Case, attach: Attach | None, *, is_training: bool) -> Any:
    """A contender on a copy of the model; `attach` gives the line for each session."""
    model = _with_own_class(copy.deepcopy(case.model))
    compiled = torch.compile(model, fullgraph=True)

    def step() -> None:
        if not is_training:
            compiled(case.inputs)
            return
        model.zero_grad()
        _first(compiled(case.inputs)).sum().backward()

    @contextlib.contextmanager
    def session() -> Iterator[Step]:
        with contextlib.nullcontext() if attach is None else attach(model, case) as kept:

            def run() -> Any:
                step()
                return kept

            yield run

    return Contender(name, how, measure_session(session), _check(session, case, name))


def _check(session: Session, case: Case, name: str) -> Callable[[], None]:
    def check() -> None:
        for _ in range(2):  # the first compiles
            with session() as step:
                kept = step()
        if isinstance(kept, hl.Recording) and not all(path in kept for path in case.paths):
            raise AssertionError(f"{name} did not record every place")

    return check


def _by_hand(case: Case) -> Contender:
    stores = [_Store() for _ in case.paths]

    @contextlib.contextmanager
    def attach(model: nn.Module, case: Case) -> Iterator[list[_Store]]:
        found = dict(model.named_modules())
        for path, store in zip(case.paths, stores, strict=True):
            hooks = found[path]._forward_hooks
            if not hooks:  # put on once: what comes and goes is not seen by compiled code
                found[path].register_forward_hook(store.keep)
        yield stores
        if any(store.value is None for store in stores):
            raise AssertionError("the hand-written store kept nothing")

    how = "a hook put on before compiling: `self.value = output.detach()`"
    return _contender("hand-written", how, case, attach, is_training=False)


WORK: dict[str, tuple[Attach, str, bool]] = {
    "idle": (_line_in_other_context, "a line that is on in another context", False),
    "record": (_record, "hl.record of the outputs", False),
    "inside": (_record, "hl.record of parts of each attention", False),
    "statistics": (_statistics, "hl.record with keep= four statistics", False),
    "gradients": (_both, "hl.record of outputs and their gradients, in training", True),
    "edit": (_edit, "hl.edit of one of them, hl.edits.scale", False),
}


def compiled_row(
    make_case: Callable[[], Case], work: str, title: str, target: float, calls: int, *, base: str
) -> Callable[[str, Plan], Result]:
    """A row: a kind of line on a compiled model, against it unhooked or with a hand-written store.

    Args:
        make_case: gives the model.
        work: which of `WORK`.
        title: the row in words.
        target: at most this, as a ratio to the base.
        calls: how many calls one measurement takes the mean of.
        base: "bare" or "hand-written".
    """

    def measure(name: str, plan: Plan) -> Result:
        case = make_case()
        attach, how, is_training = WORK[work]
        result = Result(name, title, base, target, calls=calls)
        result.notes.append("torch.compile(model, fullgraph=True), inductor")
        torch.compiler.reset()
        with torch.set_grad_enabled(is_training):
            contenders = [
                _contender("bare", "the compiled model", case, None, is_training=is_training),
                _contender("hookline", how, case, attach, is_training=is_training),
            ]
            if not is_training and work == "record":
                contenders.append(_by_hand(case))
            run_rounds(result, contenders, plan)
        torch.compiler.reset()
        return result

    return measure
