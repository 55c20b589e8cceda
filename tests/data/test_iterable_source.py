"""Ready batches of iterables, by arrival."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import hookline as hl
from data_source_checks import Counting, run, said, source_of


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
    assert there.identity() == {
        "kind": "batches", "type": "Counting", "length": None, "workers": 0, "batch_size": 3
    }  # fmt: skip
    loader = DataLoader(Counting(7), batch_size=3)
    # Workers would share the items out in another way.
    assert source_of(loader).identity() == source.identity()
    assert source_of(DataLoader(Counting(7), 3, num_workers=2)).identity() != source.identity()
    assert [batch.items for batch in run(source_of(loader), [2])] == [[6]]


def test_blank_texts_of_an_iterable_are_listed():
    def tokenize(texts):
        return {"ids": torch.zeros(len(texts), 1)}

    batches = run(source_of(iter([[None, " "], ["a", "", "b"]]), tokenize=tokenize), [0, 1])
    assert [batch.items for batch in batches] == [[], [2, 4]]
    assert [item for batch in batches for item, _ in batch.skipped] == [0, 1, 3]
    assert batches[0].data is None
    assert len(batches[1].data["ids"]) == 2
    source = source_of(iter([[None, 3]]), tokenize=tokenize)
    assert said(lambda: run(source, [0])).startswith("batch 0 must hold a tensor")


def test_the_identity_of_an_iterator_is_its_type():
    assert source_of(ready()).identity() == {
        "kind": "batches", "type": "generator", "length": None
    }  # fmt: skip


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


def test_the_texts_of_streamed_rows_are_tokenized():
    class Streamed(IterableDataset):
        def __iter__(self):
            return ({"text": text, "label": 1} for text in ("a", "b", "c"))

    source = source_of(
        Streamed(), batch_size=2, tokenize=lambda texts: {"n": torch.ones(len(texts))}
    )
    assert [batch.data["n"].tolist() for batch in run(source, [0, 1])] == [[1, 1], [1]]


class Noisy(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.rand(3) + index


class NoisyStream(IterableDataset):
    def __iter__(self):
        return (torch.rand(3) for _ in range(8))


class Moved(DataLoader):
    def __iter__(self):
        return (batch.to("cpu") for batch in super().__iter__())


def a_row(item):
    return item[None]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Moved(Noisy(), batch_size=2),
        lambda: DataLoader(Noisy(), batch_size=None, collate_fn=a_row),
        lambda: DataLoader(NoisyStream(), batch_size=2),
        pytest.param(
            lambda: DataLoader(NoisyStream(), batch_size=2, num_workers=2),
            marks=pytest.mark.processes,
        ),
    ],
)
def test_random_numbers_are_the_batchs_and_the_users_are_left(make):
    def rows(numbers):
        return [batch.data for batch in run(source_of(make()), numbers)]

    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = rows(range(4))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert all(map(torch.equal, rows(range(4)), first))
    assert torch.equal(rows([2])[0], first[2])
    assert len({tuple(batch[0].tolist()) for batch in first}) == 4


def test_an_iterator_goes_on_with_the_users_random_numbers():
    batches = (torch.rand(1, 3) for _ in range(3))
    torch.manual_seed(1)
    drawn = torch.cat([batch.data for batch in run(source_of(batches), range(3))])
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.cat([torch.rand(1, 3) for _ in range(3)]))
