"""Curves: numbers by site and step."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hookline.curves.curves_table import curves_printout, last_numbers_by_site
from hookline.curves.findings import judge_steps
from hookline.curves.logged_numbers import Logged, check_logged, logged_curves
from hookline.curves.numbers_over_steps import CurveColumns
from hookline.curves.slot_layout import Layout
from hookline.curves.step_reports import LOGGED, Reports, ReportSource, StepReport, weight_of_update
from hookline.display.results import Printout, Result
from hookline.display.text import plural
from hookline.engine import normalize_root
from hookline.engine.model_fingerprint import RecordedModel
from hookline.engine.provenance import Provenance
from hookline.errors import InputError, NotRecordedError, RanksError
from hookline.findings.finding import Findings
from hookline.util.hide_from_dir import hide_from_dir


@final
class Curve:
    """The numbers of one site, by step.

    A number is an attribute: `curve.std` is a NumPy array with one value for each of `curve.steps`.
    Steps at which the site had no value are NaN. `curve.results` holds the whole results.

    Args:
        site: the site.
        reports: the reports of all steps.
        rank: the rank; None merges the ranks.
    """

    def __init__(self, site: str, reports: Sequence[StepReport], rank: int | None) -> None:
        self.site = site
        self._reports = reports
        self._rank = rank
        self._columns = CurveColumns(site, rank)

    def __repr__(self) -> str:
        return (
            f"Curve of {self.site}: {', '.join(self.names)}; {plural(len(self._reports), 'step')}"
        )

    def __len__(self) -> int:
        return len(self._reports)

    @property
    def steps(self) -> NDArray[np.int64]:
        """The numbers of the steps."""
        return np.array([report.step for report in self._reports], np.int64)

    @property
    def results(self) -> list[Any]:
        """The result at each step, of several statistics a tuple; None where there is no value."""
        return [self._result_at(report) for report in self._reports]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the numbers."""
        weight = weight_of_update(self.site)
        has_ratio = weight is not None and any(
            {self.site, weight} <= report.layout.by_site.keys()
            for report in reversed(self._reports)
        )
        # A rank that never had a value here has NaNs by the names of those that had.
        names = (
            self._updated_columns().names
            or Curve(self.site, self._reports, None)._updated_columns().names
        )
        return (*names, *["ratio"] * has_ratio)

    def __getattr__(self, name: str) -> NDArray[np.float64]:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self.names:
            raise AttributeError(
                f"the curve of {self.site} has no {name!r}.\nUse one of {', '.join(self.names)}."
            )
        return (
            self._update_ratio() if name == "ratio" else self._updated_columns().number(name).copy()
        )

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.names]

    def _result_at(self, report: StepReport) -> Any:
        results = report.results(self.site, self._rank)
        has_several = len(report.layout.by_site.get(self.site, ())) > 1
        return tuple(results) if results and has_several else next(iter(results), None)

    def _updated_columns(self) -> CurveColumns:
        self._columns.extend(self._reports)
        return self._columns

    def _update_ratio(self) -> NDArray[np.float64]:
        """Return the ratio of an update's norm to the weight's at each step."""
        weight = weight_of_update(self.site)
        columns = CurveColumns("" if weight is None else weight, self._rank)
        columns.extend(self._reports)
        norms = columns.number("norm")
        with np.errstate(all="ignore"):
            return np.where(norms != 0, self._updated_columns().number("norm") / norms, np.nan)


@final
@hide_from_dir("reports")
class Curves(Result):
    """The statistics that `hl.monitor` measured, by site and training step.

        >>> import hookline as hl
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        >>> with hl.monitor(model, "1") as seen:
        ...     for _ in range(3):
        ...         _ = model(torch.ones(4, 2))
        >>> seen.sites, seen["1"].mean.shape, seen.steps.tolist()
        (('1',), (3,), [0, 1, 2])

    `hl.monitor` gives curves, and `hl.open` reads them from a folder. `seen["1"]` is the curve of a
    site. Its attributes are arrays of shape `(steps,)`: `mean`, `std`, `min`, `max`, `norm`,
    `zero_share`, `non_finite` and more, which `seen["1"].names` lists. At a step at which the site
    had no value, the number is NaN. `seen["1"].results` has the whole result of each step; of
    several statistics, a tuple with one of each.

    `seen["0.weight"]` is the curve of the weight itself, and `seen["0.weight:update"]` that of its
    updates. The curve of updates also has `ratio`: the norm of the update over that of the weight.
    Curves may be read while they grow: each look-up sees the steps measured by then.

    `seen.log(loss=loss)` keeps numbers of your own beside them, and `seen.logged["loss"]` reads
    them.

    Args:
        source: the reports.
        rank: the rank whose own numbers are shown; None merges the ranks.
        log: takes numbers to log and the step, or None; None if the monitor is not here.

    Raises:
        NotRecordedError: by `seen[site]`: the site has no curve; the message shows close sites.
    """

    def __init__(
        self,
        source: ReportSource,
        rank: int | None = None,
        log: Callable[[dict[str, float | Tensor], int | None], None] | None = None,
    ) -> None:
        self._source = source
        self._rank = rank
        self._log = log
        self._curves: dict[str, Curve] = {}
        self._n_seen = 0  # the reports whose layouts are in the next dict
        self._layouts: dict[int, Layout] = {}  # by id, the layout of the last report at the end

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            raise AttributeError(
                f"curves hold what was measured and have no {name!r} to set, got {value!r}."
                "\nSet step, every and first on the line: with (line := hl.monitor(model)) as seen:"
                " line.step = 1000."
            )
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_log": None, "_curves": {}, "_layouts": {}, "_n_seen": 0}

    @property
    def sites(self) -> tuple[str, ...]:
        """A tuple of the sites that had a value at some step, as text.

            >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
            >>> with hl.monitor(model, ports="output") as seen:
            ...     _ = model(torch.ones(4, 2))
            >>> seen.sites
            ('(root)', '0', '1')

        Iteration over the curves yields these sites, too. The order is that of registration: of
        modules as in `model.named_modules()`, then of parameters. It is not the order in which
        they run.
        """
        return self._sites_of(self._source.read())

    def _sites_of(self, reports: Sequence[StepReport]) -> tuple[str, ...]:
        last: Layout | None = None
        for report in reports[self._n_seen : len(reports)]:
            self._n_seen += 1
            if report.layout is not last:
                last = report.layout
                self._layouts.pop(id(last), None)
                self._layouts[id(last)] = last
        layouts = reversed(self._layouts.values())
        return tuple(dict.fromkeys(site for layout in layouts for site in layout.by_site))

    @property
    def steps(self) -> NDArray[np.int64]:
        """The numbers of the measured training steps, int64, shape `(steps,)`.

            >>> model = nn.Linear(2, 3)
            >>> with hl.monitor(model, ports="output", every=2) as seen:
            ...     for _ in range(5):
            ...         _ = model(torch.ones(4, 2))
            >>> seen.steps
            array([0, 2, 4])

        The steps that `every=` of `hl.monitor` skips are not measured.
        """
        return np.array([report.step for report in self._source.read()], np.int64)

    @property
    def seconds(self) -> NDArray[np.float64]:
        """The time at which each step ended, shape `(steps,)`, as Unix time in seconds.

            >>> model = nn.Linear(2, 3)
            >>> with hl.monitor(model, ports="output") as seen:
            ...     for _ in range(3):
            ...         _ = model(torch.ones(4, 2))
            >>> bool(seen.seconds[-1] >= seen.seconds[0])
            True

        Unix time counts the seconds since the first of January 1970, in UTC.
        """
        return np.array([report.seconds for report in self._source.read()], np.float64)

    @property
    def model(self) -> RecordedModel | None:
        """Identify the model by its `fingerprint`, and by the `versions` of packages.

            >>> model = nn.Linear(2, 3)
            >>> with hl.monitor(model, ports="output", to=tmp_path / "run") as seen:
            ...     _ = model(torch.ones(4, 2))
            >>> hl.open(tmp_path / "run").model.type
            'torch.nn.modules.linear.Linear'

        The model is identified as it was when the monitor began, and written to the folder of the
        run with the first report. None without a folder, or if an older hookline wrote it.
        """
        self._source.read()
        return self._source.model

    @property
    def provenance(self) -> Provenance:
        """Say where the values come from: versions, device, model, flags that change numbers.

            >>> model = nn.Linear(2, 3)
            >>> with hl.monitor(model, ports="output", to=tmp_path / "run") as seen:
            ...     _ = model(torch.ones(4, 2))
            >>> hl.open(tmp_path / "run").provenance.device
            'cpu'

        The fields are empty where `model` is None.
        """
        model = self.model
        return Provenance() if model is None else model.provenance

    @property
    def n_ranks(self) -> int:
        """The number of ranks whose numbers these curves hold; 1 without a distributed job.

            >>> model = nn.Linear(2, 3)
            >>> with hl.monitor(model, ports="output") as seen:
            ...     _ = model(torch.ones(4, 2))
            >>> seen.n_ranks
            1

        `rank` gives the numbers of one of them.
        """
        return max((len(report.slots) for report in self._source.read()), default=1)

    def __len__(self) -> int:
        return len(self._source.read())

    def __iter__(self) -> Iterator[str]:
        return iter(self.sites)

    def __contains__(self, site: object) -> bool:
        return self._match_site(str(site), self.sites) is not None

    def __getitem__(self, site: Any) -> Curve:
        """Return the curve of a site, as in `curves["h.0:grad_output"]`.

        A parameter's path alone means its value.

        Raises:
            NotRecordedError: the site is not here; the message shows close ones.
        """
        reports = self._source.read()
        sites = self._sites_of(reports)
        name = self._match_site(str(site), sites)
        if name is None:
            raise NotRecordedError(_no_curve_text(str(site), sites))
        if name not in self._curves:
            self._curves[name] = Curve(name, reports, self._rank)
        return self._curves[name]

    @property
    def logged(self) -> dict[str, Logged]:
        """Return the numbers that `log` was given, by name.

            >>> model = nn.Linear(2, 3)
            >>> with hl.monitor(model, ports="output") as seen:
            ...     for _ in range(3):
            ...         seen.log(loss=model(torch.ones(4, 2)).square().mean())
            >>> seen.logged["loss"].steps.tolist(), seen.logged["loss"].values.shape
            ([0, 1, 2], (3,))

        Each has two arrays of equal length: `steps` and `values`. They also hold the steps that
        `every=` of `hl.monitor` skips.
        """
        return logged_curves(self._source.read_logged())

    def log(
        self, numbers: Mapping[str, Any] | None = None, /, *, step: int | None = None, **named: Any
    ) -> None:
        """Keep numbers of your own for the present step, such as the loss.

            >>> model = nn.Linear(2, 3)
            >>> with hl.monitor(model, ports="output", every=10) as seen:
            ...     loss = model(torch.ones(4, 2)).square().mean()
            ...     seen.log(loss=loss, lr=0.1)
            ...     seen.log({"train/accuracy": 0.5})
            >>> sorted(seen.logged)
            ['loss', 'lr', 'train/accuracy']

        They go where the measured numbers go, under names such as `logged/loss`; the page shows
        them as a line. Call `log` after the forward of a step: before it, the numbers belong to the
        step before. A number that is logged twice in a step is kept as it was last. NaN and
        infinity are kept. A number on an accelerator is read when the next step is reported, so
        that the accelerator is not waited for.

        Args:
            numbers: numbers by name, for names that are no Python names.
            step: the number of the step. None is the step of the last forward.
            **named: numbers by name: Python numbers, or tensors of one element.

        Raises:
            InputError: a value is not a single real number, or no monitor is running.
        """
        checked = check_logged(numbers, named)
        if self._log is None:
            raise InputError(
                "seen.log must be called while hl.monitor runs, got curves without a monitor."
                "\nCall it inside the block: with hl.monitor(model) as seen."
            )
        self._log(checked, step)

    def findings(self) -> Findings:
        """Judge the training: what broke, at which step, and what moved first.

            >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
            >>> with hl.monitor(model, ports="output") as seen:
            ...     for scale in [1.0] * 20 + [1e4]:
            ...         _ = model(torch.ones(4, 2) * scale)
            >>> finding = seen.findings()[0]
            >>> finding.kind, finding.site, finding.step
            ('jump', '0', 20)

        Within a step, sites are compared in the order in which they had their values: weights,
        outputs as the modules ran, gradients as the backward reached them, updates. Numbers of all
        ranks are judged together ([Findings](../checking.md#findings) lists the rules).

        Returns:
            The findings, the worst first: print them, or ask `.ok` and `.worst`.
        """
        return judge_steps(self._source.read(), self._source.read_logged())

    def reports(self) -> ReportSource:
        """Return the reports that the curves are read from, those of one rank with it alone."""
        if self._rank is None:
            return self._source
        reports, at = Reports(self._source.model), slice(self._rank, self._rank + 1)
        for report in self._source.read():
            if len(slots := report.slots[at]):
                row = StepReport(report.step, report.seconds, report.layout, slots, report.order)
                reports.add(row)
        for report in self._source.read_logged():
            reports.add(StepReport.from_logged(report.step, report.seconds, report.logged))
        reports.has_ended = self._source.has_ended
        return reports

    def rank(self, number: int) -> Curves:
        """Return the curves with the numbers of one rank alone.

            >>> model = nn.Linear(2, 3)
            >>> with hl.monitor(model, ports="output") as seen:
            ...     _ = model(torch.ones(4, 2))
            >>> seen.rank(0)["(root)"].count
            array([12.])

        Args:
            number: the number of the rank, from 0.

        Returns:
            The curves, with the same sites and steps.

        Raises:
            RanksError: these curves have no such rank.
        """
        if not 0 <= number < self.n_ranks:
            raise RanksError(
                f"the rank must be below {self.n_ranks}, got {number}.\nUse curves.rank(k) for k in"
                f" range({self.n_ranks})."
            )
        return Curves(self._source, number, self._log)

    def at(self, step: int) -> dict[str, float]:
        """Return a dict of every number of one step by name, such as `h.0/std`.

            >>> model = nn.Linear(2, 3)
            >>> with hl.monitor(model, ports="output") as seen:
            ...     _ = model(torch.ones(4, 2))
            >>> seen.at(0)["(root)/non_finite"]
            0.0

        Args:
            step: the number of a training step in `steps`.

        Returns:
            The numbers, each under its site and its name; those that `log` was given under
            `logged` and their name.

        Raises:
            NotRecordedError: the step was not measured.
        """
        numbers: dict[str, float] = {}
        for report in (*self._source.read(), *self._source.read_logged()):
            if report.step == step:
                numbers.update(report.numbers(self._rank) if report.is_measured else {})
                numbers.update(
                    {f"{LOGGED}/{name}": number for name, number in report.logged.items()}
                )
        if numbers:
            return numbers
        raise NotRecordedError(
            f"step {step!r} was not reported."
            f"\nUse one of curves.steps, {_first_and_last_text(self.steps)}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers of each site at its last step, and the steps, as plain values."""
        return {"steps": self.steps.tolist(), "sites": self._table_rows()}

    def _table_rows(self) -> list[dict[str, Any]]:
        return last_numbers_by_site(self._source.read(), self.sites, self._rank)

    def _printout(self) -> Printout:
        return curves_printout(self._source.read(), self.sites, self._rank)

    @staticmethod
    def _match_site(text: str, sites: Sequence[str]) -> str | None:
        if text in sites:  # also of a module that is named like a port, `heads.a:output`
            return text
        text = normalize_root(text).removesuffix(":output")
        under = [site for site in sites if site.startswith((f"{text}:output[", f"{text}:output."))]
        names = [name for name in (text, f"{text}:value") if name in sites]
        return names[0] if names else under[0] if len(under) == 1 else None


def _no_curve_text(text: str, sites: Sequence[str]) -> str:
    if not sites:
        return (
            f"{text!r} has no curve: no step was reported yet.\nRun the model, and step its"
            " optimizer, inside the block."
        )
    close = difflib.get_close_matches(text, sites, 4) or [
        site for site in sites if site.startswith(text)
    ]
    examples = ", ".join(map(repr, close or sites[:4]))
    return f"{text!r} has no curve among {len(sites)} sites.\nUse one of them, such as {examples}."


def _first_and_last_text(steps: NDArray[np.int64]) -> str:
    return f"{steps[0]} to {steps[-1]}" if len(steps) else "of which there are none yet"
