"""Opening a folder: damage anywhere is an error, and never a wrong number."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hookline as hl
from hookline.engine.pytree import tree
from hookline.files.sealed_json import MANIFEST, seal_json
from rank_folders import folder_of_ranks
from thoroughness import examples


class Many(nn.Module):
    """A value of every kind that a folder holds."""

    def forward(self, x):
        return {
            "floats": x, "halves": x.half(), "whole": x.long(), "pair": (x[0], 0.1), 3: None,
            "complex": torch.complex(x.double(), x.double()), "text": "é", "none": x[:0],
        }  # fmt: skip


def recorded(scale=1.0):
    model = nn.Sequential(nn.Linear(2, 3), Many())
    with hl.record(model, ports=("input", "output", "grad_output"), copy=True) as run:
        for k in range(2):
            model(torch.arange(4.0).reshape(2, 2) * scale + k)["floats"].sum().backward()
    return run


def everything(opened):
    """All that a recording says, as plain data."""
    if opened.ranks:
        return [everything(one) for one in opened.ranks], str(opened.report()), opened.sites
    values = [
        [(key, facts(one.calls(key))) for key in one] + [one.number, one.failed, one.order]
        for one in opened.passes
    ]
    return values, str(opened.report()), opened.sites, opened.modules, opened.lost


def facts(value):
    """A value with its tensors as what they hold, to be compared with ==."""
    return repr(tree.map_tensors(lambda one: (one.dtype, one.shape, one.tolist()), value))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Two folders and what is in them: of one process, and of two ranks."""
    base = tmp_path_factory.mktemp("whole")
    one = recorded().save(base / "one")
    two = folder_of_ranks(base / "two", [recorded(), recorded(3.0)])
    return {folder: everything(hl.open(folder)) for folder in (one, two)}


def files_of(folder):
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


def check_damaged(folder, expected):
    """Either all is right, or an error says that it is not."""
    try:
        found = everything(hl.open(folder))
    except hl.FolderError:
        with pytest.raises(hl.FolderError) as caught:
            hl.open(folder, verify=True)
        assert len(str(caught.value).splitlines()) <= 3
    else:
        assert found == expected


@pytest.mark.slow
@settings(max_examples=examples(300), deadline=None)
@given(
    which=st.integers(0, 1),
    changes=st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 2**20), st.integers(1, 255)),
        min_size=1,
        max_size=3,
    ),
)
def test_flipped_bytes_anywhere_give_right_values_or_an_error(whole, which, changes):
    folder = list(whole)[which]
    paths = files_of(folder)
    before = {path: (folder / path).read_bytes() for path in paths}
    try:
        for number, position, mask in changes:
            path = folder / paths[number % len(paths)]
            data = bytearray(path.read_bytes())
            data[position % len(data)] ^= mask
            path.write_bytes(data)
        check_damaged(folder, whole[folder])
    finally:
        for path, data in before.items():
            (folder / path).write_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_a_flip_in_each_region_of_each_file_is_an_error(whole, which):
    """Of a small folder no byte is unguarded, but for those that nobody reads."""
    folder = list(whole)[which]
    for path in files_of(folder):
        data = (folder / path).read_bytes()
        for position in range(0, len(data), 41):
            (folder / path).write_bytes(
                data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]
            )
            with pytest.raises(hl.FolderError):
                hl.open(folder, verify=True)
        (folder / path).write_bytes(data)
    assert everything(hl.open(folder, verify=True)) == whole[folder]


@pytest.mark.slow
@pytest.mark.parametrize("change", ["cut", "longer", "zeros", "other", "gone"])
def test_a_file_that_is_another_is_an_error_or_right(whole, tmp_path, change):
    for folder, expected in whole.items():
        for path in files_of(folder):
            copy = Path(shutil.copytree(folder, tmp_path / "copy"))
            data = (copy / path).read_bytes()
            if change == "gone":
                (copy / path).unlink()
            else:
                (copy / path).write_bytes({
                    "cut": data[:-7], "longer": data + b" ", "zeros": bytes(len(data)),
                    "other": data[::-1],
                }[change])  # fmt: skip
            check_damaged(copy, expected)
            shutil.rmtree(copy)


def test_a_damaged_value_names_its_file_and_site_and_what_to_do(tmp_path):
    model = nn.Sequential(nn.Identity(), nn.Identity())
    with hl.record(model, copy=True) as run:
        model(torch.full((8,), 7.0))
    folder = run.save(tmp_path / "run")
    (file,) = folder.glob("*.safetensors")
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 64]))  # the last value's last byte
    opened = hl.open(folder)
    right = [key for key in ("0", "1", "(root)") if is_readable(opened, key)]
    assert len(right) == 2
    ((wrong,)) = {"0", "1", "(root)"} - set(right)
    for ask in (lambda: opened[wrong], lambda: hl.open(folder, verify=True)):
        with pytest.raises(hl.FolderError) as caught:
            ask()
        assert repr(wrong) in str(caught.value)
        assert file.name in str(caught.value)
        assert str(folder) in str(caught.value)
        assert "Copy the folder again from a whole one, or record it again." in str(caught.value)
    assert opened.passes[0].outline(wrong).shape == (8,)


def is_readable(opened, key):
    try:
        return opened[key].tolist() == [7.0] * 8
    except hl.FolderError:
        return False


def test_verifying_reads_all_and_opening_reads_nothing(tmp_path, monkeypatch):
    from hookline.files.safetensors_file import TensorFile

    folder = recorded().save(tmp_path / "run")
    seen = []
    verify = TensorFile.read_verified_bytes
    monkeypatch.setattr(
        TensorFile,
        "read_verified_bytes",
        lambda self, name: (seen.append(name), verify(self, name)),
    )
    hl.open(folder)
    assert seen == []
    hl.open(folder, verify=True)
    (sums,) = json.loads((folder / MANIFEST).read_text())["checksums"].values()
    assert set(seen) == {str(number) for number in range(len(sums) - 1)}


def test_an_older_format_is_refused_with_what_to_do(tmp_path):
    folder = recorded().save(tmp_path / "run")
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["version"] = 1
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(hl.FolderError, match=r"of version 1; this hookline reads version 2") as got:
        hl.open(folder)
    assert "Open it with the hookline that wrote it" in str(got.value)


def changed(folder, **changes):
    """Write a manifest that is whole, and says something else."""
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest.update(changes)
    (folder / MANIFEST).write_bytes(seal_json(manifest))


RANKS = [
    [], {}, None, 3, "rank0", ["rank0"], {"..": ""}, {".": ""}, {"rank0/../..": ""},
    {"other_contexts": ""}, {"rank9": ""}, {"rank0": "0" * 16}, {"rank0": None},
]  # fmt: skip


@pytest.mark.parametrize("ranks", RANKS, ids=str)
def test_ranks_that_are_not_what_was_written_are_refused(tmp_path, ranks):
    folder = folder_of_ranks(tmp_path / "run", [recorded()])
    changed(folder, ranks=ranks)
    with pytest.raises(hl.FolderError, match=r"is damaged"):
        hl.open(folder)


def test_a_rank_that_leads_back_to_its_own_folder_is_refused(tmp_path):
    folder = folder_of_ranks(tmp_path / "run", [recorded()])
    shutil.rmtree(folder / "rank0")
    (folder / "rank0").symlink_to(folder)
    with pytest.raises(hl.FolderError, match="is damaged"):
        hl.open(folder)


def test_a_site_that_no_rank_has_is_an_error_with_what_is_there(tmp_path):
    run = hl.open(folder_of_ranks(tmp_path / "run", [recorded()]))
    with pytest.raises(hl.NotRecordedError, match="'nothing' was never selected; recorded: 9"):
        run["nothing"]


@pytest.mark.parametrize("ask", ["reduced", "full"])
def test_values_of_ranks_that_differ_are_refused(tmp_path, ask):
    model, runs = nn.Linear(4, 2), []
    for keep in (None, lambda value: (value, value), lambda value: value[0]):
        with hl.record(model, keep=keep) as run:
            model(torch.ones(3, 4))
        runs.append(run)
    rows = hl.record(model)
    with rows as run:
        model(torch.ones(2, 4))
    for number, other in enumerate(runs[1:]):
        opened = hl.open(folder_of_ranks(tmp_path / f"{number}", [runs[0], other]))
        with pytest.raises(hl.RanksError, match=r"are not of one kind: .*rank 0.*rank 1"):
            getattr(opened, ask)("(root)", **({"dim": 0} if ask == "full" else {}))
    opened = hl.open(folder_of_ranks(tmp_path / "rows", [runs[0], run]))
    if ask == "full":
        assert opened.full("(root)", dim=0).shape == (5, 2)
        return
    with pytest.raises(hl.RanksError, match=r"one shape, got .*Tensor\[3, 2\].*Tensor\[2, 2\]"):
        opened.reduced("(root)")


def test_released_ranks_are_read_again(tmp_path):
    opened = hl.open(folder_of_ranks(tmp_path / "run", [recorded(), recorded()]))
    site = next(iter(opened))
    opened.ranks[1][site].zero_()
    with pytest.raises(hl.OverwrittenError):
        opened.ranks[1][site]
    opened.release()
    assert opened.ranks[1][site].any()


def test_ranks_of_two_savings_are_never_mixed(tmp_path):
    one = folder_of_ranks(tmp_path / "one", [recorded(), recorded()])
    two = folder_of_ranks(tmp_path / "two", [recorded(5.0), recorded(5.0)])
    shutil.rmtree(one / "rank1")
    (two / "rank1").rename(one / "rank1")
    with pytest.raises(hl.FolderError, match=r"rank1 must be of the same recording"):
        hl.open(one)


def test_a_site_that_is_listed_twice_is_refused_at_once(tmp_path, monkeypatch):
    """However many are listed: hundreds of thousands of one site took 38 seconds."""
    folder = recorded().save(tmp_path / "run")
    sites = json.loads((folder / MANIFEST).read_text())["sites"]
    changed(folder, sites=[*sites, sites[0]])
    with pytest.raises(hl.FolderError, match=r"listed once, got '\(root\):input' twice"):
        hl.open(folder)
    # Not what comes behind them, which is not even JSON.
    listed = ", ".join([json.dumps(sites[0])] * 1000)
    (folder / MANIFEST).write_text(f'{{"sites": [{listed}, nonsense')
    with pytest.raises(hl.FolderError, match=r"listed once, got '\(root\):input' twice"):
        hl.open(folder)


def test_modules_named_as_parts_of_a_manifest_are_not_its_sites(tmp_path):
    model = nn.ModuleDict({name: nn.Identity() for name in ("path", "port", "leaf", "call")})
    model.forward = model["leaf"].forward
    with pytest.warns(hl.HooklineWarning, match="never fired"), hl.record(model, "*") as run:
        model["call"](torch.ones(1))
    opened = hl.open(run.save(tmp_path / "run"))
    assert opened.report().why == run.report().why
    assert len(opened.report().why) == 3


def test_a_pipe_in_place_of_a_manifest_does_not_hang(tmp_path):
    folder = recorded().save(tmp_path / "run")
    (folder / MANIFEST).unlink()
    os.mkfifo(folder / MANIFEST)
    with pytest.raises(hl.FolderError, match=r"manifest\.json must be a regular file, got a pipe"):
        hl.open(folder)
    with pytest.raises(hl.FolderError, match=r"holds other files \(manifest.json\)"):
        recorded().save(folder)
    (folder / MANIFEST).unlink()
    (folder / MANIFEST).symlink_to("/dev/zero")
    with pytest.raises(
        hl.FolderError, match=r"manifest\.json must be a regular file, got a device"
    ):
        hl.open(folder)


# -- the model ------------------------------------------------------------------------------------


def recorded_of(model):
    with hl.record(model) as run:
        model(torch.zeros(1, 2))
    return run


def test_ranks_of_one_model_identify_it_together(tmp_path):
    model, other = nn.Linear(2, 3), nn.Linear(2, 3)
    runs = [recorded_of(model), recorded_of(model)]
    opened = hl.open(folder_of_ranks(tmp_path / "same", runs))
    assert opened.model == opened.ranks[1].model == runs[0].model
    mixed = hl.open(folder_of_ranks(tmp_path / "mixed", [recorded_of(model), recorded_of(other)]))
    with pytest.raises(hl.AmbiguousError, match=r"run.ranks\[0\].model"):
        mixed.model  # noqa: B018


def test_a_saved_recording_identifies_its_model(tmp_path):
    model, changed = nn.Linear(2, 3), nn.Linear(2, 3)
    same = copy.deepcopy(model)
    opened = hl.open(recorded_of(model).save(tmp_path / "a"))
    assert opened.model == hl.open(recorded_of(same).save(tmp_path / "b")).model
    assert opened.model.type == "torch.nn.modules.linear.Linear"
    assert hl.open(opened.save(tmp_path / "c")).model == opened.model
    other = hl.open(recorded_of(changed).save(tmp_path / "d"))
    assert other.model.fingerprint != opened.model.fingerprint
    assert other.model.structure == opened.model.structure
    assert other.model.weights != opened.model.weights


def test_the_model_is_read_when_the_recording_is_saved(tmp_path):
    model = nn.Linear(2, 3)
    run = recorded_of(model)
    before = run.model
    with torch.no_grad():
        model.weight.add_(1)
    assert hl.open(run.save(tmp_path / "a")).model == run.model != before


def test_a_model_that_is_gone_is_not_identified(tmp_path):
    model = nn.Linear(2, 3)
    run = recorded_of(model)
    held = weakref.ref(model)
    del model
    gc.collect()
    assert held() is None
    assert run.model is None
    assert hl.open(run.save(tmp_path / "a")).model is None


def test_copies_of_a_recording_hold_no_model():
    model = nn.Linear(2, 3)
    run = recorded_of(model)
    assert copy.deepcopy(run).model is None
    assert pickle.loads(pickle.dumps(run)).model is None


def test_an_older_folder_has_no_model(tmp_path):
    path = recorded_of(nn.Linear(2, 3)).save(tmp_path / "a") / "manifest.json"
    manifest = json.loads(path.read_bytes())
    del manifest["identity"]
    path.write_bytes(seal_json({**manifest, "checksum": "0" * 16}))
    assert hl.open(tmp_path / "a").model is None


@pytest.mark.parametrize("identity", [3, {}, {"type": "x"}, [1]])
def test_a_damaged_identity_is_a_damaged_folder(tmp_path, identity):
    path = recorded_of(nn.Linear(2, 3)).save(tmp_path / "a") / "manifest.json"
    manifest = json.loads(path.read_bytes())
    path.write_bytes(seal_json({**manifest, "identity": identity, "checksum": "0" * 16}))
    with pytest.raises(hl.FolderError, match="is damaged"):
        hl.open(tmp_path / "a")
