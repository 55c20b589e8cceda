"""The manifest of a store: equal jobs give equal bytes."""

from __future__ import annotations

import json

from hookline.files.place import LocalPlace
from hookline.stores.job import environment, read_manifest, write_manifest


def test_the_order_of_keys_changes_no_byte(tmp_path):
    job = {
        "sites": ["b", "a"], "model": {"weights": "x", "type": "y"}, "options": {}, "data": {},
        "batch_size": 4, "shard_batches": 1, "n_items": 0, "columns": [],
    }  # fmt: skip
    places = [LocalPlace(tmp_path / name) for name in "ab"]
    write_manifest(places[0], job, environment(), [])
    as_sent = json.loads(json.dumps(job, sort_keys=True))
    write_manifest(places[1], as_sent, dict(reversed(environment().items())), [])
    assert places[0].read("manifest.json") == places[1].read("manifest.json")
    assert read_manifest(places[0])["job"] == job
