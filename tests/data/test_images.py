"""A folder of pictures: sorted by name, prepared one by one."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch
from torch import nn

import hookline as hl
from data_source_checks import alike, run, said, source_of, whole

pictures = pytest.importorskip("PIL.Image")


def grey(picture) -> torch.Tensor:
    return torch.from_numpy(np.array(picture.convert("L"))).unsqueeze(0)


@pytest.fixture
def folder(tmp_path):
    """Seven pictures of one colour each, two of them in a folder inside, and other files."""
    there = tmp_path / "photos"
    (there / "cats").mkdir(parents=True)
    (there / ".hidden").mkdir()
    for name in ["b.png", "a.png", "10.bmp", "9.PNG", "c.jpg", "cats/z.png", "cats/a.png"]:
        colour = len(name) * 10
        pictures.new("RGB", (4, 3), (colour, colour, colour)).save(there / name)
    for name in ["notes.txt", ".hidden.png", ".hidden/d.png"]:
        (there / name).write_bytes(b"none")
    return there


NAMES = ["10.bmp", "9.PNG", "a.png", "b.png", "c.jpg", "cats/a.png", "cats/z.png"]


def test_pictures_come_sorted_by_name(folder):
    source = source_of(str(folder), batch_size=3, preprocess=grey)
    assert source.names == NAMES
    batches = whole(source)
    assert [tuple(batch.data.shape) for batch in batches] == [
        (3, 1, 3, 4),
        (3, 1, 3, 4),
        (1, 1, 3, 4),
    ]
    colours = torch.cat([batch.data[:, 0, 0, 0] for batch in batches]).tolist()
    assert colours == [len(name) * 10 for name in NAMES]


def test_a_broken_picture_is_named_without_its_place(folder):
    (folder / "b.png").write_bytes(b"noise")
    source = source_of(folder, preprocess=grey)
    assert said(lambda: run(source, [0])).startswith(
        "item 3 (b.png) must load, got InputError: b.png cannot be read as a picture:"
    )
    (batch,) = run(source_of(folder, preprocess=grey, on_error="skip"), [0])
    assert batch.items == [0, 1, 2, 4, 5, 6]
    assert str(folder) not in batch.skipped[0][1]


def test_a_linked_folder_is_a_folder_and_a_link_back_is_none(folder, tmp_path):
    dogs = tmp_path / "dogs"
    dogs.mkdir()
    (folder / "cats" / "z.png").rename(dogs / "z.png")
    targets = {"dogs": dogs, "dogs again": dogs, ".dogs": dogs, "cats/all": folder}
    for link, target in {**targets, "cats/loop": folder / "cats"}.items():
        (folder / link).symlink_to(target)
    names = [*NAMES[:-1], "dogs again/z.png", "dogs/z.png"]
    assert source_of(folder, preprocess=grey).names == names


def test_a_broken_link_is_an_item_that_fails(folder):
    (folder / "a.png").unlink()
    (folder / "a.png").symlink_to(folder / "gone")
    source = source_of(folder, preprocess=grey, on_error="skip")
    assert source.names == NAMES
    assert [item for item, _ in run(source, [0])[0].skipped] == [2]


def test_pictures_of_several_sizes_are_refused_with_the_fix(folder):
    pictures.new("L", (5, 5)).save(folder / "a.png")
    assert said(lambda: run(source_of(folder, preprocess=grey), [0])).endswith(
        "\nResize pictures to one size in preprocess=, or give one at a time."
    )


def test_a_folder_of_pictures_needs_a_preprocessing(folder):
    assert said(lambda: source_of(folder)) == (
        f"preprocess must convert the pictures of {folder} to tensors, got None."
        "\nGive the model's own, such as weights.transforms() of torchvision. A model without one"
        " takes tensors."
    )
    source = source_of(folder, preprocess=np.array, on_error="skip")
    assert "preprocess must return a tensor, got ndarray" in said(lambda: run(source, [0]))


def test_the_identity_is_names_and_sizes_wherever_they_lie(folder, tmp_path):
    before = source_of(folder, preprocess=grey).identity()
    assert (before["kind"], before["length"]) == ("images", 7)
    assert str(tmp_path) not in json.dumps(before)
    folder.rename(tmp_path / "moved")
    assert source_of(tmp_path / "moved", preprocess=grey).identity() == before
    (tmp_path / "moved" / "a.png").rename(tmp_path / "moved" / "aa.png")
    assert source_of(tmp_path / "moved", preprocess=grey).identity() != before


def test_a_pipe_among_pictures_is_no_picture(folder):
    os.mkfifo(folder / "pipe.png")  # to open it would wait for ever
    assert source_of(folder, preprocess=grey).names == NAMES


def test_a_lone_picture_is_a_source_of_one_item(folder):
    (batch,) = whole(source_of(folder / "b.png", preprocess=grey))
    assert batch.data.shape == (1, 1, 3, 4)


def test_a_folder_without_pictures_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("1")
    assert f"{tmp_path} must hold pictures, got 1 other file." in said(
        lambda: source_of(tmp_path, preprocess=grey)
    )


@pytest.mark.processes
def test_workers_read_the_same_pictures(folder):
    (folder / "b.png").write_bytes(b"noise")
    here, there = (
        source_of(folder, batch_size=2, preprocess=grey, workers=workers, on_error="skip")
        for workers in (0, 2)
    )
    assert all(map(alike, run(here, [3, 1, 0]), run(there, [3, 1, 0])))


def test_rows_of_a_store_know_their_files_and_labels(folder, tmp_path):
    (folder / "b.png").write_bytes(b"no picture")

    def mean(picture):
        return torch.tensor(np.asarray(picture.convert("L")), dtype=torch.float32).mean().reshape(1)

    given = {"preprocess": mean, "on_error": "skip", "batch_size": 2}
    with pytest.warns(hl.HooklineWarning, match="1 item could not be loaded"):
        store = hl.extract(nn.Identity(), folder, "", tmp_path / "s", **given)
    assert len(store.files) == len(store.labels) == len(store) == len(store.names) - 1
    for row, file in enumerate(store.files):
        assert store[""][row] == mean(pictures.open(folder / file))
        assert store.labels[row] == (file.split("/")[0] if "/" in file else "")
