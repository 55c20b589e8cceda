"""Some items of a store as a recording, for all that draws or compares recordings."""

from __future__ import annotations

from collections.abc import Sequence

from hookline.engine import Report
from hookline.recordings import Recording
from hookline.recordings.pass_record import make_pass
from hookline.stores.store import Store, parse_column_name


def excerpt(store: Store, items: Sequence[int]) -> Recording:
    """Read some items of a store, as the one pass of a recording.

        >>> from hookline.stores import excerpt
        >>> run = excerpt(store, [40, 41])
        >>> run["fc"].shape
        torch.Size([2, 3])

    Args:
        store: the store.
        items: the items, by their places in the store. Values with a row for each token are padded
            with zeros to the longest item.

    Raises:
        IndexError: there is no such item.
        FolderError: a shard is gone or damaged.
    """
    sites = tuple(map(parse_column_name, store.sites))
    chosen = list(items)
    log = [
        (number, column.padded(chosen)[0] if column.is_ragged else column[chosen], None)
        for number, column in enumerate(store[name] for name in store.sites)
    ]
    report = Report(
        name="extract",
        model_type=str(store.job["model"].get("type", "model")).rpartition(".")[2],
        passes=1,
        other_contexts=0,
        ended=True,
        sites=sites,
        counts=(1,) * len(sites),
        why={},
    )
    recording = Recording(sites, report)
    recording.begin_pass(make_pass(0, False, log))
    return recording
