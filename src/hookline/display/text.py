"""Plurals, errors in a line, and the escaping of characters that do not print."""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Collection, Sequence
from itertools import islice
from typing import TypeVar

_Item = TypeVar("_Item")
_LONGEST_LINE = 1000  # characters of an error's message in another


def plural(number: int, noun: str, nouns: str | None = None) -> str:
    """Return a number with its noun: `1 pass`, `2 passes`.

    >>> plural(2, "pass", "passes"), plural(1, "site")
    ('2 passes', '1 site')
    """
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"


def share_text(n_shown: int, total: int, noun: str, nouns: str | None = None) -> str:
    """Format a share as `64 of 512 channels`, or `64 channels` if all are shown."""
    whole = plural(total, noun, nouns)
    return whole if n_shown == total else f"{n_shown:,} of {whole}"


def listed(things: Collection[object], most: int) -> str:
    """Join at most so many things by commas, and mark that there are more.

    >>> listed(["a", "b", "c"], 2), listed(range(2), 2)
    ('a, b, …', '0, 1')
    """
    return ", ".join(map(str, islice(things, most))) + ", …" * (len(things) > most)


def pick_evenly(items: Sequence[_Item], n: int) -> list[_Item]:
    """Choose at most n items, evenly spaced, the first and the last included.

    >>> pick_evenly("abcdefg", 3)
    ['a', 'd', 'g']
    """
    if len(items) <= n:
        return list(items)
    return [items[round(k * (len(items) - 1) / max(n - 1, 1))] for k in range(n)]


def name_without_torch(thing: object) -> str:
    """Name a dtype, layout or the like of torch without `torch.`.

    >>> name_without_torch(torch.bfloat16), name_without_torch(torch.strided)
    ('bfloat16', 'strided')
    """
    return str(thing).removeprefix("torch.")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message without its full stop, or the error's type.

    A very long line, such as one that quotes a field of a damaged file, is cut.

    >>> first_line(ValueError("It is odd.\\nGive another.")), first_line(KeyError())
    ('It is odd', 'KeyError')
    """
    text = str(error).strip()
    line = (text.splitlines()[0] if text else type(error).__name__).rstrip(".")
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}…"


def type_and_line(error: BaseException) -> str:
    """Return an error's type and the first line of its message.

    >>> type_and_line(ValueError("It is odd.")), type_and_line(KeyError())
    ('ValueError: It is odd', 'KeyError')
    """
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line}"


def escape_invisible(text: str) -> str:
    """Escape characters that do not print: control, format and surrogate characters.

    Module names come from users or from a folder's author. A direction mark or a terminal control
    sequence in a name could reverse, hide or colour the text beside it. Newlines and tabs are kept.

    >>> print(escape_invisible("layer\\u202egnp.1"))
    layer\\u202egnp.1
    """
    if text.isprintable():
        return text
    return "".join(
        ascii(char)[1:-1] if char not in "\n\t" and unicodedata.category(char) in _UNSEEN else char
        for char in text
    )


_UNSEEN = ("Cc", "Cf", "Cs")  # Unicode categories: control, format, surrogate


def escape_html(text: str) -> str:
    """Escape a text for HTML, including characters that do not print.

    >>> escape_html("<script>")
    '&lt;script&gt;'
    """
    return html.escape(text if text.isprintable() else escape_invisible(text))


def escape_to_one_line(text: str) -> str:
    """Escape all characters that do not print, newlines included.

    >>> print(escape_to_one_line("a\\nb"))
    a\\nb
    """
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def shorten(text: str, most: int) -> str:
    """Shorten a text by cutting out its middle, because paths differ at their ends."""
    text = escape_to_one_line(text)
    if len(text) <= most:
        return text
    tail = (most - 1) * 2 // 3
    return f"{text[: most - 1 - tail]}…{text[-tail:]}"
