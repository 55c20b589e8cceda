"""One pass of a recording, or one backward pass over it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Never, final, overload

from hookline.display.results import Printout, Result
from hookline.display.text import plural
from hookline.engine import Pass, Selection, Site, hide_from_dir
from hookline.engine.run_settings import Settings, settings_from
from hookline.recordings.key_index import Key, ParsedKey, run_suffix
from hookline.recordings.log_entries import Entry
from hookline.recordings.lookups import Lookups
from hookline.recordings.pass_log import Log, Read
from hookline.recordings.site_tables import entries_of_pass, pass_printout, site_rows


@final
@hide_from_dir(
    "calls_with_dtensors", "holds_shard", "layouts", "outline", "suggest_one_value",
    "values_by_replica",
)  # fmt: skip
class PassRecord(Lookups, Result):
    """One pass (run of the model) of a recording, with the look-ups of the recording.

    Iteration yields the keys of the sites that fired, in registration order. If a module ran
    several times, each call has a key: `block#0`. If several backward passes computed a gradient,
    each of them has a key: `fc:grad_output#backward0`. `order` lists the keys in firing order.
    """

    def __init__(self, log: Log, current: Pass, backward: int | None = None) -> None:
        self._log = log
        self._pass = current
        self._backward = backward

    def __reduce__(self) -> Never:
        raise TypeError(
            f"pass {self.number} cannot be copied or pickled alone: its values belong to its"
            f" recording.\nCopy the recording, and write .passes[{self.number}] of the copy."
        )

    @property
    def number(self) -> int:
        """The number of the pass, from 0."""
        return self._pass.number

    @property
    def failed(self) -> bool | None:
        """True if the model raised in this pass, False if not; None while the pass runs."""
        return self._pass.failed

    @property
    def settings(self) -> Settings | None:
        """The settings of torch under which the pass ran: modes, autocast, seed, precision.

            >>> model = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5)).eval()
            >>> with torch.no_grad(), hl.record(model) as run:
            ...     _ = model(torch.zeros(4, 2))
            >>> settings = run.passes[0].settings
            >>> settings.training, settings.autocast, settings.grad
            ({'': False}, {}, 'off')

        None for a module that ran outside a run of the model, and for a recording that an older
        hookline saved.
        """
        return settings_from(self._pass.settings)

    @property
    def backwards(self) -> list[PassRecord]:
        """The backward passes over this pass, in order, each with its own gradients."""
        runs = self._log.autograd_runs(self._pass) if self._backward is None else [self._backward]
        return [PassRecord(self._log, self._pass, run) for run in runs]

    @property
    def order(self) -> list[str]:
        """The keys in firing order, for instance to search for the first NaN."""
        return self._shortest_keys(self._fired())

    def fired(self) -> list[tuple[Site, int]]:
        """List each site that fired, with the number of the module's call, in firing order."""
        return [(self._log.sites[index], call) for index, call, _ in self._fired()]

    def __contains__(self, key: object) -> bool:
        """Return whether a site has one or more values in this pass."""
        if not isinstance(key, str | Site | Selection):
            return False
        return self._log.has(key, self._pass, self._backward)

    def outline(self, key: Key) -> Any:
        """Return a value's structure; a value in a folder has meta tensors without data.

        A value in memory is returned as it is, even if it was changed in place later.

        Raises:
            NotRecordedError, AmbiguousError: as in a look-up.
            FolderError: the folder is gone or damaged.
        """
        return self._single_value(key, self._log.outline)

    def suggest_one_value(self, key: Key) -> tuple[str, str]:
        """Return the code after this pass's name, and the key, of one of a site's values.

        Raises:
            NotRecordedError: the site did not fire in this pass.
        """
        parsed_key = self._parse_key(key)
        return "", str(self._log.key_of_first_entry(parsed_key, *self._find_entries(parsed_key)[0]))

    def calls(self, key: Key) -> list[Any]:
        """Return the values of every call of a site in this pass, in order.

        Raises:
            NotRecordedError: the site did not fire in this pass.
        """
        return self._values(key)

    def calls_with_dtensors(self, key: Key) -> list[Any]:
        """Return what `calls` does, with each DTensor as it is and not this rank's shard of it.

        Raises:
            NotRecordedError: the site did not fire in this pass.
        """
        return self._values(key, self._log.read_with_dtensors)

    def _values(self, key: Key, read: Read | None = None) -> list[Any]:
        parsed_key = self._parse_key(key)
        return self._log.values(parsed_key, *self._find_entries(parsed_key)[0], read)

    def __iter__(self) -> Iterator[str]:
        fired = sorted(
            dict.fromkeys(self._fired()), key=lambda call: (call[0], call[1], call[2] or 0)
        )
        return iter(dict.fromkeys(self._shortest_keys(fired)))

    def to_dict(self) -> dict[str, Any]:
        """Return the printed table as plain values: `sites` has a dict for each site that fired."""
        return {"number": self.number, "failed": self.failed, "sites": self._table_rows()}

    def _table_rows(self) -> list[dict[str, Any]]:
        noted = entries_of_pass(self._pass, self._backward)
        return site_rows(self._log, sorted({entry[0] for entry in noted}), [noted])

    def _printout(self) -> Printout:
        return pass_printout(self._log, self._pass, self._backward)

    def _single_value(self, key: Key, read: Read | None = None) -> Any:
        parsed_key = self._parse_key(key)
        return self._log.single_value(parsed_key, *self._find_entries(parsed_key)[0], read)

    @property
    def _name(self) -> str:
        name = f"run.passes[{self.number}]"
        if self._backward is None:
            return name
        return f"{name}.backwards[{self._log.autograd_runs(self._pass).index(self._backward)}]"

    def _find_entries(self, parsed_key: ParsedKey) -> list[tuple[Pass, list[Entry]]]:
        return self._log.find_entries(parsed_key, self._pass, self._backward)

    def _fired(self) -> list[tuple[int, int, int | None]]:
        return self._log.fired_sites(self._pass, self._backward)

    def _shortest_keys(self, fired: list[tuple[int, int, int | None]]) -> list[str]:
        """Return the shortest keys, with the call and the backward pass only if needed."""
        calls: dict[int, set[int]] = {}
        runs: dict[int, set[int | None]] = {}
        for index, call, run in self._log.fired_sites(self._pass, None):
            calls.setdefault(index, set()).add(call)
            runs.setdefault(index, set()).add(run)
        numbers = {run: number for number, run in enumerate(self._log.autograd_runs(self._pass))}
        keys = []
        for index, call, run in fired:
            text = self._log.index.keys[index] + (f"#{call}" if len(calls[index]) > 1 else "")
            if self._backward is None and run is not None and len(runs[index] - {None}) > 1:
                text += run_suffix(numbers[run], None)
            keys.append(text)
        return keys


@final
class PassList(Sequence[PassRecord]):
    """The passes of a recording, created on access because there may be 100,000."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def __len__(self) -> int:
        return len(self._log.passes)

    @overload
    def __getitem__(self, index: int) -> PassRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[PassRecord]: ...
    def __getitem__(self, index: int | slice) -> PassRecord | list[PassRecord]:
        if isinstance(index, slice):
            return [PassRecord(self._log, current) for current in self._log.passes[index]]
        if not hasattr(index, "__index__"):
            raise TypeError(
                f"a pass must be chosen by its number, got {index!r}."
                "\nWrite run.passes[0][site], or run[site] if there is one pass."
            )
        if not -len(self) <= index < len(self):
            ran = plural(len(self), "pass", "passes")
            raise IndexError(
                f"the pass must be one of the {ran} that ran, from 0 on, got {index}."
                "\nLook how many there are: len(run.passes)."
            )
        return PassRecord(self._log, self._log.passes[index])

    def __repr__(self) -> str:
        passes = plural(len(self), "pass", "passes")
        return f"{passes} of a Recording of {plural(len(self._log.sites), 'site')}"


def make_pass(
    number: int, failed: bool | None, log: Sequence[Any], settings: Settings | None = None
) -> Pass:
    """Create a pass with the entries of a saved or copied one."""
    current = Pass(number)
    current.failed = failed
    current.settings = settings
    current.log = list(log)
    return current
