"""Say what differs before any layer is blamed: inputs, models, versions, names, shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from hookline.display.text import listed, plural
from hookline.engine import path_text, paths_above
from hookline.engine.model_fingerprint import RecordedModel
from hookline.engine.run_settings import Settings, ignores_mode
from hookline.findings import Finding
from hookline.verbs.compare.comparison import ComparedSite
from hookline.verbs.compare.noise_floor import FINE
from hookline.verbs.compare.pair_by_name import Pairing
from hookline.verbs.compare.read_sides import Side
from hookline.verbs.compare.tf32 import IN_TF32
from hookline.verbs.compare.token_alignment import Alignment

_MOST_NAMED = 3
_NOT_RECORDED = (
    "the inputs of the model were not recorded in both, so they may differ: record them with"
    ' hl.record(model, ["**", "(root):input"])'
)


def find_input_differences(inputs: list[ComparedSite]) -> list[Finding]:
    """Say which inputs of the model differ.

    Args:
        inputs: the rows of the model's inputs; empty if they were not recorded in both.
    """
    if not inputs:
        return [Finding("inputs", _NOT_RECORDED, "(root):input")]
    odd = [row for row in inputs if row.verdict in ("differs", "not comparable")]
    return [
        Finding("inputs", f"the inputs differ: {row.site} ({row.why})", row.site) for row in odd
    ]


def find_coarse_floors(eps: float, rows: list[ComparedSite], flags: Sequence[str]) -> list[Finding]:
    """Say that a coarse dtype, or TF32, hides small faults.

    Args:
        eps: the coarsest eps of all values.
        rows: the rows.
        flags: the flags of torch that had a GPU multiply in TF32, if that made the floors.
    """
    if eps < FINE:
        return []
    largest = max(row.floor.relative for row in rows)
    text = (
        f"differences below {largest:.1g} are noise in these dtypes: to see smaller ones, run both"
        " in float32 or float64, or measure the noise and give floor="
    )
    if flags:
        text = (
            f"differences below {largest:.1g} are noise, because {IN_TF32}: to see smaller ones,"
            f" set {' and '.join(flags)} = False"
        )
    elif not largest:  # a measured floor of zero
        text = (
            f"these dtypes round away what is below {eps / 2:.1g} of a value: to see it, run both"
            " in float32 or float64, as hl.shadow(a, b, inputs) does"
        )
    return [Finding("floor", text)]


def find_token_remarks(
    alignment: Alignment | None, why: str, partial: Mapping[str, int], *, does_differ: bool
) -> list[Finding]:
    """Say what a reader should know of the alignment, and whether positions explain a difference.

    Args:
        alignment: the alignment; None without one.
        why: the reason why there is none; empty if none is needed.
        partial: by site, for how many tokens or rows one side has no value.
        does_differ: whether a value differs.
    """
    if alignment is None:
        return [Finding("tokens", why)] if why else []
    remarks = []
    if alignment.positions and does_differ:
        text = f"the inputs differ: {alignment.positions}"
        remarks.append(Finding("inputs", text, "(root):input"))
    if partial:
        sites = listed([f"{site} ({number})" for site, number in partial.items()], _MOST_NAMED)
        text = f"tokens or rows with a value on one side alone, which were not compared: {sites}"
        remarks.append(Finding("tokens", text, next(iter(partial))))
    return [*remarks, *(Finding("tokens", note) for note in alignment.notes)]


def find_setting_differences(a: Side, b: Side) -> tuple[list[Finding], list[Finding]]:
    """Say which settings of torch differ between two runs.

    Returns:
        The settings that change the numbers of any model; and those that few models feel.
    """
    if not a.settings or not b.settings:
        return [], []
    pairs = list(zip(a.settings, b.settings, strict=False))
    ours, theirs = next((pair for pair in pairs if pair[0] != pair[1]), pairs[0])
    kinds = {**b.modules, **a.modules}
    texts = [*_differing_modes(ours, theirs, kinds), *_differing_torch_settings(ours, theirs)]
    modes = [Finding("modes", text) for text in texts]
    rest = []
    if ours.grad != theirs.grad:
        rest.append(Finding("modes", f"gradients were {ours.grad} in a, and {theirs.grad} in b"))
    if ours.seed != theirs.seed:
        rest.append(Finding("seeds", f"torch's seed was {ours.seed} in a, and {theirs.seed} in b"))
    return modes, rest


def _differing_modes(a: Settings, b: Settings, kinds: Mapping[str, str]) -> Iterator[str]:
    """Say which modules were in training mode in one run alone, and compute otherwise in it."""
    holders = {above for path in kinds for above in paths_above(path)}
    odd = [
        path
        for path in sorted({*a.training, *b.training})
        if a.is_training(path) != b.is_training(path)
        and not (path and path not in holders and ignores_mode(kinds.get(path, "")))
    ]
    for is_training, label, other in ((True, "a", "b"), (False, "b", "a")):
        mine = [path for path in odd if a.is_training(path) is is_training]
        if mine and "" in mine:
            yield f"{label} ran in training mode, {other} in eval mode"
        elif mine:
            names = listed([path_text(path) for path in mine], _MOST_NAMED)
            yield f"in training mode in {label}, and in eval mode in {other}: {names}"


def _differing_torch_settings(a: Settings, b: Settings) -> Iterator[str]:
    """Say which settings of torch differ that change numbers."""
    if a.autocast != b.autocast:
        ours, theirs = _autocast_text(a.autocast), _autocast_text(b.autocast)
        yield f"autocast was {ours} in a, and {theirs} in b"
    for name, ours, theirs in _differing_values(a.precision, b.precision, "unknown"):
        yield f"the precision of {name} was {ours} in a, and {theirs} in b"
    if a.deterministic != b.deterministic:
        label, other = "ab" if a.deterministic else "ba"
        yield f"deterministic algorithms were asked for in {label}, and not in {other}"


def _differing_values(
    a: Mapping[str, str], b: Mapping[str, str], missing: str
) -> Iterator[tuple[str, str, str]]:
    """Yield the names whose values differ, with both; `missing` stands for none."""
    for name in {**a, **b}:
        ours, theirs = a.get(name, missing), b.get(name, missing)
        if ours != theirs:
            yield name, ours, theirs


def _autocast_text(dtypes: Mapping[str, str]) -> str:
    return " and ".join(f"{dtype} on {device}" for device, dtype in dtypes.items()) or "off"


def find_unpaired(pairing: Pairing, alone: dict[str, list[str]]) -> list[Finding]:
    """Say which values are on one side alone.

    Args:
        pairing: the pairs, and the values without one.
        alone: the values of one side alone, and the tensors in one value of a pair, by side.
    """
    remarks = []
    for label, other, entries in (("a", "b", pairing.only_a), ("b", "a", pairing.only_b)):
        keys = alone[label]
        if not keys:
            continue
        text = f"{plural(len(keys), 'value')} only in {label}: {listed(keys, _MOST_NAMED)}"
        if entries and all(entry.kind == "gradient" for entry in entries):
            text += (
                f"; {other} has no gradients there: record both with"
                ' ports=("output", "grad_output"), and run backward'
            )
        remarks.append(Finding("names", text, keys[0]))
    return remarks


def find_model_differences(side_a: Side, side_b: Side, *, does_differ: bool) -> list[Finding]:
    """Say what differs between two models: class, structure, weights, code, versions.

    Of one model that is alive no weights are read.
    """
    if side_a.living_model is not None and side_a.living_model is side_b.living_model:
        return []
    lost = [label for label, side in (("a", side_a), ("b", side_b)) if side.has_lost_model]
    if lost and does_differ:
        whose = f"the model{'s' * (len(lost) - 1)} of {' and '.join(lost)}"
        are = "no longer exists" if len(lost) == 1 else "no longer exist"
        text = f"{whose} {are}, so structure and weights were not compared: keep the model"
        return [Finding("model", f"{text} until then, or save the recording while it is there")]
    a, b = ([model for model in side.identify() if model is not None] for side in (side_a, side_b))
    if len(a) == len(b):
        return _compare_rank_models(a, b)
    are_stages = any(len({model.structure for model in models}) > 1 for models in (a, b))
    if not a or not b or are_stages:  # of a pipeline, whose ranks have other modules
        return []
    of_parts = list(_weights_not_compared("a", a)) + list(_weights_not_compared("b", b))
    known = replace(a[0], weights=b[0].weights) if of_parts else a[0]
    return [*_model_differences(known, b[0]), *(of_parts if does_differ else ())]


def _compare_rank_models(a: list[RecordedModel], b: list[RecordedModel]) -> list[Finding]:
    """Compare the model of each rank with that of the same rank; what comes first is said."""
    of_ranks = [list(_model_differences(*pair)) for pair in zip(a, b, strict=True)]
    rank = next((rank for rank, findings in enumerate(of_ranks) if findings), None)
    if rank is None:
        return []
    if all(findings == of_ranks[rank] for findings in of_ranks):
        return of_ranks[rank]
    return [replace(finding, text=f"on rank {rank}: {finding.text}") for finding in of_ranks[rank]]


def _weights_not_compared(name: str, models: list[RecordedModel]) -> Iterator[Finding]:
    """Say that the weights of several ranks were not compared, if each has its own."""
    odd = next((n for n, model in enumerate(models) if model.weights != models[0].weights), None)
    if any(model.sharded for model in models):
        yield Finding(
            "model",
            f"each of {len(models)} ranks has a part of the weights in {name}, so they were not"
            " compared: compare state dicts, of torch's get_model_state_dict(full_state_dict=True)",
        )
    elif odd is not None:
        text = f"ranks 0 and {odd} of {name} have different weights: under data parallelism they"
        yield Finding("model", f"{text} must be equal; in parts, compare whole state dicts")


def _structure_hint(a: RecordedModel, b: RecordedModel) -> str:
    """Name the first module that is of another class or, if none is, that has other arguments."""
    ours, theirs = (
        {path: " ".join(text.split()) for path, text in model.modules.items()} for model in (a, b)
    )
    class_a, class_b = (
        {path: text.partition("(")[0] for path, text in side.items()} for side in (ours, theirs)
    )
    odd = [*_differing_values(class_a, class_b, "missing")] or [
        *_differing_values(ours, theirs, "missing")
    ]
    if not ours or not theirs or not odd:
        return "compare what print(model) says of both"
    path, mine, yours = odd[0]
    more = f" (and {len(odd) - 1} more)" * (len(odd) > 1)
    return f"{path_text(path)} is {mine} in a, and {yours} in b{more}"


def _model_differences(a: RecordedModel, b: RecordedModel) -> Iterator[Finding]:
    if a.type != b.type:
        yield Finding("model", f"the model is a {a.type} in a, and a {b.type} in b")
    else:
        parts = ("structure", "weights", "code")
        names = [name for name in parts if getattr(a, name) != getattr(b, name)]
        if names:
            are = "differ" if len(names) > 1 or names[0] == "weights" else "differs"
            hints = [_structure_hint(a, b)] * ("structure" in names)
            hints += ["compare two state dicts to see which"] * ("weights" in names)
            advice = f": {', and '.join(hints)}" if hints else ""
            yield Finding("model", f"{' and '.join(names)} of the model {are}{advice}")
    versions = [
        f"{name} {ours} and {theirs}"
        for name, ours, theirs in _differing_values(a.versions, b.versions, "none")
    ]
    if versions:
        yield Finding("versions", f"versions differ: {', '.join(versions)}")
    if a.device and b.device and a.device != b.device:
        yield Finding("device", f"the model was on {a.device} in a, on {b.device} in b")
    flags = [
        f"{name} {a.flags[name]} and {b.flags[name]}"
        for name in a.flags.keys() & b.flags.keys() - {"seed"}  # the seed is told by pass
        if a.flags[name] != b.flags[name]
    ]
    if flags:
        yield Finding("flags", f"flags differ: {', '.join(sorted(flags))}")


def find_dtype_and_shape_differences(rows: list[ComparedSite]) -> list[Finding]:
    """Say where dtypes differ, and what could not be compared."""
    remarks = []
    dtypes: dict[tuple[str, str], list[str]] = {}
    reasons: dict[str, list[ComparedSite]] = {}
    for row in rows:
        pair = row.form.rpartition(" ")[2], row.other_form.rpartition(" ")[2]
        if row.verdict == "not comparable":
            kind = "other shapes" if row.why.startswith("shapes") else row.why
            reasons.setdefault(kind, []).append(row)
        elif pair[0] != pair[1]:
            dtypes.setdefault(pair, []).append(row.site)
    for pair, sites in dtypes.items():
        text = f"{plural(len(sites), 'value')} {pair[0]} in a and {pair[1]} in b"
        remarks.append(Finding("dtypes", text, sites[0]))
    for reason, odd in reasons.items():
        names = [
            f"{row.site} ({row.why.removeprefix('shapes ')})" * (reason == "other shapes")
            or row.site
            for row in odd
        ]
        text = f"{plural(len(odd), 'value')} not comparable, {reason}: {listed(names, _MOST_NAMED)}"
        remarks.append(Finding("values", text, odd[0].site))
    return remarks
