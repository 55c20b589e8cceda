"""The lock of a folder: one writer at a time, and none that outlives its process."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import signal
import subprocess
import sys
import textwrap
from contextlib import ExitStack, contextmanager

import pytest
import torch

import hookline as hl
from forked_children import child
from hookline.files import folder_lock as module
from hookline.files.folder_or_url import LocalPlace, locked
from warm import talking


@contextmanager
def another_process(folder):
    """Another process that holds the lock of a folder."""
    script = """
        import sys
        from hookline.files.folder_or_url import locked, as_place
        with locked(as_place(sys.argv[1])):
            print("locked", flush=True)
            sys.stdin.read()
    """
    with talking("-c", textwrap.dedent(script), str(folder)) as (process, _, written):
        assert written.readline() == "locked\n"
        yield process


@pytest.fixture(params=[errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def without_flock(request, monkeypatch):
    """A file system without flock."""

    def refuse(*_):
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", refuse)


def refused(folder):
    with pytest.raises(hl.FolderError) as caught, locked(LocalPlace(folder)):
        pass
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    return lines


def test_a_second_writer_of_this_process_is_told_so(tmp_path):
    with locked(LocalPlace(tmp_path)):
        first, second = refused(tmp_path)
    assert first == f"this process is writing to {tmp_path} already."
    assert second == "Wait until it has ended, or give another folder."
    with locked(LocalPlace(tmp_path)):
        pass


def test_a_lock_under_which_nothing_was_written_leaves_nothing(tmp_path):
    for folder in (tmp_path, tmp_path / "new"):
        with pytest.raises(ValueError, match="stop"), locked(LocalPlace(folder)):
            raise ValueError("stop")
    assert os.listdir(tmp_path) == []
    with locked(LocalPlace(tmp_path)):
        (tmp_path / "x").touch()
    assert sorted(os.listdir(tmp_path)) == [".lock", "x"]


def test_a_lock_whose_file_is_removed_meanwhile_is_taken_anew(tmp_path, monkeypatch):
    def lock(handle, kind):
        monkeypatch.undo()
        (tmp_path / ".lock").unlink()
        fcntl.flock(handle, kind)

    monkeypatch.setattr(fcntl, "flock", lock)
    with locked(LocalPlace(tmp_path)):
        refused(tmp_path)
        assert os.listdir(tmp_path) == [".lock"]


@pytest.mark.processes
def test_a_second_writer_is_told_who_the_first_is(tmp_path):
    with another_process(tmp_path) as process:
        first, _ = refused(tmp_path)
        assert first.startswith(f"another process is writing to {tmp_path} (process {process.pid} ")
    with locked(LocalPlace(tmp_path)):
        pass


def test_a_lock_ends_though_another_process_has_its_file(tmp_path):
    place = LocalPlace(tmp_path)
    with locked(place):
        copy = os.dup(place._lock._handle.fileno())  # as code in C that forks may have
    try:
        with locked(LocalPlace(tmp_path)):
            pass
    finally:
        os.close(copy)


def test_an_interrupt_at_any_line_of_a_lock_ends_it(tmp_path, interrupted):
    held = []  # as the traceback in a notebook holds what the interrupted lines held

    def lock():
        with ExitStack() as stack:
            place = LocalPlace(tmp_path)
            held.append(place)
            place.lock_until_exit(stack)
            held.append(place._lock)

    for step in itertools.count(1):
        came = interrupted(step, "hookline.files", lock)
        with locked(LocalPlace(tmp_path)):
            pass
        if not came:
            break
    assert step > 30
    assert not any(lock._handle for lock in held if isinstance(lock, module.FolderLock))


@pytest.mark.processes
def test_a_forked_child_does_not_end_the_lock_of_its_parent(tmp_path):
    lock = locked(LocalPlace(tmp_path))
    lock.__enter__()
    child(lambda: lock.__exit__(None, None, None))
    assert "this process is writing" in refused(tmp_path)[0]
    lock.__exit__(None, None, None)


@pytest.mark.processes
def test_a_killed_writers_children_do_not_keep_its_lock(tmp_path):
    script = """
        import os, sys
        from hookline.files.folder_or_url import locked, as_place
        with locked(as_place(sys.argv[1])):
            if os.fork() == 0:
                sys.stdin.read()  # until the test ends
                os._exit(0)
            os.kill(os.getpid(), 9)
    """
    with talking("-c", textwrap.dedent(script), str(tmp_path)) as (process, _, _):
        assert process.wait() == -signal.SIGKILL
        LocalPlace(tmp_path).write("x", [b"a"])
        until_free(tmp_path)


def until_free(folder):
    """Wait for a child that was forked a moment before its parent was killed."""
    for _ in range(1000):
        try:
            with locked(LocalPlace(folder)):
                return
        except hl.FolderError:
            os.sched_yield()
    with locked(LocalPlace(folder)):
        pass


@pytest.mark.processes
def test_a_lock_that_outlives_its_process_names_who_has_it_open(tmp_path, monkeypatch):
    with locked(LocalPlace(tmp_path)):
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        here = module._Owner.this_process()
        text = f"process {ended.pid} on {here.host}\n{here.started} {here.machine}\n"
        (tmp_path / ".lock").write_text(text)
        monkeypatch.setattr(module.os, "getpid", lambda: 0)  # this process counts as another
        first, second = refused(tmp_path)
        monkeypatch.undo()
    assert first == (
        f"{tmp_path} is locked: process {os.getpid()} has its file .lock open, though process"
        f" {ended.pid} on {here.host}, which locked it, has ended."
    )
    assert second == "End that process, or give another folder."


def test_a_lock_that_fails_otherwise_is_an_error_with_its_reason(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", fails)
    assert "Input/output error" in refused(tmp_path)[0]


# -- without flock --------------------------------------------------------------------------------


def test_without_flock_a_store_is_written(tmp_path, without_flock):
    store = hl.extract(torch.nn.Identity(), torch.ones(8, 4), "", tmp_path / "s")
    assert len(store) == 8
    assert ".writer" not in os.listdir(tmp_path / "s")


def test_without_flock_a_second_writer_is_refused(tmp_path, without_flock):
    with locked(LocalPlace(tmp_path)):
        assert refused(tmp_path)[0].startswith(f"this process is writing to {tmp_path} (process")
    with locked(LocalPlace(tmp_path)):
        pass


def written_by(folder, **changes):
    owner = module._Owner.this_process()._replace(**changes)
    (folder / ".writer").write_text(f"{owner}\n{owner.started} {owner.machine}\n")
    return owner


@pytest.mark.processes
def test_without_flock_an_ended_writer_is_taken_over(tmp_path, without_flock):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for changes in ({"process": ended.pid}, {"started": "1"}):  # the number may be given again
        written_by(tmp_path, **changes)
        with locked(LocalPlace(tmp_path)):
            assert "this process" in refused(tmp_path)[0]
        assert os.listdir(tmp_path) == [".lock"]


def test_without_flock_a_writer_that_lives_is_named(tmp_path, without_flock):
    parent = os.getppid()
    owner = written_by(tmp_path, process=parent, started=module._start_time(parent))
    assert refused(tmp_path)[0] == f"another process is writing to {tmp_path} ({owner})."
    assert (tmp_path / ".writer").exists()


@pytest.mark.parametrize("changes", [{"host": "elsewhere"}, {"machine": "another-boot/1"}])
def test_without_flock_a_writer_elsewhere_is_left_alone(tmp_path, without_flock, changes):
    owner = written_by(tmp_path, **changes)
    first, second = refused(tmp_path)
    path = tmp_path / ".writer"
    assert first == (
        f"{owner} may be writing to {tmp_path}: {path} names it, and this machine cannot see"
        " whether it has ended."
    )
    assert second == f"If it has ended, remove {path}, and start again."
    path.unlink()
    with locked(LocalPlace(tmp_path)):
        pass


@pytest.mark.parametrize("process", [None, 10**30])
def test_without_flock_a_file_without_a_name_is_left_alone(tmp_path, without_flock, process):
    (tmp_path / ".writer").touch()
    if process is not None:
        written_by(tmp_path, process=process)
    first, second = refused(tmp_path)
    assert first.endswith("is there, and names no process.")
    assert second == f"If none is writing, remove {tmp_path / '.writer'}, and start again."


def test_a_writer_with_flock_sees_one_without(tmp_path):
    parent = os.getppid()
    owner = written_by(tmp_path, process=parent, started=module._start_time(parent))
    assert refused(tmp_path)[0] == f"another process is writing to {tmp_path} ({owner})."
    written_by(tmp_path, started="1")
    with locked(LocalPlace(tmp_path)):
        assert os.listdir(tmp_path) == [".lock"]


@pytest.mark.processes
def test_a_writer_without_flock_sees_one_with(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with another_process(tmp_path) as process:
        monkeypatch.setattr(fcntl, "flock", refuse)
        assert f"(process {process.pid} on" in refused(tmp_path)[0]
    with locked(LocalPlace(tmp_path)):
        pass


def test_without_flock_a_file_that_was_taken_is_noticed(tmp_path, without_flock):
    place = LocalPlace(tmp_path)
    with locked(place):
        (tmp_path / ".writer").unlink()
        with pytest.raises(hl.FolderError, match="must stay where it is"):
            place.write("x", [b"a"])


def test_without_flock_two_do_not_take_over_at_once(tmp_path, without_flock, monkeypatch):
    written_by(tmp_path, started="1")
    state = module._Owner.process_state

    def is_taken_meanwhile(owner):
        if owner.started == "1":
            (tmp_path / ".writer").unlink()
            parent = os.getppid()
            written_by(tmp_path, process=parent, started=module._start_time(parent))
            return "ended"
        return state(owner)

    monkeypatch.setattr(module._Owner, "process_state", is_taken_meanwhile)
    assert refused(tmp_path)[0].startswith(f"another process is writing to {tmp_path} (process")
    assert sorted(os.listdir(tmp_path)) == [".lock", ".writer"]
