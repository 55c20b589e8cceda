"""Curves: numbers by site and step."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from hookline.curves.numbers import numbers_of
from hookline.curves.overview import curves_html, curves_text
from hookline.curves.step_reports import Source, StepReport
from hookline.engine.identity import RecordedModel
from hookline.errors import NotRecordedError, RanksError


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

    def __repr__(self) -> str:
        return f"Curve of {self.site}: {', '.join(self.names)}; {len(self._reports)} steps"

    def __len__(self) -> int:
        return len(self._reports)

    @property
    def steps(self) -> NDArray[np.int64]:
        """The numbers of the steps."""
        return np.array([one.step for one in self._reports], np.int64)

    @property
    def results(self) -> list[Any]:
        """The result of the first statistic at each step; None where the site had no value."""
        return [next(iter(self._at(one)), None) for one in self._reports]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the numbers."""
        last = next((found for one in reversed(self._reports) if (found := self._at(one))), [])
        names = [name for result in last for name in (*_attributes(result), *numbers_of(result))]
        names += ["ratio"] * any(one.ratio(self.site) is not None for one in self._reports[-1:])
        return tuple(dict.fromkeys(name for name in names if name))

    def __getattr__(self, name: str) -> NDArray[np.float64]:
        if name.startswith("_") or name not in self.names:
            raise AttributeError(
                f"the curve of {self.site} has no {name!r}.\nUse one of {', '.join(self.names)}."
                if not name.startswith("_")
                else name
            )
        return np.array([self._number(one, name) for one in self._reports], np.float64)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.names]

    def _at(self, report: StepReport) -> list[Any]:
        return report.results(self.site, self._rank)

    def _number(self, report: StepReport, name: str) -> float:
        if name == "ratio":
            ratio = report.ratio(self.site, self._rank)
            return np.nan if ratio is None else ratio
        for result in self._at(report):
            number = numbers_of(result).get(name)
            if number is None and name in _attributes(result):
                number = getattr(result, name)
            if number is not None:
                return float(number)
        return np.nan


def _attributes(result: Any) -> list[str]:
    """Return the fields and properties of a result that hold a number."""
    names = [one.name for one in dataclasses.fields(result)] if _is_record(result) else []
    names += [name for name, part in vars(type(result)).items() if isinstance(part, property)]
    return [name for name in names if isinstance(getattr(result, name), int | float)]


def _is_record(result: Any) -> bool:
    return dataclasses.is_dataclass(result) and not isinstance(result, type)


@final
class Curves:
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
    had no value, the number is NaN. `seen["1"].results` has the whole result of each step.

    `seen["0.weight"]` is the curve of the weight itself, and `seen["0.weight:update"]` that of its
    updates. The curve of updates also has `ratio`: the norm of the update over that of the weight.
    Curves may be read while they grow: each look-up sees the steps measured by then.

    Args:
        source: the reports.
        rank: the rank whose own numbers are shown; None merges the ranks.

    Raises:
        NotRecordedError: by `seen[site]`: the site has no curve; the message shows close sites.
    """

    def __init__(self, source: Source, rank: int | None = None) -> None:
        self._source = source
        self._rank = rank

    @property
    def sites(self) -> tuple[str, ...]:
        """A tuple of the sites that had a value at some step, as text.

            >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
            >>> with hl.monitor(model, ports="output") as seen:
            ...     _ = model(torch.ones(4, 2))
            >>> seen.sites
            ('(root)', '0', '1')

        Iteration over the curves yields these sites, too.
        """
        reports = self._source.read()
        layouts = {id(one.layout): one.layout for one in reversed(reports)}
        return tuple(dict.fromkeys(site for one in layouts.values() for site in one.by_site))

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
        return np.array([one.step for one in self._source.read()], np.int64)

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
        return np.array([one.seconds for one in self._source.read()], np.float64)

    @property
    def model(self) -> RecordedModel | None:
        """What identifies the model: its `fingerprint`, and the `versions` of packages.

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
    def n_ranks(self) -> int:
        """The number of ranks whose numbers these curves hold; 1 without a distributed job.

            >>> model = nn.Linear(2, 3)
            >>> with hl.monitor(model, ports="output") as seen:
            ...     _ = model(torch.ones(4, 2))
            >>> seen.n_ranks
            1

        `rank` gives the numbers of one of them.
        """
        return max((len(one.slots) for one in self._source.read()), default=1)

    def __len__(self) -> int:
        return len(self._source.read())

    def __iter__(self) -> Iterator[str]:
        return iter(self.sites)

    def __contains__(self, site: object) -> bool:
        return self._find(str(site)) is not None

    def __getitem__(self, site: Any) -> Curve:
        """Return the curve of a site, as in `curves["h.0:grad_output"]`.

        A parameter's path alone means its value.

        Raises:
            NotRecordedError: the site is not here; the message shows close ones.
        """
        found = self._find(str(site))
        if found is None:
            raise NotRecordedError(self._explain(str(site)))
        return Curve(found, self._source.read(), self._rank)

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
        return Curves(self._source, number)

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
            The numbers, each under its site and its name.

        Raises:
            NotRecordedError: the step was not measured.
        """
        for report in self._source.read():
            if report.step == step:
                return report.numbers(self._rank)
        raise NotRecordedError(
            f"step {step} was not reported.\nUse one of curves.steps, {_ends(self.steps)}."
        )

    def __repr__(self) -> str:
        return curves_text(self._source.read(), self.sites, self._rank)

    def _repr_html_(self) -> str:
        return curves_html(self._source.read(), self.sites, self._rank)

    def _find(self, text: str) -> str | None:
        sites = self.sites
        under = [site for site in sites if site.startswith((f"{text}:output[", f"{text}:output."))]
        known = [one for one in (text, f"{text}:value") if one in sites]
        return known[0] if known else under[0] if len(under) == 1 else None

    def _explain(self, text: str) -> str:
        sites = self.sites
        if not sites:
            return (
                f"{text!r} has no curve: no step was reported yet.\nRun the model, and step its"
                " optimizer, inside the block."
            )
        close = difflib.get_close_matches(text, sites, 4) or [
            one for one in sites if one.startswith(text)
        ]
        shown = ", ".join(map(repr, close or sites[:4]))
        return f"{text!r} has no curve among {len(sites)} sites.\nUse one of them, such as {shown}."


def _ends(steps: NDArray[np.int64]) -> str:
    return f"{steps[0]} to {steps[-1]}" if len(steps) else "of which there are none yet"
