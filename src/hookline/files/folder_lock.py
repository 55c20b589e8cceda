"""Lock a store's folder, so that one process at a time writes to it.

    .lock       locked by `flock`, which ends with the process, however it ends
    .writer     created exclusively and removed at the end, on a file system without `flock`

Both name the process that holds them. A `.writer` whose process has ended is taken over. Only the
machine of a process knows that the process has ended.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import socket
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Literal, NamedTuple, final

from hookline.errors import FolderError
from hookline.util.fork_safe_handle import ForkSafeHandle

try:
    import fcntl
except ImportError:  # not POSIX: no locks, so two writers are not noticed
    fcntl = None  # type: ignore[assignment]

_LOCK, _WRITER = ".lock", ".writer"
# More digits no process has, and `os.kill` refuses them.
_OWNER = re.compile(r"process (\d{1,9}) on (.+)\n(\S*) (\S*)\n")
_OWNER_BYTES = 1024
_HELD = (errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES)
_WITHOUT_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)  # the last one of NFS
_MOST_TRIES = 10  # each but the last removes the file of a process that has ended


class _Owner(NamedTuple):
    """Name the process that holds a lock."""

    process: int  # its number
    host: str  # the name of its machine
    started: str  # the time of its start, in ticks of the machine; empty if not known
    machine: str  # the boot and the process namespace in which the number counts; else empty

    @staticmethod
    def this_process() -> _Owner:
        """Return this process."""
        process = os.getpid()
        return _Owner(process, socket.gethostname(), _start_time(process), _boot_and_namespace())

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"

    def process_state(self) -> Literal["this process", "alive", "ended", "unknown"]:
        """Tell whether the process is alive, as far as that is known here."""
        this_process = _Owner.this_process()
        if self == this_process:
            return "this process"
        if (self.host, self.machine) != (this_process.host, this_process.machine):
            return "unknown"
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return "ended"
        except OSError:  # another user's
            pass
        return "alive" if self.started == _start_time(self.process) else "ended"


@final
class FolderLock:
    """Lock the folder of one writer."""

    def __init__(self, folder: Path, shown: str) -> None:
        self._folder = folder
        self._shown = shown
        self._path = folder / _LOCK
        self._handle: ForkSafeHandle | None = None

    def acquire(self) -> None:
        """Lock the folder, which is created if it does not exist.

        Raises:
            FolderError: another writer holds the lock, or may hold it.
            OSError: the folder, or the file of the lock, cannot be opened or created.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        if fcntl is None:
            return
        self._acquire_once()
        if not self.has_lock_file():  # a writer that wrote nothing has removed its file meanwhile
            self.release()
            self.acquire()

    def _acquire_once(self) -> None:
        handle = ForkSafeHandle(self._path, os.O_RDWR | os.O_CREAT)
        try:
            if self._flock_if_supported(handle):
                self._remove_stale(self._folder / _WRITER)
            else:
                handle.close()
                self._check_owner_ended(_LOCK)
                handle = self._create_writer_file()
            _write_owner(handle)
        except BaseException:
            self._unlock_and_close(handle)
            raise
        self._handle = handle

    def release(self) -> None:
        """End the lock, and remove its file from a folder that holds nothing else.

        A forked child, which has closed its copy, leaves both to its parent. Idempotent, and to be
        called again if Ctrl-C interrupts it.
        """
        handle = self._handle
        if handle is None:
            return
        try:
            with suppress(OSError):
                os.ftruncate(handle.fileno(), 0)
                is_alone = self._path.name == _LOCK and os.listdir(self._folder) == [_LOCK]
                if is_alone and is_open_file_at(handle, self._path):
                    self._path.unlink()  # before it is unlocked: afterwards it is the next writer's
        finally:
            self._unlock_and_close(handle)
            self._handle = None

    def has_lock_file(self) -> bool:
        """Tell whether the folder still holds the file of the lock."""
        return (
            self._handle is None
            or not self._handle.is_open
            or is_open_file_at(self._handle, self._path)
        )

    def _unlock_and_close(self, handle: ForkSafeHandle) -> None:
        with suppress(OSError):
            if not handle.is_open:
                return
            if self._path.name == _WRITER:
                self._path.unlink()
            else:
                _unlock(handle)
        handle.close()

    def _flock_if_supported(self, handle: ForkSafeHandle) -> bool:
        """Lock `.lock`; return False if the file system has no such locks."""
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                raise self._lock_error() from None
            if error.errno in _WITHOUT_FLOCK:
                return False
            raise
        return True

    def _lock_error(self) -> FolderError:
        """Return the error for a lock that another descriptor holds, wherever that is."""
        owner = _read_owner(self._path)
        state = "unknown" if owner is None else owner.process_state()
        if state == "this process":
            return _busy_error(f"this process is writing to {self._shown} already")
        if state != "ended":
            return _busy_error(
                f"another process is writing to {self._shown}{f' ({owner})' if owner else ''}"
            )
        holders = _processes_with_open(self._path)
        holder = f"process {', '.join(map(str, holders))} has" if holders else "another process has"
        return FolderError(
            f"{self._shown} is locked: {holder} its file {_LOCK} open, though {owner}, which locked"
            " it, has ended.\nEnd that process, or give another folder."
        )

    def _create_writer_file(self) -> ForkSafeHandle:
        """Create `.writer`, which only one process can do."""
        self._path = self._folder / _WRITER
        for _ in range(_MOST_TRIES):
            try:
                return ForkSafeHandle(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            except FileExistsError:
                self._remove_stale(self._path)
        raise _busy_error(f"other processes are writing to {self._shown}")

    def _check_owner_ended(self, name: str) -> _Owner | None:
        """Check that no process named in a file may be writing; return the one that was."""
        path = self._folder / name
        owner = _read_owner(path)
        state = "ended" if owner is None else owner.process_state()
        if state == "unknown":
            raise FolderError(
                f"{owner} may be writing to {self._shown}: {path} names it, and this machine cannot"
                f" see whether it has ended.\nIf it has ended, remove {path}, and start again."
            )
        if state != "ended":
            writer = "this process" if state == "this process" else "another process"
            raise _busy_error(f"{writer} is writing to {self._shown} ({owner})")
        return owner

    def _remove_stale(self, path: Path) -> None:
        """Remove the file of a writer that has ended."""
        owner = self._check_owner_ended(path.name)
        if not path.exists():
            return
        if owner is None:
            raise FolderError(
                f"another process may be writing to {self._shown}: {path} is there, and names no"
                f" process.\nIf none is writing, remove {path}, and start again."
            )
        # Renamed first: of two that take it over at once, one gets it.
        aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        with suppress(FileNotFoundError):
            path.rename(aside)
            if _read_owner(aside) == owner:
                aside.unlink()
            else:  # it is the file of a process that came between
                aside.rename(path)


def flock(
    path: Path, stack: ExitStack, *, shared: bool = False, waiting: bool = False
) -> ForkSafeHandle | None:
    """Lock a file or a folder until the stack closes; None if it is locked, or there are no locks.

    `shared` lets other shared locks be beside this one. `waiting` waits while it is locked.
    """
    if fcntl is None:
        return None
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        handle = ForkSafeHandle(path, os.O_RDONLY)
    except OSError:
        return None
    stack.callback(handle.close)
    try:
        fcntl.flock(handle, kind if waiting else kind | fcntl.LOCK_NB)
    except OSError:
        return None
    stack.callback(_unlock, handle)
    return handle


def _unlock(handle: ForkSafeHandle) -> None:
    """Unlock at once: a child that was just forked may not have closed its copy yet."""
    if handle.is_open:
        fcntl.flock(handle, fcntl.LOCK_UN)


def is_open_file_at(handle: ForkSafeHandle, path: Path) -> bool:
    """Return whether an open file or folder is still the one at a path."""
    try:
        return os.path.samestat(os.fstat(handle.fileno()), os.stat(path))
    except OSError as error:
        if error.errno not in _GONE:
            raise
        return False


def _busy_error(event: str) -> FolderError:
    return FolderError(f"{event}.\nWait until it has ended, or give another folder.")


def _write_owner(handle: ForkSafeHandle) -> None:
    owner = _Owner.this_process()
    with suppress(OSError):  # a full disk: the lock holds without a name
        os.ftruncate(handle.fileno(), 0)
        os.pwrite(handle.fileno(), f"{owner}\n{owner.started} {owner.machine}\n".encode(), 0)


def _read_owner(path: Path) -> _Owner | None:
    """Return the process that a file names; None if it names none."""
    try:
        with path.open("rb") as file:
            text = file.read(_OWNER_BYTES).decode(errors="replace")
    except OSError:
        return None
    match = _OWNER.fullmatch(text)
    return None if match is None else _Owner(int(match[1]), match[2], match[3], match[4])


def _start_time(pid: int) -> str:
    """Return the time of a process's start, in ticks since the boot; empty if not known."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[19]


def _boot_and_namespace() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _processes_with_open(path: Path) -> list[int]:
    """Return the processes that have a file open, among those that this process may look into."""
    holders = []
    try:
        status = os.stat(path)
        processes = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []
    for process in processes:
        with suppress(OSError):
            handles = [f"/proc/{process}/fd/{name}" for name in os.listdir(f"/proc/{process}/fd")]
            if process != os.getpid() and any(_is_same_file(handle, status) for handle in handles):
                holders.append(process)
    return holders


def _is_same_file(path: str, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(path), status)
    except OSError:
        return False
