"""The folder of a recording: whole, one of two, and nothing left by writers that were killed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.files.folder_lock import flock
from hookline.files.folder_or_url import as_place
from hookline.files.sealed_json import MANIFEST
from hookline.recordings import atomic_replace, folder
from warm import run_python, talking


def recorded(number):
    model = nn.Sequential(*[nn.Identity() for _ in range(4)])
    with hl.record(model, "*") as run:
        model(torch.full((64,), float(number)))
    return run


def number_in(folder):
    """The number that a recording is of; all of its values say the same."""
    (number,) = {value for one in hl.open(folder).values() for value in one.tolist()}
    return number


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def is_alone(folder):
    """Whether a folder holds a manifest and the files that it names, and nothing else."""
    manifest = json.loads((folder / MANIFEST).read_text())
    return names_in(folder) == sorted([MANIFEST, *manifest["checksums"]])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["report.html.bak", "my-report.html", "manifest.json.orig", "values-1.safetensors.tmp",
     "old-values-1.safetensors", "rank0.txt", "my-rank0", ".hidden"],
)  # fmt: skip
def test_a_file_of_the_users_is_never_taken_for_ours(tmp_path, name):
    folder = recorded(1).save(tmp_path / "run")
    (folder / "report.html").write_text("a page of ours")
    (folder / name).write_text("years of work")
    with pytest.raises(hl.FolderError, match="holds other files"):
        recorded(2).save(folder)
    assert (folder / name).read_text() == "years of work"
    assert number_in(folder) == 1
    (folder / name).unlink()
    recorded(2).save(folder)
    assert number_in(folder) == 2
    assert not (folder / "report.html").exists()


def test_a_replacement_that_fails_leaves_the_older_recording(tmp_path, monkeypatch):
    folder = recorded(1).save(tmp_path / "run")
    (folder / "report.html").write_text("its page")
    before = names_in(folder)
    replace = Path.replace

    def failing(self, target):
        if target.name == MANIFEST:
            raise OSError(5, "Input/output error")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", failing)
    with pytest.raises(hl.FolderError, match="Input/output error"):
        recorded(2).save(folder)
    assert names_in(tmp_path) == ["run"]
    assert names_in(folder) == before
    assert number_in(folder) == 1
    assert (folder / "report.html").read_text() == "its page"


def test_a_folder_that_changed_meanwhile_is_not_replaced(tmp_path, monkeypatch):
    folder = recorded(1).save(tmp_path / "run")
    before = names_in(folder)
    write = hl.recordings.folder.write_tensor_files

    def slow(place, token, contents):
        (folder / "thesis.txt").write_text("years of work")
        return write(place, token, contents)

    monkeypatch.setattr("hookline.recordings.folder.write_tensor_files", slow)
    with pytest.raises(hl.FolderError, match=r"holds other files \(thesis.txt\)"):
        recorded(2).save(folder)
    assert number_in(folder) == 1
    assert names_in(tmp_path) == ["run"]
    assert names_in(folder) == sorted([*before, "thesis.txt"])


def test_a_file_of_others_in_the_folder_of_a_rank_is_kept(tmp_path):
    folder = recorded(1).save(tmp_path / "run")
    (folder / "rank0").mkdir()
    (folder / "rank0" / "thesis.txt").write_text("years of work")
    with pytest.raises(hl.FolderError, match=r"rank0 holds other files \(thesis.txt\)"):
        recorded(2).save(folder)
    assert (folder / "rank0" / "thesis.txt").exists()


@pytest.mark.slow
def test_of_two_writers_one_wins_and_a_reader_sees_either(tmp_path):
    folder = recorded(0).save(tmp_path / "run")
    errors, seen, writing = [], set(), [1, 2]

    def write(number):
        run = recorded(number)
        try:
            for _ in range(25):
                run.save(folder)
        except Exception as error:
            errors.append(error)
        finally:
            writing.remove(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    while writing:
        opened = hl.open(folder)  # there is always one
        with contextlib.suppress(hl.FolderError):  # its files are gone by now
            (number,) = {one[0].item() for one in opened.values()}
            seen.add(number)
    for thread in threads:
        thread.join()
    assert errors == []
    assert seen <= {0, 1, 2}
    assert number_in(folder) in (1, 2)
    assert names_in(tmp_path) == ["run"]
    assert is_alone(folder)


def test_a_folder_is_looked_at_while_no_other_writer_replaces_it(tmp_path, monkeypatch):
    folder = recorded(0).save(tmp_path / "run")
    is_manifest, locks = atomic_replace._has_recording_manifest, []

    def look(place):
        with contextlib.ExitStack() as stack:
            locks.append(flock(folder, stack))
        return is_manifest(place)

    monkeypatch.setattr(atomic_replace, "_has_recording_manifest", look)
    recorded(1).save(folder)
    assert locks == [None, None]  # before anything is written, and before it is named


@pytest.mark.processes
def test_processes_that_write_and_are_killed_leave_one_recording(tmp_path):
    """`python tests/recordings/killed_writers.py 300` does it more often."""
    script = Path(__file__).with_name("killed_writers.py")
    done = run_python(script, "12", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["kills"], found["broken"]) == (12, 0)
    assert names_in(tmp_path) == ["run"]
    assert number_in(tmp_path / "run") == 4
    assert is_alone(tmp_path / "run")


def left_behind(folder, *names):
    """Lay out files in a folder."""
    for name in names:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"half")


def test_the_next_save_removes_only_what_a_killed_writer_left(tmp_path):
    folder = recorded(1).save(tmp_path / "run")
    left_behind(
        folder, ".0123abcd.writing", "values-0123abcd-00000.safetensors", ".0123abcd.manifest",
        ".0123abcd.page", ".manifest.json.12.0123abcd.part", "rank0-0123abcd/manifest.json",
        "rank0-0123abcd/values-0123abcd-00000.safetensors",
    )  # fmt: skip
    beside = [".run.0123abcd.part", ".run2", "run.0123abcd"]
    left_behind(tmp_path, *beside)
    (folder / "rank0-0123abcd" / "manifest.json").write_text('{"format": "hookline-recording"')
    recorded(2).save(folder)
    assert number_in(folder) == 2
    assert is_alone(folder)
    assert names_in(tmp_path) == sorted([*beside, "run"])


@pytest.mark.parametrize("name", [".0123abcd.writing.bak", ".0123abcd.part", ".writing"])
def test_a_hidden_file_of_others_is_never_taken_for_a_writers(tmp_path, name):
    folder = recorded(1).save(tmp_path / "run")
    left_behind(folder, name)
    with pytest.raises(hl.FolderError, match="holds other files"):
        recorded(2).save(folder)
    assert number_in(folder) == 1
    assert name in names_in(folder)


@pytest.mark.processes
def test_what_a_living_writer_writes_is_not_removed(tmp_path):
    """The writer is another process, which is killed then."""
    script = """
        import sys, time, torch, hookline as hl
        from torch import nn
        from hookline.recordings import folder
        write = folder.write_tensor_files
        def stopped(*args):
            write(*args)
            print("written", flush=True)
            sys.stdin.read()
        folder.write_tensor_files = stopped
        model = nn.Sequential(nn.Identity())
        with hl.record(model, "0") as run:
            model(torch.ones(2))
        run.save(sys.argv[1])
    """
    folder = tmp_path / "run"
    with talking("-c", textwrap.dedent(script), str(folder)) as (writer, _, written):
        assert written.readline() == "written\n"
        (mark,) = folder.glob(".*.writing")
        (values,) = folder.glob("values-*")
        recorded(1).save(folder)
        assert number_in(folder) == 1
        assert mark.exists()
        assert values.exists()
        writer.end()
    recorded(2).save(folder)
    assert is_alone(folder)
    assert number_in(folder) == 2


def test_a_failing_save_leaves_what_was_there(tmp_path, monkeypatch):
    folder = recorded(1).save(tmp_path / "run")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hookline.recordings.folder.write_tensor_files", full)
    for name in ("run", "new"):
        with pytest.raises(hl.FolderError, match="No space left"):
            recorded(2).save(tmp_path / name)
    assert number_in(folder) == 1
    assert is_alone(folder)
    assert names_in(tmp_path) == ["run"]


def test_an_unfinished_first_recording_is_not_opened(tmp_path):
    left_behind(tmp_path / "run", ".0123abcd.writing", "values-0123abcd-00000.safetensors")
    with pytest.raises(hl.FolderError, match=r"it has no manifest\.json"):
        hl.open(tmp_path / "run")
    recorded(1).save(tmp_path / "run")
    assert is_alone(tmp_path / "run")


@pytest.fixture
def without_locks(monkeypatch):
    """A disk that knows no locks."""

    def refuse(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_a_disk_without_locks_keeps_what_may_be_somebodys(tmp_path, without_locks):
    folder = tmp_path / "run"
    others = [".0123abcd.writing", "values-0123abcd-00000.safetensors"]
    left_behind(folder, *others)
    for number in (2, 3):
        recorded(number).save(folder)
        assert number_in(folder) == number
    manifest = json.loads((folder / MANIFEST).read_text())
    assert names_in(folder) == sorted([*others, MANIFEST, *manifest["checksums"]])


@pytest.mark.processes
def test_a_child_that_was_forked_during_a_save_keeps_no_lock(tmp_path):
    script = """
        import os, sys, torch, hookline as hl
        from pathlib import Path
        from torch import nn
        from hookline.recordings import atomic_replace
        model = nn.Sequential(nn.Identity())
        with hl.record(model, "0") as run:
            model(torch.ones(2))
        place = atomic_replace.as_recording_place(sys.argv[1])
        read, write = os.pipe()
        unfinished = atomic_replace.RecordingDraft(place).__enter__()
        place.write_new(f"values-{unfinished.token}-00000.safetensors", [b"half"])
        with place.wait_for_lock():
            child = os.fork()
            if child == 0:
                os.close(write)
                os.read(read, 1)  # until the parent has gone
                os._exit(0)
        unfinished._mark.pop_all()  # as if this process had ended: the mark stays
        assert len(os.listdir(place.folder)) == 2
        run.save(sys.argv[1])
        assert len(os.listdir(place.folder)) == 2
        print("saved")
    """
    done = run_python("-c", textwrap.dedent(script), tmp_path / "run")
    assert done.stdout == "saved\n", done.stderr


def test_at_a_url_only_files_of_the_older_manifest_are_removed():
    place = as_place(f"memory://test-draft-{os.getpid()}")
    url, rank = str(place), "rank0-0123abcd"
    recorded(1).save(f"{url}/{rank}")
    checksum = json.loads((place / rank).read(MANIFEST))["checksum"]
    place.write(MANIFEST, [folder.encode_manifest({"ranks": {rank: checksum}})])
    place.write("values-89abcdef-00000.safetensors", [b"of a writer that may live"])
    assert hl.open(url).ranks[0]["0"][0] == 1
    recorded(2).save(url)
    assert hl.open(url)["0"][0] == 2
    (values,) = json.loads(place.read(MANIFEST))["checksums"]
    assert place.names() == sorted([MANIFEST, values, "values-89abcdef-00000.safetensors"])
