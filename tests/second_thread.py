"""A second thread that acts while a first one is in the middle of something, or waits for it."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable


def in_autograds_thread(act: Callable[[], object]) -> None:
    """Call a function in a thread that `threading` does not know, as autograd's are on a GPU."""
    done, errors = _thread.allocate_lock(), []

    def run() -> None:
        try:
            act()
        except BaseException as error:
            errors.append(error)
        finally:
            done.release()

    done.acquire()
    _thread.start_new_thread(run, ())
    assert done.acquire(timeout=30)
    for error in errors:
        raise error


class ToldLock:
    """A reentrant lock that tells when a thread waits for it."""

    def __init__(self):
        self._lock = threading.RLock()
        self.told = threading.Event()

    def acquire(self, blocking=True):
        if self._lock.acquire(blocking=False):
            return True
        self.told.set()
        return self._lock.acquire(blocking=blocking)

    def release(self):
        self._lock.release()

    def __enter__(self):
        return self.acquire()

    def __exit__(self, *error):
        self.release()


class Meanwhile:
    """A function that another thread calls, once: until it has ended or waits for the lock.

    Args:
        act: what the other thread does.
        lock: the lock that the first thread may hold.
    """

    def __init__(self, act: Callable[[], object], lock: ToldLock | None = None):
        self._act = act
        self._told = threading.Event() if lock is None else lock.told
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __call__(self, *_: object) -> None:
        """Let the other thread act; later calls do nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
            assert self._told.wait(60)

    def _run(self):
        try:
            self._act()
        except BaseException as error:
            self._error = error
        finally:
            self._told.set()

    def end(self) -> None:
        """Wait for the other thread, and raise what it raised."""
        assert self._thread is not None
        self._thread.join(60)
        assert not self._thread.is_alive(), "the threads wait for each other"
        if self._error is not None:
            raise self._error
