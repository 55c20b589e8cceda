"""Texts and rows in tables: parquet by row groups, data sets of the package datasets."""

from __future__ import annotations

import json
import pickle
import sys

import pytest
import torch

from data_source_checks import alike, run, said, source_of, whole

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
datasets = pytest.importorskip("datasets")

TEXTS = [f"text {number}" for number in range(23)]


@pytest.fixture(autouse=True)
def _quiet():
    """Write data sets without a bar of progress."""
    was = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    yield
    if was:
        datasets.enable_progress_bars()


def tokenize(lines) -> dict:
    width = max(map(len, lines))
    return {"ids": torch.tensor([[*map(ord, line.ljust(width))] for line in lines])}


def half(picture) -> torch.Tensor:
    return torch.full((2, 2), picture.size[0] / 2)


def write(path, texts, group=4, kind=None) -> None:
    column = pyarrow.array(texts, kind)
    table = pyarrow.table({"id": range(len(texts)), "text": column})
    parquet.write_table(table, path, row_group_size=group)


# parquet


@pytest.mark.parametrize("kind", ["string", "large_string", "dictionary"])
@pytest.mark.parametrize(("group", "size"), [(4, 3), (100, 7), (1, 5)])
def test_a_column_of_texts_is_read_across_row_groups(tmp_path, kind, group, size):
    arrow = {"dictionary": pyarrow.dictionary(pyarrow.int32(), pyarrow.string())}.get(kind, kind)
    write(tmp_path / "a.parquet", TEXTS, group, arrow)
    there = source_of(tmp_path / "a.parquet", batch_size=size, tokenize=tokenize)
    here = source_of(TEXTS, batch_size=size, tokenize=tokenize)
    assert all(map(alike, whole(there), whole(here)))


def test_a_batch_reads_its_row_groups_alone(tmp_path, monkeypatch):
    write(tmp_path / "a.parquet", TEXTS)
    source = source_of(tmp_path / "a.parquet", batch_size=2, tokenize=tokenize)
    read = []
    whole_group = parquet.ParquetFile.read_row_group

    def watched(self, group, **options):
        read.append((group, options["columns"]))
        return whole_group(self, group, **options)

    monkeypatch.setattr(parquet.ParquetFile, "read_row_group", watched)
    run(source, range(12))
    assert read == [(group, ["text"]) for group in range(6)]


def test_texts_that_are_null_or_blank_are_listed(tmp_path):
    write(tmp_path / "a.parquet", ["a", None, " ", "b"])
    (batch,) = whole(source_of(tmp_path / "a.parquet", tokenize=tokenize))
    assert (batch.items, [item for item, _ in batch.skipped]) == ([0, 3], [1, 2])


def test_a_source_of_parquet_pickles_without_rows(tmp_path):
    write(tmp_path / "a.parquet", ["word " * 1000] * 10)
    source = source_of(tmp_path / "a.parquet", tokenize=tokenize)
    run(source, [0])
    assert len(pickle.dumps(source)) < 3000


def test_the_identity_of_parquet_is_its_content(tmp_path):
    found = []
    for folder, texts in [("1", TEXTS), ("2", TEXTS), ("3", [*TEXTS[:-1], "other"])]:
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "a.parquet", texts)
        found.append(source_of(tmp_path / folder / "a.parquet", tokenize=tokenize).identity())
    assert found[0] == found[1] != found[2]
    assert found[0]["schema"] == {"id": "int64", "text": "string"}
    assert found[0]["length"] == 23
    assert str(tmp_path) not in json.dumps(found)


def test_a_parquet_file_without_texts_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"body": ["a"], "id": [1]}), path)
    assert 'must have a column "text", got body, id.' in said(
        lambda: source_of(path, tokenize=tokenize)
    )
    write(path, [1, 2])
    assert "got int64" in said(lambda: source_of(path, tokenize=tokenize))
    write(path, [], kind="string")
    assert "must have at least one text" in said(lambda: source_of(path, tokenize=tokenize))
    path.write_bytes(b"noise")
    assert "must be a parquet file, got ArrowInvalid" in said(
        lambda: source_of(path, tokenize=tokenize)
    )


@pytest.mark.parametrize("package", ["pyarrow", "datasets"])
def test_a_missing_package_is_named_with_its_install(tmp_path, monkeypatch, package):
    write(tmp_path / "a.parquet", TEXTS)
    datasets.Dataset.from_dict({"x": [1]}).save_to_disk(tmp_path / "rows")
    for name in ("pyarrow.parquet", "datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    path = tmp_path / ("a.parquet" if package == "pyarrow" else "rows")
    message = said(lambda: source_of(path, tokenize=tokenize))
    assert message.startswith(f"{path} needs the package {package}, which is not installed.")
    assert message.endswith(f"\nInstall it: pip install {package}")


# datasets


def saved(folder, columns):
    dataset = datasets.Dataset.from_dict(columns)
    dataset.save_to_disk(folder)
    return dataset


def test_texts_of_a_saved_data_set(tmp_path):
    dataset = saved(tmp_path / "rows", {"text": TEXTS, "id": range(23)})
    here = source_of(TEXTS, batch_size=5, tokenize=tokenize)
    for data in (tmp_path / "rows", dataset, dataset.with_format("torch")):
        there = source_of(data, batch_size=5, tokenize=tokenize)
        assert all(map(alike, whole(there), whole(here)))


def test_rows_of_a_saved_data_set_are_keyword_arguments(tmp_path):
    dataset = saved(tmp_path / "rows", {"ids": [[1, 2], [3, 4], [5, 6]], "label": [0, 1, 0]})
    for data in (tmp_path / "rows", dataset):
        batches = whole(source_of(data, batch_size=2))
        assert batches[0].data["ids"].tolist() == [[1, 2], [3, 4]]
        assert batches[1].data["label"].tolist() == [0]
    selected = dataset.with_format("torch", columns=["ids"])
    assert list(run(source_of(selected), [0])[0].data) == ["ids"]


def test_lists_in_a_stream_are_tensors_as_in_a_table():
    table = datasets.Dataset.from_dict({"x": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]})
    batch = next(iter(source_of(table.to_iterable_dataset(), batch_size=2).batches([0])))
    assert torch.equal(batch.data["x"], torch.tensor([[1.0, 2.0], [3.0, 4.0]]))


def test_pictures_of_a_saved_data_set_are_prepared(tmp_path):
    pictures = pytest.importorskip("PIL.Image")
    made = [pictures.new("L", (size, 3)) for size in (2, 4)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    dataset = datasets.Dataset.from_dict({"image": made, "label": [0, 1]}, features=features)
    dataset.save_to_disk(tmp_path / "rows")
    (batch,) = whole(source_of(tmp_path / "rows", preprocess=half))
    assert batch.data[:, 0, 0].tolist() == [1, 2]


def test_a_saved_data_set_pickles_as_its_path(tmp_path):
    saved(tmp_path / "rows", {"x": torch.zeros(100, 50).tolist()})
    source = source_of(tmp_path / "rows")
    run(source, [0])
    assert len(pickle.dumps(source)) < 2000


def test_the_identity_of_a_saved_data_set_is_its_content(tmp_path):
    found = []
    for name, last in [("1", 3), ("2", 3), ("3", 4)]:
        saved(tmp_path / name, {"x": [1, 2, last]})
        found.append(source_of(tmp_path / name).identity())
    assert found[0] == found[1] != found[2]
    assert found[0]["columns"] == {"x": "Value('int64')"}
    assert str(tmp_path) not in json.dumps(found)


def test_several_data_sets_in_a_dict_or_folder_are_refused(tmp_path):
    one = datasets.Dataset.from_dict({"x": [1]})
    several = datasets.DatasetDict({"train": one, "test": one})
    assert said(lambda: source_of(several)) == (
        "data must be one data set, got a DatasetDict of 2: train, test."
        "\nGive one of them: data['train']."
    )
    several.save_to_disk(tmp_path / "rows")
    assert said(lambda: source_of(tmp_path / "rows")) == (
        f"{tmp_path / 'rows'} must be one data set, got a folder of 2: train, test."
        f"\nGive one of them: '{tmp_path / 'rows' / 'train'}'."
    )


def test_a_broken_or_empty_data_set_is_refused(tmp_path):
    saved(tmp_path / "none", {"x": []})
    assert "at least one row" in said(lambda: source_of(tmp_path / "none"))
    dataset = datasets.Dataset.from_dict({"x": []})
    assert "at least one item, got an empty Dataset" in said(lambda: source_of(dataset))
    saved(tmp_path / "rows", {"x": [1]})
    next((tmp_path / "rows").glob("*.arrow")).unlink()
    assert "must be a data set that save_to_disk wrote, got" in said(
        lambda: source_of(tmp_path / "rows")
    )
    (tmp_path / "rows" / "state.json").write_text("[]")
    assert "must be one that save_to_disk wrote" in said(lambda: source_of(tmp_path / "rows"))


@pytest.mark.processes
def test_workers_read_tables(tmp_path):
    write(tmp_path / "a.parquet", TEXTS)
    saved(tmp_path / "rows", {"text": TEXTS})
    for path in (tmp_path / "a.parquet", tmp_path / "rows"):
        here, there = (
            source_of(path, batch_size=6, tokenize=tokenize, workers=workers) for workers in (0, 2)
        )
        assert all(map(alike, run(here, [3, 1, 0]), run(there, [3, 1, 0])))
