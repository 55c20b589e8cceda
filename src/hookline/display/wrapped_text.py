"""Wrap text to the width of a terminal: between words, and never within a shape or a path."""

from __future__ import annotations

import functools
import os
import re
import sys
import unicodedata
from collections.abc import Sequence
from typing import TextIO

from hookline.display.text import escape_invisible, escape_to_one_line

LEAST_WIDTH = 40
_TEXT_WIDTH = 80

# The signs that results have in their texts, and one of ASCII for each.
_SIGNS = "●▲○…·▁▂▃▄▅▆▇█"
_PLAIN_SIGNS = "*!o~._.-:=+*#"

# A text, or lines of it, each with its style in a terminal. Neither is parsed as markup.
Cell = str | Sequence[tuple[str, str]]
Line = list[tuple[str, str]]

# A word, with a shape such as [1, 64, 112, 112] as one, in spite of its spaces.
UNIT = re.compile(r"(?:\[[\w, ]*\]|\S)+")


def wrap(text: str, width: int, hanging: str = "") -> list[str]:
    """Break a line of text between its words. Its indentation is kept; later lines hang more."""
    if text_width(text) <= width:
        return [text]
    indent = text[: len(text) - len(text.lstrip())]
    lines: list[str] = []
    for unit in UNIT.findall(text):
        if lines and text_width(lines[-1]) + 1 + text_width(unit) <= width:
            lines[-1] += f" {unit}"
        else:
            lines.append(f"{indent}{hanging if lines else ''}{unit}")
    return lines


def wrap_cell(cell: Cell, width: int) -> list[Line]:
    """Break the lines of a cell between words."""
    return [
        [(line, style)] for text, style in cell_lines(cell) for line in wrap(text, width) if text
    ]


def wrap_titled(title: str, text: str, width: int) -> list[Line]:
    """Wrap a bold title with the text after it."""
    first, *rest = wrap(f"{title}{text}", width, "  ")
    cut = len(escape_invisible(title))
    return [[(first[:cut], "bold"), (first[cut:], "")], *[[(line, "")] for line in rest]]


def cell_lines(cell: Cell, *, may_break: bool = True) -> list[tuple[str, str]]:
    """Return the lines of a cell, each with its style, without invisible characters.

    Args:
        may_break: whether a newline begins a line; one in the name of a module does not.
    """
    pieces = [(cell, "")] if isinstance(cell, str) else cell
    if not may_break:
        return [(escape_to_one_line(text), style) for text, style in pieces]
    return [(line, style) for text, style in pieces for line in escape_invisible(text).split("\n")]


def text_width(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 1 + (unicodedata.east_asian_width(char) in "FW")
        for char in text
    )


def replace_missing_signs(text: str) -> str:
    """Replace the signs of hookline that stdout cannot encode, such as cp1252 on Windows."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text if _is_encodable(text, encoding) else text.translate(_plain_signs(encoding))


@functools.cache
def _plain_signs(encoding: str) -> dict[int, str]:
    """Return what stands for each sign that an encoding lacks."""
    pairs = zip(_SIGNS, _PLAIN_SIGNS, strict=True)
    return {ord(sign): plain for sign, plain in pairs if not _is_encodable(sign, encoding)}


def _is_encodable(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def terminal_width() -> int:
    """Return the width of the terminal at stdout; 80 where stdout is not a terminal."""
    return max(_terminal_columns(sys.stdout) or _TEXT_WIDTH, LEAST_WIDTH)


def fold_line(line: str, file: TextIO) -> str:
    """Fold a line that is wider than the terminal at a file; a line for another file stays."""
    width = _terminal_columns(file)
    if not width or text_width(line) <= width:
        return line
    lines = [""]
    for part in re.findall(r" *\S.*?(?=  |$)", line):
        if not lines[-1] or text_width(lines[-1] + part) <= width:
            lines[-1] += part
        else:
            lines += wrap(f"    {part.strip()}", width)
    return "\n".join(lines)


def _terminal_columns(file: TextIO) -> int | None:
    """Return the width of the terminal at a file; None if there is no terminal."""
    try:
        return os.get_terminal_size(file.fileno()).columns if file.isatty() else None
    except (AttributeError, OSError, ValueError):
        return None
