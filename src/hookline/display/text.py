"""Numbers with their nouns, names as they can be seen."""

from __future__ import annotations

import unicodedata


def plural(number: int, one: str, many: str | None = None) -> str:
    """A number with its noun: `1 pass`, `2 passes`.

    >>> plural(2, "pass", "passes"), plural(1, "site")
    ('2 passes', '1 site')
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def escape_invisible(text: str) -> str:
    """A text whose marks that are not seen are: those of direction, and what a terminal obeys.

    Names of modules are the user's own words, or those of whoever made a folder: a mark in one
    could turn round, hide or colour what stands beside it. Line breaks and tabs stay.

    >>> print(escape_invisible("layer\\u202egnp.1"))
    layer\\u202egnp.1
    """
    if text.isprintable():
        return text
    return "".join(
        ascii(char)[1:-1] if char not in "\n\t" and unicodedata.category(char) in _UNSEEN else char
        for char in text
    )


_UNSEEN = ("Cc", "Cf", "Cs")  # controls, marks of format, halves of a pair
