"""A recording: the values that a line kept, by pass, site and call.

Look-ups never guess. Several calls or passes, an overwritten value and a site that did not fire
raise errors that say what to write instead.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, final, overload

from torch import Tensor, nn

from hookline.display.results import Printout, Result
from hookline.display.text import first_line
from hookline.engine import (
    TIMEOUT_S,
    Pass,
    Report,
    Selection,
    Site,
    UnversionedMemory,
    has_parts,
    hide_from_dir,
    is_in_transform,
    sites_of_part,
    unwrap,
)
from hookline.engine.model_fingerprint import RecordedModel, recorded_model
from hookline.engine.provenance import Provenance
from hookline.engine.run_settings import settings_from
from hookline.errors import AmbiguousError, FolderError, OverwrittenError
from hookline.findings.finding import Findings
from hookline.recordings.folder import has_several_ranks, write_ranks, write_recording
from hookline.recordings.gradient_flow import GradientFlow, gradient_flow
from hookline.recordings.join_passes import cat_passes, stack_passes, suggest_join_code
from hookline.recordings.judge_passes import findings_html, judge_passes
from hookline.recordings.key_index import Key, ParsedKey
from hookline.recordings.log_entries import Entry, FolderContents, PassContents
from hookline.recordings.lookups import Lookups
from hookline.recordings.pass_log import Log, Read, append_in_transform, append_with_copy
from hookline.recordings.pass_record import PassList, PassRecord, make_pass
from hookline.recordings.site_tables import MOST_PASSES, recording_printout, site_rows
from hookline.recordings.stored_values import StoredValue


@final
@hide_from_dir(
    "begin_pass", "finish", "holds_shard", "layouts", "pop_passes", "set_model",
    "suggest_one_value", "cut_last_pass_at_completion", "values_by_replica",
)  # fmt: skip
class Recording(Lookups, Result):
    """A mapping from sites to recorded values.

        >>> import hookline as hl
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        >>> with hl.record(model, nn.Linear) as run:
        ...     _ = model(torch.zeros(4, 2))
        >>> run["0"].shape
        torch.Size([4, 3])

    `hl.record`, `hl.features` and `hl.open` give recordings. A site is written as in `hl.select`:
    `run["layer4"]` is an output. Other examples are `run["layer4:input"]` and
    `run["h.3:output[0]"]`. If a site has one value, the look-up returns it. If a site has several
    values, write which one you want. Passes and calls are counted from 0.

    - A module ran several times in a pass: `run["block#2"]`, or `run.calls("block")` for a list.
    - Several passes: `run.passes[1]["block"]`; `run.cat("block")` or `run.stack("block")` for all.
    - Several backward passes in one pass: `run.passes[0].backwards[1]["block:grad_output"]`.
    - A part that `parts = hl.anatomy(model)` has named: `run[parts["resid_post", 3]]`.

    `run[run.sites[15]]` looks up the 16th site. `run.items()` yields every value once, under its
    shortest key. If a site has values in several passes, the key names the pass: `block#2#pass1`.

    Values are detached and share memory with the model's own tensors. A value is copied only if
    torch cannot detect a change to it, or with `hl.record(..., copy=True)`. In a distributed job
    the values are this rank's; `full` and `reduced` ask the other ranks. If all ranks saved one
    folder, `hl.open` returns one recording, and its `ranks` holds the recording of each rank.

    Attributes:
        sites: the selected sites, in the order in which the model registers its modules.
        modules: the type name of each module of the model, by its path.
        lost: descriptions of the parts of values that `save` could not save.
        ranks: the recordings of all ranks that saved one folder, in order; otherwise empty.

    Raises:
        NotRecordedError: by a look-up: the site was not selected, or it has no value.
        AmbiguousError: by a look-up: the key matches several values.
        OverwrittenError: by a look-up: the value was changed in place after it was recorded.
        SiteError: by a look-up: the value has no such part, as in `run["lstm:output[7]"]`.
        SelectionError: by a look-up: the key is malformed.
        FolderError: by a look-up: the file of the value is gone or damaged.
    """

    def __init__(
        self,
        sites: tuple[Site, ...],
        report: Callable[[], Report] | Report,
        modules: Mapping[str, str] | None = None,
        *,
        keeps_graph: bool = False,
        unversioned: UnversionedMemory | None = None,
    ) -> None:
        self.sites = sites
        self.modules = modules or {}
        self.lost: list[str] = []
        self.ranks: tuple[Recording, ...] = ()
        self._report: Callable[[], Report] | Report = report
        self._log = Log(sites, self.report, keeps_graph=keeps_graph, unversioned=unversioned)
        self._is_transformed = False
        self._model: RecordedModel | Callable[[], nn.Module | None] | None = None

    # -- callbacks of the line ------------------------------------------------------------------

    def begin_pass(self, current: Pass) -> None:
        """Add a new pass, whose log fills as the sites fire."""
        self._log.passes.append(current)
        if current.is_transformed:
            current.log_entry = partial(append_in_transform, current.log, self._log.keeps_graph)
            self._is_transformed = True
        unversioned = self._log.unversioned
        if unversioned is not None and unversioned.begin_pass(current):
            current.log_entry = partial(append_with_copy, current.log_entry)

    def finish(self, report: Report) -> None:
        """Keep the report of the ended line instead of the line itself."""
        self._report = report
        if self._is_transformed and not is_in_transform():
            self._log.unwrap_entries()

    def set_model(self, model: RecordedModel | Callable[[], nn.Module | None] | None) -> None:
        """Note the identity of the model, or a weak reference to the model."""
        self._model = model
        if callable(model):
            self._log.sites_of_part = partial(_sites_of_part, model)

    def pop_passes(self) -> list[PassRecord]:
        """Remove all passes from the recording, and return them."""
        return [PassRecord(self._log, current) for current in self._log.pop_passes()]

    def cut_last_pass_at_completion(self) -> None:
        """Drop what the last pass has recorded after each site had a value."""
        self._log.cut_last_pass_at_completion()

    @property
    def model(self) -> RecordedModel | None:
        """Identify the model by its `fingerprint`, and by the `versions` of packages.

            >>> model = nn.Linear(2, 3)
            >>> with hl.record(model) as run:
            ...     _ = model(torch.zeros(4, 2))
            >>> opened = hl.open(run.save(tmp_path / "run"))
            >>> opened.model.fingerprint == run.model.fingerprint, sorted(opened.model.versions)[:2]
            (True, ['hookline', 'python'])

        `save` writes it, as the model is at that moment. Before, each look-up reads the model as it
        is then. None if the model no longer exists, or if an older hookline saved the recording.

        Raises:
            AmbiguousError: the recording holds several ranks with different weights; write
                `run.ranks[0].model`.
        """
        if self.ranks:
            fingerprints = {rank.model.fingerprint if rank.model else "" for rank in self.ranks}
            if len(fingerprints) > 1:
                self._refuse_several_ranks("model")
            return self.ranks[0].model
        if self._model is None or isinstance(self._model, RecordedModel):
            return self._model
        model = self._model()
        return None if model is None else recorded_model(model)

    @property
    def provenance(self) -> Provenance:
        """Say where the values come from: versions, device, model, flags that change numbers.

            >>> model = nn.Linear(2, 3)
            >>> with hl.record(model) as run:
            ...     _ = model(torch.zeros(4, 2))
            >>> opened = hl.open(run.save(tmp_path / "run"))
            >>> opened.provenance.device, opened.provenance.flags["deterministic algorithms"]
            ('cpu', 'off')

        The fields are empty where `model` is None.
        """
        model = self.model
        return Provenance() if model is None else model.provenance

    # -- look-ups -------------------------------------------------------------------------------

    @property
    def passes(self) -> Sequence[PassRecord]:
        """The passes (runs of the model), in the order in which they began.

            >>> model = nn.Linear(2, 3)
            >>> with hl.record(model) as run:
            ...     for rows in (4, 1):
            ...         _ = model(torch.zeros(rows, 2))
            >>> [list(one["(root)"].shape) for one in run.passes]
            [[4, 3], [1, 3]]

        A pass has the same look-ups as the recording. It also has `number`, `order`, `fired()`,
        `backwards`, `failed` and `settings`, the modes and flags of torch.

        Raises:
            AmbiguousError: the recording holds several ranks; write `run.ranks[0].passes`.
        """
        self._refuse_several_ranks("passes")
        return PassList(self._log)

    def _single_value(self, key: Key, read: Read | None = None) -> Any:
        log, parsed_key = self._log_and_parsed_key(key)
        passes = log.find_entries(parsed_key)
        if len(passes) > 1:
            of_pass = log.key_of_first_entry(parsed_key, *passes[0])
            raise AmbiguousError(
                f"{str(parsed_key)!r} has a value in each of {len(passes)} passes."
                f"\nWrite run.passes[{passes[0][0].number}][{str(of_pass)!r}] for one of them"
                f"{_join_suggestion_text(log, parsed_key)}."
            )
        return log.single_value(parsed_key, *passes[0], read)

    def _find_entries(self, parsed_key: ParsedKey) -> list[tuple[Pass, list[Entry]]]:
        return self._log.find_entries(parsed_key)

    def __iter__(self) -> Iterator[str]:
        if self.ranks:
            return iter(dict.fromkeys(key for rank in self.ranks for key in rank))
        passes = list(self.passes)
        if len(passes) == 1:
            return iter(passes[0])
        parse = self._log.index.parse
        keys = [(record.number, [(key, parse(key).number) for key in record]) for record in passes]
        n_passes = Counter(site for _, pairs in keys for site in {site for _, site in pairs})
        return (
            f"{key}#pass{number}" if n_passes[site] > 1 else key
            for number, pairs in keys
            for key, site in pairs
        )

    def __contains__(self, key: object) -> bool:
        """Return whether a site has one or more values."""
        if self.ranks:
            return any(key in rank for rank in self.ranks)
        return isinstance(key, str | Site | Selection) and self._log.has(key)

    def suggest_one_value(self, key: Key) -> tuple[str, str]:
        """Return the code after `run`, and the key, of one of a site's values.

        Raises:
            NotRecordedError: the site did not fire.
            AmbiguousError: the site has values on several ranks.
        """
        log, parsed_key = self._log_and_parsed_key(key)
        (current, entries), *later = log.find_entries(parsed_key)
        code = f".passes[{current.number}]" if later else ""
        return code, str(log.key_of_first_entry(parsed_key, current, entries))

    def calls(self, key: Key) -> list[Any]:
        """Return a list of a site's values in one pass, with a value for each call of the module.

            >>> relu = nn.ReLU()
            >>> model = nn.Sequential(nn.Linear(2, 3), relu, nn.Linear(3, 3), relu)
            >>> with hl.record(model, nn.ReLU) as run:
            ...     _ = model(torch.zeros(4, 2))
            >>> [list(value.shape) for value in run.calls("1")]
            [[4, 3], [4, 3]]

        Args:
            key: the site, as in a look-up.

        Returns:
            The values, in the order of the calls.

        Raises:
            NotRecordedError, OverwrittenError: as in a look-up.
            AmbiguousError: the site has values of several passes, or gradients of several backward
                passes. For one pass, write `run.passes[1].calls(key)`.
        """
        log, parsed_key = self._log_and_parsed_key(key)
        passes = log.find_entries(parsed_key)
        if len(passes) > 1:
            raise AmbiguousError(
                f"{str(parsed_key)!r} ran in {len(passes)} passes.\nWrite"
                f" run.passes[{passes[0][0].number}].calls({str(parsed_key)!r}) for one of them, or"
                f" run.cat({str(parsed_key)!r}, dim=None) for a list of all values."
            )
        return log.values(parsed_key, *passes[0])

    def stack(self, key: Key) -> Tensor:
        """Stack a site's values along a new first dimension, one value for each pass.

            >>> model = nn.Linear(2, 3)
            >>> with hl.record(model) as run:
            ...     for _ in range(5):
            ...         _ = model(torch.zeros(4, 2))
            >>> run.stack("(root)").shape
            torch.Size([5, 4, 3])

        A pass in which the site did not fire is left out.

        Args:
            key: the site, as in a look-up.

        Returns:
            A tensor of shape `(passes, *shape of the value)`.

        Raises:
            NotRecordedError, OverwrittenError: as in a look-up.
            AmbiguousError: the module ran several times in a pass.
            StructureError: the values are not tensors of one shape.
        """
        return stack_passes(*self._log_and_parsed_key(key))

    @overload
    def cat(self, key: Key, dim: int = 0) -> Tensor: ...
    @overload
    def cat(self, key: Key, dim: None) -> list[Any]: ...
    def cat(self, key: Key, dim: int | None = 0) -> Tensor | list[Any]:
        """Concatenate a site's values of all passes, for instance of several batches.

            >>> import hookline as hl
            >>> model = nn.Linear(2, 3)
            >>> with hl.record(model) as run:
            ...     for rows in (4, 4, 1):
            ...         _ = model(torch.zeros(rows, 2))
            >>> run.cat("(root)").shape
            torch.Size([9, 3])

        Values come in the order of the passes. If a module ran several times in a pass, the result
        would have more rows than the inputs. So the key must name a call: `run.cat("relu#1")`.

        Args:
            key: the site, as in a look-up.
            dim: the dimension along which the values are concatenated and their sizes may differ.
                0-d tensors become a 1-d tensor. None returns a list of the values of all passes and
                calls, whatever their shapes and types.

        Returns:
            One tensor; with `dim=None` a list.

        Raises:
            NotRecordedError, OverwrittenError: as in a look-up.
            AmbiguousError: the module ran several times in a pass, unless `dim=None`.
            InputError: `dim` is not an integer.
            StructureError: the values are not tensors, have no dimension `dim`, or differ in
                another dimension.
        """
        log, parsed_key = self._log_and_parsed_key(key)
        if dim is None:
            return [value for calls in log.values_by_pass(parsed_key) for value in calls]
        return cat_passes(log, parsed_key, dim)

    def gradients(self) -> GradientFlow:
        """Measure the recorded gradients: their norms, and which are dead or exploding.

            >>> import hookline as hl
            >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
            >>> with hl.record(model, ports="grad") as run:
            ...     model(torch.ones(4, 2)).sum().backward()
            >>> [row.site for row in run.gradients()]
            ['0.weight:grad', '0.bias:grad', '2.weight:grad', '2.bias:grad']

        Returns:
            A table with a row for each site: print it, or iterate over its rows. A row has `site`,
            `count`, `norm`, `ratio`, `largest`, `zeros` and `state`. `norm` is the mean L2 norm of
            the gradients, and `ratio` the mean ratio of this norm to the parameter's norm. `zeros`
            is the share of zeros, from 0 to 1. `.dead` lists the sites whose gradients are all
            zero, or did not arrive. `.exploding` lists the sites whose gradients are not finite or
            much too large: over 100 times the parameter's norm, or over 1000 times the median norm
            of their port. Where ranks split a gradient, all of this is of this rank's part.

        Raises:
            NotRecordedError: no gradient port was recorded.
            OverwrittenError: a gradient was changed in place after it was recorded.
            AmbiguousError: the recording holds several ranks; write `run.ranks[0].gradients()`.
        """
        self._refuse_several_ranks("gradients()")
        return gradient_flow(self._log, self.report())

    def findings(self) -> Findings:
        """Judge the recorded values: what is wrong, worst first, and where it begins.

            >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
            >>> _ = nn.init.constant_(model[2].weight, float("nan"))
            >>> with hl.record(model) as run:
            ...     _ = model(torch.ones(4, 2))
            >>> finding = run.findings()[0]
            >>> finding.level, finding.kind, finding.site
            ('error', 'non-finite', '2')

        The values are read once, in firing order, one at a time. Record outputs of all modules, and
        `grad_output` for rules on gradients; record the inputs, too, to tell a fault of a module
        from one of the code before it ([Findings](../checking.md#findings) lists the rules).

        Returns:
            The findings: print them, iterate over them, or ask `.ok` and `.worst`.

        Raises:
            FolderError: the folder of the recording is gone or damaged.
            AmbiguousError: the recording holds several ranks; write `run.ranks[0].findings()`.
        """
        self._refuse_several_ranks("findings()")
        return judge_passes(self.passes, self.modules, self.report())[0]

    def report(self) -> Report:
        """Return the report: how often each site fired, and why some sites never fired.

            >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
            >>> with hl.record(model, "*") as run:
            ...     _ = model(torch.zeros(4, 2))
            >>> print(run.report())
            hl.record on Sequential: 2 sites, 1 pass, 2 fired, 0 never; ended
              site  type    fired
              0     Linear      1
              1     ReLU        1

        Returns:
            The report: print it, or read its attributes.
        """
        return self._report if isinstance(self._report, Report) else self._report()

    # -- the folder -----------------------------------------------------------------------------

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        alone: bool = False,
        group: Any = None,
        timeout: float = TIMEOUT_S,
    ) -> Path | Any:
        """Write the recording to a folder atomically; `hl.open(folder)` reads it.

            >>> model = nn.Linear(2, 3)
            >>> with hl.record(model) as run:
            ...     _ = model(torch.zeros(4, 2))
            >>> folder = run.save(tmp_path / "run")
            >>> hl.open(folder)["(root)"].shape
            torch.Size([4, 3])

        An older recording in the folder is replaced, and its `report.html` removed. In a
        distributed job this is a collective: all ranks must call it, and they write into one
        folder. Parts that cannot be saved (sparse tensors, a library's caches) are listed in
        `run.lost`.

        Args:
            folder: the folder, or a URL of fsspec such as `s3://bucket/run`. For several ranks
                the folder must be on a disk that all of them share.
            alone: True writes this rank's recording only, without waiting for other ranks.
            group: the process group whose ranks save together; None means all ranks.
            timeout: the time that ranks wait for one another, in seconds.

        Returns:
            The folder's path; of a URL the text.

        Raises:
            FolderError: the folder holds other files, or the disk is full or read-only.
            OverwrittenError: a value was changed in place after it was recorded.
            RanksError: a rank did not call this in time, or selected other sites of the same model.
            AmbiguousError: the recording itself holds several ranks, because `hl.open` read it.
        """
        self._refuse_several_ranks("save(...)")
        if not alone and has_several_ranks(group):
            path, contents = write_ranks(folder, self._folder_contents, self.sites, group, timeout)
        else:
            contents = self._folder_contents()
            path = write_recording(folder, contents)
        self.lost = contents.lost
        return path

    def _folder_contents(self) -> FolderContents:
        def checked(entry: Entry) -> Entry:
            self._log.read_local(entry)
            # A transform that ran inside the model has left its wrappers.
            return entry._replace(value=self._log.unwrap_transforms(entry.value))

        passes = self._pass_contents(checked)
        report, lost = self.report(), list(self.lost)
        return FolderContents(report, self.sites, passes, lost, self.modules, self.model)

    def _pass_contents(self, keep: Callable[[Entry], Entry]) -> list[PassContents]:
        return [
            PassContents(
                current.number,
                current.failed,
                [keep(Entry(*noted)) for noted in current.log],
                settings_from(current.settings),
            )
            for current in self._log.passes
        ]

    def release(self) -> None:
        """Close the files of the folder that this recording was opened from.

            >>> model = nn.Linear(2, 3)
            >>> with hl.record(model) as run:
            ...     _ = model(torch.zeros(4, 2))
            >>> opened = hl.open(run.save(tmp_path / "run"))
            >>> value = opened["(root)"]
            >>> opened.release()

        A file that was read stays mapped until it is closed, and counts as memory of this process.
        The next look-up opens the file again. Values that are still referenced stay valid.
        """
        for rank in self.ranks:
            rank.release()
        stored = _first_stored_value(self)  # all lie in one folder
        if stored is not None:
            stored.release()

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle by value; the stamps of the copy start anew."""
        identity = self._model if isinstance(self._model, RecordedModel) else None
        state = {**self.__dict__, "_report": self.report(), "_log": None, "_model": identity}
        state["copies"] = self._pass_contents(
            lambda entry: entry._replace(value=self._log.read_local(entry), stamp=None)
        )
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        copies = state.pop("copies")
        self.__dict__.update(state)
        self._log = Log(self.sites, self.report)
        for copied in copies:
            self._log.passes.append(make_pass(*copied))

    def to_dict(self) -> dict[str, Any]:
        """Return the printed table as plain values: `sites` has a dict for each site.

        Shapes and dtypes are those of the first 100 passes. `calls` is a text: "3", or "1 to 3"
        where passes differ.

        Raises:
            AmbiguousError: the recording holds several ranks; write `run.ranks[0].to_dict()`.
        """
        return {
            "model": self.report().model_type,
            "passes": len(self.passes),
            "sites": self._table_rows(),
        }

    def _table_rows(self) -> list[dict[str, Any]]:
        self._refuse_several_ranks("table")
        passes = [tuple(current.log) for current in self._log.passes]
        return site_rows(self._log, range(len(self.sites)), passes)

    def _printout(self) -> Printout:
        if self.ranks:
            printout = self.ranks[0]._printout()
            head = f" of {len(self.ranks)} ranks: run.ranks[0] is {printout.title}{printout.head}"
            return replace(printout, head=head)
        first: dict[Site, tuple[PassRecord, int]] = {}
        for record in self.passes[:MOST_PASSES]:
            for site, call in record.fired():
                first.setdefault(site, (record, call))

        def remark(site: Site) -> str:
            return _why_unreadable(*first[site], site) if site in first else ""

        return recording_printout(self._log, self.report().model_type, len(self.lost), remark)

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows: findings, the depth strip, and the table."""
        judged = "" if self.ranks else findings_html(self.passes, self.modules, self.report())
        return judged + super()._repr_html_()

    @property
    def _name(self) -> str:
        return "run"

    def _rank_recordings(self) -> tuple[Recording, ...]:
        return self.ranks

    def _parse_key(self, key: Key) -> ParsedKey:
        return self._log_and_parsed_key(key)[1]

    def _log_and_parsed_key(self, key: Key) -> tuple[Log, ParsedKey]:
        log = self._rank_with_value(key)._log
        return log, log.index.parse(key)

    def _rank_with_value(self, key: Key) -> Recording:
        """Return the recording of the only rank on which a site has a value."""
        if not self.ranks:
            return self
        having = [rank for rank, recording in enumerate(self.ranks) if key in recording]
        if len(having) > 1:
            raise AmbiguousError(
                f"{str(key)!r} has a value on each of {len(having)} ranks."
                f"\nWrite run.ranks[{having[0]}][{str(key)!r}] for one of them."
                f"\nCombine all with run.full({str(key)!r}, dim=0) or"
                f" run.reduced({str(key)!r}, op='mean')."
            )
        return self.ranks[having[0] if having else 0]

    def _refuse_several_ranks(self, attribute: str) -> None:
        if self.ranks:
            raise AmbiguousError(
                f"this recording holds {len(self.ranks)} ranks, and each has its own {attribute}."
                f"\nWrite run.ranks[0].{attribute} for one of them."
            )


def _join_suggestion_text(log: Log, parsed_key: ParsedKey) -> str:
    try:
        return f", or {suggest_join_code(log, parsed_key, log.outline)}"
    except AmbiguousError:  # several backward passes cannot be joined
        return ""


def _why_unreadable(record: PassRecord, call: int, site: Site) -> str:
    """Say why a site's first value cannot be looked up, without reading tensor data."""
    key = site if site.call is not None else Site(site.path, site.port, site.leaf, call)
    try:
        runs = record.backwards if site.is_gradient else []
        next((run for run in runs if (site, call) in run.fired()), record)[key]
    except OverwrittenError:
        return "overwritten in place after it was recorded; a look-up says how to keep it"
    except FolderError as error:
        return first_line(error)
    return ""


def _sites_of_part(model: Callable[[], nn.Module | None], text: str) -> list[str]:
    """Return the sites of a part of a model; the text itself, if no parts are known."""
    live = model()
    if live is None or not has_parts(live := unwrap(live)):
        return [text]
    return sites_of_part(live, text)


def living_model(recording: Recording) -> nn.Module | None:
    """Return the model of a recording of this process; None if it is gone, or of another one."""
    reference = recording._model
    return reference() if callable(reference) else None


def is_read_from_folder(recording: Recording) -> bool:
    """Tell whether the values of a recording are read from a folder."""
    return any(_first_stored_value(part) is not None for part in (recording, *recording.ranks))


def _first_stored_value(recording: Recording) -> StoredValue | None:
    values = (entry[1] for current in recording._log.passes for entry in current.log)
    return next((value for value in values if isinstance(value, StoredValue)), None)


def has_lost_model(recording: Recording) -> bool:
    """Tell whether a recording of this process cannot identify its model, which is gone."""
    return callable(recording._model) and living_model(recording) is None
