"""The page of a training: findings, the loss, a map of time and depth, each site's curves.

The served page asks for the steps that it lacks. The page that is a file holds the numbers itself.
"""

from __future__ import annotations

import base64
import os
import threading
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from hookline.curves import Curves, Logged, StepReport, logged_curves, numbers_of_site
from hookline.curves.downsampled_table import DownsampledTable
from hookline.curves.findings import judge_steps
from hookline.curves.ports import PORTS, path_and_port
from hookline.curves.slot_layout import NO_TURN
from hookline.curves.step_reports import ReportSource
from hookline.display.text import escape_invisible
from hookline.errors import InputError
from hookline.findings import Findings
from hookline.views.page.page_state import number_fact
from hookline.views.page.page_templates import load_template
from hookline.views.page.recording_data import finding_data, pack_json
from hookline.views.page.recording_page import page_path, write_page_file
from hookline.views.page.url_parameters import parse_int as number_of

_COLUMNS_IN_FILE = 256
_PAUSES = 5.0  # between two judgements, times the seconds that one took
_MOST_POINTS = 512  # of a curve of the user's own numbers
_TITLES = {
    "mean": "mean", "std": "standard deviation", "norm": "norm", "max": "maximum",
    "min": "minimum", "zero_share": "share of zeros", "non_finite": "non-finite count",
    "ratio": "update ÷ weight",
}  # fmt: skip
# In the order in which the page shows them.
_KINDS = {
    "output": "outputs", "input": "inputs", "grad_output": "gradients of outputs",
    "grad_input": "gradients of inputs", "value": "weights", "grad": "gradients of weights",
    "update": "updates of weights",
}  # fmt: skip
assert set(_KINDS) == set(PORTS)


@final
class OpenRun:
    """A run, which may grow while it is shown.

    Args:
        reader: gives its reports.
        most_columns: the greatest number of columns.
    """

    def __init__(self, reader: ReportSource, most_columns: int | None = None) -> None:
        self.reader = reader
        self.lock = threading.RLock()  # held while an answer is made
        self.table: DownsampledTable = (
            DownsampledTable() if most_columns is None else DownsampledTable(most_columns)
        )
        self.reports: Sequence[StepReport] = ()
        self.logged: Sequence[StepReport] = ()
        self._n_taken = 0
        self._findings: tuple[tuple[int, int], Findings] = (-1, -1), Findings([])
        self._judged, self._seconds = 0.0, 0.0  # when the steps were judged, and how long it took

    def read_new_reports(self) -> None:
        """Take the reports that have been added since.

        Raises:
            FolderError: the folder is damaged or gone, or holds another run now.
        """
        with self.lock:
            self.reports = self.reader.read()
            self.logged = self.reader.read_logged()
            n_reports = len(self.reports)
            self.table.add(self.reports[self._n_taken : n_reports])
            self._n_taken = n_reports

    @property
    def n_ranks(self) -> int:
        """The number of ranks of the last report."""
        return len(self.reports[-1].slots) if self.reports else 1

    def status(self) -> dict[str, Any]:
        """Return the last step, its age in seconds, and whether the run has ended."""
        if not self.reports:
            return {"n_steps": 0, "n_logged": len(self.logged), "ended": self.reader.has_ended}
        last, recent = self.reports[-1], self.reports[-20:]
        return {
            "n_steps": self._n_taken,
            "n_logged": len(self.logged),
            "step": last.step,
            "first_step": self.reports[0].step,
            "when": last.seconds,
            "age": max(time.time() - last.seconds, 0.0),
            "pace": (last.seconds - recent[0].seconds) / max(len(recent) - 1, 1),
            "ended": self.reader.has_ended,
            "n_ranks": self.n_ranks,
        }

    def data_of_new_columns(
        self, name: str, from_column: int, stride: int, n_known: int
    ) -> dict[str, Any]:
        """Return what a page lacks that has the columns before one, of a number.

        Args:
            name: the number; one that is not here stands for the usual one.
            from_column: the first column that is wanted: the page's last one, which may have grown.
            stride: the steps in each of the page's columns; after a change all columns are sent.
            n_known: how many numbers of the last step the page has; another count sends the whole.
        """
        table = self.table
        name = name if name in table.names else default_number_name(table.names)
        if stride != table.stride or n_known != table.now.size or from_column > len(table.columns):
            from_column = 0
        columns = table.columns[from_column:]
        answer: dict[str, Any] = {
            **self.status(),
            "number": name,
            "stride": table.stride,
            "from": from_column,
            "firsts": [span.first for span in columns],
            "lasts": [span.last for span in columns],
            "values": self._packed_columns(name, from_column),
            "bad": _pack_array(table.have_non_finite(from_column), np.uint8),
            "now": _pack_array(table.now, np.float32),
            **self._findings_data(),
        }
        if not from_column:
            answer["names"] = [[key, _TITLES.get(key, key)] for key in table.names]
            answer["sites"] = [_path_leaf_and_port(site) for site in table.sites]
            answer["depth"] = _firing_depths(table.sites, self.reports)
        return answer

    def _packed_columns(self, name: str, column: int = 0) -> list[str]:
        """Return the numbers of columns as text: the last ones; then the least and greatest."""
        if not name:
            return [""]
        values = self.table.last_min_max(name, column)
        sent = values if self.table.stride > 1 else values[:1]
        return [_pack_array(part, np.float32) for part in sent]

    def findings(self) -> Findings:
        """Judge the steps so far; of a long run that goes on, now and then."""
        counts = len(self.reports), len(self.logged)
        start = time.monotonic()
        is_early = not self.reader.has_ended and start - self._judged < _PAUSES * self._seconds
        if counts != self._findings[0] and not is_early:
            self._findings = counts, judge_steps(self.reports, self.logged, self.table)
            self._judged = time.monotonic()
            self._seconds = self._judged - start
        return self._findings[1]

    def _findings_data(self) -> dict[str, Any]:
        findings = self.findings()
        number_of = {site: k for k, site in enumerate(self.table.sites)}
        return {
            "findings": [finding_data(finding, number_of.get) for finding in findings],
            "notes": [escape_invisible(note) for note in findings.notes],
        }

    def whole_page_data(self) -> dict[str, Any]:
        """Return everything that a page without a server shows."""
        answer = {**self.data_of_new_columns("", 0, 0, -1), "values": []}
        answer["numbers"] = {name: self._packed_columns(name) for name in self.table.names}
        answer["logged"] = logged_data(self.logged)
        return answer

    def numbers_by_rank(self, site: int, name: str) -> list[list[float | None]]:
        """Return a number at each column's last step, for each rank.

        Raises:
            InputError: there is no such site.
        """
        if not 0 <= site < len(self.table.sites):
            raise InputError(
                f"site must be from 0 to {len(self.table.sites) - 1}, got {site}.\nReload the page."
            )
        at = self.table.sites[site]
        chosen = [self.reports[column.index] for column in self.table.columns]
        return [
            [_number_at_rank(report, at, rank, name) for report in chosen]
            for rank in range(self.n_ranks)
        ]


def logged_data(reports: Sequence[StepReport]) -> list[dict[str, Any]]:
    """Return the user's own numbers to draw, the loss first, each with `_MOST_POINTS` at most.

    A point stands for the same number of logged steps: it has the last number, the least and the
    greatest, and whether a number is NaN or infinite. None stands for no finite number.
    """
    curves = logged_curves(reports)
    return [_downsampled_points(name, curves[name]) for name in sorted(curves, key=_loss_sort_key)]


def _loss_sort_key(name: str) -> int:
    return 0 if name == "loss" else 1 if "loss" in name.lower() else 2


def _downsampled_points(name: str, curve: Logged) -> dict[str, Any]:
    stride = -(-len(curve.steps) // _MOST_POINTS)
    starts = np.arange(0, len(curve.steps), stride)
    lasts = np.append(starts[1:], len(curve.steps)) - 1
    is_finite = np.isfinite(curve.values)
    values = np.where(is_finite, curve.values, np.nan)
    drawn = {
        "last": values[lasts],
        "low": np.fmin.reduceat(values, starts),
        "high": np.fmax.reduceat(values, starts),
    }
    return {
        "name": escape_invisible(name),
        "steps": curve.steps[lasts].tolist(),
        "bad": np.logical_or.reduceat(~is_finite, starts).tolist(),
        "each": stride,
        **{
            key: [None if np.isnan(x) else x for x in column.tolist()]
            for key, column in drawn.items()
        },
    }


def default_number_name(names: Sequence[str]) -> str:
    """Return the number that is shown unless another is chosen; an empty text without any."""
    return next((name for name in ("norm", "std", "mean") if name in names), "".join(names[:1]))


def _number_at_rank(report: StepReport, site: str, rank: int, name: str) -> float | None:
    if rank >= len(report.slots):
        return None
    if name == "ratio":
        ratio = report.update_ratio(site, rank)
        return None if ratio is None or not np.isfinite(ratio) else ratio
    results = report.layout.results(site, report.slots, rank, is_lenient=True)
    numbers = numbers_of_site(results)
    number = numbers.get("" if name == "value" and name not in numbers else name)
    return number if number is not None and np.isfinite(number) else None


def _path_leaf_and_port(site: str) -> list[str]:
    path, port = path_and_port(site)
    tail = site[len(path) :].lstrip(":")
    return [escape_invisible(path), escape_invisible(tail), port]


def _firing_depths(sites: Sequence[str], reports: Sequence[StepReport]) -> list[int]:
    """Return where sites lie in depth: as their modules' outputs fired, if that is known."""
    turns: dict[str, int] = {}
    if reports and reports[-1].order is not None:
        order = zip(reports[-1].layout.by_site, reports[-1].order.tolist(), strict=True)
        for site, turn in order:
            path, port = path_and_port(site)
            if port in ("output", "input") and turn != NO_TURN:
                turns[path] = max(turn, turns.get(path, 0))
    return [turns.get(_module_path(site), place) for place, site in enumerate(sites)]


def _module_path(site: str) -> str:
    """Return the path of a site's module; of a parameter, of the module that holds it."""
    path, port = path_and_port(site)
    return path.rpartition(".")[0] if port in ("value", "grad", "update") else path


def _pack_array(numbers: NDArray[Any], dtype: Any) -> str:
    array = np.ascontiguousarray(numbers, np.dtype(dtype).newbyteorder("<"))
    return base64.b64encode(array.tobytes()).decode("ascii")


def render_served_page(template: Any, run: OpenRun, title: str, where: str) -> str:
    """Render the page of a run, which asks for the numbers itself."""
    return _render(template, run, title, where, {"kinds": _KINDS}, is_served=True)


def data_of_new_steps(run: OpenRun, parameters: dict[str, str]) -> dict[str, Any]:
    """Return the steps that a page lacks.

    Args:
        run: the run.
        parameters: `state`, the version of the run that the page shows; `steps`, how many it has;
            and the arguments of `OpenRun.data_of_new_columns`.
    """
    page = [number_of(parameters, name) or 0 for name in ("from", "stride", "known")]
    with run.lock:
        run.read_new_reports()
        if parameters.get("state", run.reader.version) != run.reader.version:
            return {"state": run.reader.version, "gone": ""}
        answer: dict[str, Any] = {"state": run.reader.version, **run.status()}
        if number_of(parameters, "steps") != answer["n_steps"]:
            answer |= run.data_of_new_columns(parameters.get("number", ""), *page)
        if number_of(parameters, "logged") != answer["n_logged"]:
            answer["logged"] = logged_data(run.logged)
    return answer


def requested_numbers_by_rank(run: OpenRun, parameters: dict[str, str]) -> list[list[float | None]]:
    """Return a site's numbers of each rank."""
    site = number_of(parameters, "site")
    with run.lock:
        return run.numbers_by_rank(-1 if site is None else site, parameters.get("number", ""))


def write_curves_page(
    curves: Curves, path: str | os.PathLike[str], *, title: str = "", where: str = ""
) -> Path:
    """Write curves as a page; see `write_page`.

    Args:
        title: the heading; empty for one that names the model, if it is known.
        where: the folder of the run, if there is one.
    """
    run = OpenRun(curves.reports(), _COLUMNS_IN_FILE)
    run.read_new_reports()
    of_model = "" if curves.model is None else f" of {curves.model.type.rpartition('.')[2]}"
    data = {"kinds": _KINDS, **run.whole_page_data()}
    title = title or f"Training{of_model}"
    text = _render(load_template("training"), run, title, where, data, is_served=False)
    return write_page_file(page_path(path), text)


def _render(
    template: Any, run: OpenRun, title: str, where: str, core: dict[str, Any], *, is_served: bool
) -> str:
    facts = [
        number_fact(len(run.table.sites), "site", "sites"),
        number_fact(len(run.reports), "step", "steps"),
    ]
    ranks = [("ranks, merged", f"{run.n_ranks:,}")] if run.n_ranks > 1 else []
    now = {"state": run.reader.version} if is_served else {"now": datetime.now().astimezone()}
    return str(
        template.render(
            is_served=is_served,
            title=title or where,
            subtitle="" if is_served else where,
            where=where,
            facts=[*([] if is_served else facts), *ranks],
            core=pack_json(core),
            **now,
        )
    )
