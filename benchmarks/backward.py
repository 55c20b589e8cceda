"""Gradients of every block's output in a step of training: hookline, tensor hooks, torch's own."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import hookline as hl
from benchmarks.contenders import Values, contender, session_without_setup
from benchmarks.models import Case
from benchmarks.timing import Contender, Plan, Result, Step, run_rounds


def gradient_row(
    make_case: Callable[[], Case], title: str, target: float, calls: int
) -> Callable[[str, Plan], Result]:
    """A row: forward and backward with the gradients of the places recorded, against the bare."""

    def measure(name: str, plan: Plan) -> Result:
        case = make_case()
        result = Result(name, title, "bare", target, calls=calls)
        result.notes.append("a step is zero_grad, forward, a sum, backward")
        contenders = [_bare(case), _tensor_hooks(case), _hookline(case), _retain_grad(case)]
        # Rows are measured without gradients, as one records; here they are what is measured.
        with torch.enable_grad():
            return run_rounds(result, [*contenders, _full_backward_hooks(case)], plan)

    return measure


def _training_step(case: Case) -> Callable[[], None]:
    model, inputs = case.model, case.inputs

    def step() -> None:
        model.zero_grad()
        output = model(inputs)
        loss = output.sum() if isinstance(output, Tensor) else output[0].sum()
        loss.backward()

    return step


def _truth(case: Case) -> Values:
    """The gradients that torch.autograd.grad gives, of outputs that plain hooks caught."""

    def values(_: object) -> list[Tensor]:
        caught: dict[str, Tensor] = {}

        def keep(name: str) -> Callable[..., None]:
            return lambda module, args, output: caught.__setitem__(name, output)

        handles = [
            module.register_forward_hook(keep(path))
            for path, module in zip(case.paths, case.modules(), strict=True)
        ]
        output = case.model(case.inputs)
        loss = output.sum() if isinstance(output, Tensor) else output[0].sum()
        for handle in handles:
            handle.remove()
        return list(torch.autograd.grad(loss, [caught[path] for path in case.paths]))

    return values


def _bare(case: Case) -> Contender:
    return contender("bare", "forward and backward", session_without_setup(_training_step(case)))


def _in_order(case: Case) -> Values:
    return lambda store: [store[path] for path in case.paths]


def _hooked(
    case: Case,
    register: str,
    make: Callable[[dict[str, Any], str], Callable[..., None]],
) -> Callable[[], contextlib.AbstractContextManager[Step]]:
    """A session in which every place has a hook of torch's; a step gives what the hooks stored."""
    step = _training_step(case)

    @contextlib.contextmanager
    def session() -> Iterator[Step]:
        store: dict[str, Any] = {}
        modules = zip(case.paths, case.modules(), strict=True)
        handles = [getattr(module, register)(make(store, path)) for path, module in modules]

        def run() -> dict[str, Any]:
            # torch warns of full backward hooks where no input needs a gradient: the first layer.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                step()
            return store

        yield run
        for handle in handles:
            handle.remove()

    return session


def _tensor_hooks(case: Case) -> Contender:
    """The least that keeps gradients: a hook on each output, which a forward hook puts there."""

    def make(store: dict[str, Any], name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Any) -> None:
            output.register_hook(lambda grad: store.__setitem__(name, grad))

        return hook

    session = _hooked(case, "register_forward_hook", make)
    how = "register_forward_hook, in it `output.register_hook(...)`"
    return contender("hand-written", how, session, _in_order(case), _truth(case))


def _retain_grad(case: Case) -> Contender:
    """`retain_grad` on each output, and the outputs kept: their memory with them."""

    def make(store: dict[str, Any], name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Any) -> None:
            output.retain_grad()
            store[name] = output

        return hook

    session = _hooked(case, "register_forward_hook", make)
    values: Values = lambda store: [store[path].grad for path in case.paths]  # noqa: E731
    return contender("retain_grad", "`output.retain_grad()`", session, values, _truth(case))


def _full_backward_hooks(case: Case) -> Contender:
    def make(store: dict[str, Any], name: str) -> Callable[..., None]:
        def hook(module: Any, grad_input: Any, grad_output: Any) -> None:
            store[name] = grad_output[0]

        return hook

    session = _hooked(case, "register_full_backward_hook", make)
    how = "register_full_backward_hook"
    return contender("full backward hooks", how, session, _in_order(case), _truth(case))


def _hookline(case: Case) -> Contender:
    step = _training_step(case)

    @contextlib.contextmanager
    def session() -> Iterator[Step]:
        with hl.record(case.model, case.selector, ports="grad_output") as run:

            def one() -> hl.Recording:
                step()
                return run

            yield one

    how = '`with hl.record(model, ..., ports="grad_output")` around the steps'
    values: Values = lambda run: [run[f"{path}:grad_output"] for path in case.paths]  # noqa: E731
    return contender("hookline", how, session, values, _truth(case))
