"""Sources: data of any kind as batches by number, cut by the index of the items."""

from __future__ import annotations

import json
import pickle

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
    RandomSampler,
    SequentialSampler,
    Subset,
)

import hookline as hl
from data_source_checks import Counting, Random, Squares, alike, all_numbers, run, said, source_of
from hookline.data.fingerprints import fingerprint
from hookline.engine.pytree.tree import tensors
from thoroughness import examples


def collect(batches):
    """Collate as people do who drop broken items unseen."""
    return torch.stack([item for item in batches if item[0] != 2])


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


@settings(max_examples=examples(60), deadline=None)
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


@settings(max_examples=examples(60), deadline=None)
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


def test_a_shuffling_loader_in_a_progress_bar_is_refused():
    tqdm = pytest.importorskip("tqdm").tqdm
    bar = tqdm(DataLoader(Squares(7), batch_size=3, shuffle=True), disable=True)
    assert "got one that shuffles" in said(lambda: source_of(bar))
    bar = tqdm(DataLoader(Squares(7), batch_size=3), disable=True)
    assert len(run(source_of(bar), range(3))) == 3


def test_a_loader_of_another_order_or_of_a_part_is_refused():
    items = Squares(7)
    own = BatchSampler(RandomSampler(items), 3, False)
    short = BatchSampler(SequentialSampler(items), 3, True)
    for loader, got in [
        (DataLoader(items, sampler=RandomSampler(items)), "shuffles"),
        (DataLoader(items, sampler=[3, 1]), "one with a list"),
        (DataLoader(items, batch_sampler=own), "shuffles"),
        (DataLoader(items, batch_sampler=short), "drop_last=True"),
        (DataLoader(items, sampler=SequentialSampler(range(3))), "got 3 of 7 items"),
        (DataLoader(items, batch_size=2, drop_last=True), "drop_last=True"),
        (DataLoader(Counting(5), batch_size=2, drop_last=True), "drop_last=True"),
    ]:
        assert got in said(lambda loader=loader: source_of(loader))


def test_a_loader_of_batches_in_order_is_run_as_it_is():
    items = Squares(7)
    in_order = BatchSampler(SequentialSampler(items), 3, False)
    loader = DataLoader(items, batch_sampler=in_order)
    batches = run(source_of(loader), range(3))
    assert [batch.items for batch in batches] == [[0, 1, 2], [3, 4, 5], [6]]


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


def column_of_pandas(**options):
    return lambda texts: pytest.importorskip("pandas").Series(texts, [7, 3], **options)


@pytest.mark.parametrize(
    "column",
    [
        list,
        np.array,
        lambda texts: np.array(texts, object),
        lambda texts: [{"text": text, "label": 1} for text in texts],
        column_of_pandas(),
        column_of_pandas(dtype="string"),
        column_of_pandas(dtype="category"),
    ],
    ids=["list", "array", "objects", "rows", "series", "strings", "categories"],
)
def test_texts_of_a_list_or_column_are_tokenized_together(column):
    def tokenize(texts):
        width = max(map(len, texts))
        return {"ids": torch.tensor([[*map(ord, text.ljust(width))] for text in texts])}

    (batch,) = run(source_of(column(["a", "bcd"]), tokenize=tokenize), [0])
    assert batch.data["ids"].tolist() == [[97, 32, 32], [98, 99, 100]]
    assert run(source_of(torch.arange(2), tokenize=tokenize), [0])[0].data.tolist() == [0, 1]


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

    class Rays(Squares):
        __module__ = "ray.data.dataset"

        def iter_rows(self):
            raise NotImplementedError

    assert "got a ray.data.Dataset.\nGive its rows, list(" in said(lambda: source_of(Rays(3)))
    assert "got Frame.\nGive its columns as arrays" in said(lambda: source_of(Frame(3)))
    assert "got Unsized.\nGive it a __len__" in said(lambda: source_of(Unsized()))


@pytest.mark.parametrize(
    "data",
    [[], Squares(0), torch.zeros(0, 3), np.zeros(()), {}, ()],
    ids=lambda data: type(data).__name__,
)
def test_data_without_items_are_refused(data):
    assert "must h" in said(lambda: source_of(data))


@pytest.mark.parametrize("size", [0, -1, 2.0, "8", True])
def test_a_batch_size_that_is_not_a_positive_integer_is_refused(size):
    assert said(lambda: source_of(range(3), batch_size=size)) == (
        f"batch_size must be a positive integer, got {size!r}.\nGive batch_size=32."
    )


def test_other_options_that_cannot_be_are_refused():
    assert "workers must be an integer >= 0" in said(lambda: source_of(range(3), workers=-1))
    assert "on_error must be 'raise' or 'skip'" in said(lambda: source_of([1], on_error="no"))


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


class InAWorker(Dataset):
    """Items that tell whether a worker process has loaded them."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor([float(torch.utils.data.get_worker_info() is not None)])


@pytest.mark.processes
@pytest.mark.parametrize(("own", "given"), [(1, 0), (0, 1)])
def test_a_loaders_workers_or_those_asked_for_load_the_items(tmp_path, own, given):
    loader = DataLoader(InAWorker(), batch_size=2, num_workers=own)
    store = hl.extract(nn.Identity(), loader, "", tmp_path / "s", workers=given)
    assert store["(root)"][:].flatten().tolist() == [1.0] * 4
