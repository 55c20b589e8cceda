"""The writer: shards in order, a bounded number behind, errors where they are noticed."""

from __future__ import annotations

import threading

import pytest
import torch

import hookline as hl
from hookline.files.folder_or_url import as_place
from hookline.stores.shard_file import BatchRows, ShardWriter, read_shard, shard_file_name


def chunks(number):
    return [BatchRows(number, [number], {"x": torch.full((1, 4), float(number))})]


def ready():
    """The rows are on the CPU."""


def test_shards_are_written_in_order_and_told(tmp_path):
    place, told = as_place(tmp_path / "s"), []
    with ShardWriter(place, told.append) as writer:
        for number in range(5):
            writer.submit(number, chunks(number), ready)
    assert [shard.number for shard in told] == list(range(5))
    assert [read_shard(place, shard_file_name(number), verify=True) for number in range(5)] == told


@pytest.mark.slow
def test_no_more_wait_than_may(tmp_path):
    go, begun = threading.Event(), []

    def wait():
        begun.append(1)
        go.wait(30)

    with ShardWriter(as_place(tmp_path / "s"), lambda shard: None, waiting=2) as writer:
        writer.submit(0, chunks(0), wait)
        writer.submit(1, chunks(1), ready)
        third = threading.Thread(target=writer.submit, args=(2, chunks(2), ready))
        third.start()
        third.join(0.2)
        assert third.is_alive()  # it waits for the first
        go.set()
        third.join(30)
        assert not third.is_alive()
    assert begun == [1]


def test_what_cannot_be_written_raises_at_the_latest_at_the_end(tmp_path):
    (tmp_path / "s").write_text("a file")
    with pytest.raises(hl.FolderError, match="cannot write"):
        with ShardWriter(as_place(tmp_path / "s"), lambda shard: None) as writer:
            writer.submit(0, chunks(0), ready)


def test_after_an_error_what_waits_is_still_written(tmp_path):
    told = []
    with pytest.raises(ZeroDivisionError):
        with ShardWriter(as_place(tmp_path / "s"), told.append) as writer:
            writer.submit(0, chunks(0), ready)
            writer.submit(1, chunks(1), ready)
            1 / 0  # noqa: B018
    assert len(told) == 2


def test_no_thread_is_left(tmp_path):
    before = threading.active_count()
    with ShardWriter(as_place(tmp_path / "s"), lambda shard: None) as writer:
        writer.submit(0, chunks(0), ready)
    assert threading.active_count() == before
