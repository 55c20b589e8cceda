"""Data sets of torch over a store: each row once, in an order that is really shuffled."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import hookline as hl
from hookline.stores import open_store
from small_stores import write_store

N_ROWS = 203
VALUES = torch.arange(N_ROWS * 2.0).reshape(N_ROWS, 2)
LENGTHS = [k * 5 % 7 for k in range(40)]
N_TOKENS = sum(LENGTHS)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """203 rows in 26 shards of up to 8."""
    where = tmp_path_factory.mktemp("store")
    columns = {"fc": VALUES, "id": torch.arange(N_ROWS)}
    return open_store(write_store(where, columns, items=range(1000, 1000 + N_ROWS)))


@pytest.fixture(scope="module")
def ragged(tmp_path_factory):
    """40 items of 0 to 6 tokens in 5 shards."""
    return open_store(write_store(
        tmp_path_factory.mktemp("ragged"),
        {"h": torch.arange(N_TOKENS), "pooled": torch.arange(40) * 10},
        lengths=LENGTHS, per_token=["h"], tokens=torch.arange(N_TOKENS) % 9,
    ))  # fmt: skip


def of_rank(monkeypatch, rank, world):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: world)


# -- by index -------------------------------------------------------------------------------------


def test_a_row_of_one_site_is_a_tensor_and_of_several_a_dict(store):
    assert torch.equal(store.dataset("fc")[-1], VALUES[-1])
    row = store.dataset("fc:output", "@item")[7]
    assert torch.equal(row["fc"], VALUES[7])
    assert row["@item"] == 1007
    assert set(store.dataset()[0]) == {"fc", "id"}
    assert len(store.dataset("fc")) == N_ROWS
    with pytest.raises(IndexError):
        store.dataset("fc")[N_ROWS]
    with pytest.raises(hl.NotRecordedError, match="Did you mean"):
        store.dataset("fcc")


def test_several_rows_are_read_at_once(store):
    rows = store.dataset("fc", "id")
    assert torch.equal(rows[10:12]["fc"], VALUES[10:12])
    assert torch.equal(rows[[5, 3]]["id"], torch.tensor([5, 3]))
    assert [one["id"].item() for one in rows.__getitems__([5, 3])] == [5, 3]


@pytest.mark.parametrize("sites", [("fc",), ("fc", "id", "@item")])
def test_a_loader_gives_each_row_once_in_random_order(store, sites):
    loader = DataLoader(
        store.dataset(*sites), 50, shuffle=True, generator=torch.Generator().manual_seed(0)
    )
    batches = list(loader)
    values = torch.cat([batch["fc"] if len(sites) > 1 else batch for batch in batches])
    assert [len(batch) for batch in values.split(50)] == [50, 50, 50, 50, 3]
    assert not torch.equal(values, VALUES)
    assert torch.equal(values[values[:, 0].argsort()], VALUES)
    if len(sites) > 1:
        ids = torch.cat([batch["id"] for batch in batches])
        assert torch.equal(values, VALUES[ids])
        assert torch.equal(torch.cat([batch["@item"] for batch in batches]), ids + 1000)


def test_a_loader_without_shuffling_keeps_the_order(store):
    assert torch.equal(torch.cat(list(DataLoader(store.dataset("fc"), 64))), VALUES)


def test_rows_are_tokens_where_one_site_has_tokens(ragged):
    rows = ragged.dataset("h", "pooled", "@token", "@item", "@length")
    assert len(rows) == N_TOKENS
    item_of = torch.repeat_interleave(torch.arange(40), torch.tensor(LENGTHS))
    for index in (0, -1, 57, np.int64(3)):
        row = rows[index]
        assert row["pooled"] == item_of[index] * 10
        assert row["@item"] == item_of[index]
    found = rows[::-3]
    assert torch.equal(found["h"], torch.arange(N_TOKENS).flip(0)[::3])
    assert torch.equal(found["pooled"], item_of.flip(0)[::3] * 10)
    assert torch.equal(found["@length"], torch.tensor(LENGTHS)[item_of.flip(0)[::3]])
    assert len(ragged.dataset("pooled", "@item")) == 40
    with pytest.raises(IndexError):
        rows[N_TOKENS]


# -- shuffled -------------------------------------------------------------------------------------


@given(
    batch_size=st.one_of(st.none(), st.integers(1, 300)),
    shards=st.integers(1, 40),
    seed=st.integers(0, 2**40),
)
def test_an_epoch_has_each_row_once(store, batch_size, shards, seed):
    rows = store.shuffled("fc", "id", batch_size=batch_size, shards=shards, seed=seed)
    batches = list(rows)
    assert len(rows) == len(batches) == math.ceil(N_ROWS / (batch_size or 1))
    if batch_size is None:
        ids, values = (torch.stack([one[name] for one in batches]) for name in ("id", "fc"))
    else:
        assert all(len(batch["id"]) == batch_size for batch in batches[:-1])
        ids, values = (torch.cat([batch[name] for batch in batches]) for name in ("id", "fc"))
    assert torch.equal(ids.sort().values, torch.arange(N_ROWS))
    assert torch.equal(values, VALUES[ids])


def ids_of(batches):
    return torch.cat(list(batches)).tolist()


def test_each_epoch_has_its_own_order_that_the_seed_repeats(store):
    rows, same, other = (store.shuffled("id", seed=seed) for seed in (3, 3, 4))
    epochs = [ids_of(rows) for _ in range(3)]
    assert len(set(map(tuple, epochs))) == 3
    assert [ids_of(same) for _ in range(3)] == epochs
    assert ids_of(other) not in epochs
    rows.set_epoch(1)
    assert [ids_of(rows), ids_of(rows)] == epochs[1:]


@given(world=st.integers(1, 7), batch_size=st.integers(1, 80), drop_last=st.booleans())
def test_the_ranks_share_the_rows(store, world, batch_size, drop_last):
    found, n_batches = [], []
    for rank in range(world):
        with pytest.MonkeyPatch.context() as patch:
            of_rank(patch, rank, world)
            rows = store.shuffled("id", batch_size=batch_size, drop_last=drop_last)
            batches = list(rows)
            assert len(batches) == len(rows)
        found += ids_of(batches) if batches else []
        n_batches.append(len(batches))
    assert len(set(found)) == len(found)
    if drop_last:
        assert n_batches == [N_ROWS // world // batch_size] * world
        assert len(found) == sum(n_batches) * batch_size
    else:
        assert sorted(found) == list(range(N_ROWS))


def test_a_spawned_worker_knows_its_rank(store, monkeypatch):
    rows = store.shuffled("id")
    with monkeypatch.context() as patch:
        of_rank(patch, 1, 2)
        data, mine = pickle.dumps(rows), ids_of(rows)
        rows.set_epoch(0)
    assert ids_of(pickle.loads(data)) == mine
    assert len(mine) == N_ROWS - N_ROWS // 2


@pytest.mark.processes
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_share_the_rows_and_know_the_epoch(store, persistent):
    rows = store.shuffled("id", batch_size=10, shards=4)
    loader = DataLoader(rows, batch_size=None, num_workers=2, persistent_workers=persistent)
    epochs = [ids_of(loader) for _ in range(3)]
    assert len(loader) == 21
    assert all(sorted(one) == list(range(N_ROWS)) for one in epochs)
    assert len(set(map(tuple, epochs))) == 3
    rows.set_epoch(1)
    assert [ids_of(loader), ids_of(loader)] == epochs[1:]


@pytest.mark.processes
@pytest.mark.parametrize("n_seeds", [1, 2])
def test_a_loader_that_draws_its_seed_again_has_new_orders(store, n_seeds):
    rows = store.shuffled("id", batch_size=10, shards=4)
    epochs = []
    for epoch in range(2 * n_seeds + 1):
        torch.manual_seed(epoch % n_seeds)
        epochs.append(ids_of(DataLoader(rows, batch_size=None, num_workers=2)))
    assert all(sorted(ids) == list(range(N_ROWS)) for ids in epochs)
    assert len(set(map(tuple, epochs))) == len(epochs)


@pytest.mark.processes
def test_an_epoch_that_is_left_early_loses_no_row_of_the_next(store):
    rows = store.shuffled("id", batch_size=10)
    loader = DataLoader(rows, batch_size=None, num_workers=2)
    for _ in range(2):
        next(iter(loader))
        assert sorted(ids_of(loader)) == list(range(N_ROWS))


def test_tokens_are_shuffled_with_what_their_items_have(ragged):
    rows = ragged.shuffled("h", "pooled", "@token", batch_size=7, shards=2)
    batches = list(rows)
    h, pooled, token = (torch.cat([one[name] for one in batches]) for name in batches[0])
    item_of = torch.repeat_interleave(torch.arange(40), torch.tensor(LENGTHS))
    assert torch.equal(h.sort().values, torch.arange(N_TOKENS))
    assert torch.equal(pooled, item_of[h] * 10)
    assert torch.equal(token, h % 9)


@pytest.mark.parametrize(
    "options", [{"batch_size": 0}, {"shards": -1}, {"shards": 2.5}, {"batch_size": True}]
)
def test_a_number_that_is_not_positive_is_refused(store, options):
    with pytest.raises(hl.InputError, match=f"{next(iter(options))} must be a positive integer"):
        store.shuffled("id", **options)


@pytest.mark.parametrize("seed", ["a", -1, 0.5, None])
def test_a_seed_is_an_integer_from_0(store, seed):
    with pytest.raises(hl.InputError, match="seed must be an integer from 0"):
        store.shuffled("id", seed=seed)
    assert len(store.shuffled("id", seed=np.int64(7)))


def test_batches_are_of_their_own_memory(store):
    for batch in store.shuffled("fc", batch_size=16):
        assert batch.untyped_storage().nbytes() == batch.nbytes
        batch.zero_()
    assert torch.equal(store["fc"][:], VALUES)


# -- how well -------------------------------------------------------------------------------------

RUN = 512


@pytest.fixture(scope="module")
def correlated(tmp_path_factory):
    """131,072 rows in 32 shards, which are equal in runs of 512, as the tokens of a text are."""
    numbers = torch.Generator().manual_seed(0)
    runs = torch.randn(131_072 // RUN, generator=numbers)
    values = runs.repeat_interleave(RUN) + 0.1 * torch.randn(131_072, generator=numbers)
    where = tmp_path_factory.mktemp("correlated")
    return open_store(write_store(where, {"x": values}, batch_size=512, shard_batches=8))


def variance_of_means(batches, values):
    """The variance of the means of batches, against that of independent draws."""
    means = torch.tensor([batch.mean() for batch in batches if len(batch) == 256])
    return (means.var() / (values.var() / 256)).item()


@pytest.mark.slow
def test_batches_vary_about_as_independent_draws_do(correlated):
    values = correlated["x"][:]
    found = variance_of_means(correlated.shuffled("x", batch_size=256), values)
    assert 0.5 < found < 4
    loader = DataLoader(
        correlated.dataset("x"), 256, shuffle=True, generator=torch.Generator().manual_seed(0)
    )
    assert 0.5 < variance_of_means(loader, values) < 2
    in_order = variance_of_means(DataLoader(correlated.dataset("x"), 256), values)
    assert in_order > 100


def test_neighbours_do_not_come_one_after_the_other(correlated):
    batches = torch.cat(list(correlated.shuffled("x", batch_size=256)))
    values = correlated["x"][:]

    def correlation(series):
        return torch.corrcoef(torch.stack([series[:-1], series[1:]]))[0, 1]

    assert correlation(values) > 0.9
    assert correlation(batches) < 0.05


def test_single_shards_mix_worse_than_several(correlated):
    values = correlated["x"][:]
    one = variance_of_means(correlated.shuffled("x", shards=1), values)
    four = variance_of_means(correlated.shuffled("x", shards=4), values)
    assert one > 2 * four > 2
