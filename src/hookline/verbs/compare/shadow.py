"""Give each module of one model what its counterpart in another model got."""

from __future__ import annotations

import copy
import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from hookline.display.text import first_line, listed, name_without_torch
from hookline.engine import module_tree, path_text, require_model
from hookline.engine.pytree import describe, tree
from hookline.engine.pytree.describe import leaf_text
from hookline.errors import HooklineError, InputError
from hookline.findings import Finding
from hookline.verbs.attach.raw_line import attach
from hookline.verbs.compare.comparison import ComparedSite, Comparison, Verdict, number_text
from hookline.verbs.compare.judge import Judge, leaf_key
from hookline.verbs.compare.measure import MeasuredPair, measure_values
from hookline.verbs.compare.noise_floor import Floor, eps_of
from hookline.verbs.compare.pair_by_name import Names, Pairing, pair_entries
from hookline.verbs.compare.read_sides import Entry, Side
from hookline.verbs.compare.setup_findings import find_unpaired
from hookline.verbs.shared.casting import cast_model, dtype_after_cast
from hookline.verbs.shared.failing_module import hookline_notes
from hookline.verbs.shared.model_state import eval_without_side_effects
from hookline.verbs.shared.refused_weights import refuse_meta_tensors
from hookline.verbs.shared.run_model import (
    Inputs,
    call_model,
    refuse_function_or_iterator,
    unwrap_lone_tensor,
)

# The floor of a local error, in eps times the square root of the number of modules inside. Clean
# modules of twelve models were off by at most 2.4.
_MULTIPLES = (4.0, 4.0, 32.0, 64.0)
# Also in float64, norms, softmax and rotary tables are computed in float32: up to 1e-7.
_EPS_OF_FLOAT64 = 2.0**-22
_WIDENED = (torch.float32, torch.bfloat16, torch.float16)
_MOST_NAMED = 3
_NO_REPEAT = "it does not repeat itself on its own inputs, so it reads what changes meanwhile"
_OTHER_FORM = "its inputs have another form in b, such as another mask"


@final
@dataclass(slots=True)
class ModuleCall:
    """A call of a module: copies of what it got and of what it returned."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None


Calls = dict[tuple[str, str], ModuleCall]  # by path and number, in the order in which they end


class ModelRun(NamedTuple):
    """A model in eval mode on the inputs."""

    model: nn.Module  # the model, or its copy in float64
    calls: Calls  # the calls of its modules

    @property
    def side(self) -> Side:
        """The outputs, in firing order, as `hl.compare` takes them."""
        entries = [
            Entry(path, number, partial(getattr, entry, "output"))
            for (path, number), entry in self.calls.items()
        ]
        return Side("recording", entries)


@final
@dataclass(slots=True)
class _LocalRun:
    """The outputs of a module of b on what its counterpart in a got."""

    path: str  # its path in b
    why: str  # why there are none; empty if there are
    pairs: dict[
        str, MeasuredPair
    ]  # how far its tensors are from those of a, by the site of their row
    floor: Floor  # what rounding explains of them


def shadow(a: nn.Module, b: nn.Module, inputs: Inputs, *, names: Names | None = None) -> Comparison:
    """Run two models, and each module of b again on the inputs of its counterpart in a.

        >>> model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))
        >>> port = nn.Sequential(nn.Linear(8, 8), nn.GELU("tanh"), nn.Linear(8, 2))
        >>> _ = port.load_state_dict(model.state_dict())
        >>> comparison = hl.shadow(model, port, torch.randn(4, 8))
        >>> comparison.suspect, [row.site for row in comparison if row.verdict == "differs"]
        ('1', ['1', '(root)'])

    The error of a module on its counterpart's inputs is its *local* error: the modules before have
    no part in it. The suspect is the deepest module whose local error is above the floor; without
    one, the first whose output differs.

    Copies of the models run in float64, where they run in it, with parameters and buffers rounded
    to the coarser dtype of the two: so a fault shows that bfloat16 would hide, and what a dtype
    rounds while it runs is left out. A module of b has no local error if it gets inputs of another
    form than in a, such as another mask, or if it does not give its output again on its own inputs.
    Both models run in eval mode, and are left as they were. The inputs and outputs of all modules
    are kept meanwhile.

    Args:
        a: the reference: numbers are relative to it. In `hl.compare`, it is the second argument.
        b: the port.
        inputs: the arguments of both models: a tensor, a tuple of arguments, or a dict of keyword
            arguments.
        names: renames modules of b to those of a, as in `hl.compare`: a function from a path to a
            path, or a dict `{path in b: path in a}`, which also renames what lies below a path.

    Returns:
        The comparison of the modules' outputs, in firing order. A row has `local`, the local error,
        beside `relative`, the error with those of all modules before. Where there is a local
        error, the verdict is its own. `row.site` is the site in a, and `row.other` that in b.

    Raises:
        InputError: a model cannot run on the inputs, or has lazy parameters; the models have no
            path in common; or `names` is invalid.
    """
    require_model(a, "hl.shadow(a, b, inputs)")
    require_model(b, "hl.shadow(a, b, inputs)")
    refuse_function_or_iterator(inputs, "both models")
    refuse_meta_tensors("hl.shadow", a, inputs)
    refuse_meta_tensors("hl.shadow", b, inputs)
    inputs = unwrap_lone_tensor(a, inputs)
    runs, eps, remarks = _run_both_models(a, b, inputs)
    sides = runs[0].side, runs[1].side
    pairing = pair_entries(*sides, names)
    if not any(ours.path and theirs.path for ours, theirs in pairing.pairs):
        keys = [listed([entry.key for entry in side.entries], _MOST_NAMED) for side in sides]
        raise InputError(
            f"a and b must have modules in common, got {keys[0]} and {keys[1]}."
            "\nGive names={'path in b': 'path in a'}, or a function from paths of b to paths of a."
        )
    # A site is called as in a, and its numbers are relative to a.
    pairs = [
        (replace(ours, read=theirs.read), replace(theirs, read=ours.read))
        for ours, theirs in pairing.pairs
    ]
    judge = Judge(None, Pairing(pairs, pairing.only_b, pairing.only_a))
    rows = judge.judge_pairs(*sides)
    with eval_without_side_effects(runs[1].model):
        local = {ours.key: _run_locally(runs, ours, theirs, eps) for ours, theirs in pairing.pairs}
    judged = [_judge_row(row, local[judge.entry_of[row.site].key]) for row in rows]
    alone = {"a": judge.alone["b"], "b": judge.alone["a"]}
    remarks += _find_mode_differences(a, b, pairing.pairs)
    remarks += [*find_unpaired(pairing, alone), *_find_unmeasured(local)]
    entries = [judge.entry_of[row.site] for row in rows]
    paths = [(entry.path, local[entry.key].path) for entry in entries]
    suspect, faults = _find_suspects(judged, paths)
    return Comparison(judged, [*remarks, *faults], suspect)


def _run_locally(runs: list[ModelRun], ours: Entry, theirs: Entry, eps: float) -> _LocalRun:
    """Run a module of b on its counterpart's inputs; where it cannot be run on them, say why."""
    ours_call, own = (
        run.calls[entry.path, entry.rest] for run, entry in zip(runs, (ours, theirs), strict=True)
    )
    n_modules = sum(not any(True for _ in part.children()) for part in own.module.modules())
    unit = eps * math.sqrt(n_modules)
    floor = Floor(*(unit * multiple for multiple in _MULTIPLES))
    # The whole model got the same inputs.
    why, output = (
        ("", own.output) if not ours.path else _run_theirs_on_inputs_of_ours(ours_call, own)
    )
    pairs = [] if why else list(measure_values(output, ours_call.output))
    if ours.path and _exceed_floor(pairs, floor) and not _is_repeatable(own, floor):
        why, pairs = _NO_REPEAT, []
    return _LocalRun(theirs.path, why, {leaf_key(ours, pair.leaf): pair for pair in pairs}, floor)


def _exceed_floor(pairs: list[MeasuredPair], floor: Floor) -> bool:
    gaps = [pair.gap for pair in pairs if pair.gap is not None]
    return any(gap.problem or floor.exceeded_by(gap) for gap in gaps)


def _is_repeatable(own: ModuleCall, floor: Floor) -> bool:
    """Tell whether a module gives its output again on its own inputs."""
    why, output = _run_theirs_on_inputs_of_ours(own, own)
    if why or _leaf_forms(output) != _leaf_forms(own.output):
        return False
    return not _exceed_floor(list(measure_values(output, own.output)), floor)


def _run_theirs_on_inputs_of_ours(ours: ModuleCall, theirs: ModuleCall) -> tuple[str, Any]:
    """Return why a module cannot be run on its counterpart's inputs, or what it returns."""
    given = theirs.args, theirs.kwargs
    fed = _cast_like(given, (ours.args, ours.kwargs))
    if _leaf_forms(fed) != _leaf_forms(given):
        return _OTHER_FORM, None
    args, kwargs = fed
    try:
        return "", theirs.module(*args, **kwargs)
    except Exception as error:  # whatever the user's module raises
        return f"it refuses the inputs of a: {first_line(error)}", None


def _cast_like(given: Any, value: Any) -> Any:
    """Return copies of a value's tensors, the floating ones in the dtypes of another value."""
    dtypes = {leaf: tensor.dtype for leaf, tensor in tree.tensors(given)}
    wanted = {
        id(tensor): dtypes[leaf]
        for leaf, tensor in tree.tensors(value)
        if leaf in dtypes and tensor.is_floating_point() and dtypes[leaf].is_floating_point
    }
    return tree.map_tensors(
        lambda tensor: tensor.to(wanted.get(id(tensor), tensor.dtype), copy=True), value
    )


def _leaf_forms(value: Any) -> list[tuple[str, str]]:
    return [(leaf_text(leaf), describe.in_full(tensor)) for leaf, tensor in tree.tensors(value)]


def _judge_row(row: ComparedSite, local: _LocalRun) -> ComparedSite:
    """Judge a row by its local error, where there is one."""
    pair = local.pairs.get(row.site)
    if pair is None or pair.gap is None or row.verdict == "not comparable":
        return row if row.why and row.relative is None else replace(row, why=local.why)
    own = pair.gap
    verdict: Verdict = "identical"
    if own.problem or local.floor.exceeded_by(own):
        verdict = "differs"
    elif own.differs or row.verdict != "identical":
        verdict = "noise"
    error = math.inf if own.problem else own.relative
    return replace(row, verdict=verdict, local=error, floor=local.floor, why=own.problem)


def _find_suspects(
    rows: list[ComparedSite], paths: list[tuple[str, str]]
) -> tuple[str | None, list[Finding]]:
    """Name the suspects: the deepest modules of b with a local error above the floor.

    Args:
        rows: the rows.
        paths: the path of each in a and in b.

    Returns:
        The path in a of the first, and a finding for each.
    """
    odd = [(row, *pair) for row, pair in zip(rows, paths, strict=True) if row.verdict == "differs"]
    faults = [fault for fault in odd if fault[0].local is not None]
    outer = {path for *_, path in faults}
    deepest = {
        path: (row, other)
        for row, path, other in reversed(faults)
        if not any(_is_within(inner, other) for inner in outer)
    }
    remarks = []
    for path, (row, other) in reversed(deepest.items()):
        name = path_text(path) + f" ({path_text(other)} in b)" * (path != other)
        text = f"{name} computes otherwise: local error {number_text(row.local)}"
        remarks.append(Finding("site", text, row.site))
    if remarks or not odd:
        return next(reversed(deepest), None), remarks
    row, path, _ = odd[0]
    text = f"no module computes otherwise; the first output that differs is {row.site}"
    return path, [Finding("site", text, row.site)]


def _is_within(path: str, outer: str) -> bool:
    return path != outer and (not outer or path.startswith(f"{outer}."))


def _find_mode_differences(
    a: nn.Module, b: nn.Module, pairs: list[tuple[Entry, Entry]]
) -> list[Finding]:
    """Say which modules are in training mode in one model alone."""
    ours, theirs = (
        {node.path: node.module.training for node in module_tree(model).nodes} for model in (a, b)
    )
    odd = [
        path_text(entry.path)
        for entry, other in pairs
        if not entry.rest and ours[entry.path] != theirs[other.path]
    ]
    if not odd:
        return []
    names = listed(odd, _MOST_NAMED)
    text = f"in training mode in one model alone, and run in eval mode in both: {names}"
    return [Finding("model", text, odd[0])]


def _find_unmeasured(local: dict[str, _LocalRun]) -> list[Finding]:
    """Say which modules have no local error."""
    reasons: dict[str, list[str]] = {}
    for key, entry in local.items():
        if entry.why:
            reasons.setdefault(entry.why, []).append(key)
    return [
        Finding("inputs", f"no local error at {listed(sites, _MOST_NAMED)}: {why}", sites[0])
        for why, sites in reasons.items()
    ]


# -- both models ----------------------------------------------------------------------------------


def _run_both_models(
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
    dtypes = [_computed_dtypes(model) for model in (a, b)]
    coarser = max([*dtypes[0], *dtypes[1]], key=lambda dtype: eps_of([dtype]))
    remarks = []
    if coarser in _WIDENED:
        try:
            copies = [cast_model(copy.deepcopy(model), coarser) for model in (a, b)]
            wide = [cast_model(model, torch.float64) for model in copies]
            runs = [
                ModelRun(model, _run_and_record_calls(model, _cast_copies(inputs, torch.float64)))
                for model in wide
            ]
        except Exception as error:  # a kernel without float64, a forward that is bound to a model
            name = name_without_torch(coarser)
            text = f"float64 is not tried, so the floors are of {name}: {first_line(error)}"
            remarks.append(Finding("floor", text))
        else:
            return runs, _EPS_OF_FLOAT64, remarks
    runs = []
    for name, model, (first, *_) in zip("ab", (a, b), dtypes, strict=True):
        try:
            runs.append(ModelRun(model, _run_and_record_calls(model, _cast_copies(inputs, first))))
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
    return runs, eps_of([coarser]), remarks


def _computed_dtypes(model: nn.Module) -> list[torch.dtype]:
    """Return the floating dtypes of the parameters in their order, the input's presumably first.

    Weights in float8 are only stored so: torch adds and multiplies in another dtype.
    """
    dtypes = dict.fromkeys(parameter.dtype for parameter in model.parameters())
    floating = [dtype for dtype in dtypes if dtype.is_floating_point and dtype.itemsize > 1]
    return floating or [torch.float32]


def _cast_copies(value: Any, dtype: torch.dtype) -> Any:
    """Return copies of a value's tensors, the floating ones in a dtype."""
    return tree.map_tensors(
        lambda tensor: tensor.detach().to(dtype_after_cast(tensor, dtype), copy=True), value
    )


def _run_and_record_calls(model: nn.Module, inputs: Any) -> Calls:
    """Run a model in eval mode, and return the calls of its modules."""
    calls: Calls = {}
    running: list[ModuleCall] = []
    counts: Counter[str] = Counter()
    paths = {id(node.module): node.path for node in module_tree(model).nodes}

    def copy_of(tensor: Tensor) -> Tensor:
        return tensor.detach().clone()

    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
        running.append(ModuleCall(module, *tree.map_tensors(copy_of, (args, kwargs))))

    def end(module: nn.Module, args: Any, output: Any) -> None:
        entry = running.pop()
        while entry.module is not module:  # a module inside raised, which this one caught
            entry = running.pop()
        entry.output = tree.map_tensors(copy_of, output)
        path = paths[id(module)]
        calls[path, f"#{counts[path]}" * (counts[path] > 0)] = entry
        counts[path] += 1

    line = attach(model)
    line.options.quiet = line.options.lenient = True  # a port may leave modules out
    with eval_without_side_effects(model), line:
        line.forward_pre(lambda path, module: True, begin, with_kwargs=True)
        line.forward(lambda path, module: True, end)
        call_model(model, inputs)
    return calls
