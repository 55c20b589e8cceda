"""Gather the slots of all ranks: one collective for a report."""

from __future__ import annotations

import hashlib
import itertools
import weakref
from dataclasses import replace
from typing import Any, NamedTuple, final

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from hookline.curves import Entry, Layout
from hookline.curves.run_folder import statistic_to_json
from hookline.display.text import first_line, listed
from hookline.engine import (
    allows_uneven_inputs,
    default_store,
    format_by_rank,
    gather_json,
    group_ranks,
    has_process_group,
    tensor_parallel_ranks,
)
from hookline.errors import RanksError, warn
from hookline.statistics.covariance import CovarianceStatistic
from hookline.verbs.monitor.rank_copies import RankCopies
from hookline.verbs.monitor.report_barrier import ReportBarrier
from hookline.verbs.monitor.slots import (
    ALL,
    FIRST,
    MINE,
    SiteSlots,
    Slots,
    absent_slots,
    pack_slots,
)

_QUESTION = "hl.monitor"
# The port of the value that a gradient at a module is of.
_VALUES = {"grad_output": "output", "grad_input": "input"}


@final
class _RankSite(NamedTuple):
    """Hold what a rank says of a site, as JSON carries it."""

    name: str
    widths: list[int]
    counts: str
    over: list[int]
    value: str  # the site of the value that a gradient is of; else the site itself
    splits_features: bool  # whether ranks have parts of the last dimension of a DTensor

    @classmethod
    def from_slots(cls, site: SiteSlots) -> _RankSite:
        """Return what this rank says of a site."""
        port = _VALUES.get(site.site.port, site.site.port)
        value = str(replace(site.site, port=port))
        widths = list(site.widths)
        return cls(site.name, widths, site.counts, site.over, value, site.splits_features)


@final
class ReportedStep(NamedTuple):
    """The step of a report."""

    step: int  # its number
    settings: str  # which steps are reported, in words
    is_last: bool  # whether the line has ended, so that other ranks may not come


@final
class RankGatherer:
    """Turn the slots of a step into a layout and the slots of each rank.

    All ranks agree on a layout when a site appears. Each later report is one all_gather, which all
    ranks begin together.

    Args:
        slots: the slots of all sites.
        model: the model.
    """

    def __init__(self, slots: Slots, model: nn.Module) -> None:
        self._slots = slots
        self._statistics = slots.statistics
        self._model = weakref.ref(model)
        self._copies = RankCopies(())
        self._by_name: dict[str, dict[int, _RankSite]] = {}
        self._layout = Layout(slots.statistics, ())
        self._barrier: ReportBarrier | None = None  # once the ranks have agreed
        self._version = -1
        self._is_alone = False

    @property
    def rank(self) -> int:
        """Return this process's rank; 0 without a process group."""
        return dist.get_rank() if has_process_group() else 0

    @property
    def is_grouped(self) -> bool:
        """Tell whether other ranks take part."""
        return has_process_group() and dist.get_world_size() > 1 and not self._is_alone

    def publish_settings(self, settings: str) -> None:
        """Tell which steps this rank reports from now on."""
        if self._barrier is not None:
            self._barrier.publish_settings(settings)

    def announce_leave(self, how: str) -> None:
        """Tell the other ranks that this one reports no more."""
        if self._barrier is not None:
            self._barrier.announce_leave(how)

    def gather(
        self, sites: list[SiteSlots], slots: dict[str, list[Tensor]], version: int, at: ReportedStep
    ) -> tuple[Layout, NDArray[Any]]:
        """Gather a step's slots.

        Args:
            sites: the sites that ever had a value here.
            slots: their slots.
            version: the version of the sites.
            at: the step.

        Returns:
            The layout, and the slots of each rank, of shape [ranks, width].
        """
        packed_slots = pack_slots(sites, slots)
        was_grouped = self._barrier is not None and not self._is_alone
        if self.is_grouped or was_grouped:
            try:
                self._check_ranks_can_meet()
                return self._gather_together(sites, packed_slots, version, at)
            except RanksError as error:
                self._is_alone, self._version = True, -1
                warn(f"hl.monitor shows this rank's numbers alone: {error}")
        return self._layout_of_one_rank(sites, version), packed_slots.cpu().numpy()[None]

    def _check_ranks_can_meet(self) -> None:
        """Check that this rank would not wait in vain for the others.

        Raises:
            RanksError: the others cannot come.
        """
        if not has_process_group():
            raise RanksError(
                "the process group was destroyed.\nEnd hl.monitor before destroy_process_group()."
            )
        model = self._model()
        if model is not None and allows_uneven_inputs(model):
            raise RanksError(
                "in join(), ranks make different numbers of steps."
                "\nFor numbers of all ranks, make the same steps on each, without join()."
            )

    def _layout_of_one_rank(self, sites: list[SiteSlots], version: int) -> Layout:
        if version != self._version:
            entries = [
                Entry(site.name, number, width)
                for site in sites
                for number, width in enumerate(site.widths)
            ]
            self._layout, self._version = Layout(self._statistics, tuple(entries)), version
        return self._layout

    def _gather_together(
        self, sites: list[SiteSlots], packed_slots: Tensor, version: int, at: ReportedStep
    ) -> tuple[Layout, NDArray[Any]]:
        is_new = version != self._version
        has_agreed = self._barrier is None
        if self._barrier is None:
            self._barrier = self._make_barrier(at)
            self._agree_on_layout(sites, version)
            is_new = False
        self._barrier.wait_for_all(at.step, at.settings, is_last=at.is_last)
        gathered = _all_gather(self._slots_in_layout(sites, packed_slots, is_new=is_new))
        if gathered[:, 0].any():  # a site has appeared on some rank
            self._agree_on_layout(sites, version)
            has_agreed = True
            gathered = _all_gather(self._slots_in_layout(sites, packed_slots, is_new=False))
        slots = gathered[:, 1:]
        if has_agreed:
            self._warn_of_unequal_parameters(slots)
        if self._copies.record_differences(self._layout, slots):
            self._layout = self._layout_of_all(len(slots))
        return self._layout, slots

    def _make_barrier(self, at: ReportedStep) -> ReportBarrier:
        """Compare what the ranks monitor, and make their barrier.

        Raises:
            RanksError: a rank monitors something else.
        """
        model, ranks = self._model(), group_ranks(None, _QUESTION)
        store, me = default_store(), dist.get_rank()
        said = {
            "statistics": [_statistic_text(statistic) for statistic in self._statistics],
            "settings": at.settings,
            "sites": self._slots.selected_names(),
            "model": "" if model is None else _module_digest(model),
            "split": [] if model is None else tensor_parallel_ranks(model),
            # Each process counts its monitors, and may have others than rank 0.
            "number": store.add("hookline/monitors", 1) if me == ranks[0] else 0,
        }
        by_rank = gather_json(_QUESTION, said, ranks)
        _check_ranks_agree("statistics", [", ".join(said["statistics"]) for said in by_rank])
        _check_ranks_agree("steps", [said["settings"] for said in by_rank])
        if len({said["model"] for said in by_rank}) == 1:  # the stages of a pipeline differ
            _check_ranks_agree("sites", _unshared_sites([said["sites"] for said in by_rank]))
        self._copies = RankCopies([said["split"] for said in by_rank])
        return ReportBarrier(store, f"hookline/monitor/{by_rank[0]['number']}", ranks, me)

    def _agree_on_layout(self, sites: list[SiteSlots], version: int) -> None:
        """Agree on the layout of all ranks: the sites of rank 0, then those of other ranks."""
        rows = [_RankSite.from_slots(site) for site in sites]
        by_rank = gather_json(_QUESTION, rows, group_ranks(None, _QUESTION))
        self._by_name = {}
        for rank, rows_there in enumerate(by_rank):
            for site in itertools.starmap(_RankSite, rows_there):
                self._by_name.setdefault(site.name, {})[rank] = site
        _warn_of_differing_slot_counts(self._by_name)
        self._layout, self._version = self._layout_of_all(len(by_rank)), version

    def _warn_of_unequal_parameters(self, slots: NDArray[Any]) -> None:
        """Warn of parameters that are no copies, though the first rank's numbers stand for all."""
        names = []
        for name, holders in self._by_name.items():
            if len(holders) > 1 and {site.counts for site in holders.values()} == {FIRST}:
                spans = [span for _, span in self._layout.by_site[name]]
                of_ranks = slots[sorted(holders), spans[0].start : spans[-1].stop]
                if _are_of_different_values(of_ranks):
                    names.append(name)
        if names:
            warn(
                f"hl.monitor shows the first rank's numbers of {listed(names, 4)}: other ranks have"
                " other values, as experts and stages of a pipeline do."
                "\nRead theirs: seen.rank(1)[...]."
            )

    def _layout_of_all(self, n_ranks: int) -> Layout:
        entries: list[Entry] = []
        for name, holders in self._by_name.items():
            widths = holders[min(holders)].widths
            ranks = self._counting_ranks(name, holders, n_ranks)
            of_site = [Entry(name, number, width, ranks) for number, width in enumerate(widths)]
            if n_ranks > 1 and self._may_have_split_features(name, ranks):
                of_site = [self._drop_covariance(entry) for entry in of_site]
            entries += of_site
        return Layout(self._statistics, tuple(entries))

    def _may_have_split_features(self, name: str, ranks: tuple[int, ...] | None) -> bool:
        """Tell whether the ranks that count may have parts of the features of a value.

        Those of a plain tensor in tensor parallelism may be parts of its rows, too.
        """
        holders = self._by_name[name]
        if any(site.splits_features for site in holders.values()):
            return True
        is_plain = {site.counts for site in holders.values()} == {ALL}
        return is_plain and self._copies.share_a_group(holders if ranks is None else ranks)

    def _drop_covariance(self, entry: Entry) -> Entry:
        """Return an entry for which no rank counts, if it is of features; else the entry."""
        if not isinstance(self._statistics[entry.statistic], CovarianceStatistic):
            return entry
        self._slots.add_complaint(
            entry.site, "has no covariance over all ranks, which may have parts of its features"
        )
        return replace(entry, ranks=())

    def _counting_ranks(
        self, name: str, holders: dict[int, _RankSite], n_ranks: int
    ) -> tuple[int, ...] | None:
        """Return the ranks that count for a site; None for all."""
        kinds = {site.counts for site in holders.values()}
        if kinds == {FIRST}:
            return (min(holders),)
        counting = [rank for rank, site in holders.items() if site.counts in (ALL, MINE)]
        # Where several meshes have a parameter, as data parallelism copies it, the first counts.
        over = holders[min(holders)].over
        counting = [rank for rank in counting if holders[rank].over == over or not over]
        if kinds == {ALL}:
            counting = self._copies.counting_ranks((name, holders[min(holders)].value), counting)
        return None if len(counting) == n_ranks and kinds == {ALL} else tuple(counting)

    def _slots_in_layout(
        self, sites: list[SiteSlots], packed_slots: Tensor, *, is_new: bool
    ) -> Tensor:
        """Put this rank's slots at their places in the layout; `ABSENT` stands for missing ones.

        A report begins with one number: whether a site has appeared. A site whose width differs
        from rank 0's has no place.
        """
        placed = absent_slots(1 + self._layout.width, "cpu")
        placed[0] = float(is_new)
        if is_new:
            return placed
        widths = [sum(site.widths) for site in sites]
        parts = torch.split(packed_slots.cpu(), widths)
        for site, part in zip(sites, parts, strict=True):
            spans = [span for _, span in self._layout.by_site[site.name]]
            place = placed[1 + spans[0].start : 1 + spans[-1].stop]
            if len(place) == len(part):
                place.copy_(part)
        return placed


def _statistic_text(statistic: Any) -> str:
    """Name a statistic with its options, so that equal ones have equal names."""
    spelled = statistic_to_json(statistic)
    options = ", ".join(f"{name}={value}" for name, value in spelled.get("options", {}).items())
    return f"{spelled['name']}({options})" if "name" in spelled else str(spelled["type"])


def _module_digest(model: nn.Module) -> str:
    """Return a digest of the paths and types of a model's modules."""
    tree = [(path, type(module).__name__) for path, module in model.named_modules()]
    return hashlib.sha256(repr(tree).encode()).hexdigest()


def _unshared_sites(by_rank: list[list[str]]) -> list[str]:
    """Name the sites of each rank that some rank lacks."""
    common = set(by_rank[0]).intersection(*by_rank[1:])
    return [
        listed([site for site in sites if site not in common], 4) or "no others"
        for sites in by_rank
    ]


def _check_ranks_agree(what: str, texts: list[str]) -> None:
    """Refuse to gather the numbers of ranks that monitor different things.

    Raises:
        RanksError: they do.
    """
    if len(set(texts)) > 1:
        raise RanksError(
            f"the ranks monitor different {what}: {format_by_rank(range(len(texts)), texts)}."
            "\nCall hl.monitor with the same arguments on every rank."
        )


def _are_of_different_values(slots: NDArray[Any]) -> bool:
    """Tell whether most slots of a rank differ from those of the first, by more than rounding.

    A sum may differ much by rounding alone, where its terms cancel.
    """
    present = slots[~np.isnan(slots).all(axis=1)]
    counted = present[:1] != 0
    differ = ~np.isclose(present, present[:1], rtol=0.01, atol=0.0, equal_nan=True) & counted
    return bool((2 * differ.sum(axis=1) > counted.sum()).any())


def _warn_of_differing_slot_counts(by_name: dict[str, dict[int, _RankSite]]) -> None:
    """Warn of sites of which only the slots that are as many as on the first rank are merged."""
    for name, holders in by_name.items():
        widths = {rank: str(sum(site.widths)) for rank, site in holders.items()}
        if len(set(widths.values())) > 1:
            warn(
                f"hl.monitor merges {name} of those ranks alone that have as many slots as rank"
                f" {min(widths)}: {format_by_rank(widths, widths.values())} slots."
                "\nGive stats= whose slots are as many for values of any shape: hl.stats.moments()."
            )
            return


def _all_gather(slots: Tensor) -> NDArray[Any]:
    backend = str(dist.get_backend())
    if "gloo" not in backend and "mpi" not in backend:
        slots = slots.to(torch.accelerator.current_accelerator())
    gathered = [torch.empty_like(slots) for _ in range(dist.get_world_size())]
    try:
        dist.all_gather(gathered, slots)
    except RuntimeError as error:
        raise RanksError(
            f"a rank was lost while the numbers of all were gathered ({first_line(error)[:120]})."
            "\nLook at the output of the other ranks."
        ) from error
    return torch.stack(gathered).cpu().numpy()
