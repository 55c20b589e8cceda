"""Give each module of one model what its counterpart in another model got."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from hookline.display.text import first_line, listed, plural
from hookline.engine import path_text, require_model
from hookline.engine.pytree import tree
from hookline.engine.pytree.describe import leaf_text
from hookline.errors import InputError
from hookline.findings import Finding
from hookline.statistics.difference import Difference
from hookline.verbs.attach.raw_line import attach
from hookline.verbs.compare.comparison import ComparedSite, Comparison, number_text
from hookline.verbs.compare.floor import Floor, eps_of, floor_of
from hookline.verbs.compare.measure import Measured, measured
from hookline.verbs.shared.rerun import eval_without_side_effects
from hookline.verbs.shared.run_model import Inputs, call

# The floor of a local error, in eps times the square root of the number of modules inside. Clean
# modules of twelve models were off by at most 2.4.
_MULTIPLES = (4.0, 4.0, 32.0, 64.0)
# Also in float64, norms, softmax and rotary tables are computed in float32: up to 1e-7.
_EPS_OF_FLOAT64 = 2.0**-22
_MOST_NAMED = 3
_OTHER_FORM = "its inputs have another form in b, such as another mask"


@final
@dataclass(slots=True)
class _Call:
    """A call of a module: copies of what it got and of what it returned."""

    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None


_Calls = dict[tuple[str, int], _Call]  # by path and number, in the order in which they end


class _Floors(NamedTuple):
    """The eps of outputs and of local errors."""

    eps: float
    local_eps: float

    def local(self, n_modules: int) -> Floor:
        """Return the floor of the local error of a module with so many modules inside."""
        unit = self.local_eps * math.sqrt(n_modules)
        return Floor(*(unit * multiple for multiple in _MULTIPLES))


class _Runs(NamedTuple):
    """The calls of two models on one input, which ran in one dtype each.

    Args:
        b: the second model, or its copy in float64.
        ours: the calls of the first model.
        theirs: the calls of the second model.
        floor: the noise floors of their dtype.
        remarks: what is said of the dtype.
    """

    b: nn.Module
    ours: _Calls
    theirs: _Calls
    floor: _Floors
    remarks: list[Finding]


def shadow(a: nn.Module, b: nn.Module, inputs: Inputs) -> Comparison:
    """Run two models, and each module of b again on what the same module of a got.

        >>> model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))
        >>> port = nn.Sequential(nn.Linear(8, 8), nn.GELU("tanh"), nn.Linear(8, 2))
        >>> _ = port.load_state_dict(model.state_dict())
        >>> comparison = hl.shadow(model, port, torch.randn(4, 8))
        >>> comparison.suspect, [row.site for row in comparison if row.verdict == "differs"]
        ('1', ['1', '(root)'])

    The error of a module on its counterpart's inputs is its *local* error: the modules before have
    no part in it. The suspect is the deepest module whose local error is above the floor; without
    one, the first whose output differs.

    Models in float32 are copied and compared in float64, where they run in it. A module of b that
    gets inputs of another form than in a, such as another mask, has no local error. Both models run
    in eval mode, and are left as they were. The inputs and outputs of all modules are kept
    meanwhile.

    Args:
        a: the model to compare with; numbers are relative to it.
        b: its port, with the same paths of modules.
        inputs: the arguments of both models: a tensor, a tuple of arguments, or a dict of keyword
            arguments.

    Returns:
        The comparison of the modules' outputs, in firing order. A row has `local`, the local error,
        beside `relative`, the error with those of all modules before. Where there is a local
        error, the verdict is its own.

    Raises:
        InputError: the models have no path in common, or a model has lazy parameters.
    """
    require_model(a, "hl.shadow(a, b, inputs)")
    require_model(b, "hl.shadow(a, b, inputs)")
    if callable(inputs) and not isinstance(inputs, Tensor):
        raise InputError(
            f"inputs must be the arguments of both models, got a {type(inputs).__name__}."
            "\nGive a tensor, a tuple of arguments or a dict of keyword arguments."
        )
    runs = _run(a, b, inputs)
    runs.remarks.extend(_of_modes(a, b))
    common = [key for key in runs.ours if key in runs.theirs]
    if not any(path for path, _ in common):
        sides = runs.ours, runs.theirs
        names = [listed([path_text(path) for path, _ in side], _MOST_NAMED) for side in sides]
        raise InputError(
            f"a and b must have modules in common, got {names[0]} and {names[1]}."
            "\nGive a port whose modules have the same paths; or record both, and write"
            " hl.compare(run_b, run_a, names=...)."
        )
    with eval_without_side_effects(runs.b):
        modules = dict(runs.b.named_modules())
        rows = [(key[0], row) for key in common for row in _rows(runs, key, modules[key[0]])]
    return _comparison(runs, rows)


# -- running -------------------------------------------------------------------------------------


def _run(a: nn.Module, b: nn.Module, inputs: Any) -> _Runs:
    """Run both models, in float64 if both are in float32 and run in it."""
    dtypes = _dtype(a), _dtype(b)
    remarks = []
    if dtypes == (torch.float32, torch.float32):
        try:
            wide = [copy.deepcopy(model).double() for model in (a, b)]
            ours, theirs = (_calls(model, _cast(inputs, torch.float64)) for model in wide)
        except Exception as error:  # a kernel without float64, a forward that is bound to a model
            text = f"float64 is not tried, so the floors are of float32: {first_line(error)}"
            remarks.append(Finding("floor", text))
        else:
            floors = _Floors(eps_of([torch.float64]), _EPS_OF_FLOAT64)
            return _Runs(wide[1], ours, theirs, floors, remarks)
    ours, theirs = (_calls(model, _cast(inputs, _dtype(model))) for model in (a, b))
    return _Runs(b, ours, theirs, _Floors(eps_of(dtypes), eps_of(dtypes)), remarks)


def _dtype(model: nn.Module) -> torch.dtype:
    """Return the coarsest floating dtype of the parameters."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    floating = [dtype for dtype in dtypes if dtype.is_floating_point]
    return max(floating, key=lambda dtype: eps_of([dtype]), default=torch.float32)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Return copies of a value's tensors, the floating ones in a dtype."""

    def cast(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        return tensor.to(dtype, copy=True) if tensor.is_floating_point() else tensor.clone()

    return tree.map_tensors(cast, value)


def _calls(model: nn.Module, inputs: Any) -> _Calls:
    """Run a model in eval mode, and return the calls of its modules."""
    calls: _Calls = {}
    running: list[_Call] = []
    counts: Counter[str] = Counter()
    paths = {id(module): path for path, module in model.named_modules()}

    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
        running.append(_Call(paths[id(module)], *tree.map_tensors(_clone, (args, kwargs))))

    def end(_: nn.Module, args: Any, output: Any) -> None:
        entry = running.pop()
        entry.output = tree.map_tensors(_clone, output)
        calls[entry.path, counts[entry.path]] = entry
        counts[entry.path] += 1

    line = attach(model)
    line.options.quiet = line.options.lenient = True  # a port may leave modules out
    with eval_without_side_effects(model), line:
        line.forward_pre(_is_any, begin, with_kwargs=True)
        line.forward(_is_any, end)
        call(model, inputs)
    return calls


def _is_any(path: str, module: nn.Module) -> bool:
    return True


def _clone(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


# -- errors --------------------------------------------------------------------------------------


def _rows(runs: _Runs, key: tuple[str, int], module: nn.Module) -> Iterator[ComparedSite]:
    """Yield a row for each tensor in the output of a call."""
    ours, theirs = runs.ours[key], runs.theirs[key]
    pairs = list(measured(theirs.output, ours.output))
    # The whole model got the same inputs.
    why, local = ("", pairs) if not key[0] else _local(ours, theirs, module)
    by_leaf = {pair.leaf: pair for pair in local}
    n_modules = sum(not any(True for _ in inner.children()) for inner in module.modules())
    floors = runs.floor.local(n_modules), floor_of(runs.floor.eps, "output")
    for pair in pairs:
        if pair.alone_in:
            continue
        site = path_text(key[0]) + f":output{leaf_text(pair.leaf)}" * bool(pair.leaf)
        site += f"#{key[1]}" * (key[1] > 0)
        row = ComparedSite(
            site, site, "not comparable", why=pair.why or why,
            form=pair.forms[0], other_form=pair.forms[1],
        )  # fmt: skip
        yield _judged(row, pair.gap, by_leaf.get(pair.leaf), floors)


def _local(ours: _Call, theirs: _Call, module: nn.Module) -> tuple[str, list[Measured]]:
    """Run a module on its counterpart's inputs; where it cannot be run on them, say why."""
    given = theirs.args, theirs.kwargs
    fed = _in_dtypes_of(given, (ours.args, ours.kwargs))
    if _form(fed) != _form(given):
        return _OTHER_FORM, []
    args, kwargs = fed
    try:
        output = module(*args, **kwargs)
    except Exception as error:  # whatever the user's module raises
        return f"it refuses the inputs of a: {first_line(error)}", []
    return "", list(measured(output, ours.output))


def _in_dtypes_of(given: Any, value: Any) -> Any:
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


def _form(value: Any) -> list[tuple[str, torch.dtype, torch.Size]]:
    return [(leaf_text(leaf), tensor.dtype, tensor.shape) for leaf, tensor in tree.tensors(value)]


def _judged(
    row: ComparedSite, gap: Difference | None, local: Measured | None, floors: tuple[Floor, Floor]
) -> ComparedSite:
    """Judge a row by its local error, or else by the error with those of the modules before."""
    if gap is None:
        return row
    if not gap.problem:
        row = replace(
            row, relative=gap.relative, norm_ratio=gap.norm_ratio, worst_row=gap.worst_row,
            worst_element=gap.worst_element, row=gap.row, element=gap.element,
        )  # fmt: skip
    own, floor = gap, floors[1]
    if local is not None and local.gap is not None:
        own, floor = local.gap, floors[0]
        row = replace(row, local=math.inf if own.problem else own.relative)
    row = replace(row, floor=floor, why=own.problem or row.why)
    if own.problem or floor.exceeded_by(own):
        return replace(row, verdict="differs")
    return replace(row, verdict="noise" if own.differs or gap.differs else "identical")


def _comparison(runs: _Runs, by_path: list[tuple[str, ComparedSite]]) -> Comparison:
    """Name the suspects: the deepest modules with a local error above the floor."""
    rows = [row for _, row in by_path]
    odd = [(path, row) for path, row in by_path if row.verdict == "differs"]
    faults = [(path, row) for path, row in odd if row.local is not None]
    paths = {path for path, _ in faults}
    deepest = [
        (path, row) for path, row in faults if not any(_is_within(other, path) for other in paths)
    ]
    remarks = [*runs.remarks, *_of_missing(runs), *_of_forms(rows)]
    for path in dict.fromkeys(path for path, _ in deepest):
        row = next(row for other, row in deepest if other == path)
        text = f"{path_text(path)} computes otherwise: local error {number_text(row.local)}"
        remarks.append(Finding("site", text, row.site))
    suspect = deepest[0][0] if deepest else None
    if suspect is None and odd:
        suspect, row = odd[0]
        text = f"no module computes otherwise; the first output that differs is {row.site}"
        remarks.append(Finding("site", text, row.site))
    return Comparison(rows, remarks, suspect)


def _is_within(path: str, outer: str) -> bool:
    return path != outer and (not outer or path.startswith(f"{outer}."))


def _of_modes(a: nn.Module, b: nn.Module) -> list[Finding]:
    """Say which modules are in training mode in one model alone."""
    modes = {path: module.training for path, module in a.named_modules()}
    odd = [
        path_text(path)
        for path, module in b.named_modules()
        if module.training != modes.get(path, module.training)
    ]
    if not odd:
        return []
    names = listed(odd, _MOST_NAMED)
    text = f"in training mode in one model alone, and run in eval mode in both: {names}"
    return [Finding("model", text, odd[0])]


def _of_missing(runs: _Runs) -> list[Finding]:
    """Say which modules ran in one model alone."""
    remarks = []
    for label, ours, theirs in (("a", runs.ours, runs.theirs), ("b", runs.theirs, runs.ours)):
        paths = [path_text(path) for path, number in ours if (path, number) not in theirs]
        if paths:
            text = f"{plural(len(paths), 'call')} only in {label}: {listed(paths, _MOST_NAMED)}"
            remarks.append(Finding("names", text, paths[0]))
    return remarks


def _of_forms(rows: list[ComparedSite]) -> list[Finding]:
    """Say which modules have no local error."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.local is None and row.why:
            reasons.setdefault(row.why, []).append(row.site)
    return [
        Finding("inputs", f"no local error at {listed(sites, _MOST_NAMED)}: {why}", sites[0])
        for why, sites in reasons.items()
    ]
