"""Judge pairs of values in firing order, each by its noise floor, and name the suspect."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from hookline.display.text import plural
from hookline.engine import path_text
from hookline.engine.pytree.describe import leaf_text
from hookline.engine.pytree.tree import Leaf
from hookline.engine.run_settings import ROUNDING
from hookline.findings import Finding
from hookline.statistics.difference import Difference
from hookline.verbs.compare.compare_by_token import (
    measure_by_token,
    measure_inputs,
    measure_parameters,
    observe_shapes,
)
from hookline.verbs.compare.comparison import (
    ComparedSite,
    Comparison,
    Verdict,
    number_text,
    ratio_text,
)
from hookline.verbs.compare.measure import MeasuredPair, arrays_in, measure_values
from hookline.verbs.compare.noise_floor import Floor, eps_of, estimate_floor, measured_floor
from hookline.verbs.compare.pair_by_name import Pairing
from hookline.verbs.compare.prefetch import Values, prefetch_pairs
from hookline.verbs.compare.read_sides import Entry, Side
from hookline.verbs.compare.tf32 import IN_TF32, tf32_flags_of
from hookline.verbs.compare.token_alignment import Alignment
from hookline.verbs.compare.unjoined_ranks import compare_by_rank, find_unjoined_pair


@final
class Judge:
    """Measures pairs in firing order, and judges each by its noise floor.

    Args:
        floor: the measured floor, or None.
        pairing: the pairs, in firing order, and the values without one.
        alignment: where the common tokens lie; None if values are compared as they are.
    """

    def __init__(
        self, floor: Comparison | None, pairing: Pairing, alignment: Alignment | None = None
    ) -> None:
        self._floors = {row.site: row for row in floor.rows} if floor is not None else {}
        self._pairs = pairing.pairs
        self._alignment = alignment
        self.eps: float = 0.0  # the coarsest on the way, since its errors travel on
        self._stored_eps: float = 0.0  # of the dtypes alone, without TF32
        self._flags: tuple[list[str], ...] = ()  # what had a GPU multiply in TF32, by side
        self.coarsest: float = 0.0  # also of values with a measured floor
        self.entry_of: dict[str, Entry] = {}  # by the site of a row
        # The values of one side alone, and tensors in one value of a pair.
        self.alone = {
            "a": [entry.key for entry in pairing.only_a],
            "b": [entry.key for entry in pairing.only_b],
        }
        self.partial: dict[str, int] = {}  # for how many tokens one of a pair has no value
        # Choices among scores that noise put in another order.
        self.flipped: list[ComparedSite] = []
        self._has_elements = False

    def judge_pairs(self, a: Side, b: Side) -> list[ComparedSite]:
        """Return the rows of all pairs, and close files from time to time.

        Where no pair has an element, as of an empty batch, nothing is comparable.
        """
        if self._alignment is not None:
            observe_shapes(self._alignment, self._pairs)
        self._flags = tf32_flags_of(a), tf32_flags_of(b)
        rows: list[ComparedSite] = []
        for (ours, theirs), values in prefetch_pairs(self._pairs, a, b):
            of_pair = self._judge_pair(ours, theirs, values)
            del values
            self.entry_of |= {row.site: ours for row in of_pair}
            rows += of_pair
        if self._has_elements:
            return rows
        return [
            ComparedSite(
                row.site, row.other, "not comparable", form=row.form, other_form=row.other_form,
                why="no elements",
            )
            if row.verdict == "identical" else row
            for row in rows
        ]  # fmt: skip

    def _judge_pair(self, ours: Entry, theirs: Entry, values: Values | None) -> list[ComparedSite]:
        incomparable = partial(ComparedSite, ours.key, theirs.key, "not comparable")
        if values is None:
            return [incomparable(why="overwritten in place after recording; record with copy=True")]
        pieces = ours.part(), theirs.part()
        if pieces[0] != pieces[1]:
            return [incomparable(why=_dtensor_pieces_text(*pieces))]
        parts, judged = find_unjoined_pair(values), partial(self._judge_leaves, ours, theirs)
        if parts is None:
            rows = list(judged(values).values())
        else:
            rows = compare_by_rank(parts, judged, incomparable(form="parts", other_form="parts"))
            for row in rows:  # each was compared at the tokens of some ranks alone
                self.partial.pop(row.site, None)
        self.flipped += [row for row in rows if row.why.endswith(_FLIPPED)]
        return rows

    def _judge_leaves(self, ours: Entry, theirs: Entry, values: Values) -> dict[Leaf, ComparedSite]:
        """Return the row of each pair of tensors."""
        rows: dict[Leaf, ComparedSite] = {}
        for pair in self._measure(ours, values):
            site = leaf_key(ours, pair.leaf)
            if not pair.alone_in or ours.is_input:
                rows[pair.leaf] = self._judge_tensor(pair, ours, theirs)
                self.partial |= {site: pair.n_alone} if pair.n_alone else {}
            elif site not in self.alone[pair.alone_in]:
                self.alone[pair.alone_in].append(site)
        noisy = [leaf for leaf, row in rows.items() if row.verdict == "noise"]
        for leaf, row in rows.items():
            is_odd = row.verdict == "differs" and bool(noisy)
            if is_odd and is_flipped_by_noise(*values, leaf, noisy):
                rows[leaf] = replace(row, verdict="noise", why=f"{row.why}: {_FLIPPED}")
        return rows

    def _measure(self, entry: Entry, values: Values) -> Iterator[MeasuredPair]:
        if self._alignment is None:
            return measure_values(*values)
        if entry.port == "grad":
            return measure_parameters(self._alignment, *values)
        by_token = measure_inputs if entry.is_input else measure_by_token
        return by_token(self._alignment, *values)

    def _judge_tensor(self, pair: MeasuredPair, ours: Entry, theirs: Entry) -> ComparedSite:
        site, gap = leaf_key(ours, pair.leaf), pair.gap
        row = partial(
            ComparedSite, site, leaf_key(theirs, pair.leaf), form=pair.forms[0],
            other_form=pair.forms[1],
        )  # fmt: skip
        entry = theirs if theirs.kind == "stored" else ours
        floor = self._floor_of_pair(site, pair, entry, max(ours.n_modules, theirs.n_modules))
        if gap is None:
            return row("not comparable", why=pair.why)
        self._has_elements |= pair.n_elements > 0
        if gap.problem:
            return row("differs", why=gap.problem, floor=floor)
        exceeded = floor.exceeded_by(gap)
        verdict: Verdict = "differs" if exceeded else "noise" if gap.differs else "identical"
        why = _exceeded_text(gap, exceeded, is_exact=not eps_of(pair.dtypes)) if gap.differs else ""
        if verdict == "noise" and self.eps > self._stored_eps:
            depth = max(ours.n_modules, theirs.n_modules)
            exceeded = estimate_floor(self._stored_eps, entry.kind, depth).exceeded_by(gap)
            why = f"{_exceeded_text(gap, exceeded, is_exact=False)}: {IN_TF32}" if exceeded else ""
        return row(
            verdict, relative=gap.relative, norm_ratio=gap.norm_ratio, worst_row=gap.worst_row,
            worst_element=gap.worst_element, row=gap.row, element=gap.element, floor=floor, why=why,
        )  # fmt: skip

    def _floor_of_pair(self, site: str, pair: MeasuredPair, entry: Entry, n_modules: int) -> Floor:
        eps = eps_of(pair.dtypes)
        if not eps:  # integers have no noise
            return Floor()
        if entry.kind == "output":
            self.coarsest = max(self.coarsest, eps)
        known = self._floors.get(site)
        if known is not None and known.relative is not None and known.norm_ratio is not None:
            worst = known.worst_row or 0.0, known.worst_element or 0.0
            return measured_floor(Difference(known.relative, known.norm_ratio, *worst))
        if entry.kind == "stored" and not entry.is_input:
            return estimate_floor(eps, "stored")
        self._stored_eps = max(self._stored_eps, eps)
        sides = zip(self._flags, pair.dtypes, strict=False)
        is_in_tf32 = any(flags and dtype in _MULTIPLIED for flags, dtype in sides)
        self.eps = max(self.eps, eps, ROUNDING["tf32" if is_in_tf32 else "ieee"])
        return estimate_floor(self.eps, entry.kind, n_modules)

    @property
    def tf32_flags(self) -> list[str]:
        """The flags of torch that made the floors wider than those of the dtypes."""
        flags = dict.fromkeys(flag for flags in self._flags for flag in flags)
        return list(flags) if self.eps > self._stored_eps else []

    def find_suspect(self, rows: list[ComparedSite]) -> tuple[str | None, list[Finding]]:
        """Return the path of the module that makes the first difference, and the finding of it."""
        first = next((row for row in rows if row.verdict == "differs"), None)
        if first is None:
            return None, []
        if self.flipped and rows.index(self.flipped[0]) < rows.index(first):
            return None, [
                Finding("choice", _flipped_choices_text(self.flipped), self.flipped[0].site)
            ]
        entry = self.entry_of[first.site]
        text = f"first beyond noise: {first.site} ({first.why})"
        if entry.is_input or entry.port not in ("input", "output"):
            return None, [Finding("site", text, first.site)]
        fired = {other.path for other in self.entry_of.values() if other.port == "output"}
        path, hint = entry.path, ""
        if entry.port == "input":
            while path and (path == entry.path or path not in fired):
                path = path.rpartition(".")[0]
            hint = f"; what it is given is made in the forward of {path_text(path)}"
        elif any(other.path == path and other.port == "input" for other in self.entry_of.values()):
            hint = "; its inputs are equal up to noise"
        elif entry.n_modules:  # of a recording
            hint = '; record ports=("input", "output") to tell it from the code that feeds it'
        hint += _incomparable_text(rows[: rows.index(first)])
        return path, [Finding("site", text + hint, first.site)]


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_FLIPPED = "their scores are equal up to noise"
_MULTIPLIED = (torch.float32, torch.complex64)  # what TF32 may stand in for


def _dtensor_pieces_text(a: str, b: str) -> str:
    texts = [f"{piece} in {name}" for name, piece in (("a", a), ("b", b)) if piece]
    return (
        f"a DTensor, of which one rank has {' and '.join(texts)}; save all ranks in one folder by"
        " run.save(folder), and compare hl.open(folder)"
    )


def _incomparable_text(rows: list[ComparedSite]) -> str:
    n_unknown = sum(row.verdict == "not comparable" for row in rows)
    return f"; {plural(n_unknown, 'value')} before it could not be compared" if n_unknown else ""


def _flipped_choices_text(flipped: list[ComparedSite]) -> str:
    first = flipped[0]
    return (
        f"noise flipped choices at {first.site} ({first.why}); what differs behind them may follow"
        " from it. To rule it out, run b with the choices of a: hl.edit(b, sites,"
        " hl.edits.reroute(run_of_a))"
    )


def _exceeded_text(gap: Difference, exceeded: list[str], *, is_exact: bool) -> str:
    if not exceeded:
        return ""
    if is_exact:
        return f"{gap.n_unequal:,} of {plural(gap.numel, 'integer')} not equal"
    texts = {
        "relative": f"relative {number_text(gap.relative)}",
        "norm_ratio": f"norm ratio {ratio_text(gap.norm_ratio)}",
        "worst_row": f"row {gap.row} by {number_text(gap.worst_row)}",
        "worst_element": f"element {list(gap.element)} by {number_text(gap.worst_element)}",
    }
    return texts[exceeded[0]]


# -- choices that rounding flipped ----------------------------------------------------------------


def is_flipped_by_noise(ours: Any, theirs: Any, leaf: Leaf, equal_leaves: Collection[Leaf]) -> bool:
    """Tell whether scores in the same values explain why indices differ.

    Scores that moved by at most `d` can only swap their order if they lie within `2 d`. So both
    choices must pick scores that lie so close, of each vector.

    Args:
        ours: the first value, with the indices and the scores from which they were chosen: the
            last dimension of the indices is shorter, as of `topk`, or missing, as of `argmax`.
        theirs: the second value.
        leaf: the leaf of the indices.
        equal_leaves: the leaves of tensors that are equal up to noise.
    """
    a, b = dict(arrays_in(ours)), dict(arrays_in(theirs))
    chosen = a.get(leaf), b.get(leaf)
    if not all(isinstance(indices, Tensor) and indices.dtype in _INTEGERS for indices in chosen):
        return False
    return any(
        _do_scores_explain_choice((a.get(scores), b.get(scores)), chosen) for scores in equal_leaves
    )


def _do_scores_explain_choice(scores: tuple[Any, Any], chosen: tuple[Any, Any]) -> bool:
    if not all(isinstance(part, Tensor) and part.is_floating_point() for part in scores):
        return False
    first, second = (part.cpu().double() for part in scores)
    if first.shape != second.shape or not first.dim():
        return False
    picked = [_picked_scores(first, indices.cpu().long()) for indices in chosen]
    if picked[0] is None or picked[1] is None or picked[0].shape != picked[1].shape:
        return False
    reach = 2 * (first - second).abs().amax(-1, keepdim=True)
    return bool(((picked[0] - picked[1]).abs() <= reach).all())


def _picked_scores(scores: Tensor, indices: Tensor) -> Tensor | None:
    """Return the scores at indices of the last dimension, sorted; None if they are no indices."""
    if indices.shape == scores.shape[:-1]:
        indices = indices[..., None]
    n = scores.shape[-1]
    is_shorter = indices.dim() == scores.dim() and indices.shape[-1] < n
    if not is_shorter or indices.shape[:-1] != scores.shape[:-1]:
        return None
    if not bool(((indices >= 0) & (indices < n)).all()):
        return None
    return scores.gather(-1, indices).sort(-1).values


def leaf_key(entry: Entry, leaf: tuple[Any, ...]) -> str:
    """Return the key of a leaf: it is written after the port, and before the call."""
    if not leaf:
        return entry.key
    rest, sign, numbers = entry.rest.partition("#")
    port = "" if ":" in rest or (entry.kind == "stored" and not entry.is_input) else ":output"
    return f"{path_text(entry.path)}{rest}{port}{leaf_text(leaf)}{sign}{numbers}"
