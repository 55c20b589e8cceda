"""Measure each token in each block: norms of outputs and gradients, and errors of two runs."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookline.errors import HooklineError
from hookline.views.page.module_rows import Row, repeated_block_rows
from hookline.views.page.value_entries import ValueEntry, read_tensor

_DIGITS = 4
_LEAST_TOKENS = 2
_LEAST_BLOCKS = 2
_SHAPE = re.compile(r"\[(\d+), (\d+), (\d+)\]")


class TokenBlocks(NamedTuple):
    """The blocks whose outputs have one row a token."""

    n_tokens: int
    n_samples: int
    blocks: list[tuple[int, ValueEntry]]  # each row of the tree, with its output


def token_blocks(
    rows: Sequence[Row], entries: Sequence[ValueEntry], pass_number: int
) -> TokenBlocks | None:
    """Return the blocks of a pass whose outputs are tokens by features; None if there are none.

    Args:
        rows: the rows.
        entries: the values in firing order, of which none is read.
        pass_number: the number of the pass.
    """
    by_size: dict[tuple[int, int], list[tuple[int, ValueEntry]]] = {}
    for index in repeated_block_rows(rows):
        entry = _find_output(rows[index], entries, pass_number)
        shape = None if entry is None else _SHAPE.fullmatch(entry.shape)
        if entry is not None and shape is not None:
            size = int(shape[2]), int(shape[1])
            by_size.setdefault(size, []).append((index, entry))
    size, blocks = max(by_size.items(), key=lambda item: len(item[1]), default=((0, 0), []))
    if len(blocks) < _LEAST_BLOCKS or size[0] < _LEAST_TOKENS:
        return None
    return TokenBlocks(*size, blocks)


def _find_output(row: Row, entries: Sequence[ValueEntry], pass_number: int) -> ValueEntry | None:
    for entry in row.entries:
        if entry.site.port == "output" and entry.key.pass_number == pass_number:
            return entries[entry.order]
    return None


def measure_token_norms(
    blocks: TokenBlocks,
    rows: Sequence[Row],
    others_by_order: dict[str, dict[int, ValueEntry]],
    ids: ValueEntry | None,
    sample: int,
) -> dict[str, Any]:
    """Measure one sample; each value is read once, one at a time.

    Args:
        blocks: the blocks.
        rows: the rows.
        others_by_order: by name, values beside the outputs, by position: `gradient`, or `other`
            of another recording, from which `error` is computed.
        ids: the recorded numbers of the tokens, if there are any.
        sample: the sample.
    """
    sample = min(sample, blocks.n_samples - 1)
    data: dict[str, Any] = {
        "rows": [index for index, _ in blocks.blocks],
        "names": [rows[index].label for index, _ in blocks.blocks],
        "sample": sample,
        "samples": blocks.n_samples,
        "ids": _read_token_ids(ids, sample, blocks.n_tokens),
        "output": [_norms(_read_sample(entry, sample)) for _, entry in blocks.blocks],
    }
    gradients = others_by_order.get("gradient", {})
    if gradients:
        data["gradient"] = [
            _norms(_read_sample(gradients.get(entry.order), sample)) for _, entry in blocks.blocks
        ]
    if "other" in others_by_order:
        pairs = [(entry, others_by_order["other"].get(entry.order)) for _, entry in blocks.blocks]
        data["error"] = [
            _relative_errors(_read_sample(entry, sample), _read_sample(other, sample))
            for entry, other in pairs
        ]
    return data


def find_token_ids(
    entries: Sequence[ValueEntry], pass_number: int, n_tokens: int
) -> ValueEntry | None:
    """Return the recorded input of a pass that holds whole numbers, one for each token."""
    for entry in entries:
        is_whole = entry.dtype in ("int64", "int32")
        shape = re.fullmatch(r"\[\d+, (\d+)\]", entry.shape)
        is_input = entry.site.port == "input" and entry.key.pass_number == pass_number
        if is_input and is_whole and shape and int(shape[1]) == n_tokens:
            return entry
    return None


def _read_token_ids(entry: ValueEntry | None, sample: int, n_tokens: int) -> list[int]:
    tensor = _read_sample(entry, sample)
    if tensor is None or tensor.shape != (n_tokens,):
        return []
    return [int(number) for number in tensor.tolist()]


def _read_sample(entry: ValueEntry | None, sample: int) -> Tensor | None:
    """Read one sample of a value; None if it cannot be read."""
    if entry is None:
        return None
    try:
        return read_tensor(entry)[sample].detach().cpu().double()
    except (HooklineError, RuntimeError, TypeError, IndexError):
        return None


def _norms(tensor: Tensor | None) -> list[float | None]:
    return [] if tensor is None or tensor.dim() != 2 else round_finite(tensor.norm(dim=-1).tolist())


def _relative_errors(a: Tensor | None, b: Tensor | None) -> list[float | None]:
    """Return the relative difference of each token, by the norm of `b`."""
    if a is None or b is None or a.shape != b.shape or a.dim() != 2:
        return []
    errors = (a - b).norm(dim=-1) / b.norm(dim=-1).clamp_min(torch.finfo(b.dtype).tiny)
    return round_finite(errors.tolist())


def round_finite(numbers: Sequence[float]) -> list[float | None]:
    """Round numbers; None is no finite one."""
    return [float(f"{number:.{_DIGITS}g}") if math.isfinite(number) else None for number in numbers]
