"""Texts as items: lines of a file or rows of a table, which stay on disk."""

from __future__ import annotations

import itertools
import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from xxhash import xxh3_128

from hookline.data.fingerprints import content_fingerprint
from hookline.data.indexed_source import DataSetError, SingleItems, SkipMark
from hookline.display.text import listed
from hookline.engine.pytree import describe
from hookline.errors import InputError, warn
from hookline.models.packages import error_in_short, import_package
from hookline.util.optional_imports import module_if_imported

KEY = "text"  # of a line of .jsonl, or the column of a table
_PIECE_BYTES = 8 * 1024**2
_NEW_LINE = ord("\n")
_BOM = b"\xef\xbb\xbf"  # some editors of Windows begin a file of UTF-8 with it
_N_CHECKED = 100  # lines of .jsonl, up to the first that is not blank
_NO_LIMIT = 10**9  # a tokenizer of transformers without a limit has 1e30 tokens
_BLANK = SkipMark("EmptyText: a text must have more than white space")


class TextItems(SingleItems):
    """Items that are texts, tokenized a batch at a time.

    Blank texts keep their index, and are listed as skipped.

    Args:
        tokenize: makes a dict of tensors of a list of texts: `as_tokenizer`.
    """

    fix = "Give a tokenize= that pads the texts of a batch to one length."

    def __init__(self, tokenize: Callable[[list[str]], dict[str, Tensor]]) -> None:
        self._tokenize = tokenize

    @abstractmethod
    def read_texts(self, indices: Sequence[int]) -> list[str | None]:
        """Read texts; None where there is none."""

    def read(self, indices: Sequence[int]) -> list[Any]:
        """Read texts; mark blank ones."""
        return list(map(text_or_skip_mark, self.read_texts(indices)))

    def collate(self, values: list[Any], indices: list[int]) -> Any:
        """Tokenize texts."""
        return self._tokenize(values)


def unwrap_text_key(data: Any) -> Any:
    """Return the text, or the list of texts, at the key "text" of an item or batch; else these."""
    texts = data.get(KEY, data) if isinstance(data, Mapping) else data
    return texts if texts is None or isinstance(texts, str | list) else data


def text_or_skip_mark(text: Any) -> str | SkipMark:
    """Return a text, or the mark of one that cannot be run because it is blank."""
    if text is None or (isinstance(text, str) and not text.strip()):
        return _BLANK
    if not isinstance(text, str):
        raise TypeError(f"a text must be a str, got {type(text).__name__}")
    return text


@final
class Tokenizer:
    """A tokenizer as a function of a list of texts.

    Args:
        tokenizer: a tokenizer of transformers, or a function that returns a dict of tensors.
        options: keyword arguments of each call.
    """

    def __init__(self, tokenizer: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._options = dict(options)
        self._has_warned = False

    def __call__(self, texts: list[str]) -> dict[str, Tensor]:
        """Tokenize texts."""
        tokens = self._tokenizer(texts, **self._options)
        if not isinstance(tokens, Mapping) or not all(
            isinstance(tensor, Tensor) for tensor in tokens.values()
        ):
            raise DataSetError(
                f"tokenize must return a dict of tensors, got {_non_tensor_text(tokens)}."
                "\nGive a tokenizer of transformers, or a function that pads to one length and"
                " returns tensors."
            )
        # The encodings of tokenizers that are written in Rust tell what was cut off.
        encodings: list[Any] = getattr(tokens, "encodings", None) or []
        if not self._has_warned and any(encoding.overflowing for encoding in encodings):
            self._has_warned = True
            warn(
                f"some texts have more than {len(encodings[0].ids)} tokens and are cut there, at"
                " the tokenizer's model_max_length.\nSplit long texts into several."
            )
        return dict(tokens)


def _non_tensor_text(result: Any) -> str:
    """Describe the first value of a tokenizer's result that is not a tensor, or the result."""
    if isinstance(result, Mapping):
        for key, value in result.items():
            if not isinstance(value, Tensor):
                return f"a dict with {key}={describe.in_words(value)}"
    return type(result).__name__


def as_tokenizer(
    tokenize: Any, needed_by: str = "text"
) -> Callable[[list[str]], dict[str, Tensor]]:
    """Return a function of a list of texts that returns a dict of tensors.

    Args:
        tokenize: a function, or a tokenizer of transformers. The latter pads to the longest text
            of the batch, and cuts texts at its `model_max_length`.
        needed_by: the data that need it, for the message.

    Raises:
        InputError: it is None or cannot be called, or the tokenizer has no padding token.
    """
    if not callable(tokenize):
        raise InputError(
            f"tokenize must convert the texts of {needed_by} to tensors, got"
            f" {'None' if tokenize is None else type(tokenize).__name__}."
            "\nGive the model's tokenizer: transformers.AutoTokenizer.from_pretrained(NAME). A"
            " model without one takes tensors."
        )
    if isinstance(tokenize, Tokenizer):
        return tokenize
    transformers = module_if_imported("transformers")  # a tokenizer of it has imported it
    if transformers is None or not isinstance(tokenize, transformers.PreTrainedTokenizerBase):
        return Tokenizer(tokenize, {})
    if tokenize.pad_token is None:
        raise InputError(
            f"tokenize must be able to pad, got a {type(tokenize).__name__} without a padding"
            " token.\nGive it one, which the attention mask hides: tokenizer.pad_token ="
            " tokenizer.eos_token"
        )
    is_limited = tokenize.model_max_length < _NO_LIMIT
    return Tokenizer(tokenize, {"return_tensors": "pt", "padding": True, "truncation": is_limited})


@final
class FileLines(TextItems):
    """The lines of a text file. Their offsets are found once; the lines stay on disk.

    Args:
        path: the file: `.txt`, a text a line; or `.jsonl`, an object with the key "text" a line.
        tokenize: as in `TextItems`.

    Raises:
        InputError: the file cannot be read, or its first object has other keys.
    """

    def __init__(self, path: Path, tokenize: Callable[[list[str]], dict[str, Tensor]]) -> None:
        super().__init__(tokenize)
        self._path = path
        self._is_json = path.suffix.lower() == ".jsonl"
        try:
            self._offsets, self._fingerprint = _index_lines(path)
        except OSError as error:
            raise InputError(
                f"{path} must be readable, got {error_in_short(error)}."
                "\nGive a file that you may read."
            ) from error
        if self._is_json:
            self._check_keys()

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def identity(self) -> dict[str, Any]:
        """Return name, size and fingerprint of the file."""
        return {
            "kind": "jsonl" if self._is_json else "lines",
            "name": self._path.name,
            "size": int(self._offsets[-1]),
            "fingerprint": self._fingerprint,
        }

    def read_texts(self, indices: Sequence[int]) -> list[str | None]:
        """Read texts, in one piece from the first to the last.

        Raises:
            DataSetError: the file has another size than when it was indexed.
            ValueError: a line is not UTF-8, or not an object with the key "text".
        """
        lines = self._read_lines(indices)
        return [_text_of_json_line(line) for line in lines] if self._is_json else lines

    def _read_lines(self, indices: Sequence[int]) -> list[Any]:
        first, last = min(indices), max(indices) + 1
        start = int(self._offsets[first])
        with self._path.open("rb") as file:
            size = file.seek(0, 2)
            if size != self._offsets[-1]:
                raise DataSetError(
                    f"{self._path} must have {self._offsets[-1]} bytes, as when the job began, got"
                    f" {size}.\nPut the old file back, or extract the new one to another folder."
                )
            file.seek(start)
            data = file.read(int(self._offsets[last]) - start)
        bounds = self._offsets[first : last + 1] - start
        lines = (data[bounds[index - first] : bounds[index - first + 1]] for index in indices)
        return [line.removesuffix(b"\n").removesuffix(b"\r").decode() for line in lines]

    def _check_keys(self) -> None:
        """Check the first object of a file: if it lacks the key, all of them do."""
        for index in range(min(len(self), _N_CHECKED)):
            try:
                (line,) = self._read_lines([index])
                entry = json.loads(line) if line.strip() else {KEY: ""}
            except ValueError:
                return  # this line alone may be broken: loading it says so
            if not isinstance(entry, dict) or KEY not in entry:
                raise InputError(
                    f'{self._path} must have objects with the key "{KEY}", got {_keys_text(entry)}'
                    f' in line {index + 1}.\nWrite a text a line: {{"{KEY}": "..."}}.'
                )
            if line.strip():
                return


def _text_of_json_line(line: str) -> Any:
    """Return the text of a line of .jsonl; None for a blank line."""
    if not line.strip():
        return None
    entry = json.loads(line)
    if not isinstance(entry, dict) or KEY not in entry:
        raise ValueError(f'a line must be an object with the key "{KEY}", got {_keys_text(entry)}')
    return entry[KEY]


def _keys_text(entry: Any) -> str:
    if not isinstance(entry, dict):
        return f"a {type(entry).__name__}"
    keys = ", ".join(map(repr, itertools.islice(entry, 3)))
    return f"the keys {keys}{', …' * (len(entry) > 3)}" if entry else "an empty object"


def _index_lines(path: Path) -> tuple[NDArray[np.int64], str]:
    """Read a file once: the first byte of each line, then the end; and its fingerprint."""
    digest = xxh3_128()
    ends: list[NDArray[np.int64]] = []
    size, start = 0, 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            if size == 0 and piece.startswith(_BOM):
                start = len(_BOM)
            digest.update(piece)
            ends.append(np.flatnonzero(np.frombuffer(piece, np.uint8) == _NEW_LINE) + (size + 1))
            size += len(piece)
    starts = np.concatenate([np.array([start], np.int64), *ends])
    if starts[-1] != size:  # the last line has no newline
        starts = np.append(starts, size)
    return starts, digest.hexdigest()


@final
class ParquetTexts(TextItems):
    """The column "text" of a parquet file, read a row group at a time.

    Args:
        path: the file.
        tokenize: as in `TextItems`.

    Raises:
        InputError: pyarrow is not installed, the file is broken or has no such column of texts.
    """

    def __init__(self, path: Path, tokenize: Callable[[list[str]], dict[str, Tensor]]) -> None:
        super().__init__(tokenize)
        self._path = path
        parquet = import_package("pyarrow.parquet", str(path), InputError)
        try:
            with parquet.ParquetFile(path) as file:
                metadata, schema = file.metadata, file.schema_arrow
        except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors, too
            raise InputError(
                f"{path} must be a parquet file, got {error_in_short(error)}."
                "\nWrite it anew: pyarrow.parquet.write_table(table, FILE)."
            ) from error
        if KEY not in schema.names:
            raise InputError(
                f'{path} must have a column "{KEY}", got {listed(schema.names, 5)}.'
                f'\nRename the column of texts: table.rename_columns({{"NAME": "{KEY}"}}).'
            )
        if "string" not in str(schema.field(KEY).type):
            raise InputError(
                f'{path} must have texts in its column "{KEY}", got {schema.field(KEY).type}.'
                "\nConvert it to strings first."
            )
        rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._ends = np.cumsum(rows, dtype=np.int64)
        self._schema = {name: str(schema.field(name).type) for name in schema.names}
        self._group: tuple[int, Any] | None = None

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_group": None}

    def identity(self) -> dict[str, Any]:
        """Return name, schema and fingerprint of the file."""
        return {
            "kind": "parquet",
            "name": self._path.name,
            "size": self._path.stat().st_size,
            "schema": self._schema,
            "fingerprint": content_fingerprint([self._path]),
        }

    def read_texts(self, indices: Sequence[int]) -> list[str | None]:
        """Read texts. The last row group is kept: batches in order read each group once."""
        texts: list[str | None] = []
        for index in indices:
            group = int(np.searchsorted(self._ends, index, side="right"))
            start = int(self._ends[group - 1]) if group else 0
            texts.append(self._texts_of_group(group)[index - start].as_py())
        return texts

    def _texts_of_group(self, group: int) -> Any:
        if self._group is None or self._group[0] != group:
            self._group = None  # two groups at once would take twice the memory
            parquet = import_package("pyarrow.parquet", str(self._path), InputError)
            with parquet.ParquetFile(self._path) as file:
                table = file.read_row_group(group, columns=[KEY], use_threads=False)
            self._group = group, table.column(0)
        return self._group[1]
