"""Run two models on one input, and keep what each of their modules got and returned."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from hookline.display.text import first_line, torch_name
from hookline.engine import module_tree
from hookline.engine.pytree import tree
from hookline.errors import HooklineError, InputError
from hookline.findings import Finding
from hookline.verbs.attach.raw_line import attach
from hookline.verbs.compare.noise_floor import eps_of
from hookline.verbs.compare.read_sides import Entry, Side
from hookline.verbs.shared.casting import cast_dtype, cast_model
from hookline.verbs.shared.failing_module import hookline_notes
from hookline.verbs.shared.model_state import eval_without_side_effects
from hookline.verbs.shared.run_model import call

# Also in float64, norms, softmax and rotary tables are computed in float32: up to 1e-7.
_EPS_OF_FLOAT64 = 2.0**-22
_WIDENED = (torch.float32, torch.bfloat16, torch.float16)


@final
@dataclass(slots=True)
class Call:
    """A call of a module: copies of what it got and of what it returned."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None


Calls = dict[tuple[str, str], Call]  # by path and number, in the order in which they end


class ModelRun(NamedTuple):
    """A model in eval mode on the inputs.

    Args:
        model: the model, or its copy in float64.
        calls: the calls of its modules.
    """

    model: nn.Module
    calls: Calls

    @property
    def side(self) -> Side:
        """The outputs, in firing order, as `hl.compare` takes them."""
        entries = [
            Entry(path, number, partial(getattr, call, "output"))
            for (path, number), call in self.calls.items()
        ]
        return Side("recording", entries)


def run_both(
    a: nn.Module, b: nn.Module, inputs: Any
) -> tuple[list[ModelRun], float, list[Finding]]:
    """Run both models on copies in float64, where they run in it.

    Their parameters and buffers are rounded to the coarser dtype of the two before, so that a
    rounded copy has the numbers of the model.

    Returns:
        The runs, the eps of local errors, and what is said of the dtype.

    Raises:
        InputError: a model does not run.
    """
    dtypes = _coarsest_dtype(a), _coarsest_dtype(b)
    coarser = max(dtypes, key=lambda dtype: eps_of([dtype]))
    remarks = []
    if coarser in _WIDENED:
        try:
            copies = [cast_model(copy.deepcopy(model), coarser) for model in (a, b)]
            wide = [cast_model(model, torch.float64) for model in copies]
            runs = [ModelRun(model, _run(model, _cast(inputs, torch.float64))) for model in wide]
        except Exception as error:  # a kernel without float64, a forward that is bound to a model
            name = torch_name(coarser)
            text = f"float64 is not tried, so the floors are of {name}: {first_line(error)}"
            remarks.append(Finding("floor", text))
        else:
            return runs, _EPS_OF_FLOAT64, remarks
    runs = []
    for name, model, dtype in zip("ab", (a, b), dtypes, strict=True):
        try:
            runs.append(ModelRun(model, _run(model, _cast(inputs, dtype))))
        except HooklineError:
            raise
        except Exception as error:  # whatever the user's model raises
            notes = "".join(f"\n{note}" for note in hookline_notes(error))
            raise InputError(
                f"inputs must run in both models, got {type(error).__name__} from {name}:"
                f" {first_line(error).rstrip('.:')}.{notes}\nGive inputs that {name}(*inputs)"
                " takes, and the other model too: a tensor, a tuple of arguments or a dict of"
                " keyword arguments."
            ) from error
    return runs, eps_of(dtypes), remarks


def _coarsest_dtype(model: nn.Module) -> torch.dtype:
    """Return the coarsest floating dtype of the parameters."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    floating = [dtype for dtype in dtypes if dtype.is_floating_point]
    return max(floating, key=lambda dtype: eps_of([dtype]), default=torch.float32)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Return copies of a value's tensors, the floating ones in a dtype."""
    return tree.map_tensors(
        lambda tensor: tensor.detach().to(cast_dtype(tensor, dtype), copy=True), value
    )


def _run(model: nn.Module, inputs: Any) -> Calls:
    """Run a model in eval mode, and return the calls of its modules."""
    calls: Calls = {}
    running: list[Call] = []
    counts: Counter[str] = Counter()
    paths = {id(node.module): node.path for node in module_tree(model).nodes}

    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
        running.append(Call(module, *tree.map_tensors(_clone, (args, kwargs))))

    def end(module: nn.Module, args: Any, output: Any) -> None:
        entry = running.pop()
        while entry.module is not module:  # a module inside raised, which this one caught
            entry = running.pop()
        entry.output = tree.map_tensors(_clone, output)
        path = paths[id(module)]
        calls[path, f"#{counts[path]}" * (counts[path] > 0)] = entry
        counts[path] += 1

    line = attach(model)
    line.options.quiet = line.options.lenient = True  # a port may leave modules out
    with eval_without_side_effects(model), line:
        line.forward_pre(_match_any, begin, with_kwargs=True)
        line.forward(_match_any, end)
        call(model, inputs)
    return calls


def _match_any(path: str, module: nn.Module) -> bool:
    return True


def _clone(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()
