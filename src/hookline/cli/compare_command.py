"""The command `compare`: its arguments, and its lines for annotations in CI."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hookline.data.array_files import open_arrays
from hookline.errors import InputError
from hookline.recordings.gather_and_reduce import OPS
from hookline.verbs.compare.compare import compare
from hookline.verbs.compare.comparison import ComparedSite, Comparison
from hookline.verbs.compare.join_ranks import Dim, Dims
from hookline.verbs.compare.measure import arrays_in
from hookline.verbs.compare.read_sides import FILES

_LEVELS = {"differs": "error", "not comparable": "warning"}


def compare_from_options(
    a: str,
    b: str,
    names: Sequence[str],
    floor: str | None,
    tokens: Sequence[str],
    dims: Sequence[str],
) -> Comparison:
    """Compare two folders or files, by the options of the command as they were written.

    Args:
        a: the folder or file.
        b: the reference.
        names: the renamed paths, each as `THEIRS=OURS`.
        floor: the folder of a run that only rounding tells from the first, or None.
        tokens: `auto`, `none`, or the file of the inputs of both, or one for each.
        dims: `DIM` for all values of several ranks, or `SITES=DIM` for each kind.

    Raises:
        InputError: an option is malformed, or as in `hl.compare`.
    """
    bad = next((name for name in names if "=" not in name), None)
    if bad is not None:
        raise InputError(
            f"--names must be THEIRS=OURS, got {bad}.\nGive --names encoder.layers=h, for instance."
        )
    renamed = dict(name.split("=", 1) for name in names)
    given, joined = _parse_tokens(tokens), _parse_dims(dims)
    noise = None if floor is None else compare(a, floor)
    return compare(a, b, names=renamed or None, floor=noise, tokens=given, dims=joined)


def _parse_tokens(words: Sequence[str]) -> Any:
    """Read `tokens=` of `hl.compare` from the words of the option.

    Raises:
        InputError: there is no such file, it holds no tensors, or there are too many.
    """
    if list(words) in ([], ["auto"]):
        return "auto"
    if list(words) == ["none"]:
        return None
    bad = next((word for word in words if not Path(word).is_file()), None)
    if bad is not None or len(words) > 2:
        got = bad or f"{len(words)} files"
        raise InputError(
            f"--tokens must be auto, none, or a file of inputs for both or for each, got {got}."
            "\nGive --tokens a.safetensors --tokens b.safetensors, of input_ids and attention_mask."
        )
    sides = [_read_token_inputs(Path(word)) for word in words]
    return sides[0], sides[-1]


def _read_token_inputs(path: Path) -> Any:
    """Read the inputs of a run from a file: a dict, or a list with one for each pass.

    Raises:
        InputError: it is a file of another kind, such as texts, or holds no tensor.
    """
    if path.suffix.lower() not in FILES:
        raise InputError(
            f"--tokens must be a file of tensors by name ({', '.join(FILES)}), got {path}."
            "\nSave what the model was given, such as input_ids and attention_mask, as the"
            " tokenizer returns them."
        )
    content = open_arrays(path)
    passes = content if isinstance(content, list | tuple) else [content]
    inputs = [
        {leaf[0] if leaf else "input_ids": array for leaf, array in arrays_in(part)}
        for part in passes
    ]
    if not all(inputs):
        raise InputError(
            f"--tokens must be a file of tensors, got none in {path}."
            "\nSave input_ids and attention_mask by name."
        )
    return inputs if len(inputs) > 1 else inputs[0]


def _parse_dims(words: Sequence[str]) -> Dims | None:
    """Read `dims=` of `hl.compare` from the words of the option.

    Raises:
        InputError: a word is of another form, or one is for all beside others.
    """
    pairs = [word.rpartition("=") for word in words]
    are_for_all = [not sites for sites, _, _ in pairs]
    if any(are_for_all) and len(words) > 1:
        raise InputError(
            f"--dims must be one DIM for all, or SITES=DIM each time, got {' '.join(words)}."
            '\nGive --dims "**.q_proj=-1" --dims "**.down_proj=sum".'
        )
    dims = {
        sites: _parse_dim(dim, word) for (sites, _, dim), word in zip(pairs, words, strict=True)
    }
    return dims.get("", dims or None)


def _parse_dim(dim: str, word: str) -> Dim:
    if dim in OPS:
        return dim
    try:
        return int(dim)
    except ValueError:
        raise InputError(
            f"--dims must be DIM or SITES=DIM with a dimension, sum, mean, max or min, got {word}."
            '\nGive --dims 0 for parts of the batch, or --dims "**.q_proj=-1".'
        ) from None


def github_annotations(comparison: Comparison) -> Iterator[str]:
    """Yield a workflow command of GitHub for each finding, and each site that is not equal."""
    for finding in comparison.findings:
        if finding.kind not in ("site", "values"):
            yield _workflow_command("notice", finding.text)
    for row in comparison.rows:
        if row.verdict in _LEVELS:
            yield _workflow_command(_LEVELS[row.verdict], _annotation_text(row))


def _annotation_text(row: ComparedSite) -> str:
    floor = f", noise floor {row.floor.relative:.3g}" * (row.relative is not None)
    return f"{row.site} {row.verdict}: {row.why}{floor}"


def _workflow_command(level: str, text: str) -> str:
    """Write a workflow command; it must be one line."""
    for char, code in (("%", "%25"), ("\r", "%0D"), ("\n", "%0A")):
        text = text.replace(char, code)
    return f"::{level} title=hookline compare::{text}"
