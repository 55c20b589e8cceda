"""Sources: data of any kind as batches by number, cut by the index of the items."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    get_worker_info,
)

import hookline as hl
from hookline.engine.pytree.tree import tensors
from hookline.verbs.extract import arrays
from hookline.verbs.extract.loading import Loaded
from hookline.verbs.extract.sources import fingerprint, source_of
from source_checks import alike, all_numbers, run, said


class Squares(Dataset):
    """Item i is the row (i, i * i); the items in `bad` fail to load."""

    def __init__(self, n, bad=()):
        self.n = n
        self.bad = frozenset(bad)

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        if index in self.bad:
            raise OSError(f"cannot read item {index}.\nmore")
        return torch.tensor([index, index * index])


class Counting(IterableDataset):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(torch.arange(self.n).float().unsqueeze(1))


class Random(Dataset):
    """Items that are augmented at random, by the three generators that people use."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.tensor([index, torch.rand(()), random.random(), np.random.rand()])


class WorkerAware(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor(index) if get_worker_info().dataset is self else None


def collect(batches):
    """Collate as people do who drop broken items unseen."""
    return torch.stack([item for item in batches if item[0] != 2])


def masked(found):
    """Collate as for masked language models: a random part is left."""
    return torch.stack(found) * (torch.rand(len(found), 4) < 0.5)


def pairs(found):
    return tuple(torch.stack(found).unbind(1))


def kinds(n) -> dict:
    """The same n rows as each kind of data."""
    rows = torch.arange(2 * n).reshape(n, 2)
    return {
        "tensor": rows,
        "array": rows.numpy(),
        "dict": {"a": rows, "b": rows.numpy() + 1},
        "tuple": (rows, rows.numpy()[:, 0]),
        "list": [*rows],
        "range": range(n),
        "dataset": Squares(n),
        "failing": Squares(n, range(0, n, 3)),
        "subset": Subset(Squares(2 * n), range(n, 2 * n)),
        "random": Random(),
    }


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(sorted(kinds(1))),
    n=st.integers(1, 40),
    batch_size=st.integers(1, 12),
    data=st.data(),
)
def test_a_batch_depends_on_its_number_alone(kind, n, batch_size, data):
    source = source_of(kinds(n)[kind], batch_size=batch_size, on_error="skip")
    whole = run(source, all_numbers(source))
    asked = data.draw(st.lists(st.sampled_from(all_numbers(source)), max_size=8))
    assert all(map(alike, run(source, asked), [whole[number] for number in asked]))
    shared = pickle.loads(pickle.dumps(source))
    assert all(map(alike, run(shared, asked), [whole[number] for number in asked]))
    assert shared.identity() == source.identity()


@settings(max_examples=60, deadline=None)
@given(kind=st.sampled_from(sorted(kinds(1))), n=st.integers(1, 40), size=st.integers(1, 12))
def test_every_item_is_in_one_batch_or_skipped(kind, n, size):
    source = source_of(kinds(n)[kind], batch_size=size, on_error="skip")
    batches = run(source, all_numbers(source))
    for batch in batches:
        here = sorted([*batch.items, *(item for item, _ in batch.skipped)])
        assert here == list(
            range(batch.number * size, min((batch.number + 1) * size, len(source._items)))
        )
        for _, tensor in tensors(batch.data):
            assert len(tensor) == len(batch.items)
    found = [item for batch in batches for item in [*batch.items, *(i for i, _ in batch.skipped)]]
    assert sorted(found) == list(range(source.n_items))


def test_a_batch_of_each_kind_of_data():
    rows = torch.arange(6).reshape(3, 2)
    (batch,) = run(source_of(rows, batch_size=2), [1])
    assert (batch.number, batch.items, batch.skipped) == (1, [2], [])
    assert batch.data.tolist() == [[4, 5]]
    (batch,) = run(source_of((rows, rows.numpy()), batch_size=2), [0])
    assert type(batch.data) is tuple
    assert batch.data[1].tolist() == [[0, 1], [2, 3]]
    (batch,) = run(source_of({"ids": rows}), [0])
    assert list(batch.data) == ["ids"]
    assert batch.items == [0, 1, 2]
    (batch,) = run(source_of(Squares(3)), [0])
    assert batch.data.tolist() == [[0, 0], [1, 1], [2, 4]]


def test_32_items_a_batch_unless_told():
    assert source_of(range(100)).batch_size == 32
    assert source_of(DataLoader(range(100), batch_size=7)).batch_size == 7


def test_a_batch_is_a_copy_of_the_users_rows():
    rows = torch.zeros(4, 2)
    for data in (rows, rows.numpy()):
        (batch,) = run(source_of(data), [0])
        batch.data.add_(1)
    assert rows.sum() == 0


def test_a_read_only_array_of_a_foreign_byte_order():
    rows = np.arange(6, dtype=">f4").reshape(3, 2)[::-1]
    rows.flags.writeable = False
    (batch,) = run(source_of(rows), [0])
    assert batch.data.tolist() == [[4, 5], [2, 3], [0, 1]]
    assert source_of(rows).identity() == source_of(rows.astype("<f4")).identity()


class Sliced:
    """An array of another library, such as h5py: slices give arrays."""

    def __init__(self, array):
        self.array = array
        self.shape = array.shape
        self.dtype = array.dtype

    def __len__(self):
        return len(self.array)

    def __getitem__(self, index):
        assert isinstance(index, slice)
        return self.array[index]


def test_whatever_slices_as_an_array_is_read_by_slices():
    rows = np.arange(6.0).reshape(3, 2)
    source = source_of(Sliced(rows), batch_size=2)
    assert run(source, [1])[0].data.tolist() == [[4, 5]]
    assert source.identity() == source_of(rows).identity()


@pytest.mark.parametrize("cut", [slice(None), slice(3, 9), slice(None, None, -2)])
def test_a_mapped_array_pickles_as_its_place_in_the_file(tmp_path, cut):
    rows = np.arange(4096 * 5, dtype=np.float32).reshape(4096, 5)
    np.save(tmp_path / "rows.npy", rows)
    mapped = np.load(tmp_path / "rows.npy", mmap_mode="r")[cut]
    source = source_of(mapped, batch_size=3)
    data = pickle.dumps(source)
    assert len(data) < 2000
    there = pickle.loads(data)
    assert torch.equal(run(there, [1])[0].data, torch.tensor(rows[cut][3:6].copy()))
    assert there.identity() == source.identity() == source_of(rows[cut].copy()).identity()


def test_a_private_mapping_pickles_with_its_changes(tmp_path):
    np.save(tmp_path / "rows.npy", np.zeros((4, 2)))
    mapped = np.load(tmp_path / "rows.npy", mmap_mode="c")
    mapped[1] = 7
    there = pickle.loads(pickle.dumps(source_of(mapped)))
    assert run(there, [0])[0].data.sum() == 14


def test_a_mapped_file_that_was_cut_is_said(tmp_path):
    path = tmp_path / "rows.npy"
    np.save(path, np.zeros((4, 2)))
    data = pickle.dumps(source_of(np.load(path, mmap_mode="r")))
    path.write_bytes(path.read_bytes()[:-1])
    message = said(lambda: run(pickle.loads(data), [0]))
    assert message == (
        f"{path} must have at least 192 bytes, got 191."
        "\nPut the file back that the job was started with."
    )
    path.unlink()
    assert "must be readable, got FileNotFoundError" in said(lambda: run(pickle.loads(data), [0]))


# DataLoader


def test_a_loader_gives_its_own_batches():
    loader = DataLoader(Squares(7), batch_size=3, collate_fn=pairs)
    source = source_of(loader)
    batches = run(source, all_numbers(source))
    assert [batch.items for batch in batches] == [[0, 1, 2], [3, 4, 5], [6]]
    for batch, own in zip(batches, loader, strict=True):
        assert fingerprint(batch.data) == fingerprint(own)


def test_a_loader_that_shuffles_is_refused_with_the_fix():
    loader = DataLoader(Squares(7), batch_size=3, shuffle=True)
    assert said(lambda: source_of(loader)) == (
        "data must be a DataLoader that goes through its data set in order, got one that shuffles."
        "\nGive DataLoader(dataset, batch_size=3), so that each run and each resume has the same"
        " rows."
    )


def test_a_loader_of_another_order_or_of_a_part_is_refused():
    items = Squares(7)
    own = BatchSampler(RandomSampler(items), 3, False)
    for loader, got in [
        (DataLoader(items, sampler=RandomSampler(items)), "shuffles"),
        (DataLoader(items, sampler=[3, 1]), "one with a list"),
        (DataLoader(items, batch_sampler=own), "one with a BatchSampler"),
        (DataLoader(items, sampler=SequentialSampler(range(3))), "got 3 of 7 items"),
        (DataLoader(items, batch_size=2, drop_last=True), "drop_last=True"),
        (DataLoader(Counting(5), batch_size=2, drop_last=True), "drop_last=True"),
    ]:
        assert got in said(lambda loader=loader: source_of(loader))


def test_a_loader_and_another_batch_size_are_refused():
    loader = DataLoader(Squares(7), batch_size=3)
    assert source_of(loader, batch_size=3).batch_size == 3
    assert said(lambda: source_of(loader, batch_size=4)).startswith(
        "batch_size must be the DataLoader's own, 3, got 4."
    )


def test_a_loader_of_ready_batches_counts_their_items():
    source = source_of(DataLoader([torch.zeros(2, 3), torch.zeros(4, 3)], batch_size=None))
    assert source.n_items is None
    assert [batch.items for batch in run(source, [0, 1])] == [[0, 1], [2, 3, 4, 5]]


class Doubling(DataLoader):
    def __iter__(self):
        return (batch * 2 for batch in super().__iter__())


def test_a_loader_that_changes_its_batches_is_run_itself():
    source = source_of(Doubling(Squares(3), batch_size=2))
    assert [batch.data.tolist() for batch in run(source, [0, 1])] == [[[0, 0], [2, 2]], [[4, 8]]]


def test_a_collate_function_that_drops_items_is_refused():
    source = source_of(DataLoader(Squares(4), batch_size=4, collate_fn=collect))
    assert said(lambda: run(source, [0])).startswith(
        "items 0 to 3 must become a batch with a first dimension of 4, got Tensor[3, 2].\nGive"
    )


# Iterables


def ready(n=3) -> Iterator:
    return (torch.full((k + 1, 2), float(k)) for k in range(n))


def test_batches_of_an_iterable_come_by_arrival():
    source = source_of(ready())
    assert (source.n_items, source.batch_size, source.names) == (None, 0, None)
    batches = run(source, [0, 2, 5])
    assert [(one.number, one.items) for one in batches] == [(0, [0]), (2, [3, 4, 5])]
    assert batches[1].data.tolist() == [[2, 2]] * 3


def test_an_iterator_goes_on_where_it_stands():
    source = source_of(ready())
    assert run(source, [0])[0].items == [0]
    assert [batch.items for batch in run(source, [1, 2])] == [[1, 2], [3, 4, 5]]
    assert said(lambda: run(source, [1])).startswith(
        "data must give batch 1 again, got an iterator (generator) that is past it."
    )
    with pytest.raises(IndexError, match="must increase, got 1 after 1"):
        run(source_of(ready()), [1, 1])


def test_an_iterable_data_set_begins_anew_when_asked():
    source = source_of(Counting(7), batch_size=3)
    for _ in range(2):
        assert [batch.items for batch in run(source, range(9))] == [[0, 1, 2], [3, 4, 5], [6]]
    there = pickle.loads(pickle.dumps(source))
    assert run(there, [1])[0].data.tolist() == [[3], [4], [5]]
    assert there.identity() == {"kind": "batches", "type": "Counting", "length": None}
    loader = DataLoader(Counting(7), batch_size=3)
    assert [batch.items for batch in run(source_of(loader), [2])] == [[6]]


def test_iterables_that_cannot_be_used_are_refused():
    assert said(lambda: run(source_of(iter([])), [0])).startswith(
        "data must give at least one batch, got none from this list_iterator."
    )
    assert "got dict(a=None)" in said(lambda: run(source_of(iter([{"a": None}])), [0]))
    assert "got Tensor[]" in said(lambda: run(source_of(iter([torch.tensor(1)])), [0]))
    assert "batch_size must be left out" in said(lambda: source_of(ready(), batch_size=2))
    assert "on_error must be 'raise'" in said(lambda: source_of(ready(), on_error="skip"))
    assert "must be readable from the start" in said(lambda: pickle.dumps(source_of(ready())))


def test_an_iterable_that_fails_names_the_batch():
    def failing():
        yield torch.zeros(2)
        raise OSError("disk")

    source = source_of(failing())
    with pytest.raises(hl.InputError, match=r"batch 1 must load, got OSError from") as caught:
        run(source, [0, 1])
    assert isinstance(caught.value.__cause__, OSError)
    source = source_of(iter([torch.tensor(1), torch.zeros(2)]))
    assert "batch 0 must hold a tensor" in said(lambda: run(source, [0]))
    assert "must give batch 0 again" in said(lambda: run(source, [0]))


def test_batches_of_texts_are_tokenized():
    source = source_of(
        iter([["a", "b"], ("c",)]), tokenize=lambda texts: {"n": torch.ones(len(texts))}
    )
    assert [batch.items for batch in run(source, [0, 1])] == [[0, 1], [2]]


# Items that fail


def test_a_failing_item_is_named_with_the_way_to_skip_it():
    source = source_of(Squares(7, bad=[4]), batch_size=3)
    with pytest.raises(hl.InputError) as caught:
        run(source, [0, 1])
    assert str(caught.value) == (
        "item 4 must load, got OSError: cannot read item 4."
        "\nLeave out items that fail, and list them: on_error='skip'."
    )
    assert isinstance(caught.value.__cause__, OSError)


def test_failing_items_are_left_out_and_listed():
    batches = run(source_of(Squares(7, bad=[3, 4, 5, 6]), batch_size=4, on_error="skip"), [0, 1])
    assert batches[0].items == [0, 1, 2]
    assert batches[0].skipped == [(3, "OSError: cannot read item 3")]
    assert batches[0].data.tolist() == [[0, 0], [1, 1], [2, 4]]
    assert (batches[1].items, batches[1].data) == ([], None)
    assert [item for item, _ in batches[1].skipped] == [4, 5, 6]


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
    loaded = Loaded(0, [0], (torch.zeros(1), {"mask": torch.ones(1)}, "text"))
    assert loaded.pin_memory().data == (torch.ones(1), {"mask": torch.tensor([2.0])}, "text")


@pytest.mark.processes
def test_workers_end_with_a_loop_that_is_left_early():
    batches = source_of(Squares(100), batch_size=2, workers=2).batches(range(50))
    assert next(batches).items == [0, 1]
    assert len(multiprocessing.active_children()) == 2
    batches.close()
    assert not multiprocessing.active_children()


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


def test_items_that_do_not_fit_together_are_refused():
    ragged = [torch.zeros(2), torch.zeros(3)]
    for on_error in ("raise", "skip"):
        source = source_of(ragged, on_error=on_error)
        message = said(lambda source=source: run(source, [0]))
        assert message.startswith("items 0 to 1 must fit together in one batch, got RuntimeError:")
        assert "collate_fn=" in message
    assert "must become a batch with a first dimension of 2, got list(str, str)" in said(
        lambda: run(source_of(["a", "b"]), [0])
    )


def test_an_item_that_cannot_be_collated_is_found():
    source = source_of([1.0, object(), 3.0], on_error="skip")
    (batch,) = run(source, [0])
    assert batch.items == [0, 2]
    assert batch.data.tolist() == [1, 3]
    assert batch.skipped[0][1].startswith("TypeError: default_collate: batch must contain")


def test_texts_of_a_list_are_tokenized_together():
    def tokenize(texts):
        width = max(map(len, texts))
        return {"ids": torch.tensor([[*map(ord, text.ljust(width))] for text in texts])}

    (batch,) = run(source_of(["a", "bcd"], tokenize=tokenize), [0])
    assert batch.data["ids"].tolist() == [[97, 32, 32], [98, 99, 100]]


# Bad input


@pytest.mark.parametrize(
    "data",
    [None, 3, nn.Linear(2, 2), nn.Sequential(nn.ReLU()), Squares, {1, 2}, b"rows", print],
    ids=repr,
)
def test_what_is_not_data_is_refused(data):
    assert said(lambda: source_of(data)).startswith("data must be a Dataset, a DataLoader, an")


def test_data_frames_and_unsized_data_sets_are_refused():
    class Frame(Squares):
        def __dataframe__(self):
            raise NotImplementedError

    class Unsized(Dataset):
        pass

    assert "got Frame.\nGive its columns as arrays" in said(lambda: source_of(Frame(3)))
    assert "got Unsized.\nGive it a __len__" in said(lambda: source_of(Unsized()))


@pytest.mark.parametrize(
    "data", [[], Squares(0), torch.zeros(0, 3), np.zeros(()), {}, ()], ids=repr
)
def test_data_without_items_are_refused(data):
    assert "must h" in said(lambda: source_of(data))


def test_arrays_that_do_not_fit_are_refused():
    assert said(lambda: source_of({"a": torch.zeros(3), "b": torch.zeros(4)})) == (
        "data must hold arrays of one length, got 3 in data['a'], 4 in data['b']."
        "\nCut them to one length, or leave out those that the model does not take."
    )
    assert "data[1] must be an array or a tensor, got str" in said(
        lambda: source_of((torch.zeros(3), "cat"))
    )
    assert "data must hold numbers" in said(lambda: source_of(np.array(["a", "b"])))


@pytest.mark.parametrize("size", [0, -1, 2.0, "8", True])
def test_a_batch_size_that_is_not_a_positive_integer_is_refused(size):
    assert said(lambda: source_of(range(3), batch_size=size)) == (
        f"batch_size must be a positive integer, got {size!r}.\nGive batch_size=32."
    )


def test_other_options_that_cannot_be_are_refused():
    assert "workers must be an integer >= 0" in said(lambda: source_of(range(3), workers=-1))
    assert "on_error must be 'raise' or 'skip'" in said(lambda: source_of([1], on_error="no"))


@pytest.mark.parametrize("number", [-1, 3])
def test_a_batch_that_does_not_exist_is_refused(number):
    with pytest.raises(IndexError, match=f"must be from 0 to 2, got {number}"):
        run(source_of(range(9), batch_size=3), [number])


# Identity


def test_an_identity_is_json_and_tells_data_apart():
    rows = torch.arange(12.0).reshape(4, 3)
    same = [rows, rows.clone(), rows.numpy(), np.asfortranarray(rows.numpy())]
    assert len({json.dumps(source_of(data).identity()) for data in same}) == 1
    assert source_of(rows).identity()["shape"] == [4, 3]
    others = [
        rows, rows + 1, rows[:3], rows.double(), rows.reshape(4, 3, 1), {"a": rows}, {"b": rows},
        (rows,), (rows, rows), Squares(4), Squares(5), range(4),
    ]  # fmt: skip
    assert len({json.dumps(source_of(data).identity()) for data in others}) == len(others)


def test_a_large_array_is_known_by_rows_that_are_spread(monkeypatch):
    monkeypatch.setattr(arrays, "WHOLE_BYTES", 4096)
    monkeypatch.setattr(arrays, "N_SAMPLES", 8)
    rows = torch.zeros(1000, 8)
    before = source_of(rows).identity()
    rows[1] = 1  # between two samples: not seen, as documented
    assert source_of(rows).identity() == before
    rows[999] = 1
    assert source_of(rows).identity() != before
