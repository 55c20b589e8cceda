"""The results of a sweep and of an attribution: arrays with named axes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hookline.display.results import Printout, Result
from hookline.display.text import listed, plural
from hookline.display.text_table import Heading
from hookline.display.units import measure
from hookline.engine import Site, normalize_root
from hookline.errors import InputError
from hookline.verbs.sweep.estimate_verdicts import Array, Verdict, judge_sites, spearman
from hookline.verbs.sweep.grid import Label

_MOST_ROWS, _MOST_NAMED = 12, 4
_ENOUGH = 20  # measured changes a site, for a verdict


@dataclass(eq=False, repr=False)
class Effects(Result):
    """The effects of many changes: an array with named axes.

    Attributes:
        axes: the names of the axes, in the order of the arrays.
        labels: the labels of each axis, by its name.
        baseline: the metric of the unchanged run.
        clean: the metric of the clean run; None if there was none.
        effects: the effect of each change: the metric less the baseline. NaN where there is none.
        is_change: whether there is such a change: sites may have values of other sizes.
    """

    labels: dict[str, tuple[Label, ...]]
    baseline: float
    clean: float | None
    effects: Array
    is_change: NDArray[np.bool_]

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes, in the order of the arrays."""
        return tuple(self.labels)

    @property
    def normalised(self) -> Array:
        """The effects as shares of the difference between the clean run and the baseline.

        Raises:
            InputError: there was no clean run, or its metric is the baseline.
        """
        if self.clean is None or self.clean == self.baseline:
            got = "none" if self.clean is None else f"the same metric, {measure(self.clean)}"
            raise InputError(
                f"normalised effects need a clean run of another metric, got {got}."
                "\nGive clean=, the inputs of this run."
            )
        return self.effects / (self.clean - self.baseline)

    def _index_of_labels(self, *labels: Label) -> tuple[int, ...]:
        """Return the index of labels, given in the order of the axes; later axes may be left out.

        Raises:
            InputError: an axis has no such label, or there are fewer axes.
        """
        if len(labels) > len(self.axes):
            raise InputError(
                f"there are {plural(len(self.axes), 'axis', 'axes')}, got"
                f" {plural(len(labels), 'label')}.\nGive labels for {', '.join(self.axes)}."
            )
        numbers = []
        for axis, label in zip(self.axes, labels, strict=False):
            known = self.labels[axis]
            name = normalize_root(str(label)).removesuffix(":output")
            key = name if label not in known and isinstance(label, str | Site) else label
            if key not in known:
                shown = listed([repr(name) for name in known], 4)
                raise InputError(
                    f"the axis {axis!r} must have the label, got {label!r}."
                    f"\nGive one of its labels: {shown}."
                )
            numbers.append(known.index(key))
        return tuple(numbers)

    def __getitem__(self, labels: Label | tuple[Label, ...]) -> Any:
        """Return the effect at a label of each axis; at the first labels alone, an array."""
        return self.effects[
            self._index_of_labels(*(labels if isinstance(labels, tuple) else (labels,)))
        ]

    def _indexed_labels(self) -> Iterator[tuple[tuple[int, ...], dict[str, Label]]]:
        """Yield the index and the labels of each change, in the order of the arrays."""
        for index in map(tuple, np.argwhere(self.is_change).tolist()):
            pairs = zip(self.labels.items(), index, strict=True)
            yield index, {axis: labels[number] for (axis, labels), number in pairs}

    def _by_effect_size(self) -> list[tuple[tuple[int, ...], dict[str, Label]]]:
        """Return the changes by the size of their effect, NaN first."""
        sizes = np.nan_to_num(np.abs(self.effects), nan=np.inf, posinf=np.inf)
        return sorted(
            self._indexed_labels(), key=lambda place: float(sizes[place[0]]), reverse=True
        )

    def _headings(self) -> list[Heading]:
        return [Heading(axis, "path" if axis == "site" else "text") for axis in self.axes]

    def _metrics_text(self) -> str:
        clean = "" if self.clean is None else f", clean {measure(self.clean)}"
        return f"metric {measure(self.baseline)} without a change{clean}"


@final
@dataclass(frozen=True, slots=True)
class SweepRow:
    """One change of a sweep.

    Args:
        labels: its label on each axis.
        metric: the metric of the changed run.
        effect: the metric less that of the unchanged run.
        unmoved: whether the change put in the value that was there.
    """

    labels: dict[str, Label]
    metric: float
    effect: float
    unmoved: bool


@final
@dataclass(eq=False, repr=False)
class Sweep(Effects):
    """The metric of a model under each of many changes: an array with named axes.

    Print it for the changes with the largest effects. `sweep[labels]` looks an effect up, and
    `hl.plots.sweep` draws a heat map.

    Attributes:
        axes: the names of the axes, in the order of the arrays: "site", or "change" for changes
            that are made together; then those of `each`; then "change", if each site has several.
        labels: the labels of each axis, by its name.
        values: the metric under each change, float64; NaN where a site has no such change.
        effects: the metric less the baseline.
        is_change: whether there is such a change: sites may have values of other sizes.
        unmoved: whether a change put in the value that was there, so that nothing could move.
        baseline: the metric of the unchanged run.
        clean: the metric of the clean run; None if `clean` was not given.
        forwards: how many forwards were run.
        notes: how the forwards were shared, and why not where they were not.
    """

    values: Array
    unmoved: NDArray[np.bool_]
    forwards: int
    notes: list[str]

    @property
    def rows(self) -> tuple[SweepRow, ...]:
        """The changes, in the order of the arrays."""
        return tuple([self._row(index, labels) for index, labels in self._indexed_labels()])

    def _row(self, index: tuple[int, ...], labels: dict[str, Label]) -> SweepRow:
        effect, metric = float(self.effects[index]), float(self.values[index])
        return SweepRow(labels, metric, effect, bool(self.unmoved[index]))

    def to_dict(self) -> dict[str, Any]:
        """Return the axes, the metrics and the changes, as plain values."""
        return {
            "axes": {axis: list(self.labels[axis]) for axis in self.axes},
            "baseline": self.baseline, "clean": self.clean, "forwards": self.forwards,
            "notes": list(self.notes), "rows": self._table_rows(),
        }  # fmt: skip

    def _table_rows(self) -> list[dict[str, Any]]:
        return [
            {**row.labels, "metric": row.metric, "effect": row.effect, "unmoved": row.unmoved}
            for row in self.rows
        ]

    def _printout(self) -> Printout:
        ranked = self._by_effect_size()
        shown = [self._row(index, labels) for index, labels in ranked[:_MOST_ROWS]]
        n_still = int((self.unmoved & self.is_change).sum())
        n_idle = int(((self.effects == 0) & ~self.unmoved).sum())
        notes = [
            f"{plural(n_still, 'change')} put in the value that was there: unmoved."
            * bool(n_still),
            f"{plural(n_idle, 'change')} moved the value and not the metric." * bool(n_idle),
            *self.notes,
        ]
        return Printout(
            title=f"{plural(len(ranked), 'change')}",
            head=f": {self._metrics_text()}; {plural(self.forwards, 'forward')}",
            headings=[
                *self._headings(), Heading("metric", "number"), Heading("effect", "number"),
                Heading("of clean", "number", 1), Heading("", "text"),
            ],
            rows=[self._cells(row) for row in shown],
            n_rows=len(ranked),
            more="changes: .rows",
            notes=[note for note in notes if note],
        )  # fmt: skip

    def _cells(self, row: SweepRow) -> list[str]:
        gap = None if self.clean is None else self.clean - self.baseline
        share = row.effect / gap if gap else math.nan
        of_clean = f"{share:z.0%}" if math.isfinite(share) else ""
        labels = [str(label) for label in row.labels.values()]
        return [*labels, measure(row.metric), f"{row.effect:+.4g}", of_clean,
                "unmoved" * row.unmoved]  # fmt: skip


@final
@dataclass(eq=False, repr=False)
class Attribution(Effects):
    """Estimates of the effects of putting back clean values: an array with named axes.

    Print it for the largest estimates. `estimate[labels]` looks an estimate up, and
    `hl.plots.sweep` draws a heat map.

    Attributes:
        axes: the names of the axes, in the order of the array: "site", then those of `each`.
        labels: the labels of each axis, by its name.
        baseline: the metric of the unchanged run.
        clean: the metric of the clean run.
        effects: the estimated effect of each change; NaN where there is none.
        is_change: whether there is such a change: sites may have values of other sizes.
        scores: the score of each element of a value, by site: tensors of the value's shape.
        gradients: the mean gradient of each element on the path, by site.
        measured: the effects of the changes that were measured, as `check` asks; NaN elsewhere.
    """

    scores: dict[str, Tensor]
    gradients: dict[str, Tensor]
    measured: Array

    @property
    def rank_correlation(self) -> float:
        """Spearman's correlation of estimates and measured effects; NaN without enough of them."""
        is_known = np.isfinite(self.measured) & np.isfinite(self.effects)
        return spearman(self.effects[is_known], self.measured[is_known])

    @property
    def failing(self) -> tuple[Label, ...]:
        """The sites where more than two thirds of the estimates that matter miss the effect.

        An estimate misses an effect if it is off by at least 0.9 of it, as behind saturated
        functions and where paths cancel. Those matter whose effect or estimate is at least half of
        the root mean square of the effects at the site, and 1 % of the largest effect of all sites.

        The measured sample says so with 95 % confidence for all sites together: by the exact test
        of a sample without replacement, at the level of 5 % divided by the number of sites. At a
        single site this needs up to 8 measured effects that matter, at each of 12 sites 14, or all
        that there are. `unjudged` names the sites with fewer.
        """
        return tuple([verdict.label for verdict in self._verdicts() if verdict.is_failing])

    @property
    def unjudged(self) -> tuple[Label, ...]:
        """The sites with too few measured effects to be called failing, whatever they are."""
        return tuple([verdict.label for verdict in self._verdicts() if not verdict.is_known])

    def _verdicts(self) -> list[Verdict]:
        return judge_sites(self.labels[self.axes[0]], self.effects, self.measured)

    def to_dict(self) -> dict[str, Any]:
        """Return the axes, the metrics, the estimates and how far they hold, as plain values."""
        return {
            "axes": {axis: list(self.labels[axis]) for axis in self.axes},
            "baseline": self.baseline, "clean": self.clean,
            "rank_correlation": self.rank_correlation, "failing": list(self.failing),
            "unjudged": list(self.unjudged), "rows": self._table_rows(),
        }  # fmt: skip

    def _table_rows(self) -> list[dict[str, Any]]:
        return [
            {**labels, "estimate": float(self.effects[index]),
             "measured": float(self.measured[index])}
            for index, labels in self._indexed_labels()
        ]  # fmt: skip

    def _printout(self) -> Printout:
        ranked = self._by_effect_size()
        return Printout(
            title=plural(len(ranked), "estimate"),
            head=f": {self._metrics_text()}",
            headings=[
                *self._headings(), Heading("estimate", "number"), Heading("measured", "number"),
            ],
            rows=[
                [*[str(label) for label in labels.values()], f"{self.effects[index]:+.4g}",
                 "" if math.isnan(self.measured[index]) else f"{self.measured[index]:+.4g}"]
                for index, labels in ranked[:_MOST_ROWS]
            ],
            n_rows=len(ranked),
            more="estimates: .effects",
            notes=self._trust_notes(),
        )  # fmt: skip

    def _trust_notes(self) -> list[str]:
        """Say how far the estimates can be trusted."""
        n_measured = int((~np.isnan(self.measured)).sum())
        lost = [site for site, scores in self.scores.items() if scores.isnan().any()]
        notes = [
            f"NaN at {listed(lost, _MOST_NAMED)}: a value or a gradient is not finite there."
            " Measure there with hl.sweep."
        ] * bool(lost)
        if not n_measured:
            return [*notes, "Not compared with real changes: give check=20."]
        notes += [
            f"Rank correlation with {plural(n_measured, 'measured change')}:"
            f" {self.rank_correlation:.2f}."
        ]
        if self.failing:
            notes.append(
                f"Failing at {listed(list(map(str, self.failing)), _MOST_NAMED)}: saturated or"
                " cancelling. Measure there with hl.sweep."
            )
        if self.unjudged:
            notes.append(
                f"Too few measured changes to tell at"
                f" {listed(list(map(str, self.unjudged)), _MOST_NAMED)}: give"
                f" check={_ENOUGH * len(self.labels[self.axes[0]])}."
            )
        return notes
