"""The place of a recording: whole, one of two, and nothing left by writers that were killed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.recordings import target_folder

BOTH_WAYS = pytest.mark.parametrize("way", ["at once", "in two steps"])


@pytest.fixture
def replaced(request, monkeypatch):
    """Replace folders as systems do that can exchange two names, or as others do."""
    if request.param == "in two steps":
        monkeypatch.setattr(target_folder, "_exchange", lambda *_: False)
    return request.param


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


@pytest.mark.parametrize("replaced", ["at once", "in two steps"], indirect=True)
def test_a_replacement_that_fails_leaves_the_older_recording(tmp_path, monkeypatch, replaced):
    folder = recorded(1).save(tmp_path / "run")
    (folder / "report.html").write_text("its page")
    replace = Path.replace

    def failing(self, target):
        if self.suffix == ".part":
            raise OSError(5, "Input/output error")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", failing)
    monkeypatch.setattr(target_folder, "_exchange", lambda *_: False)
    with pytest.raises(hl.FolderError, match="Input/output error"):
        recorded(2).save(folder)
    assert names_in(tmp_path) == ["run"]  # put back by the save itself
    assert number_in(folder) == 1
    assert (folder / "report.html").read_text() == "its page"


def test_a_folder_that_changed_meanwhile_is_not_replaced(tmp_path, monkeypatch):
    folder = recorded(1).save(tmp_path / "run")
    write = hl.recordings.folder.write_contents

    def slow(building, contents):
        (folder / "thesis.txt").write_text("years of work")
        return write(building, contents)

    monkeypatch.setattr("hookline.recordings.folder.write_contents", slow)
    with pytest.raises(hl.FolderError, match=r"holds other files \(thesis.txt\)"):
        recorded(2).save(folder)
    assert number_in(folder) == 1
    assert names_in(tmp_path) == ["run"]


def test_a_file_of_others_in_the_folder_of_a_rank_is_kept(tmp_path):
    folder = recorded(1).save(tmp_path / "run")
    (folder / "rank0").mkdir()
    (folder / "rank0" / "thesis.txt").write_text("years of work")
    with pytest.raises(hl.FolderError, match=r"rank0 holds other files \(thesis.txt\)"):
        recorded(2).save(folder)
    assert (folder / "rank0" / "thesis.txt").exists()


def test_two_names_are_exchanged_in_one_step_where_possible(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if sys.platform == "linux" and target_folder._exchange(tmp_path / "a", tmp_path / "b"):
        assert [names_in(tmp_path / name) for name in "ab"] == [["b"], ["a"]]
    assert not target_folder._exchange(tmp_path / "a", tmp_path / "nothing")


@pytest.mark.parametrize("replaced", ["at once", "in two steps"], indirect=True)
def test_of_two_writers_one_wins_and_a_reader_sees_either(tmp_path, replaced):
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


def test_a_folder_is_looked_at_while_no_other_writer_replaces_it(tmp_path, monkeypatch):
    folder = recorded(0).save(tmp_path / "run")
    is_manifest, free = target_folder._is_manifest, []

    def look(path):
        with contextlib.ExitStack() as stack:
            free.append(target_folder._hold(tmp_path, stack, alone=True, waiting=False))
        return is_manifest(path)

    monkeypatch.setattr(target_folder, "_is_manifest", look)
    recorded(1).save(folder)
    assert free == [False, False]  # before anything is written, and before it is moved there


WRITERS = """
    import json, os, signal, sys, torch, hookline as hl
    from pathlib import Path
    from torch import nn
    from hookline.recordings import target_folder
    base, rounds = Path(sys.argv[1]), 12
    if sys.argv[2] == "in two steps":
        target_folder._exchange = lambda *_: False
    def recorded(number):
        model = nn.Sequential(*[nn.Identity() for _ in range(4)])
        with hl.record(model, "*") as run:
            model(torch.full((64,), float(number)))
        return run
    recorded(0).save(base / "run")
    def child(work):
        pid = os.fork()
        if pid == 0:
            try:
                work()
            except BaseException as error:
                print(type(error).__name__, error, flush=True)
                os._exit(1)
            os._exit(0)
        return pid
    def write(number):
        run = recorded(number)
        for _ in range(rounds):
            run.save(base / "run")
    def read():
        for _ in range(10 * rounds):
            assert len(hl.open(base / "run")) == 4
    children = [child(lambda: write(1)), child(lambda: write(2)), child(read), child(read)]
    for _ in range(rounds):
        begun, said = os.pipe()
        victim = os.fork()
        if victim == 0:
            run = recorded(9)
            os.write(said, b"x")
            while True:
                run.save(base / "run")
        os.read(begun, 1)
        recorded(3).save(base / "run")  # as long as the other writes, too
        os.kill(victim, signal.SIGKILL)
        os.waitpid(victim, 0)
        os.close(begun), os.close(said)
    statuses = [os.waitpid(pid, 0)[1] for pid in children]
    recorded(4).save(base / "run")
    print(json.dumps([statuses, os.listdir(base)]))
"""


@BOTH_WAYS
@pytest.mark.processes
def test_processes_that_write_and_are_killed_leave_one_recording(tmp_path, way):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WRITERS), tmp_path, way],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    statuses, names = json.loads(done.stdout.splitlines()[-1])
    assert statuses == [0, 0, 0, 0], done.stdout
    assert names == ["run"]
    assert number_in(tmp_path / "run") == 4


def left_behind(folder, name, number=None):
    """Lay out what a writer leaves that is killed."""
    hidden = folder / name
    if number is None:
        hidden.mkdir(parents=True)
        (hidden / "values-0-00000.safetensors").write_bytes(b"half")
        (hidden / "manifest.json").touch()
    else:
        recorded(number).save(hidden)
    return hidden


def test_the_next_save_removes_only_what_a_killed_writer_left(tmp_path):
    left_behind(tmp_path, ".run.0123abcd.part")
    left_behind(tmp_path, ".run.0123abce.part", 7)
    ranks = left_behind(tmp_path, ".run.0123abcf.part")
    left_behind(ranks, "rank0", 7)
    kept = [
        left_behind(tmp_path, ".run2.0123abcd.part"),  # of another recording
        left_behind(tmp_path, ".run.part"),
        left_behind(tmp_path, ".run.0123abcd.part.bak"),
        left_behind(tmp_path, "run.0123abcd.part"),
        left_behind(tmp_path, ".run.0123abc0.part"),
        left_behind(tmp_path, ".run.0123abc3.part"),
    ]
    (kept[-1] / "thesis.txt").write_text("years of work")
    (kept[-2] / "report.html.bak").write_text("a page that somebody keeps")
    (tmp_path / ".run.0123abc1.part").write_text("a file")
    (tmp_path / ".run.0123abc2.part").symlink_to(kept[0])
    recorded(1).save(tmp_path / "run")
    assert names_in(tmp_path) == sorted(
        [".run.0123abc1.part", ".run.0123abc2.part", "run", *(path.name for path in kept)]
    )


@pytest.mark.processes
def test_what_a_living_writer_builds_is_not_removed(tmp_path):
    """The writer is another process, which is killed then."""
    script = """
        import sys, time, torch, hookline as hl
        from torch import nn
        from hookline.recordings import folder
        write = folder.write_contents
        def stopped(building, contents):
            write(building, contents)
            print("written", flush=True)
            sys.stdin.read()
        folder.write_contents = stopped
        model = nn.Sequential(nn.Identity())
        with hl.record(model, "0") as run:
            model(torch.ones(2))
        run.save(sys.argv[1])
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), tmp_path / "run"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as writer:  # fmt: skip
        assert writer.stdout.readline() == b"written\n"
        recorded(1).save(tmp_path / "run")
        (hidden,) = tmp_path.glob(".*")
        assert (hidden / "manifest.json").exists()
        writer.send_signal(signal.SIGKILL)
    recorded(2).save(tmp_path / "run")
    assert names_in(tmp_path) == ["run"]
    assert number_in(tmp_path / "run") == 2


def test_an_interrupted_replacement_is_recovered_by_opening(tmp_path):
    left_behind(tmp_path, ".run.0123abcd.old", 1)
    os.utime(tmp_path / ".run.0123abcd.old", ns=(0, 0))
    left_behind(tmp_path, ".run.0123abce.old", 2)  # the last one
    left_behind(tmp_path, ".run.0123abcf.part", 3)
    assert number_in(tmp_path / "run") == 2
    recorded(4).save(tmp_path / "run")
    assert names_in(tmp_path) == ["run"]


def test_an_interrupted_replacement_is_undone_by_a_failing_save(tmp_path, monkeypatch):
    left_behind(tmp_path, ".run.0123abcd.old", 1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hookline.recordings.folder.write_contents", full)
    with pytest.raises(hl.FolderError, match="No space left"):
        recorded(2).save(tmp_path / "run")
    assert number_in(tmp_path / "run") == 1
    assert names_in(tmp_path) == ["run"]


def test_an_older_recording_that_is_there_stays_where_it_is(tmp_path):
    left_behind(tmp_path, ".run.0123abcd.old", 1)
    recorded(2).save(tmp_path / "other")
    shutil.move(tmp_path / "other", tmp_path / "run")
    assert number_in(tmp_path / "run") == 2
    assert names_in(tmp_path) == [".run.0123abcd.old", "run"]


@pytest.fixture
def without_locks(monkeypatch):
    """A disk that knows no locks."""

    def refuse(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_a_disk_without_locks_keeps_what_may_be_somebodys(tmp_path, without_locks):
    left_behind(tmp_path, ".run.0123abcd.part")
    left_behind(tmp_path, ".run.0123abcd.old", 1)
    with pytest.raises(hl.FolderError) as caught:
        hl.open(tmp_path / "run")
    assert "rename .run.0123abcd.old to run" in str(caught.value)
    for number in (2, 3):
        recorded(number).save(tmp_path / "run")
        assert number_in(tmp_path / "run") == number
    assert names_in(tmp_path) == [".run.0123abcd.old", ".run.0123abcd.part", "run"]


@pytest.mark.processes
def test_a_child_that_was_forked_during_a_save_keeps_no_lock(tmp_path):
    script = """
        import os, sys, torch, hookline as hl
        from pathlib import Path
        from torch import nn
        from hookline.recordings import target_folder
        model = nn.Sequential(nn.Identity())
        with hl.record(model, "0") as run:
            model(torch.ones(2))
        target = Path(sys.argv[1])
        read, write = os.pipe()
        name = target_folder.name_of_part(target)
        with target_folder.part(target, name) as building, target_folder._turn(target.parent):
            child = os.fork()
            if child == 0:
                os.close(write)
                os.read(read, 1)  # until the parent has gone
                os._exit(0)
        run.save(target)
        assert not building.exists()
        print("saved")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), tmp_path / "run"],
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "saved\n"
