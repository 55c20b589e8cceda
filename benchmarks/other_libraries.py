"""Other libraries on the same work, each as its own documentation uses it.

Each is made by a function that imports its library, so that one that is not installed is skipped.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.baukit_style import TraceDict
from benchmarks.contenders import Values, contender, session_without_setup, truth
from benchmarks.models import Case
from benchmarks.timing import Contender, Step
from benchmarks.torchvision_import import import_torchvision

Make = Callable[[Case], Contender]


def made(makers: dict[str, Make], case: Case) -> tuple[list[Contender], dict[str, str]]:
    """The contenders of the libraries that are installed, and why the others are left out."""
    contenders, skipped = [], {}
    for name, make in makers.items():
        try:
            contenders.append(make(case))
        except ImportError:
            skipped[name] = "not installed"
        except NotImplementedError as error:
            skipped[name] = str(error)
    return contenders, skipped


def _by_path(case: Case) -> Values:
    return lambda kept: [kept[path] for path in case.paths]


def _extractor(case: Case) -> Step:
    import_torchvision()
    from torchvision.models.feature_extraction import create_feature_extractor

    if not case.traceable:
        raise NotImplementedError("torch.fx cannot trace this model")
    nodes = {path: path for path in case.paths}
    return lambda: create_feature_extractor(case.model, return_nodes=nodes)


def torchvision_steady(case: Case) -> Contender:
    """An extractor made once."""
    make, inputs = functools.cache(_extractor(case)), case.inputs

    @contextlib.contextmanager
    def session() -> Iterator[Step]:
        extractor = make()
        yield lambda: extractor(inputs)

    how = "create_feature_extractor, made once"
    return contender("torchvision", how, session, _by_path(case), truth(case), every=4)


def torchvision_each(case: Case) -> Contender:
    """An extractor made for each call: not what it is for, and shown as its set-up cost."""
    make, inputs = _extractor(case), case.inputs
    how = "create_feature_extractor, made for each call"
    step = session_without_setup(lambda: make()(inputs))
    return contender("torchvision", how, step, _by_path(case), truth(case), every=20)


def baukit_steady(case: Case) -> Contender:
    """A tracing dictionary around all calls."""
    model, inputs, paths = case.model, case.inputs, case.paths

    @contextlib.contextmanager
    def session() -> Iterator[Step]:
        with TraceDict(model, paths) as traces:

            def step() -> TraceDict:
                model(inputs)
                return traces

            yield step

    how = "TraceDict around the calls (the technique, written anew)"
    return contender("baukit-style", how, session, _traced(case), truth(case), every=4)


def baukit_each(case: Case) -> Contender:
    """A tracing dictionary for each call."""
    model, inputs, paths = case.model, case.inputs, case.paths

    def step() -> TraceDict:
        with TraceDict(model, paths) as traces:
            model(inputs)
        return traces

    how = "TraceDict around each call (the technique, written anew)"
    return contender(
        "baukit-style", how, session_without_setup(step), _traced(case), truth(case), every=4
    )


def baukit_stop(case: Case) -> Contender:
    """A tracing dictionary that ends the forward at the last layer."""
    model, inputs, paths = case.model, case.inputs, case.paths

    def step() -> TraceDict:
        with TraceDict(model, paths, stop=True) as traces:
            model(inputs)
        return traces

    how = "TraceDict(stop=True) around each call (the technique, written anew)"
    return contender(
        "baukit-style", how, session_without_setup(step), _traced(case), truth(case), every=4
    )


def _traced(case: Case) -> Values:
    return lambda traces: [traces[path].output for path in case.paths]


def nnsight_steady(case: Case) -> Contender:
    """A model wrapped once, and a trace for each call, which is nnsight's only way."""
    import nnsight

    inputs = case.inputs
    wrapped = nnsight.NNsight(case.model)
    places = [wrapped.get(path) for path in case.paths]

    def step() -> list[Any]:
        with wrapped.trace(inputs):
            kept = nnsight.save([])
            for place in places:
                kept.append(place.output)
        return kept

    how = "NNsight(model) once, `with wrapped.trace(x)` each call"
    return contender("nnsight", how, session_without_setup(step), list, truth(case), every=4)


def nnsight_each(case: Case) -> Contender:
    """A model wrapped and traced for each call."""
    import nnsight

    model, inputs, paths = case.model, case.inputs, case.paths

    def step() -> list[Any]:
        wrapped = nnsight.NNsight(model)
        places = [wrapped.get(path) for path in paths]
        with wrapped.trace(inputs):
            kept = nnsight.save([])
            for place in places:
                kept.append(place.output)
        return kept

    how = "NNsight(model) and `with wrapped.trace(x)` each call"
    return contender("nnsight", how, session_without_setup(step), list, truth(case), every=4)


def nnsight_stop(case: Case) -> Contender:
    """A trace that is stopped after the last layer."""
    import nnsight

    inputs = case.inputs
    wrapped = nnsight.NNsight(case.model)
    places = [wrapped.get(path) for path in case.paths]

    def step() -> list[Any]:
        with wrapped.trace(inputs) as tracer:
            kept = nnsight.save([])
            for place in places:
                kept.append(place.output)
            tracer.stop()
        return kept

    how = "NNsight(model) once, `with wrapped.trace(x)` and tracer.stop() each call"
    return contender("nnsight", how, session_without_setup(step), list, truth(case), every=4)


def captum_steady(case: Case) -> Contender:
    """One attribution object; it puts its hooks on and off in each call."""
    from captum.attr import LayerActivation

    inputs = case.inputs
    activation = LayerActivation(case.model, case.modules())
    how = "LayerActivation once, .attribute(x) each call"
    step = session_without_setup(lambda: activation.attribute(inputs))
    return contender("captum", how, step, list, truth(case), every=4)


def captum_each(case: Case) -> Contender:
    """An attribution object for each call."""
    from captum.attr import LayerActivation

    model, inputs = case.model, case.inputs
    how = "LayerActivation(model, layers).attribute(x) each call"
    step = session_without_setup(lambda: LayerActivation(model, case.modules()).attribute(inputs))
    return contender("captum", how, step, list, truth(case), every=4)


def tdhook_steady(case: Case) -> Contender:
    """One context around all calls."""
    from tdhook.latent.activation_caching import ActivationCaching
    from tensordict import TensorDict

    model, inputs, pattern = case.model, case.inputs, case.pattern

    @contextlib.contextmanager
    def session() -> Iterator[Step]:
        with ActivationCaching(pattern).prepare(model) as hooked:
            yield lambda: hooked(TensorDict({"input": inputs}, batch_size=[]))["cache"]

    how = "ActivationCaching(pattern).prepare(model) around the calls"
    return contender("tdhook", how, session, _by_path(case), truth(case), every=4)


def tdhook_each(case: Case) -> Contender:
    """A context for each call."""
    from tdhook.latent.activation_caching import ActivationCaching
    from tensordict import TensorDict

    model, inputs, pattern = case.model, case.inputs, case.pattern

    def step() -> Any:
        with ActivationCaching(pattern).prepare(model) as hooked:
            return hooked(TensorDict({"input": inputs}, batch_size=[]))["cache"]

    how = "ActivationCaching(pattern).prepare(model) around each call"
    return contender(
        "tdhook", how, session_without_setup(step), _by_path(case), truth(case), every=4
    )


STEADY: dict[str, Make] = {
    "torchvision": torchvision_steady,
    "baukit-style": baukit_steady,
    "nnsight": nnsight_steady,
    "captum": captum_steady,
    "tdhook": tdhook_steady,
}
EACH: dict[str, Make] = {
    "torchvision": torchvision_each,
    "baukit-style": baukit_each,
    "nnsight": nnsight_each,
    "captum": captum_each,
    "tdhook": tdhook_each,
}
FEATURES: dict[str, Make] = {
    "torchvision": torchvision_steady,
    "baukit-style": baukit_stop,
    "nnsight": nnsight_stop,
    "captum": captum_steady,
}
