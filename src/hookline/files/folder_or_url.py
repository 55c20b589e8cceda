"""A place for files: a folder on this machine, or a URL that fsspec reads and writes.

A file is there whole or not at all. A local file is written beside its place under another name,
synced to disk and renamed. An object store has one request for a whole object.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from hookline.display.text import first_line, type_and_line
from hookline.errors import FolderError
from hookline.files.folder_lock import FolderLock, flock, is_open_file_at
from hookline.files.local_files import (
    FileState,
    MappedFile,
    file_state,
    open_regular,
    replace_file,
    sync_folder,
)
from hookline.files.unreadable_or_damaged import UnreadableError

_PART = ".part"
_LOCAL = "file://"  # fsspec would write such files without lock and sync
# Only a writer's own files: the folder may turn out to be one with other files in it.
_LEFT_BEHIND = re.compile(
    r"\.(shard-\d{8}\.safetensors|manifest\.json|names\.json)\.\d+\.[0-9a-f]{8}\.part"
)
AGAIN = "Start again to go on."
_CHECK = "Check the address, the network and the credentials."
_MOST_BUFFERS = 1024  # of one call: IOV_MAX of Linux and macOS
# In calls of this size Linux holds the file in large pages, and reading random rows takes 0.8 of
# the time.
_WRITE_BYTES = 2**22


def as_place(to: str | os.PathLike[str] | Place) -> Place:
    """Return the place of a path or a URL (`s3://bucket/features`); a place is returned as it is.

    Raises:
        FolderError: it is neither, or fsspec has no such protocol.
    """
    if isinstance(to, LocalPlace | RemotePlace):
        return to
    if isinstance(to, str) and "://" in to.rstrip("/") and not to.startswith(_LOCAL):
        return RemotePlace(to)
    return LocalPlace(
        _checked_path(to, "a folder or a URL", "'features/' or 's3://bucket/features'")
    )


def _checked_path(to: str | os.PathLike[str], kind: str, example: str) -> Path:
    try:
        text = to.removeprefix(_LOCAL) if isinstance(to, str) else to
        path = Path(text)
        # Without the name of a bucket, fsspec takes "s3://" for a folder here.
        if text == "" or "\0" in str(path) or "://" in str(text) or _is_url_with_lost_slash(path):
            raise ValueError(to)
    except (TypeError, ValueError) as error:
        actual = repr(str(error)) if isinstance(error, ValueError) else type(to).__name__
        raise FolderError(
            f"the place of files must be {kind}, got {actual}.\nGive a name such as {example}."
        ) from None
    try:
        path.absolute()
    except FileNotFoundError:
        raise FolderError(
            f"{path} must lie in the working directory, which was deleted.\nGive an absolute path,"
            " or change to another directory: os.chdir(...)."
        ) from None
    return path


def as_local_path(to: str | os.PathLike[str]) -> Path:
    """Return the path of what can be written on this machine alone."""
    text = str(to).removeprefix(_LOCAL)
    if "://" in text or _is_url_with_lost_slash(Path(text)):
        raise FolderError(
            f"{text} must be a path on this machine: at URLs, hookline writes stores, recordings"
            " and sweeps alone.\nGive a path here, and copy to the URL what was written."
        )
    return _checked_path(to, "a path on this machine", "'runs/a'")


def _is_url_with_lost_slash(folder: Path) -> bool:
    """Tell whether a path is a URL that lost a slash, as `Path("s3://bucket")` does."""
    first = folder.parts[:1]
    return len(folder.parts) > 1 and bool(re.fullmatch(r"\w{2,}:", first[0]))


@final
class LocalPlace:
    """A folder on this machine.

    Args:
        folder: the folder. It is created with the first file.

    Attributes:
        most_bytes: the bytes that a new file should have at most.
        again: how to go on after an error, for messages.
    """

    most_bytes = 2 * 1024**3
    again = AGAIN

    def __init__(self, folder: Path) -> None:
        self._shown = folder
        self.folder: Path = folder.absolute()  # the working directory may change during a run
        self._lock: FolderLock | None = None

    def __str__(self) -> str:
        return str(self._shown)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_lock": None}

    def __truediv__(self, name: str) -> LocalPlace:
        inner = LocalPlace(self._shown / name)
        inner.folder = self.folder / name
        return inner

    def nearest_existing(self) -> Path:
        """Return the folder, or the nearest one above it that exists."""
        path = self.folder
        while not path.exists():
            path = path.parent
        return path

    def names(self, *, hidden: bool = False) -> list[str]:
        """List the files and folders, hidden ones left out by default."""
        try:
            names = os.listdir(self.folder)
            return sorted(name for name in names if hidden or not name.startswith("."))
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            raise self._no_folder_error() from None
        except OSError as error:
            raise FolderError(
                f"{self} cannot be read: {first_line(error)}.\nGive a folder that you may read."
            ) from error

    def _no_folder_error(self) -> FolderError:
        kind = "a file" if os.path.isfile(self.folder) else "a path through a file"
        return FolderError(f"{self} must be a folder, got {kind}.\nGive the name of a folder.")

    def size(self, name: str) -> int:
        """Return a file's size in bytes; a FileNotFoundError if it does not exist."""
        return os.stat(self.folder / name).st_size

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Read a file, or a range of its bytes, which must not end behind the file.

        Raises:
            FileNotFoundError: it does not exist. ValueError: it is not a regular file.
        """
        try:
            handle = open_regular(self.folder / name)
        except NotADirectoryError:
            raise self._no_folder_error() from None
        with os.fdopen(handle, "rb") as file:
            file.seek(start)
            return file.read(-1 if stop is None else max(stop - start, 0))

    def write(self, name: str, chunks: Iterable[Any]) -> None:
        """Write a file whole or not at all, durably; an older file of that name is replaced.

        Args:
            name: the file's name.
            chunks: its bytes, as contiguous buffers.

        Raises:
            FolderError: it cannot be written. What was there before is still there.
        """
        part = self.folder / f".{name}.{os.getpid()}.{secrets.token_hex(4)}{_PART}"
        self._check_still_locked()
        try:
            try:
                self.write_new(part.name, chunks)
                self.move(part.name, name)
            except BaseException:
                part.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise FolderError(
                f"cannot write {self._shown / name}: {first_line(error)}."
                f"\n{_write_remedy(error)} What was written before is whole. {self.again}"
            ) from error

    def write_new(self, name: str, chunks: Iterable[Any]) -> None:
        """Write a file of a new name, durably. Nobody reads it until another file names it."""
        if self._lock is None:
            self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / name).open("xb", buffering=0) as file:
            _write_all(file.fileno(), chunks)
            os.fsync(file.fileno())

    def move(self, name: str, to: str) -> None:
        """Give a file another name, durably; an older file of that name is replaced."""
        replace_file(self.folder / name, self.folder / to)
        sync_folder(self.folder)

    def _check_still_locked(self) -> None:
        """Check that the folder, if it is locked, is still the one that was locked."""
        if self._lock is None or self._lock.has_lock_file():
            return
        raise FolderError(
            f"{self} must stay where it is while it is written, got another folder or none."
            f"\nPut it back. {self.again}"
        )

    def remove(self, name: str) -> None:
        """Remove a file; a missing one is no error."""
        try:
            (self.folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise FolderError(
                f"cannot remove {self._shown / name}: {first_line(error)}.\nRemove it yourself."
            ) from error

    def remove_folder(self, name: str) -> None:
        """Remove a folder in this one with its files, as far as that can be done."""
        shutil.rmtree(self.folder / name, ignore_errors=True)

    def open(self, name: str) -> OpenFile:
        """Map a file, which then stays open."""
        return MappedFile(self.folder / name)

    def view(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        """Return a range of a file's bytes, memory-mapped. The file does not stay open."""
        path = self.folder / name
        os.close(open_regular(path))  # torch would wait for the writer of a pipe
        # Unlike np.memmap, torch's mapping keeps no file open; a private one is never written back.
        try:
            storage = torch.UntypedStorage.from_file(str(path), False, os.stat(path).st_size)
        except UnicodeEncodeError:  # torch opens names of UTF-8 alone
            return np.memmap(path, np.uint8, "c")[start:stop]
        mapped = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)  # type: ignore[arg-type]
        data: NDArray[np.uint8] = mapped.numpy()[start:stop]
        return data

    def state(self, name: str) -> FileState:
        """Return what changes with a file's bytes: its device, inode, size and time."""
        return file_state(os.stat(self.folder / name))

    def lock_until_exit(self, stack: ExitStack) -> None:
        """Keep other writers out until a stack closes, and remove what killed ones have left.

        A new folder into which nothing was written is removed then.

        Raises:
            FolderError: another process is writing here.
        """
        lock, is_new = FolderLock(self.folder, str(self)), not self.folder.exists()
        stack.callback(self._unlock, lock, is_new=is_new)  # first: Ctrl-C may come at any time
        try:
            lock.acquire()
        except FolderError:
            raise
        except OSError as error:
            raise FolderError(
                f"cannot write to {self}: {first_line(error)}.\n{_write_remedy(error)}"
            ) from error
        for name in filter(_LEFT_BEHIND.fullmatch, os.listdir(self.folder)):
            (self.folder / name).unlink(missing_ok=True)
        self._lock = lock

    def _unlock(self, lock: FolderLock, *, is_new: bool) -> None:
        try:
            self._lock = None
            lock.release()
        except BaseException:  # Ctrl-C came before it was released
            lock.release()
            raise
        if is_new:
            with suppress(OSError):  # it holds files
                self.folder.rmdir()

    @contextmanager
    def wait_for_lock(self) -> Iterator[bool]:
        """Lock the folder itself, which leaves no file; wait while another writer has its turn."""
        with ExitStack() as stack:
            # A lock on a folder that was removed meanwhile keeps nobody out.
            while (handle := flock(self.folder, stack, waiting=True)) is not None:
                if is_open_file_at(handle, self.folder):
                    break
                stack.close()
            yield handle is not None


@final
class RemotePlace:
    """A URL that fsspec reads and writes. It has no locks: two writers are not kept apart."""

    most_bytes = 2**28  # a file is one request
    again = AGAIN

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs  # loads aiohttp and more for some protocols

        self.url: str = url.rstrip("/")
        try:
            self._fs, self._root = url_to_fs(self.url)
        except Exception as error:  # those of protocols that connect, or open a file, are any
            is_unknown = isinstance(error, ValueError | ImportError)
            fix = "Install the package that fsspec names for this protocol, such as s3fs."
            raise FolderError(
                f"{url} cannot be used: {first_line(error)}.\n{fix if is_unknown else _CHECK}"
            ) from error

    def __str__(self) -> str:
        return self.url

    def __reduce__(self) -> tuple[Any, ...]:
        return RemotePlace, (self.url,)

    def __truediv__(self, name: str) -> RemotePlace:
        return RemotePlace(f"{self.url}/{name}")

    def names(self, *, hidden: bool = False) -> list[str]:
        """List the files and folders, hidden ones left out by default."""
        self._fs.invalidate_cache(self._root)
        try:
            paths = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        except Exception as error:
            raise self._unreachable_error(error) from error
        names = (path.rstrip("/").rsplit("/", 1)[-1] for path in paths)
        return sorted(name for name in names if hidden or not name.startswith("."))

    def size(self, name: str) -> int:
        """Return a file's size in bytes."""
        with self._convert_network_errors(name):
            return int(self._fs.size(self._path(name)))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Read a file, or a range of its bytes."""
        with self._convert_network_errors(name):
            data = bytes(self._fs.cat_file(self._path(name), start=start, end=stop))
            if stop is not None and len(data) < stop - start:
                raise OSError(f"{name}: {len(data):,} of {stop - start:,} bytes came")
            return data

    def write(self, name: str, chunks: Iterable[Any]) -> None:
        """Write an object in one request; an older one of that name is replaced."""
        try:
            self._fs.makedirs(self._root, exist_ok=True)
            self._fs.pipe_file(self._path(name), b"".join(chunks))
        except Exception as error:
            raise self._unreachable_error(error) from error

    write_new = write

    def remove(self, name: str) -> None:
        """Remove an object; a missing one is no error."""
        try:
            self._fs.rm_file(self._path(name))
        except FileNotFoundError:
            pass
        except Exception as error:
            raise self._unreachable_error(error) from error

    def remove_folder(self, name: str) -> None:
        """Remove all objects below a name, as far as that can be done."""
        with suppress(Exception):
            self._fs.rm(self._path(name), recursive=True)

    def open(self, name: str) -> OpenFile:
        """Open an object, whose ranges are downloaded as they are read."""
        self._fs.invalidate_cache(self._root)  # another process may have written the object
        return RemoteFile(self, name)

    def view(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        """Download a range of an object's bytes."""
        return np.frombuffer(self.read(name, start, stop), np.uint8)

    def lock_until_exit(self, stack: ExitStack) -> None:
        """Do nothing: object stores have no locks."""

    @contextmanager
    def wait_for_lock(self) -> Iterator[bool]:
        """Give False: object stores have no locks."""
        yield False

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextmanager
    def _convert_network_errors(self, name: str) -> Iterator[None]:
        """Turn errors of the network into an UnreadableError, but for that of a missing object."""
        try:
            yield
        except FileNotFoundError:
            raise
        except Exception as error:
            raise UnreadableError(
                f"{self.url}/{name} cannot be read: {type_and_line(error)}."
                f"\n{_CHECK} The object was not removed."
            ) from error

    def _unreachable_error(self, error: Exception) -> FolderError:
        return FolderError(
            f"{self.url} cannot be used: {type_and_line(error)}."
            f"\n{_CHECK} What was written before is whole. {self.again}"
        )


@final
class RemoteFile:
    """A file of a place that is not on this machine; each range is downloaded when it is read."""

    __slots__ = ("_place", "name", "size", "state")

    def __init__(self, place: RemotePlace, name: str) -> None:
        self._place = place
        self.name: str = name
        self.state: FileState | None = None
        self.size: int = place.size(name)

    def read_range(self, start: int, stop: int) -> bytearray:
        """Download a range."""
        return bytearray(self._place.read(self.name, start, min(stop, self.size)))

    def is_unchanged(self) -> bool:
        """Return True: what was read is not compared with the file again."""
        return True


Place = LocalPlace | RemotePlace


@contextmanager
def locked(place: Place) -> Iterator[None]:
    """Keep other writers out of the block: `place.lock_until_exit` for the block alone.

    Raises:
        FolderError: another process is writing there.
    """
    with ExitStack() as stack:
        place.lock_until_exit(stack)
        yield


OpenFile = MappedFile | RemoteFile


def _write_first_chunk(handle: int, chunks: list[memoryview]) -> int:
    return os.write(handle, chunks[0])


_write = getattr(os, "writev", _write_first_chunk)  # not on Windows


def _write_all(handle: int, chunks: Iterable[Any]) -> None:
    """Write buffers one after the other.

    A buffer may be computed as it is taken. It is written while it lies in the processor's cache.
    """
    waiting: list[memoryview] = []
    n_bytes = 0
    for chunk in chunks:
        view = memoryview(chunk)
        if view.nbytes:
            waiting.append(view.cast("B"))
            n_bytes += view.nbytes
        if n_bytes >= _WRITE_BYTES or len(waiting) == _MOST_BUFFERS:
            _write_vectored(handle, waiting)
            waiting, n_bytes = [], 0
    _write_vectored(handle, waiting)


def _write_vectored(handle: int, chunks: list[memoryview]) -> None:
    chunks = chunks[::-1]
    while chunks:
        n_bytes = _write(handle, chunks[: -_MOST_BUFFERS - 1 : -1])
        while n_bytes:  # fewer than were given, if a signal came or the disk is almost full
            chunk = chunks.pop()
            if n_bytes < chunk.nbytes:
                chunks.append(chunk[n_bytes:])
            n_bytes -= min(n_bytes, chunk.nbytes)


def _write_remedy(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "Free space on the disk."
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "Give a folder that you may write to."
    return "Give another folder."
