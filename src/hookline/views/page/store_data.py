"""A store on the page: some of its items as a recording, and what is known of all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hookline.display.units import size
from hookline.statistics import Moments
from hookline.statistics.value_statistics import moments_to_statistics
from hookline.stores import Store
from hookline.views.page.value_entries import ValueEntry

_MOST = 200  # shards and skipped items in the page


def with_whole_statistics(entry: ValueEntry, store: Store) -> ValueEntry:
    """Return a value of some items with the statistics, the shape and the bytes of all items."""
    site = entry.key.at
    if site not in store:
        return entry
    column = store[site]
    moments = store.statistics.get(column.name, Moments())
    whole = moments_to_statistics(moments, str(list(column.shape)), column.dtype)
    return replace(entry, whole=whole, shape=whole.shape, stored=column.nbytes)


def store_data(store: Store) -> dict[str, Any]:
    """Return what the page tells of a whole store, as plain data.

    {facts: [[label, text]], origin: [[label, text]],
     shards: [[file, items, rows, size]], nShards, skipped: [[item, reason]], nSkipped}
    """
    plain = store.to_dict()
    shards = [
        [shard["file"].rpartition("/")[2], shard["items"], shard["rows"], size(shard["bytes"])]
        for shard in plain["shards"][:_MOST]
    ]
    facts = [("Items", f"{store.n_items:,}")]
    facts += [("Tokens", f"{store.n_rows:,}")] * (store.n_rows != store.n_items)
    facts += [("Size", size(store.nbytes)), ("Batch size", f"{store.job['batch_size']:,}")]
    return {
        "facts": facts,
        "origin": _origin_facts(store),
        "shards": shards,
        "nShards": len(plain["shards"]),
        "skipped": [[int(item), reason] for item, reason in store.skipped[:_MOST]],
        "nSkipped": len(store.skipped),
    }


def _origin_facts(store: Store) -> list[tuple[str, str]]:
    """List where the values come from as (label, text)."""
    origin = store.provenance
    pairs = [
        ("model", str(store.job["model"].get("type", ""))),
        ("weights", origin.fingerprint),
        ("device", origin.device),
        *origin.versions.items(),
        *origin.flags.items(),
    ]
    return [(label, text) for label, text in pairs if text]
