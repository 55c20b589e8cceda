"""A store: its sites and what is known of them, and what it says where something is wrong."""

from __future__ import annotations

import json
import os
import pickle

import pytest
import torch

import hookline as hl
from hookline.files.folder_or_url import as_place
from hookline.files.safetensors_file import DTYPES
from hookline.files.sealed_json import MANIFEST
from hookline.stores import excerpt, open_store
from small_stores import write_store

VALUES = torch.arange(80.0).reshape(20, 4)


@pytest.fixture
def store(tmp_path):
    columns = {"layer1.0": VALUES, "fc:input": VALUES[:, :2], "(root)": VALUES.mean(1)}
    place = write_store(tmp_path / "s", columns, items=range(100, 120), skipped=[(3, "broken")])
    place.write("names.json", [json.dumps([f"{k}.png" for k in range(120)]).encode()])
    return open_store(tmp_path / "s")


def test_what_a_store_says_of_itself(store, tmp_path):
    assert store.sites == ("layer1.0", "fc:input", "(root)")
    assert list(store) == list(store.sites)
    assert (len(store), store.n_items, store.n_rows) == (20, 20, 20)
    assert store.items[:3].tolist() == [100, 101, 102]
    assert store.skipped == [(3, "broken")]
    assert store.names[store.items[4]] == "104.png"
    assert store.job["batch_size"] == 4
    assert store.statistics["layer1.0"].mean == VALUES.mean()
    assert store.nbytes == sum(path.stat().st_size for path in (tmp_path / "s").glob("shard*"))


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("layer1.0", "layer1.0"), ("layer1.0:output", "layer1.0"), ("fc:input", "fc:input"),
        ("", "(root)"), (":output", "(root)"), ("(root)", "(root)"),
        (hl.Site("layer1.0"), "layer1.0"), (hl.Site("fc", "input"), "fc:input"),
    ],
)  # fmt: skip
def test_a_site_is_found_however_it_is_written(store, written, name):
    assert store[written].name == name
    assert written in store


def test_a_selection_of_a_site_is_a_key(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
    store = hl.extract(net, torch.randn(5, 2), "*", tmp_path / "s")
    assert store[hl.select(net, "1")].name == "1"
    assert hl.select(net, "1") in store
    assert hl.select(net, "*") not in store
    with pytest.raises(hl.AmbiguousError, match="must be one site, got a selection of 2 sites"):
        store[hl.select(net, "*")]


def test_modules_with_a_colon_in_their_names_are_read(tmp_path):
    heads = torch.nn.ModuleDict({"a:b": torch.nn.Linear(2, 3), "c:output": torch.nn.Linear(2, 3)})
    net = torch.nn.Sequential(heads)
    net.forward = lambda x: sum(head(x) for head in heads.values())
    rows = torch.randn(5, 2)
    store = hl.extract(net, rows, "**", tmp_path / "s")
    for name, head in heads.items():
        assert torch.equal(store[f"0.{name}"][:], head(rows))
    assert store[hl.Site("0.a:b")].name == "0.a:b"
    assert torch.equal(excerpt(store, [0, 1])["0.a:b"], heads["a:b"](rows[:2]))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("layer10", r"'layer10' was never selected\. Did you mean 'layer1.0'"),
        ("fc", "'fc' was never selected; stored there: 'fc:input'"),
        ("layer1.0#1", "'layer1.0#1' was never selected; stored there: 'layer1.0'"),
        ("qqq", "never selected; stored: 3 sites, such as 'layer1.0', 'fc:input'"),
        (3, r"a key must be a site, got 3\.\nGive as the key the site itself, such as 'layer1.0'"),
        ("@token", "a store must hold rows for each token of a text to have token ids"),
    ],
)
def test_a_site_that_was_not_stored_is_an_error_with_the_way(store, key, message):
    with pytest.raises(hl.NotRecordedError, match=message):
        store[key]
    assert key not in store


def test_a_malformed_site_is_named(store):
    with pytest.raises(hl.SelectionError, match="malformed selector 'a\\[b'"):
        store["a[b"]
    assert "a[b" not in store


def test_token_ids_lie_beside_the_values(tmp_path):
    ids = torch.arange(6, dtype=torch.int32)
    place = write_store(
        tmp_path / "s", {"h": torch.arange(6.0)[:, None]}, lengths=[0, 0, 4, 2], tokens=ids,
        per_token=["h"], batch_size=1, shard_batches=1,
    )  # fmt: skip
    place.remove("names.json")
    store = open_store(place)
    assert torch.equal(store.tokens[:], ids)
    assert torch.equal(store["@token"].of_item(3), ids[4:])
    assert (store.n_items, store.n_rows, store.names) == (4, 6, None)
    assert "4 items, 6 tokens in 4 shards" in repr(store)
    store.verify()


def test_a_store_without_token_ids_says_so(store, tmp_path):
    with pytest.raises(hl.NotRecordedError, match="Extract from text"):
        _ = store.tokens


def test_the_table_shows_each_site(store):
    text = repr(store)
    assert text.startswith("Store of 3 sites, 20 items in 3 shards, ")
    assert [line.split()[0] for line in text.splitlines()[-3:]] == list(store.sites)
    assert "[20, 4]  float32  item" in text
    html = store._repr_html_()
    assert "<td>layer1.0</td>" in html
    assert "20 items in 3 shards" in html


def test_a_long_table_is_cut_and_hostile_names_are_escaped(tmp_path):
    columns = {f"m{k}": VALUES[:, :1] for k in range(30)} | {"a\u202eb<script>": VALUES}
    store = open_store(write_store(tmp_path / "s", dict(reversed(columns.items()))))
    assert "… and 7 more sites: store.sites" in repr(store)
    assert "\u202e" not in repr(store) + store._repr_html_()
    assert "<script>" not in store._repr_html_()


def test_numbers_that_are_not_finite_are_counted(tmp_path):
    values = VALUES.clone()
    values[3, 1:] = float("nan")
    store = open_store(write_store(tmp_path / "s", {"x": values, "y": values * float("nan")}))
    assert store.statistics["x"].non_finite == 3
    assert store["x"][3].isnan().sum() == 3
    assert repr(store).count("nan") == 0


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_numbers_of_each_dtype_are_measured(tmp_path, dtype):
    ones = torch.ones(8, 4).to(torch.complex64 if dtype.is_complex else torch.float32).to(dtype)
    place = write_store(tmp_path / "s", {"x": -1j * ones if dtype.is_complex else ones})
    moments = open_store(place).statistics["x"]
    assert (moments.count, moments.mean, moments.std) == (32, 1.0, 0.0)


def test_a_store_in_another_process_reads_the_same(store):
    copied = pickle.loads(pickle.dumps(store))
    assert torch.equal(copied["layer1.0"][:], VALUES)
    assert copied.sites == store.sites


def test_a_store_that_is_not_finished_says_how_to_go_on(tmp_path):
    write_store(tmp_path / "s", {"x": VALUES}, is_finished=False)
    with pytest.raises(hl.FolderError) as caught:
        hl.open(tmp_path / "s")
    assert str(caught.value) == (
        f"{tmp_path / 's'} is not finished: it holds 3 shards so far.\nStart the same hl.extract"
        " again: it keeps the complete shards."
    )


def test_a_manifest_that_is_gone_or_damaged_has_a_remedy(tmp_path):
    write_store(tmp_path / "s", {"x": VALUES})
    manifest = tmp_path / "s" / MANIFEST
    data = manifest.read_bytes()
    for text in (None, data.replace(b'"rows": [8', b'"rows": [9'), data[:-20]):
        manifest.unlink()
        if text is not None:
            manifest.write_bytes(text)
        with pytest.raises(hl.FolderError, match=f"hookline store repair {tmp_path / 's'}"):
            hl.open(tmp_path / "s")
        manifest.write_bytes(data)
    assert len(hl.open(tmp_path / "s")) == 20


@pytest.mark.parametrize(
    "change",
    [
        {"shards": {"items": [8], "rows": [8], "sizes": [1, 2], "seals": ["", ""]}},
        {"shards": {}}, {"shards": []}, {"statistics": {"x": [1]}}, {"skipped": [[1]]},
        {"job": {}}, {"job": {"columns": [{"name": "x"}]}},
    ],
)  # fmt: skip
def test_a_manifest_that_lies_is_damage(tmp_path, change):
    place = write_store(tmp_path / "s", {"x": VALUES})
    manifest = json.loads((tmp_path / "s" / MANIFEST).read_text())
    with pytest.raises(hl.FolderError, match=r"is damaged: its manifest\.json: "):
        hl.Store(place, {**manifest, **change})


def test_damaged_names_are_an_error_when_they_are_asked_for(store, tmp_path):
    again = open_store(tmp_path / "s")
    for text in ("[", "{}"):
        (tmp_path / "s" / "names.json").write_text(text)
        with pytest.raises(hl.FolderError, match=r"is damaged: its names\.json"):
            _ = again.names


def test_an_empty_folder_and_a_missing_one_are_not_stores(tmp_path):
    for where in (tmp_path, tmp_path / "missing", f"memory://nothing-{os.getpid()}"):
        with pytest.raises(hl.FolderError, match=r"is not a store: it has no manifest\.json"):
            open_store(where)
    assert str(as_place(tmp_path)) == str(tmp_path)


# -- several stores as one ------------------------------------------------------------------------


def test_stores_of_the_same_sites_are_read_as_one(tmp_path):
    stores = [
        open_store(write_store(tmp_path / name, {"x": VALUES[rows]}, items=range(99)[rows]))
        for name, rows in [("a", slice(0, 9)), ("b", slice(9, 11)), ("c", slice(11, 20))]
    ]
    joined = hl.Store.cat(stores)
    assert torch.equal(joined["x"][:], VALUES)
    assert torch.equal(joined["x"][[19, 0, 10, -20]], VALUES[[19, 0, 10, 0]])
    assert joined.items[:].tolist() == list(range(20))
    assert joined.statistics["x"].count == 80
    assert joined.parts == tuple(stores)
    assert "20 items in 5 shards" in repr(joined)
    assert "3 stores" in repr(joined)
    assert joined.to_dict()["job"] is None
    again = hl.Store.cat([joined, stores[1]])
    assert torch.equal(again["x"][18:], VALUES[[18, 19, 9, 10]])
    copied = pickle.loads(pickle.dumps(again))
    assert torch.equal(copied["x"][18:], VALUES[[18, 19, 9, 10]])
    joined.verify()


def test_stores_of_ragged_rows_are_read_as_one(tmp_path):
    values, lengths = torch.arange(20.0)[:, None], [[3, 0, 4], [1, 5], [0, 7]]
    stores, start = [], 0
    for number, one in enumerate(lengths):
        rows = slice(start, start + sum(one))
        stores.append(open_store(write_store(
            tmp_path / str(number), {"h": values[rows], "p": torch.ones(len(one), 1) * number},
            lengths=one, tokens=torch.arange(20)[rows], per_token=["h"], batch_size=2,
            shard_batches=1,
        )))  # fmt: skip
        start = rows.stop
    joined = hl.Store.cat(stores)
    assert torch.equal(joined["h"][:], values)
    assert torch.equal(joined.tokens[::-1], torch.arange(20).flip(0))
    assert joined["h"].lengths[:].tolist() == [3, 0, 4, 1, 5, 0, 7]
    assert joined["h"].of_item(4)[:, 0].tolist() == [8, 9, 10, 11, 12]
    assert joined["p"][:, 0].tolist() == [0, 0, 0, 1, 1, 2, 2]


def test_what_each_part_has_for_itself_is_asked_of_the_part(tmp_path):
    store = open_store(write_store(tmp_path / "s", {"x": VALUES}))
    joined = hl.Store.cat([store, store])
    for what in ("job", "names", "place"):
        with pytest.raises(hl.AmbiguousError, match=rf"own {what}.\nWrite store.parts\[0\].{what}"):
            getattr(joined, what)
    assert joined.parts[0].job == store.job


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"y": VALUES}, r"got Column 'x': .* none in"),
        ({"x": VALUES, "y": VALUES}, "Column 'y'"),
        ({"x": VALUES.half()}, "float16"),
        ({"x": VALUES[:, :3]}, r"rows of \[3\]"),
    ],
)
def test_stores_that_differ_are_not_joined(tmp_path, columns, message):
    one = open_store(write_store(tmp_path / "a", {"x": VALUES}))
    other = open_store(write_store(tmp_path / "b", columns))
    with pytest.raises(hl.StructureError, match=message):
        hl.Store.cat([one, other])
    with pytest.raises(hl.StructureError, match="one or more stores, got none"):
        hl.Store.cat([])


# -- files and labels -----------------------------------------------------------------------------


def named_store(where, names, items):
    place = write_store(where, {"x": torch.arange(float(len(items)))}, items=items)
    place.write("names.json", [json.dumps(names).encode()])
    return open_store(place)


def test_each_row_has_its_file_and_label(tmp_path):
    names = ["a/1.png", "a/old/2.png", "b/0.png", "b/3.png"]
    store = named_store(tmp_path, names, [0, 1, 3])
    assert store.files.tolist() == ["a/1.png", "a/old/2.png", "b/3.png"]
    assert store.files[2] == "b/3.png"
    assert store.labels.tolist() == ["a", "a", "b"]
    assert store["x"][store.labels == "b"].tolist() == [2.0]
    both = hl.Store.cat([store, store])
    assert both.files.tolist() == store.files.tolist() * 2
    assert both.labels[[0, 5]].tolist() == ["a", "b"]


def test_files_without_subfolders_have_no_labels(tmp_path):
    store = named_store(tmp_path / "a", ["1.png", "2.png"], [0, 1])
    assert store.labels is None
    mixed = named_store(tmp_path / "b", ["1.png", "a/2.png"], [0, 1])
    assert mixed.labels.tolist() == ["", "a"]
    unnamed = open_store(write_store(tmp_path / "c", {"x": torch.zeros(2)}))
    assert unnamed.files is None
    assert unnamed.labels is None
    assert hl.Store.cat([store, unnamed]).files is None


def test_names_that_are_too_few_are_damage(tmp_path):
    store = named_store(tmp_path, ["1.png"], [0, 1])
    with pytest.raises(hl.FolderError, match=r"names.json: it must have a name for each item"):
        _ = store.files
