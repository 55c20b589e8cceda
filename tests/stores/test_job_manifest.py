"""The manifest of a store: equal jobs give equal bytes."""

from __future__ import annotations

import json

from hookline.files.folder_or_url import LocalPlace
from hookline.stores.job_manifest import Job, compared_environment, read_manifest, write_manifest


def test_the_order_of_keys_changes_no_byte(tmp_path):
    job = {
        "sites": ["b", "a"], "model": {"weights": "x", "type": "y"}, "options": {}, "data": {},
        "batch_size": 4, "shard_batches": 1, "n_items": 0, "columns": [],
    }  # fmt: skip
    places = [LocalPlace(tmp_path / name) for name in "ab"]
    write_manifest(places[0], job, compared_environment(), [])
    as_sent = json.loads(json.dumps(job, sort_keys=True))
    write_manifest(places[1], as_sent, dict(reversed(compared_environment().items())), [])
    assert places[0].read("manifest.json") == places[1].read("manifest.json")
    assert read_manifest(places[0])["job"] == job


def test_each_difference_of_two_jobs_is_named_with_both_values():
    stored = Job({"type": "A"}, ["fc"], {"keep": "", "dtype": ""}, {"kind": "tensor"}, 4, 8)
    job = Job({"type": "A"}, ["fc", "end"], {"keep": "", "dtype": "half"}, {"kind": "tensor"}, 2, 8)
    texts = job.differences(stored)
    for text, parts in zip(
        texts, (("sites", "'end'"), ("options.dtype", "half"), ("batch_size",)), strict=True
    ):
        assert all(part in text for part in parts)
    assert "4" in texts[2]
    assert "2" in texts[2]
    assert stored.differences(stored) == []
