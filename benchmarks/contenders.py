"""The bare model, the hook as one writes it by hand, and hookline, on the same work.

A session is entered before a measurement, which is not timed; its steps and leaving it are. What a
session kept dies with it, so that every contender starts with nothing kept and frees what it keeps
within its time: memory that is fresh and memory that is reused do not cost the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import hookline as hl
from benchmarks.models import Case
from benchmarks.timing import Contender, Session, Step, measure_session

Values = Callable[[Any], list[Tensor]]


def contender(
    name: str,
    how: str,
    session: Session,
    values: Values | None = None,
    truth: Values | None = None,
    *,
    every: int = 1,
) -> Contender:
    """A contender whose values are compared with the true ones before it is timed.

    Args:
        name: its column.
        how: what it does, in words.
        session: gives the step to be timed.
        values: takes what the step returned apart, into one tensor for each place.
        truth: gives the true values; called with None.
        every: measured in every n-th round only.
    """

    def check() -> None:
        if values is None or truth is None:
            return
        with session() as step:
            found = [value.clone() for value in values(step())]
        expected = truth(None)
        if len(found) != len(expected):
            raise AssertionError(f"{name} kept {len(found)} values, not {len(expected)}")
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            if not torch.equal(one, other):
                raise AssertionError(f"{name}: value {number} is not the model's own")

    return Contender(name, how, measure_session(session), check, every)


def session_without_setup(step: Step) -> Session:
    """A session that sets nothing up and takes nothing down."""
    return lambda: contextlib.nullcontext(step)


def truth(case: Case) -> Values:
    """The true values of a case, copied as the modules return them."""

    def values(_: object) -> list[Tensor]:
        copies: dict[str, Tensor] = {}

        def keep(name: str) -> Callable[..., None]:
            return lambda module, args, output: copies.__setitem__(name, output.clone())

        handles = [
            module.register_forward_hook(keep(path))
            for path, module in zip(case.paths, case.modules(), strict=True)
        ]
        case.model(case.inputs)
        for handle in handles:
            handle.remove()
        return [copies[path] for path in case.paths]

    return values


def bare(case: Case) -> Contender:
    """The model alone."""
    model, inputs = case.model, case.inputs
    return contender("bare", "model(x)", session_without_setup(lambda: model(inputs)))


def hand_written(case: Case) -> Contender:
    """The least that keeps outputs: one dictionary, one closure a module, put on once."""
    model, inputs = case.model, case.inputs

    @contextlib.contextmanager
    def session() -> Iterator[Step]:
        store: dict[str, Any] = {}

        def keep(name: str) -> Callable[..., None]:
            def hook(module: Any, args: Any, output: Any) -> None:
                store[name] = output

            return hook

        modules = zip(case.paths, case.modules(), strict=True)
        handles = [module.register_forward_hook(keep(path)) for path, module in modules]

        def step() -> dict[str, Any]:
            model(inputs)
            return store

        yield step
        for handle in handles:
            handle.remove()

    how = "register_forward_hook, `store[name] = output`, put on once"
    return contender("hand-written", how, session, _in_order(case), truth(case))


def hand_written_each(case: Case) -> Contender:
    """The same put on and taken off for each call, with names looked up and values detached."""
    model, inputs, wanted = case.model, case.inputs, frozenset(case.paths)

    def step() -> dict[str, Any]:
        store: dict[str, Any] = {}

        def keep(name: str) -> Callable[..., None]:
            def hook(module: Any, args: Any, output: Any) -> None:
                store[name] = output.detach()

            return hook

        handles = [
            module.register_forward_hook(keep(path))
            for path, module in model.named_modules()
            if path in wanted
        ]
        model(inputs)
        for handle in handles:
            handle.remove()
        return store

    how = (
        "named_modules, register_forward_hook, `store[name] = output.detach()`, removed, each call"
    )
    return contender("hand-written", how, session_without_setup(step), _in_order(case), truth(case))


def recording(case: Case) -> Session:
    """A session that records with one line for all calls."""
    model, inputs, selector = case.model, case.inputs, case.selector

    @contextlib.contextmanager
    def session() -> Iterator[Step]:
        with hl.record(model, selector) as run:

            def step() -> hl.Recording:
                model(inputs)
                return run

            yield step

    return session


def hookline(case: Case) -> Contender:
    """One line for all calls of a measurement; it keeps the values of every call."""
    how = "`with hl.record(model, ...)` around the calls"
    return contender("hookline", how, recording(case), _in_order(case), truth(case))


def hookline_each(case: Case) -> Contender:
    """A line for each call."""
    model, inputs, selector = case.model, case.inputs, case.selector

    def step() -> hl.Recording:
        with hl.record(model, selector) as run:
            model(inputs)
        return run

    how = "`with hl.record(model, ...)` around each call"
    return contender("hookline", how, session_without_setup(step), _in_order(case), truth(case))


def hookline_features(case: Case, path: str, prefix: Step) -> Contender:
    """The model as far as one module, against the prefix by hand."""
    model, inputs = case.model, case.inputs
    return contender(
        "hookline",
        f'hl.features(model, x, "{path}")',
        session_without_setup(lambda: hl.features(model, inputs, path)),
        lambda run: [run[path]],
        lambda _: [prefix()],
    )


def _in_order(case: Case) -> Values:
    return lambda kept: [kept[path] for path in case.paths]
