"""Plurals, errors in a line, and the escaping of characters that do not print."""

from __future__ import annotations

import unicodedata


def plural(number: int, one: str, many: str | None = None) -> str:
    """Return a number with its noun: `1 pass`, `2 passes`.

    >>> plural(2, "pass", "passes"), plural(1, "site")
    ('2 passes', '1 site')
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message without its full stop, or the error's type.

    >>> first_line(ValueError("It is odd.\\nGive another.")), first_line(KeyError())
    ('It is odd', 'KeyError')
    """
    text = str(error).strip()
    return (text.splitlines()[0] if text else type(error).__name__).rstrip(".")


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
