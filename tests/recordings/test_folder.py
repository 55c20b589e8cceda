"""Recordings on disk: whole or not there, lazily opened, honest about what is lost."""

from __future__ import annotations

import json
import os
import resource
import textwrap
from collections import namedtuple
from contextlib import chdir

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.files.sealed_json import MANIFEST, seal_json
from hookline.recordings import Fields, NotSaved
from thoroughness import tries
from warm import run_python


def test_a_recording_comes_back_the_same(net, image, tmp_path):
    with hl.record(net, ports=("input", "output"), copy=True) as run:
        net(image)
        net(image * 2)
    opened = hl.open(run.save(tmp_path / "run"))
    assert opened.sites == run.sites
    assert list(opened) == list(run)
    for one, other in zip(opened.passes, run.passes, strict=True):
        assert one.order == other.order
        assert all(torch.equal(one[key], other[key]) for key in other)
    assert str(opened.report()) == str(run.report())
    assert opened.modules == run.modules


ALL_DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    torch.complex64, torch.complex128,
]  # fmt: skip


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_every_dtype_is_kept_as_it_is(dtype, tmp_path):
    value = torch.tensor([0.0, 1.0, 3.0]).to(dtype)
    opened = hl.open(record_value(value).save(tmp_path / "run"))
    assert opened["0"].dtype is dtype
    assert torch.equal(opened["0"].to(torch.complex128), value.to(torch.complex128))


@pytest.mark.parametrize("n_before", [1, 3])
def test_complex_numbers_lie_where_torch_can_read_them(n_before, tmp_path):
    """torch ends the process at an address of complex128 that is no multiple of 16."""
    value = [torch.arange(n_before), torch.tensor([1 + 2j, 3j], dtype=torch.complex128)]
    opened = hl.open(record_value(value).save(tmp_path / "run"))["0"][1]
    assert opened.data_ptr() % 16 == 0
    assert torch.equal(opened.clone(), value[1])


def record_value(value) -> hl.Recording:
    model = nn.Sequential(nn.Identity())
    with hl.record(model, "0") as run:
        model(value)
    return run


Point = namedtuple("Point", ["x", "y"])


def test_structures_come_back_foreign_classes_as_their_fields(holder, tmp_path):
    with hl.record(holder, "inner", ports=("input", "output")) as run:
        holder(torch.ones(2))
    opened = hl.open(run.save(tmp_path / "run"))
    value = opened["inner"]
    assert value["pair"].left.tolist() == [2.0, 2.0]
    assert type(value["pair"]).__name__ == "Pair"
    assert value["pair"].right[1] is None
    assert isinstance(value["out"], Fields)
    assert value["out"].type_name == "Out"
    assert value["out"].hidden.tolist() == [0.0, 0.0]
    assert value["out"].extra["n"] == 3
    assert opened["inner:output.out.extra.deep[0]"].tolist() == [1.0, 1.0]
    with pytest.raises(AttributeError, match="Out has no field 'nothing'; it has hidden, extra"):
        _ = value["out"].nothing


def test_plain_values_come_back_exactly(tmp_path):
    value = {"f": 0.1, "nan": float("nan"), "i": 2**60, "s": "é", "b": True, "n": None, 3: [(), {}]}
    back = hl.open(record_value(value).save(tmp_path / "run"))["0"]
    assert repr(back) == repr(value)


def test_what_cannot_be_saved_is_named(tmp_path):
    run = record_value((torch.eye(2).to_sparse(), object(), torch.ones(1)))
    opened = hl.open(run.save(tmp_path / "run"))
    assert len(run.lost) == 2
    assert run.lost == opened.lost
    assert all(line.startswith("0: ") for line in run.lost)
    assert isinstance(opened["0"][0], NotSaved)
    assert "sparse" in repr(opened["0"][0])
    assert [part.is_tensor for part in opened["0"][:2]] == [True, False]
    again = hl.open(record_value(opened["0"]).save(tmp_path / "again"))
    assert [part.is_tensor for part in again["0"][:2]] == [True, False]
    assert opened["0"][2].tolist() == [1.0]


def test_views_and_shared_memory_are_saved_as_they_were_seen(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    value = [base, base.t(), base[:, 1], base, base[1:], base.reshape(4, 3), torch.zeros(0, 3)]
    opened = hl.open(record_value(value).save(tmp_path / "run"))["0"]
    assert all(torch.equal(a, b) for a, b in zip(opened, value, strict=True))
    n_bytes = sum(file.stat().st_size for file in (tmp_path / "run").glob("*.safetensors"))
    assert n_bytes < 12 * 4 * 5 + 2000


def test_several_files_are_written_for_large_recordings(monkeypatch, net, image, tmp_path):
    from hookline.files.folder_or_url import LocalPlace

    monkeypatch.setattr(LocalPlace, "most_bytes", 4000)
    with hl.record(net, copy=True) as run:
        net(image)
    opened = hl.open(run.save(tmp_path / "run"))
    assert len(list((tmp_path / "run").glob("values-*.safetensors"))) > 3
    assert all(torch.equal(opened[key], run[key]) for key in run)


def test_values_are_read_only_when_looked_up(net, image, tmp_path):
    with hl.record(net, ["fc", "stem"]) as run:
        net(image)
    opened = hl.open(run.save(tmp_path / "run"))
    for file in (tmp_path / "run").glob("*.safetensors"):
        file.unlink()
    assert len(opened) == 2
    with pytest.raises(hl.FolderError, match="damaged, gone, or replaced"):
        opened["fc"]


def test_an_overwritten_value_is_not_saved_as_if_it_were_right(net, image, tmp_path):
    with hl.record(net) as run:
        net(image)
    with pytest.raises(hl.OverwrittenError):
        run.save(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_older_recording_is_replaced_and_anything_else_is_not(net, image, tmp_path):
    with hl.record(net, "fc") as run:
        net(image)
    run.save(tmp_path / "run")
    with hl.record(net, "stem") as second:
        net(image)
    second.save(tmp_path / "run")
    assert list(hl.open(tmp_path / "run")) == ["stem"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(hl.FolderError, match=r"holds other files \(thesis.txt\)"):
        run.save(tmp_path / "mine")
    with pytest.raises(hl.FolderError, match=r"must be a folder, got the file .*\.txt") as caught:
        run.save(tmp_path / "mine" / "thesis.txt")
    assert "cannot be used" not in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine", "run"]


def test_a_folder_with_a_manifest_of_its_own_is_left_alone(tmp_path):
    run = record_value(torch.ones(1))
    app = tmp_path / "app"
    app.mkdir()
    (app / "manifest.json").write_text('{"name": "my app"}')
    with pytest.raises(hl.FolderError, match=r"holds other files \(manifest.json\)"):
        run.save(app)
    folder = run.save(tmp_path / "run")
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(hl.FolderError, match=r"holds other files \(notes.txt\)"):
        run.save(folder)
    assert (folder / "notes.txt").read_text() == "mine"


def test_an_opened_recording_gives_no_value_of_its_replacement(tmp_path):
    folder = record_value(torch.zeros(2)).save(tmp_path / "run")
    old = hl.open(folder)
    record_value(torch.ones(2)).save(folder)
    with pytest.raises(hl.FolderError, match="replaced since it was opened"):
        old["0"]
    assert hl.open(folder)["0"].tolist() == [1.0, 1.0]


def test_conjugated_and_negated_views_are_saved_as_they_equal(tmp_path):
    z = torch.randn(3, dtype=torch.complex64)
    value = (z, z.conj(), z.to(torch.complex128).conj(), torch._neg_view(z.real.clone()))
    back = hl.open(record_value(value).save(tmp_path / "run"))["0"]
    assert all(torch.equal(a, b) for a, b in zip(back, value, strict=True))


def test_the_current_folder_and_a_link_can_be_named(tmp_path):
    run = record_value(torch.ones(1))
    (tmp_path / "here").mkdir()
    with chdir(tmp_path / "here"):
        run.save(".")
    assert hl.open(tmp_path / "here")["0"].item() == 1
    (tmp_path / "link").symlink_to(tmp_path / "here")
    record_value(torch.zeros(1)).save(tmp_path / "link")
    assert hl.open(tmp_path / "here")["0"].item() == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "link"]
    with pytest.raises(hl.FolderError):
        run.save("a\0b")


def test_what_was_lost_or_made_fields_survives_a_second_saving(holder, tmp_path):
    with hl.record(holder, "inner") as run:
        holder(torch.ones(2))
    once = hl.open(run.save(tmp_path / "one"))
    twice = hl.open(once.save(tmp_path / "two"))
    assert twice["inner"]["out"].hidden.tolist() == [0.0, 0.0]
    key = frozenset({1})
    value = (torch.eye(2).to_sparse(), torch.Size([2, 3]), torch.float16, {1.5: 1, key: 2})
    once = hl.open(record_value(value).save(tmp_path / "three"))
    twice = hl.open(once.save(tmp_path / "four"))
    assert repr(twice["0"][0]) == repr(once["0"][0])
    assert twice["0"][1:3] == (torch.Size([2, 3]), torch.float16)
    assert twice["0"][3] == {1.5: 1, "frozenset({1})": 2}
    assert [line for line in once.lost if "the key" in line] == [
        "0: the key frozenset({1}), which became the text 'frozenset({1})'"
    ]


DAMAGES = [
    {"sites": [{"path": [], "port": "output", "leaf": [], "call": None, "aliases": [],
                "type": ""}]},
    {"sites": [{"path": "0", "port": "evil", "leaf": [], "call": None, "aliases": [], "type": ""}]},
    {"sites": [{"path": "0", "port": "output", "leaf": [{}], "call": None, "aliases": [],
                "type": ""}]},
    {"passes": float("inf")},
    {"passes": [{"number": float("inf"), "failed": None, "values": []}]},
    {"passes": [{"number": 0, "failed": "x", "values": []}]},
    {"passes": [{"number": 0, "failed": False, "values": [[0, {"float": "0x1p99999"}]]}]},
    {"passes": [{"number": 0, "failed": False, "values": [[0, {"complex": "values-x/0"}]]}]},
    {"passes": [{"number": 0, "failed": False, "values": [[0, {"dtype": "load"}]]}]},
    {"passes": [{"number": 0, "failed": False, "values": [[7, 1]]}]},
]  # fmt: skip


@pytest.mark.parametrize("change", DAMAGES, ids=range(len(DAMAGES)))
def test_any_damage_to_a_manifest_is_a_folder_error(change, tmp_path):
    folder = record_value(torch.ones(1)).save(tmp_path / "run")
    damage(folder / MANIFEST, **change)
    with pytest.raises(hl.FolderError):
        hl.open(folder)["0"]


def test_an_opened_recording_of_many_passes_reads_each_file_once(tmp_path):
    model = nn.Sequential(nn.Identity())
    with hl.record(model, "0") as run:
        for k in range(300):
            model(torch.tensor([float(k)]))
    opened = hl.open(run.save(tmp_path / "run"))
    assert "0" in opened
    assert opened.stack("0")[:, 0].tolist() == list(range(300))
    assert len({id(entry[1]._files) for one in opened._log.passes for entry in one.log}) == 1


@pytest.mark.slow
def test_an_opened_recording_can_be_saved_again(net, image, tmp_path):
    with hl.record(net, "fc") as run:
        net(image)
    opened = hl.open(run.save(tmp_path / "one"))
    again = hl.open(opened.save(tmp_path / "two"))
    assert torch.equal(again["fc"], run["fc"])
    opened.save(tmp_path / "one")
    assert torch.equal(hl.open(tmp_path / "one")["fc"], run["fc"])


SAVE = """
    import os, sys, torch, hookline as hl
    from torch import nn
    model = nn.Sequential(nn.Identity())
    with hl.record(model, "0") as run:
        for k in range(20):
            model(torch.full((10000,), float(k)))
"""


CRASHES = """
    import json, shutil, signal
    from pathlib import Path
    from hookline.files import folder_or_url, safetensors_file
    from hookline.files.sealed_json import MANIFEST

    folder_or_url.LocalPlace.most_bytes = 200_000
    left = None

    def tick():
        global left
        if left is not None:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def ticking(function):
        def run(*args, **kwargs):
            tick()
            return function(*args, **kwargs)
        return run

    def writing_few(handle, chunks):
        return os.write(handle, chunks[0][:20_000])

    # Whatever touches the disk: what Python audits, and what it does not.
    sys.addaudithook(lambda event, _: event.startswith(("open", "os.", "shutil.")) and tick())
    os.fsync = ticking(os.fsync)
    folder_or_url._write = ticking(writing_few)  # also in the middle of a file
    safetensors_file.checksum = ticking(safetensors_file.checksum)

    with hl.record(model, "0") as older:
        model(torch.full((10000,), -1.0))

    def whole(target):
        found = hl.open(target, verify=True)
        if len(found.passes) == 1:
            assert found["0"][0] == -1
            return "older"
        assert [one["0"][9999].item() for one in found.passes] == list(range(20))
        return "newer"

    seen = {"none": 0, "older": 0, "newer": 0, "left over": 0, "without page": 0}
    for step in range(1, 1000):
        target = Path(sys.argv[1]) / str(step) / "run"
        if sys.argv[2] == "older":
            older.save(target)
            (target / "report.html").write_text("a page")
        child = os.fork()
        if child == 0:
            left = step
            run.save(target)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        is_there = sys.argv[2] == "older" or (target / MANIFEST).exists()
        found = whole(target) if is_there else "none"
        seen[found] += 1
        has_page = (target / "report.html").exists()
        assert not (has_page and found != "older")  # never the page of another recording
        seen["without page"] += found == "older" and not has_page
        named = (target / MANIFEST).read_text() if is_there else ""
        names = os.listdir(target) if target.exists() else []
        seen["left over"] += any(f'"{name}"' not in named for name in names if name != MANIFEST)
        run.save(target)  # what was left over goes
        assert whole(target) == "newer"
        values = json.loads((target / MANIFEST).read_text())["checksums"]
        assert {*os.listdir(target)} == {MANIFEST, *values}
        assert os.listdir(target.parent) == ["run"], os.listdir(target.parent)
        shutil.rmtree(target.parent)
        if status == 0:
            break
        assert status == signal.SIGKILL
    print(json.dumps(seen))
"""


@pytest.mark.parametrize("before", tries(["none", "older"], gate=["older"]))
@pytest.mark.processes
def test_a_crash_at_any_moment_leaves_no_recording_or_all_of_it(tmp_path, before):
    """A process is killed at the n-th thing that it does on the disk, for every n."""
    script = textwrap.dedent(SAVE) + textwrap.dedent(CRASHES)
    done = run_python("-c", script, tmp_path, before)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen[before] > 30
    assert seen["newer"] > 0
    assert seen["left over"] > 30
    assert seen["without page"] <= 1  # the page goes right before the manifest is replaced


@pytest.mark.processes
def test_a_full_disk_is_said_and_leaves_nothing(tmp_path):
    script = textwrap.dedent(SAVE) + textwrap.dedent("""
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            run.save(sys.argv[1])
        except hl.FolderError as error:
            print(error)
    """)
    assert resource.RLIMIT_FSIZE is not None
    done = run_python("-c", script, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "cannot write the recording" in done.stdout
    assert "Nothing was left behind" in done.stdout
    assert len(done.stdout.splitlines()) <= 3
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_may_not_be_written_to_is_said():
    with pytest.raises(hl.FolderError, match="cannot write the recording"):
        record_value(torch.ones(1)).save("/proc/hookline")


def damage(manifest, **changes):
    data = json.loads(manifest.read_text())
    data.update(changes)
    manifest.write_bytes(seal_json(data))


def test_what_is_no_recording_is_refused(tmp_path):
    run = record_value(torch.ones(1))
    with pytest.raises(hl.FolderError, match="it does not exist"):
        hl.open(tmp_path / "nowhere")
    with pytest.raises(hl.FolderError, match=r"it has no manifest\.json"):
        hl.open(tmp_path)
    folder = run.save(tmp_path / "run")
    damage(folder / MANIFEST, version=99)
    with pytest.raises(hl.FolderError, match="recording of version 99; this hookline reads"):
        hl.open(folder)
    damage(folder / MANIFEST, version=2, sites=[{"path": 3}])
    with pytest.raises(hl.FolderError, match="is damaged"):
        hl.open(folder)
    (folder / MANIFEST).write_text("{")
    with pytest.raises(hl.FolderError, match="cannot be read"):
        hl.open(folder)
    (folder / MANIFEST).write_text('{"format": "other"}')
    with pytest.raises(hl.FolderError, match="was written by something else"):
        hl.open(folder)


def test_a_hostile_manifest_reads_and_runs_nothing_outside(tmp_path):
    folder = record_value(torch.ones(1)).save(tmp_path / "run")
    other = record_value(torch.zeros(1)).save(tmp_path / "other")
    (file,) = other.glob("*.safetensors")
    for name in (f"../other/{file.name}/0", f"{file}/0"):
        manifest = json.loads((folder / MANIFEST).read_text())
        manifest["passes"][0]["values"][0][1] = {"tensor": name}
        (folder / MANIFEST).write_bytes(seal_json(manifest))
        with pytest.raises(hl.FolderError):
            hl.open(folder)["0"]
    manifest["passes"][0]["values"][0][1] = {
        "namedtuple": [["class", 1], ["def", 2]], "type": "os.system",
    }  # fmt: skip
    (folder / MANIFEST).write_bytes(seal_json(manifest))
    value = hl.open(folder)["0"]
    assert tuple(value) == (1, 2)
    assert not isinstance(value, type(os.system))
