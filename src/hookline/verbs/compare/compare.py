"""Compare two runs of one model, or of a model and its port, and say where they part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, final

from hookline.display.text import first_line, listed, plural
from hookline.engine import path_text
from hookline.engine.pytree.describe import leaf_text
from hookline.errors import InputError, OverwrittenError
from hookline.statistics.difference import Difference
from hookline.verbs.compare.before import Remark, before
from hookline.verbs.compare.comparison import ComparedSite, Comparison, number_text, ratio_text
from hookline.verbs.compare.floor import Floor, eps_of, floor_of, measured_floor
from hookline.verbs.compare.measure import Measured, measured
from hookline.verbs.compare.names import Names, Pairing, paired
from hookline.verbs.compare.sides import Entry, Side, side_of

_MOST_NAMED = 3
_RELEASE_BYTES = 2**28  # files of folders are closed after so many bytes were read

# What goes together. Arrays of another framework may stand for a recording.
_TOGETHER = ({"recording", "arrays"}, {"store"}, {"curves"})


def compare(
    a: Any, b: Any, *, names: Names | None = None, floor: Comparison | None = None
) -> Comparison:
    """Compare two runs site by site, and name the first that differs beyond rounding.

        >>> model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))
        >>> port = nn.Sequential(nn.Linear(8, 8), nn.GELU("tanh"), nn.Linear(8, 2))
        >>> _ = port.load_state_dict(model.state_dict())
        >>> x = torch.randn(4, 8)
        >>> with hl.record(model, ["**", "(root):input"]) as run:
        ...     _ = model(x)
        >>> with hl.record(port, ["**", "(root):input"]) as ported:
        ...     _ = port(x)
        >>> hl.compare(ported, run).first.site
        '1'

    The two may come from other processes, machines, dtypes and frameworks. Recordings need one
    forward on equal inputs. Record the inputs too, so that a difference in them is told before any
    layer is blamed; with `ports=("input", "output")`, a module is told from what feeds it.

    Four numbers of each pair decide together: the relative error, the ratio of norms, the worst row
    and the worst element. A pair is noise if each is below the noise floor. Values are read one
    pair at a time, and measured in float64.

    Args:
        a: a recording or one of its passes, a store, the curves of a monitor, a dict of arrays such
            as a state dict, or the path or URL of one of these (`.npz`, `.npy`, `.safetensors`,
            `.pt`). Arrays may be of torch, NumPy, or anything that NumPy converts.
        b: the same kind of thing, which numbers are relative to: the reference. A dict of arrays
            may be compared with a recording; its names are those of the sites.
        names: renames modules or arrays of b to those of a: a function from a path to a path, or a
            dict `{path in b: path in a}`. A dict also renames what lies below a path.
        floor: a comparison of two runs that only rounding tells apart, such as
            `hl.compare(run, run_in_float64)`, with the sites of a. Four times what it measured is
            noise. None takes the floors of the dtypes, which are wider.

    Returns:
        The comparison: `first`, `suspect`, `findings`, `rows`; it prints as a table.

    Raises:
        InputError: a side cannot be compared, is empty, or is of another kind than the other; no
            name is in both; or `names` or `floor` is invalid.
        FolderError, ModelError: a folder or a file cannot be read.
    """
    if floor is not None and not isinstance(floor, Comparison):
        raise InputError(
            f"floor must be a Comparison, got {type(floor).__name__}."
            "\nGive floor=hl.compare(run, run_in_float64)."
        )
    side_a, side_b = side_of(a, "a"), side_of(b, "b")
    if not any({side_a.noun, side_b.noun} <= kinds for kinds in _TOGETHER):
        raise InputError(
            f"a and b must be the same kind of thing, got {_a(side_a.noun)} and {_a(side_b.noun)}."
            "\nGive two recordings, two stores, two curves or two dicts of arrays."
        )
    pairing = paired(side_a, side_b, names)
    judge = _Judge(floor, pairing)
    rows = list(judge.rows(side_a, side_b))
    findings = [*_of_inputs(judge, rows), *before(side_a, side_b, pairing), *_of_forms(rows)]
    suspect, remark = judge.suspect(rows)
    return Comparison(rows, findings + remark, suspect)


def _a(noun: str) -> str:
    return f"{'a ' * (not noun.endswith('s'))}{noun}"


@final
class _Judge:
    """Measures pairs in firing order, and judges each by its noise floor.

    Args:
        floor: the measured floor, or None.
        pairing: the pairs.
    """

    def __init__(self, floor: Comparison | None, pairing: Pairing) -> None:
        self._floors = {row.site: row for row in floor.rows} if floor is not None else {}
        self._pairs = pairing.pairs
        self._eps = 0.0  # the coarsest until now, since its errors travel on
        self.entry_of: dict[str, Entry] = {}  # by the site of a row

    def rows(self, a: Side, b: Side) -> Iterator[ComparedSite]:
        """Yield the rows of all pairs, and close files from time to time."""
        n_bytes = 0
        for ours, theirs in self._pairs:
            for row, size in self._rows_of(ours, theirs):
                self.entry_of[row.site] = ours
                n_bytes += size
                yield row
            if n_bytes > _RELEASE_BYTES:
                n_bytes = 0
                a.release()
                b.release()
        a.release()
        b.release()

    def _rows_of(self, ours: Entry, theirs: Entry) -> Iterator[tuple[ComparedSite, int]]:
        try:
            values = ours.read(), theirs.read()
        except OverwrittenError:
            why = "overwritten in place after recording; record with copy=True"
            yield ComparedSite(ours.key, theirs.key, "not comparable", why=why), 0
            return
        for found in measured(*values):
            row = self._row(found, ours, theirs)
            yield row, 0 if found.gap is None else _n_bytes(found)

    def _row(self, found: Measured, ours: Entry, theirs: Entry) -> ComparedSite:
        row = ComparedSite(
            _with_leaf(ours, found.leaf), _with_leaf(theirs, found.leaf), "not comparable",
            why=found.why, form=found.forms[0], other_form=found.forms[1],
        )  # fmt: skip
        floor = self._floor(row.site, found, ours, max(ours.n_modules, theirs.n_modules))
        gap = found.gap
        if gap is None:
            return row
        if gap.problem:
            return replace(row, verdict="differs", why=gap.problem, floor=floor)
        exceeded = floor.exceeded_by(gap)
        row = replace(
            row, relative=gap.relative, norm_ratio=gap.norm_ratio, worst_row=gap.worst_row,
            worst_element=gap.worst_element, row=gap.row, element=gap.element, floor=floor,
        )  # fmt: skip
        if not gap.differs:
            return replace(row, verdict="identical")
        return replace(row, verdict="differs" if exceeded else "noise", why=_why(gap, exceeded))

    def _floor(self, site: str, found: Measured, entry: Entry, n_modules: int) -> Floor:
        eps = eps_of(found.dtypes)
        if not eps:  # integers have no noise
            return Floor()
        known = self._floors.get(site)
        if known is not None and known.relative is not None and known.norm_ratio is not None:
            least = floor_of(eps, "stored")
            noise = measured_floor(
                Difference(
                    known.relative,
                    known.norm_ratio,
                    known.worst_row or 0.0,
                    known.worst_element or 0.0,
                )
            )
            return least.raised_to(noise)
        if entry.kind == "stored" and not entry.is_input:
            return floor_of(eps, "stored")
        self._eps = max(self._eps, eps)
        return floor_of(self._eps, entry.kind, n_modules)

    def suspect(self, rows: list[ComparedSite]) -> tuple[str | None, list[Remark]]:
        """Return the path of the module that makes the first difference, and the finding of it."""
        first = next((row for row in rows if row.verdict == "differs"), None)
        if first is None:
            return None, []
        entry = self.entry_of[first.site]
        text = f"first beyond noise: {first.site} ({first.why})"
        if entry.is_input or entry.port not in ("input", "output"):
            return None, [Remark("site", text, first.site)]
        fired = {other.path for other in self.entry_of.values() if other.port == "output"}
        path, hint = entry.path, ""
        if entry.port == "input":
            while path and (path == entry.path or path not in fired):
                path = path.rpartition(".")[0]
            hint = f"; what it is given is made in the forward of {path_text(path)}"
        elif any(other.path == path and other.port == "input" for other in self.entry_of.values()):
            hint = "; its inputs are equal up to noise"
        else:
            hint = '; record ports=("input", "output") to tell it from the code that feeds it'
        return path, [Remark("site", text + hint, first.site)]


def _why(gap: Difference, exceeded: list[str]) -> str:
    if not exceeded:
        return ""
    texts = {
        "relative": f"relative {number_text(gap.relative)}",
        "norm_ratio": f"norm ratio {ratio_text(gap.norm_ratio)}",
        "worst_row": f"row {gap.row} by {number_text(gap.worst_row)}",
        "worst_element": f"element {list(gap.element)} by {number_text(gap.worst_element)}",
    }
    return texts[exceeded[0]]


def _n_bytes(found: Measured) -> int:
    """Estimate the bytes that were read, by the shape in the text of the form."""
    sizes = found.forms[0].partition("]")[0].strip("[").split(", ")
    total = 8
    for size in sizes:
        total *= int(size) if size.isdecimal() else 1
    return total


def _with_leaf(entry: Entry, leaf: tuple[Any, ...]) -> str:
    """Return the key of a leaf: it is written after the port, and before the call."""
    if not leaf:
        return entry.key
    rest, sign, numbers = entry.rest.partition("#")
    port = "" if ":" in rest or entry.kind == "stored" and not entry.is_input else ":output"
    return f"{path_text(entry.path)}{rest}{port}{leaf_text(leaf)}{sign}{numbers}"


def _of_inputs(judge: _Judge, rows: list[ComparedSite]) -> list[Remark]:
    """Say which inputs of the model differ."""
    odd = [
        row
        for row in rows
        if judge.entry_of[row.site].is_input and row.verdict in ("differs", "not comparable")
    ]
    return [
        Remark("inputs", f"the inputs differ: {row.site} ({row.why})", row.site) for row in odd
    ]


def _of_forms(rows: list[ComparedSite]) -> list[Remark]:
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
        remarks.append(Remark("dtypes", text, sites[0]))
    for reason, odd in reasons.items():
        names = [
            f"{row.site} ({row.why.removeprefix('shapes ')})" * (reason == "other shapes")
            or row.site
            for row in odd
        ]
        text = f"{plural(len(odd), 'value')} not comparable, {reason}: {listed(names, _MOST_NAMED)}"
        remarks.append(Remark("values", text, odd[0].site))
    return remarks
