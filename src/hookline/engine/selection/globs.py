"""Translate globs on paths to regexes."""

from __future__ import annotations

import re

from hookline.errors import SelectionError

# One of several characters, `[0-9]`; `[[]` and `[]]` are the brackets themselves. Colons, dots,
# commas and blanks are not allowed, because they suggest a slice.
CLASS = r"""\[!?[\[\]]?[^\s\[\]'":.,]*\]"""
_GLOB = re.compile(rf"\*\*\.|\.\*\*|\*\*|\*|\?|{CLASS}|\{{[^{{}}]*\}}|[{{}}]|[^*?{{}}.\[]+|\.|\[")


def glob(pattern: str) -> re.Pattern[str]:
    """Translate a path glob to a regex.

    - `*` matches any text within a segment, and `?` one character.
    - `[0-9]` matches one of several characters, and `[!0]` any other character.
    - `**` matches across segments; `{a,b}` matches either.
    - `a.**` is everything below `a`; `**.b` is every `b` at any depth; `**` alone is every path.

    Raises:
        SelectionError: a brace is not closed, or a range of characters does not run upwards.
    """
    out = []
    position = 0
    for token in _GLOB.findall(pattern):
        at_start, at_end = position == 0, position + len(token) == len(pattern)
        position += len(token)
        if token in "{}":
            raise SelectionError(
                f"malformed glob {pattern!r}: braces hold names and commas, {{a,b}}, are closed"
                " and do not nest."
            )
        if token == "**." and (at_start or pattern[position - 4] == "."):
            out.append(r"(?:.*\.)?")
        elif token == ".**":
            out.append(r"\..+" if at_end else r"(?:\..*)?")
        elif token in ("**", "**."):
            out.append(".*" + re.escape(token[2:]))
        elif token == "*":
            out.append(r"[^.]*")
        elif token == "?":
            out.append("[^.]")
        elif token[0] == "[" and len(token) > 2:
            out.append(_one_of(token, pattern))
        elif token[0] == "{":
            options = token[1:-1].split(",")
            out.append("(?:" + "|".join(glob(option).pattern for option in options) + ")")
        else:
            out.append(re.escape(token))
    return re.compile("".join(out))


def _one_of(token: str, pattern: str) -> str:
    """Translate `[0-9]` or `[!0-9]`, which never match a dot."""
    is_other = token[1] == "!" and len(token) > 3
    characters = re.sub(r"[\\^\[\]&~|]", r"\\\g<0>", token[1 + is_other : -1])
    regex = f"(?!\\.)[{'^' * is_other}{characters}]"
    try:
        re.compile(regex)
    except re.error:
        raise SelectionError(
            f"malformed glob {pattern!r}: a range in {token} must run upwards, as in [0-9]."
        ) from None
    return regex
