"""Read the values in the tensor files of a recording's folder.

Tensors are memory-mapped on look-up. Their shapes and dtypes are in the files' headers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, final

from torch import Tensor

from hookline.display.text import first_line
from hookline.engine import Site
from hookline.errors import FolderError, OverwrittenError
from hookline.files.folder_or_url import Place
from hookline.files.local_files import FileState
from hookline.files.safetensors_file import TensorFile
from hookline.files.unreadable_or_damaged import DAMAGE, UnreadableError, convert_read_errors
from hookline.recordings.encoding import StoreTensor, decode, holds_shard, rename_tensors
from hookline.recordings.join_dtensor_parts import Part

# The fix that errors about damage give.
REMEDY = "Copy the folder again from a whole one, or record it again."


@final
class TensorFiles:
    """The tensor files of one place, each opened once, on first use.

    Args:
        place: the place.
        sums: for each file the checksums in the manifest: of its header and of each tensor.
    """

    def __init__(self, place: Place, sums: Mapping[str, Sequence[str]]) -> None:
        self.place = place
        self._sums = sums
        self._opened: dict[str, TensorFile] = {}
        # A tensor needs no second verification while its file is unchanged.
        self._verified: dict[str, tuple[FileState | None, set[str]]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorFiles, (self.place, self._sums)

    def tensor(self, name: str) -> Tensor:
        """Read a tensor by its name in the manifest; repeated calls return the same tensor."""
        file, key = self._locate(name)
        return file.tensor(key)

    def outline(self, name: str) -> Tensor:
        """Return a meta tensor of the shape and dtype in the file's header."""
        file, key = self._locate(name)
        return file.meta_tensor(key)

    def verify(self, name: str) -> Tensor:
        """Compare a tensor's bytes with their checksum, then return its meta tensor."""
        file, key = self._locate(name)
        file.read_verified_bytes(key)
        return file.meta_tensor(key)

    def release(self) -> None:
        """Close the files; the next look-up opens them again. Tensors already read stay valid."""
        self._opened.clear()

    def _locate(self, name: str) -> tuple[TensorFile, str]:
        file, _, key = str(name).partition("/")
        opened = self._opened.get(file)
        if opened is None or not opened.file.is_unchanged():
            opened = self._opened[file] = self._open(file)
        return opened, key

    def _open(self, file: str) -> TensorFile:
        if PurePath(file).name != file or file in ("", ".", ".."):
            raise ValueError(f"a tensor's file must lie in the folder, got {file!r}")
        with convert_read_errors(f"{self.place}/{file}"):
            opened = TensorFile(self.place.open(file), self._sums[file])
        state, verified = self._verified.get(file, (None, opened.verified))
        if state == opened.file.state:
            opened.verified = verified
        self._verified[file] = opened.file.state, opened.verified
        return opened


@final
class StoredValue:
    """An encoded value of a manifest, whose tensors are read by `load()`. `site` is for errors."""

    __slots__ = ("_data", "_files", "_site")

    def __init__(self, files: TensorFiles, data: Any, site: Site) -> None:
        self._files = files
        self._data = data
        self._site = site

    def load(self, parts: dict[int, Part] | None = None) -> Any:
        """Read the value; repeated calls return the same tensors.

        `parts` takes the tensors that were parts of DTensors, with their layouts, by their `id()`.

        Raises:
            FolderError: the folder is gone or damaged, or cannot be read now.
            OverwrittenError: one of its tensors was changed in place after it was read.
        """
        return self._read(lambda: decode(self._data, self._files.tensor, parts))

    def encode(self, store_tensor: StoreTensor) -> Any:
        """Encode the value again as it was, with the layouts of parts of DTensors.

        Raises:
            FolderError, OverwrittenError: as `load`.
        """
        return self._read(
            lambda: rename_tensors(
                self._data, lambda name: store_tensor(self._files.tensor(name).detach())
            )
        )

    def outline(self) -> Any:
        """Return the value with meta tensors; no tensor data is read."""
        return self._read(lambda: decode(self._data, self._files.outline))

    def verify(self) -> None:
        """Compare the value's bytes with their checksums."""
        self._read(lambda: decode(self._data, self._files.verify))

    def holds_shard(self) -> bool:
        """Return whether a tensor of the value was one rank's part of a DTensor."""
        return holds_shard(self._data)

    def release(self) -> None:
        """Close the folder's files."""
        self._files.release()

    def _read(self, read: Callable[[], Any]) -> Any:
        """Read the value or its form, and say in an error which value cannot be read."""
        try:
            return read()
        except OverwrittenError:
            raise OverwrittenError(
                f"{self._site} was changed in place after it was looked up."
                f"\nChange a copy, run[{str(self._site)!r}].clone(). Call run.release() to read all"
                " values from the folder again."
            ) from None
        except UnreadableError:
            raise
        except (*DAMAGE, OSError) as error:
            raise FolderError(
                f"{str(self._site)!r} cannot be read: {self._files.place} is damaged, gone, or"
                f" replaced since it was opened: {first_line(error)}."
                f"\n{REMEDY} If it was replaced, open it again."
            ) from error
