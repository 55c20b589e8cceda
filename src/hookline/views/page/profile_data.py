"""The data of a profile's page: the tables of its modules, and the nested calls."""

from __future__ import annotations

from typing import Any

from hookline.display.results import printout_of
from hookline.verbs.profile.profile import Profile
from hookline.verbs.profile.table import ProfileTable


def profile_data(profiling: Profile) -> dict[str, Any]:
    """Return what the page of a profile draws, as plain data.

        {tables: [{name, rows: {path, type, depth, …}, totals: [[label, text]], notes: [text]}],
         calls: [{path, calls, seconds, flops, kept, children}], around: [[name, seconds]]}

    The first table has the sums over all passes; if there are several, the second has the medians
    of a pass. `seconds` and `flops` are by phase: forward, backward, recompute.
    """
    table = profiling.table
    total = table.total
    tables = [_table_data("all passes", table)]
    if total.passes > 1:
        tables.append(_table_data("a pass, medians", profiling.per_pass))
    around = [
        ("optimizer", total.optimizer),
        ("collectives", total.collectives),
        ("outside the model", total.outside),
        ("failed passes", total.failed),
    ]
    return {
        "tables": tables,
        "calls": profiling.calls(),
        "around": [[name, seconds] for name, seconds in around if seconds],
    }


def _table_data(name: str, table: ProfileTable) -> dict[str, Any]:
    printout = printout_of(table)
    rows = table.to_dict()["rows"]
    failure = [" ".join(printout.failure)] if printout.failure else []
    return {
        "name": name,
        "rows": {column: [row[column] for row in rows] for column in rows[0]},
        "totals": [list(pair) for pair in printout.totals],
        "notes": [*failure, *table.notes],
    }
