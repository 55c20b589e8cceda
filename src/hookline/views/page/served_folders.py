"""The folders that the server shows, which may grow, be replaced, deleted or not written yet."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import final

from hookline.curves import Curves, RunReader, is_run, run_version
from hookline.display.text import plural
from hookline.errors import FolderError, InputError
from hookline.findings import Finding, Findings, Level, sort_by_level
from hookline.opening import open as open_folder
from hookline.recordings import Recording
from hookline.stores import Store, excerpt
from hookline.verbs.check.finding import CheckFinding
from hookline.verbs.check.replay_file import read_saved_call
from hookline.verbs.compare.compare import compare
from hookline.verbs.compare.comparison import Comparison
from hookline.views.page.page_state import FolderContents, PageState
from hookline.views.page.training_page import OpenRun
from hookline.views.page.url_parameters import items_in_words

_MANIFEST = "manifest.json"
_KEPT = ".safetensors"
_N_ITEMS = 8  # of a store, if no items are chosen
_MOST_KEPT = 4  # choices of items that are kept open


@final
class FolderSource:
    """A recording in a folder, one of its ranks, or some items of a store.

    `run.save` replaces the folder, so its manifest is a new file.

    Args:
        folder: the folder, which need not exist yet.
        items: of several ranks, the rank; None shows the first. Of a store, the items whose
            values are shown; None shows the first eight. The statistics are always those of all
            items.
    """

    def __init__(self, folder: str | os.PathLike[str], items: Sequence[int] | None = None) -> None:
        self.folder: Path = Path(folder)
        self.name: str = os.fspath(folder)
        self._items = items

    def version(self) -> str:
        """Return a text that changes with the manifest, or with the run; empty if there is none."""
        try:
            status = (self.folder if self.may_hold_finding else self.folder / _MANIFEST).stat()
        except (OSError, ValueError):
            return run_version(self.folder)
        # The time of the last change tells that the right to read it was given.
        return f"{status.st_ino}-{status.st_mtime_ns}-{status.st_ctime_ns}-{status.st_size}"

    @property
    def may_hold_finding(self) -> bool:
        """Tell whether it is a file that `hl.check(keep=)` may have written."""
        return may_hold_finding(self.folder)

    def read(self, items: Sequence[int] | None = None) -> FolderContents:
        """Read the manifest, and of a store the items, of several ranks the rank, to be shown.

        Raises:
            FolderError: the folder holds no recording or store, one of another version, or a
                damaged one.
            InputError: there is no such item or rank, or items are chosen of one process.
        """
        opened = open_folder(self.folder)
        if isinstance(opened, Curves):
            raise FolderError(
                f"{self.name} must hold a recording or a store, got the curves of a run."
                "\nGive a run alone: hookline view DIR."
            )
        items = self._items if items is None else items
        if isinstance(opened, Store):
            return contents_of_store(opened, items, self.name)
        if opened.ranks:
            n_ranks = len(opened.ranks)
            rank = _chosen_rank(items, n_ranks, self.name)
            about = f"rank {rank} of {plural(n_ranks, 'rank')}"
            judge = partial(self._judge_folder, rank)
            return FolderContents(opened.ranks[rank], judge, about, (rank,), n_ranks=n_ranks)
        if items is not None:
            raise InputError(
                f"items can be chosen of a store, got a recording: {self.name}."
                "\nLeave out the items; the page of a value shows its samples."
            )
        return FolderContents(opened, self._judge_folder)

    def _judge_folder(self, rank: int | None = None) -> Findings:
        opened = open_folder(self.folder)
        if not isinstance(opened, Recording) or (rank is not None and rank >= len(opened.ranks)):
            raise FolderError(f"{self.name} holds no recording now.\nOpen the page again.")
        try:
            return opened.findings() if rank is None else _judge_rank_and_others(opened.ranks, rank)
        finally:
            opened.release()


def _judge_rank_and_others(ranks: Sequence[Recording], rank: int) -> Findings:
    """Judge one rank, and add the worst finding of each other rank that has one."""
    judged = ranks[rank].findings()
    others = [
        finding
        for number, recording in enumerate(ranks)
        if number != rank and (finding := _worst_finding_of_rank(number, recording)) is not None
    ]
    return replace(judged, rows=sort_by_level([*judged, *others]))


def _worst_finding_of_rank(rank: int, recording: Recording) -> Finding | None:
    """Return the worst finding of a rank for the list of another, which has no row for its site."""
    level: Level = "error"
    try:
        findings = recording.findings()
    except FolderError as error:
        text = str(error).splitlines()[0]
    else:
        if findings.ok:
            return None
        level, text = findings[0].level, findings[0].text
    advice = f"Choose rank {rank}, or give --items {rank}, to see it."
    return Finding("rank", f"Rank {rank}: {text}", "", level, f"rank {rank}", advice=advice)


def _chosen_rank(items: Sequence[int] | None, n_ranks: int, name: str) -> int:
    """Return the rank that is chosen, the first if none is.

    Raises:
        InputError: several are chosen, or there is no such rank.
    """
    ranks = (0,) if items is None else tuple(items)
    if len(ranks) != 1 or ranks[0] >= n_ranks:
        raise InputError(
            f"{name} has {plural(n_ranks, 'rank')}, of which a page shows one, got"
            f" {items_in_words(ranks, 'rank')}.\nGive a rank from 0 to {n_ranks - 1}."
        )
    return ranks[0]


def contents_of_store(
    store: Store, items: Sequence[int] | None = None, name: str = "the store"
) -> FolderContents:
    """Return some items of a store as a recording, and the store.

    Args:
        store: the store.
        items: the items; None for the first eight.
        name: the name of the store, for errors.

    Raises:
        InputError: the store has no such item.
        FolderError: a shard is gone or damaged.
    """
    chosen = tuple(range(min(len(store), _N_ITEMS)) if items is None else items)
    try:
        recording = excerpt(store, chosen)
    except IndexError as error:
        raise InputError(f"{name}: {error}\nGive items that it has.") from error
    about = (
        f"a store of {plural(len(store), 'item')}; the table's statistics are of all,"
        f" pictures and histograms of {items_in_words(chosen)}"
    )
    return FolderContents(recording, store.findings, about, chosen, store)


def may_hold_finding(file: Path) -> bool:
    """Tell whether it is a file that `hl.check(keep=)` may have written."""
    return file.suffix == _KEPT and file.is_file()


def read_finding(file: str | os.PathLike[str]) -> CheckFinding:
    """Return the finding in a file that `hl.check(keep=)` wrote.

    Raises:
        FolderError: it is another file, or damaged.
    """
    return read_saved_call(file).finding.with_(file=os.fspath(file))


@final
class OpenRecordings:
    """The recordings on the page, reopened when their folders change.

    Args:
        source: the recording whose sites are listed.
        other: a recording to compare with, or None.
    """

    def __init__(self, source: FolderSource, other: FolderSource | None = None) -> None:
        self.source = source
        self.other = other
        self._lock = threading.Lock()
        self._pages: dict[tuple[int, ...] | None, PageState] = {}  # the last used one last
        self._state = ""
        self._run: tuple[RunReader, OpenRun] | None = None
        self._comparing = threading.Lock()  # a comparison takes long; other pages go on
        self._comparison: tuple[str, Comparison] | None = None  # of which state

    @property
    def names(self) -> tuple[str, str]:
        """The names of the two recordings."""
        return self.source.name, self.other.name if self.other is not None else ""

    def version(self) -> str:
        """Return a text that changes with either recording; empty if one is missing."""
        sources = [self.source] if self.other is None else [self.source, self.other]
        states = [source.version() for source in sources]
        return " ".join(states) if all(states) else ""

    def holds_run(self) -> bool:
        """Tell whether the folder holds a run, which may be damaged."""
        return self.other is None and is_run(self.source.folder)

    def read_run(self) -> OpenRun | None:
        """Return the run of the folder, read up to now; None if it holds something else.

        Raises:
            FolderError: the run is damaged.
        """
        if not self.holds_run():
            return None
        with self._lock:
            if self._run is None or self._run[0].is_replaced():
                reader = RunReader(self.source.folder)
                self._run = reader, OpenRun(reader)
            _, run = self._run
        run.read_new_reports()
        return run

    def read_finding(self) -> CheckFinding | None:
        """Return the finding in the file that `hl.check(keep=)` wrote; None of a folder.

        Raises:
            FolderError: it is another file, or damaged.
        """
        if self.other is not None or not self.source.may_hold_finding:
            return None
        return read_finding(self.source.folder)

    def comparison(self) -> Comparison:
        """Compare the two folders, once for each state.

        Raises:
            InputError: they have no value in common, or are of other kinds.
            FolderError: a folder is gone or damaged.
        """
        assert self.other is not None
        with self._comparing:
            state = self.version()
            if self._comparison is None or self._comparison[0] != state:
                self._comparison = state, compare(self.source.folder, self.other.folder)
            return self._comparison[1]

    def current_page_and_version(
        self, items: tuple[int, ...] | None = None
    ) -> tuple[PageState, str]:
        """Return the current recordings and the state that they belong to.

        Raises:
            FolderError: a folder holds no recording, one of another version, or a damaged one.
            InputError: there is no such item, or the folder holds a recording.
        """
        with self._lock:
            state = self.version()
            is_new = bool(state) and state != self._state
            page = None if is_new else self._pages.pop(items, None)
            if page is None:
                other = self.other.read(items) if self.other is not None else None
                page = PageState(self.source.read(items), other, self.names)
            if is_new:
                self._pages, self._state = {}, state
            self._pages[items] = page
            if len(self._pages) > _MOST_KEPT:
                del self._pages[next(iter(self._pages))]
            return page, self._state
