"""Globs on paths. Imports only errors."""

from __future__ import annotations

import re

from hookline.engine.errors import SelectionError

_GLOB = re.compile(r"\*\*\.|\.\*\*|\*\*|\*|\{[^{}]*\}|[{}]|[^*{}.]+|\.")


def glob(pattern: str) -> re.Pattern[str]:
    """A path glob as a regex: `*` within a segment, `**` across segments, `{a,b}` for either.

    `a.**` is everything below `a`; `**.b` is every `b` at any depth; `**` alone is every path.

    Raises:
        SelectionError: a brace is not closed.
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
        elif token[0] == "{":
            options = token[1:-1].split(",")
            out.append("(?:" + "|".join(glob(option).pattern for option in options) + ")")
        else:
            out.append(re.escape(token))
    return re.compile("".join(out))
