"""What is exported is read back by the format's own package, and equal."""

from __future__ import annotations

import json
import os
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

import hookline as hl
from hookline.stores import exports as exports_module
from hookline.stores import open_store
from small_stores import write_store

N_ITEMS = 23
VALUES = torch.randn(N_ITEMS, 3, 4, generator=torch.Generator().manual_seed(0))
LENGTHS = [k * 5 % 4 for k in range(N_ITEMS)]
N_TOKENS = sum(LENGTHS)
TOKENS = torch.arange(N_TOKENS * 2.0).reshape(N_TOKENS, 2)
TABLES = ["parquet", "datasets", "lance"]
ARRAYS = ["npy", "zarr"]


@pytest.fixture(scope="module", autouse=True)
def _small_parts():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exports_module, "_PART_BYTES", 200)
        patch.setattr(exports_module, "_CHUNK_BYTES", 200)
        yield


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    columns = {
        "map": VALUES, "layer1.0:output[0]": VALUES.bfloat16(), "half": VALUES[:, 0].half(),
        "flag": VALUES[:, 0] > 0, "id": torch.arange(N_ITEMS),
    }  # fmt: skip
    where = tmp_path_factory.mktemp("store")
    return open_store(write_store(where, columns, items=range(50, 50 + N_ITEMS)))


@pytest.fixture(scope="module")
def ragged(tmp_path_factory):
    where = tmp_path_factory.mktemp("ragged")
    return open_store(write_store(
        where, {"h": TOKENS, "pooled": torch.arange(N_ITEMS * 2.0).reshape(-1, 2)},
        lengths=LENGTHS, tokens=torch.arange(N_TOKENS) % 7, per_token=["h"],
    ))  # fmt: skip


def table(path, format):
    """An exported table as a dict of lists, read by the package of its format."""
    if format == "parquet":
        from pyarrow import parquet

        return parquet.read_table(path).to_pydict()
    if format == "lance":
        import lance

        found = lance.dataset(str(path)).to_table().to_pydict()
        return {name.replace("/", "."): values for name, values in found.items()}
    from datasets import load_from_disk

    return load_from_disk(str(path)).to_dict()


def arrays(path, format):
    """Exported arrays by column, read by the package of their format."""
    if format == "zarr":
        import zarr

        return dict(zarr.open_group(str(path), mode="r").arrays())
    return {name.stem: np.load(name, mmap_mode="r") for name in path.glob("*.npy")}


@pytest.mark.slow
def test_zarr_has_an_array_for_each_name(tmp_path):
    names = ["a/b", "a\\b", "a%2Fb", ".", "..", "é.x"]
    columns = {name: torch.full((2, 3), float(n)) for n, name in enumerate(names)}
    written = open_store(write_store(tmp_path / "store", columns))
    found = arrays(written.export(tmp_path / "zarr", "zarr"), "zarr")
    texts = ["a%2Fb", "a%5Cb", "a%252Fb", "%2E", "%2E%2E", "é.x"]
    assert [int(found[text][0, 0]) for text in texts] == [*range(len(names))]


@pytest.mark.parametrize("format", TABLES)
def test_a_table_has_a_row_for_each_item(store, tmp_path, format):
    path = store.export(tmp_path / "new" / f"x.{format}", format)
    found = table(path, format)
    assert list(found) == [*store.sites, "@item"]
    assert found["@item"] == list(range(50, 50 + N_ITEMS))
    for site in store.sites:
        expected = store[site][:]
        if format == "parquet":
            expected = expected.reshape(N_ITEMS, -1) if expected.ndim > 1 else expected
        numbers = torch.tensor(found[site], dtype=torch.float64)
        assert torch.equal(numbers, expected.double()), site


SHAPES = [(), (5,), (3, 4), (3, 4, 2), (2, 3, 2, 2)]


@pytest.fixture(scope="module")
def shaped(tmp_path_factory):
    """A store of columns of one to five dimensions."""
    columns = {f"x{len(shape)}": torch.randn(N_ITEMS, *shape) for shape in SHAPES}
    return open_store(write_store(tmp_path_factory.mktemp("shaped"), columns))


def test_a_parquet_row_is_one_list_of_fixed_length(shaped, tmp_path):
    from pyarrow import parquet

    schema = parquet.read_schema(shaped.export(tmp_path / "x.parquet", "parquet"))
    for shape in SHAPES:
        field, n = schema.field(f"x{len(shape)}"), int(np.prod(shape))
        assert str(field.type) == (f"fixed_size_list<element: float>[{n}]" if shape else "float")
        about = field.metadata or {}
        assert about.get(b"shape") == (str(list(shape)).encode() if len(shape) > 1 else None)


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_tables_of_any_shape_become_arrays_again(shaped, tmp_path, package):
    package = pytest.importorskip(package)
    table = package.read_parquet(shaped.export(tmp_path / "x.parquet", "parquet"))
    for name in shaped:
        rows = np.stack(list(table[name])).reshape(shaped[name].shape)
        assert name == "x0" or rows.dtype == np.float32
        assert np.array_equal(rows, shaped[name].numpy())


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    """A store of files, of which one was skipped."""
    where = tmp_path_factory.mktemp("labelled")
    items = [0, 1, 3]
    place = write_store(where, {"x": torch.arange(3.0)}, items=items)
    place.write(
        "names.json", [json.dumps(["a/1.png", "a/2.png", "b/0.png", "b/\udce9.png"]).encode()]
    )
    return open_store(place)


@pytest.mark.parametrize("format", TABLES)
def test_tables_have_the_file_and_the_label_of_a_row(labelled, tmp_path, format):
    found = table(labelled.export(tmp_path / f"x.{format}", format, "x"), format)
    assert list(found) == ["x", "@item", "@file", "@label"]
    assert found["@file"] == ["a/1.png", "a/2.png", "b/\\udce9.png"]
    assert found["@label"] == ["a", "a", "b"]


@pytest.mark.slow
@pytest.mark.parametrize("format", ARRAYS)
def test_arrays_are_of_numbers_alone(labelled, tmp_path, format):
    assert set(arrays(labelled.export(tmp_path / "x", format), format)) == {"x", "@item"}


@pytest.mark.slow
@pytest.mark.parametrize("format", ARRAYS)
def test_arrays_have_the_shapes_and_numbers_of_the_columns(store, tmp_path, format):
    found = arrays(store.export(tmp_path / "x", format), format)
    assert len(found) == len(store.sites) + 1
    for site in [*store.sites, "@item"]:
        name = site if format == "zarr" else site.replace(":", "%3A")
        expected = store[site][:]
        if expected.dtype is torch.bfloat16:
            expected = expected.float()
        assert np.array_equal(found[name][:], expected.numpy()), site
        assert found[name].dtype == expected.numpy().dtype


@pytest.mark.parametrize("format", TABLES)
def test_tokens_are_lists_of_rows(ragged, tmp_path, format):
    found = table(ragged.export(tmp_path / f"x.{format}", format), format)
    assert list(found) == ["h", "pooled", "@item", "@token"]
    assert [len(one) for one in found["h"]] == LENGTHS
    assert sum(found["h"], []) == TOKENS.tolist()  # noqa: RUF017
    assert sum(found["@token"], []) == [k % 7 for k in range(N_TOKENS)]  # noqa: RUF017
    assert found["pooled"] == ragged["pooled"][:].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("format", ARRAYS)
def test_tokens_are_rows_beside_the_lengths_of_items(ragged, tmp_path, format):
    found = arrays(ragged.export(tmp_path / "x", format), format)
    assert np.array_equal(found["h"][:], TOKENS)
    assert found["@length"][:].tolist() == LENGTHS
    assert found["@token"][:].tolist() == [k % 7 for k in range(N_TOKENS)]


@pytest.mark.slow
@pytest.mark.parametrize("format", TABLES + ARRAYS)
def test_chosen_sites_alone_are_exported(store, tmp_path, format):
    path = store.export(tmp_path / "x", format, "half:output")
    found = table(path, format) if format in TABLES else arrays(path, format)
    assert set(found) == {"half", "@item"}


@pytest.mark.slow
@pytest.mark.parametrize("format", ["parquet", "npy"])
def test_memory_does_not_grow_with_the_store(tmp_path, format, monkeypatch):
    monkeypatch.setattr(exports_module, "_PART_BYTES", 2**18)
    values = torch.zeros(40_000, 64)
    store = open_store(write_store(tmp_path / "s", {"x": values}, batch_size=4000))
    store.export(tmp_path / "warm", format, "@item")
    tracemalloc.start()
    try:
        store.export(tmp_path / "x", format)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < values.nbytes / 4


@pytest.mark.parametrize("format", TABLES)
def test_what_arrow_does_not_have_is_refused_and_leaves_nothing(tmp_path, format):
    columns = {"z": VALUES.to(torch.complex64), "empty": VALUES[:, :0], "x": VALUES}
    store = open_store(write_store(tmp_path / "s", columns))
    for site, message in [("z", "a dtype that Arrow has"), ("empty", "one or more numbers")]:
        with pytest.raises(hl.StructureError, match=f"{site} must have .*{message}, got"):
            store.export(tmp_path / "out", format, site)
    assert not (tmp_path / "out").exists()
    store.export(tmp_path / "out", format, "x")


@pytest.mark.parametrize("format", ARRAYS)
def test_arrays_hold_complex_and_empty_rows(tmp_path, format):
    store = open_store(write_store(tmp_path / "s", {"z": VALUES.to(torch.complex64)}))
    found = arrays(store.export(tmp_path / "x", format), format)
    assert np.array_equal(found["z"][:], VALUES.to(torch.complex64))


@pytest.mark.parametrize(
    ("format", "module", "package"),
    [
        ("parquet", "pyarrow", "pyarrow"), ("lance", "lance", "pylance"), ("zarr", "zarr", "zarr"),
        ("datasets", "datasets", "datasets"),
    ],
)  # fmt: skip
def test_a_package_that_is_missing_is_named(store, tmp_path, monkeypatch, format, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(hl.InputError, match=f"{package} must be installed to export to {format}"):
        store.export(tmp_path / "x", format)


@pytest.mark.parametrize("format", [*TABLES, *ARRAYS])
def test_a_relative_name_with_a_colon_is_no_url(store, tmp_path, monkeypatch, format):
    monkeypatch.chdir(tmp_path)
    assert store.export("a:b", format) == Path("a:b")
    assert os.path.exists("a:b")


def test_an_unknown_format_and_a_file_that_is_there_are_refused(store, tmp_path):
    with pytest.raises(hl.InputError, match=r"format must be one of 'parquet', .* got 'hdf5'"):
        store.export(tmp_path / "x", "hdf5")
    (tmp_path / "x").write_text("mine")
    with pytest.raises(hl.FolderError, match="x must not exist yet to export to it"):
        store.export(tmp_path / "x", "npy")
    with pytest.raises(hl.FolderError, match=r"cannot write .*x/y: .*exists"):
        store.export(tmp_path / "x" / "y", "npy")
    assert (tmp_path / "x").read_text() == "mine"


@pytest.mark.parametrize("format", TABLES + ARRAYS)
def test_a_damaged_shard_leaves_no_half_export(tmp_path, format):
    place = write_store(tmp_path / "s", {"x": VALUES})
    data = bytearray(place.read("shard-00000001.safetensors"))
    data[-1] ^= 1
    place.write("shard-00000001.safetensors", [bytes(data)])
    with pytest.raises(hl.FolderError, match=r"shard-00000001\.safetensors is damaged"):
        open_store(place).export(tmp_path / "x", format)
    assert not (tmp_path / "x").exists()
