"""Loading: items that fail, random items, worker processes."""

from __future__ import annotations

import multiprocessing
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info

import hookline as hl
from data_source_checks import Counting, Random, Squares, alike, run, said, source_of
from hookline.data.indexed_source import RawBatch


class WorkerAware(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor(index) if get_worker_info().dataset is self else None


def masked(found):
    """Collate as for masked language models: a random part is left."""
    return torch.stack(found) * (torch.rand(len(found), 4) < 0.5)


def test_a_failing_item_is_named_with_the_way_to_skip_it():
    source = source_of(Squares(7, bad=[4]), batch_size=3)
    with pytest.raises(hl.InputError) as caught:
        run(source, [0, 1])
    assert str(caught.value) == (
        "item 4 must load, got OSError: cannot read item 4."
        "\nLeave out items that fail, and list them: on_error='skip', or --skip-errors."
    )
    assert isinstance(caught.value.__cause__, OSError)


def test_failing_items_are_left_out_and_listed():
    batches = run(source_of(Squares(7, bad=[3, 4, 5, 6]), batch_size=4, on_error="skip"), [0, 1])
    assert batches[0].items == [0, 1, 2]
    assert batches[0].skipped == [(3, "OSError: cannot read item 3")]
    assert batches[0].data.tolist() == [[0, 0], [1, 1], [2, 4]]
    assert (batches[1].items, batches[1].data) == ([], None)
    assert [item for item, _ in batches[1].skipped] == [4, 5, 6]


@pytest.mark.parametrize("change", [-1, 1])
def test_a_length_that_changes_leaves_the_items_as_they_were(change):
    class Changing(list):
        def __len__(self):
            self.length = getattr(self, "length", 7) + change
            return self.length

    source = source_of(Changing(torch.arange(20)), batch_size=4)
    batches = run(source, range(-(-source.n_items // 4)))
    assert [item for batch in batches for item in batch.items] == list(range(source.n_items))


@pytest.mark.processes
def test_workers_load_the_same_and_skip_the_same():
    here, there = (
        source_of(Squares(11, bad=[2, 7]), batch_size=3, workers=workers, on_error="skip")
        for workers in (0, 2)
    )
    assert all(map(alike, run(here, [3, 1, 0]), run(there, [3, 1, 0])))
    with pytest.raises(hl.InputError, match=r"^item 2 must load, got OSError: cannot") as caught:
        run(source_of(Squares(11, bad=[2]), batch_size=3, workers=2), range(4))
    assert "OSError: cannot read item 2." in caught.value.__notes__[0]


@pytest.mark.processes
@pytest.mark.parametrize("collate", [None, masked])
def test_random_items_are_the_same_in_every_process(collate):
    loader = DataLoader(Random(), batch_size=4, collate_fn=collate)
    there = run(source_of(loader, workers=2), [0, 1, 2])
    assert all(map(alike, run(source_of(loader), [0, 1, 2]), there))
    assert all(map(alike, run(source_of(loader), [2, 0]), [there[2], there[0]]))


def test_loading_leaves_the_random_states_as_they_are():
    before = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
    run(source_of(Random(), batch_size=4), [0, 1, 2])
    run(source_of(DataLoader(Random(), batch_size=4)), [0, 1, 2])
    run(source_of(Counting(3)), [0])
    run(source_of(torch.zeros(3)), [0])
    run(source_of(TensorDataset(torch.zeros(3))), [0])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), repr(np.random.get_state())) == before[1:]


@pytest.mark.processes
def test_a_worker_finds_the_users_own_data_set():
    (batch,) = run(source_of(WorkerAware(), workers=1), [0])
    assert batch.data.tolist() == [0, 1, 2, 3]


def test_pinning_keeps_a_tuple(monkeypatch):
    # torch's own pinning would make a list of it; this machine has nothing to pin for.
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor + 1)
    loaded = RawBatch(0, [0], (torch.zeros(1), {"mask": torch.ones(1)}, "text"))
    assert loaded.pin_memory().data == (torch.ones(1), {"mask": torch.tensor([2.0])}, "text")


def test_what_is_no_dense_cpu_tensor_is_not_pinned(monkeypatch):
    # torch raises for these; meta stands for an accelerator.
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: 1 / 0)
    nested = torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged)
    data = [torch.ones(2, device="meta"), torch.eye(2).to_sparse(), nested]
    pinned = RawBatch(0, [0], list(data)).pin_memory().data
    assert all(after is before for after, before in zip(pinned, data, strict=True))


@pytest.mark.processes
def test_workers_end_with_a_loop_that_is_left_early():
    batches = source_of(Squares(100), batch_size=2, workers=2).batches(range(50))
    assert next(batches).items == [0, 1]
    assert len(multiprocessing.active_children()) == 2
    batches.close()
    assert not multiprocessing.active_children()


@pytest.mark.processes
def test_no_worker_is_started_for_nothing():
    batches = source_of(Squares(100), batch_size=2, workers=3).batches([7])
    assert next(batches).items == [14, 15]
    assert len(multiprocessing.active_children()) == 1
    batches.close()


def test_numbers_are_taken_as_they_are_needed():
    taken = []

    def numbers():
        for number in range(5):
            taken.append(number)
            yield number

    batches = source_of(Squares(10), batch_size=2).batches(numbers())
    assert [next(batches).number, next(batches).number] == [0, 1]
    assert len(taken) <= 3


def test_running_out_of_memory_is_not_the_items_fault():
    class Large(Squares):
        def __getitem__(self, index):
            raise MemoryError("no room")

    with pytest.raises(MemoryError):
        run(source_of(Large(3), on_error="skip"), [0])


def test_items_that_become_no_batch_need_a_collate_function():
    items = [{"input": torch.zeros(2), "meta": None}] * 3
    message = said(lambda: run(source_of(items), [0]))
    assert message.startswith("item 0 must load, got TypeError: default_collate:")
    assert "collate_fn=" in message
    assert "on_error='skip'" in message

    class BadFirst(Squares):
        def __getitem__(self, index):
            return super().__getitem__(index) if index in self.bad else items[0]

    message = said(lambda: run(source_of(BadFirst(3, bad=[0])), [0]))
    assert message.startswith("item 0 must load, got OSError: cannot read item 0.")
    assert "collate_fn=" not in message  # that is of the items behind it


def test_items_that_do_not_fit_together_are_refused():
    ragged = [torch.zeros(2), torch.zeros(3)]
    for on_error in ("raise", "skip"):
        source = source_of(ragged, on_error=on_error)
        message = said(lambda source=source: run(source, [0]))
        assert message.startswith("items 0 to 1 must fit together in one batch, got RuntimeError:")
        assert "collate_fn=" in message
    message = said(lambda: run(source_of(["a", "b"]), [0]))
    assert "must become a batch with a first dimension of 2, got list(str, str)" in message
    assert "Give tokenize=" in message


def test_an_item_that_cannot_be_collated_is_found():
    source = source_of([1.0, object(), 3.0], on_error="skip")
    (batch,) = run(source, [0])
    assert batch.items == [0, 2]
    assert batch.data.tolist() == [1, 3]
    assert batch.skipped[0][1].startswith("TypeError: default_collate: batch must contain")


@pytest.mark.parametrize("number", [-1, 3])
def test_a_batch_that_does_not_exist_is_refused(number):
    with pytest.raises(IndexError, match=f"must be from 0 to 2, got {number}"):
        run(source_of(range(9), batch_size=3), [number])
