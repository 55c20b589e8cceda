"""A site: one place where a value flows, and its notation; globs on paths.

The grammar is `PATH[:PORT][LEAF][#CALL]`: `layer4.1.conv2`, `h.3:output[0]`,
`block:output.last_hidden_state`, `block#2`. A path alone means the module's output.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Final

from hookline.engine.pytree.describe import leaf_text
from hookline.engine.pytree.tree import Key, Leaf
from hookline.errors import SelectionError

# The values of a module, forward and backward; `grad` is the gradient of a parameter or a tensor.
PORTS: Final = ("input", "output", "grad_input", "grad_output", "grad")
# The notation of the root, whose path is the empty string, as in torch. The empty string does not
# print.
ROOT: Final = "(root)"
_NAMED_ROOT: Final = "[(]root)"  # a module that is named `(root)`, quoted as in a glob
GRADIENT_PORTS: Final = frozenset(port for port in PORTS if port.startswith("grad"))

# One of several characters, `[0-9]`; `[[]` and `[]]` are the brackets themselves. Colons, dots,
# commas and blanks are not allowed, because they suggest a slice.
_CLASS = r"""\[!?[\[\]]?[^\s\[\]'":.,]*\]"""
_GLOB = re.compile(rf"\*\*\.|\.\*\*|\*\*|\*|\?|{_CLASS}|\{{[^{{}}]*\}}|[{{}}]|[^*?{{}}.\[]+|\.|\[")

# A number in brackets is a leaf: `h.3[0]`. Where it cannot be a leaf, it belongs to the path: after
# a dot, `h.[12]`, or before a port or another glob character, `layer[12]:input`, `layer[34].*`.
_IN_PATH = rf"(?!\[-?\d+\]){_CLASS} | (?<=\.){_CLASS} | {_CLASS}(?=[^'\"]*[:*?])"
_GRAMMAR = re.compile(
    rf"(?P<path> (?: [^:#\[\]] | {_IN_PATH} )* )"
    r"""
        (?: : (?P<port>[^.:#\[\]]*) )?
        (?P<leaf> (?: \[(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\[\]'"]*)\] | \.[^.:#\[\]]+ )* )
        (?: \# (?P<call>[^#]*) )?""",
    re.VERBOSE,
)
_LEAF_KEY = re.compile(
    r"""\[\s*(?P<number>-?\d{1,9})\s*\]
      | \[(?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")\]
      | \.(?P<name>[^.\[\]]+)""",
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class Site:
    """One place where a value flows: a module path, a port, and where needed a leaf and a call.

        >>> str(hl.Site("h.3", "output", (0,)))
        'h.3:output[0]'
        >>> str(hl.Site("", "input"))
        '(root):input'

    Args:
        path: the dotted path of the module or parameter; the empty string for the root.
        port: "input", "output", "grad_input", "grad_output"; "grad" of a parameter or tensor.
        leaf: the keys that lead to one part of the value; () is the whole value.
        call: the k-th run of the module within a pass, from 0; None is every run. If a module
            calls itself, inputs are counted when a run begins, and outputs when a run ends.
        aliases: the other paths of a shared module.
        module_type: the name of the module's class; for a parameter, `Linear.weight`.
    """

    path: str
    port: str = "output"
    leaf: Leaf = ()
    call: int | None = None
    aliases: tuple[str, ...] = field(default=(), compare=False, repr=False)
    module_type: str = field(default="", compare=False, repr=False)

    @property
    def is_gradient(self) -> bool:
        """Tell whether the value at this site flows backward."""
        return self.port in GRADIENT_PORTS

    def __str__(self) -> str:
        port = "" if self.port == "output" and not self.leaf else f":{self.port}"
        call = "" if self.call is None else f"#{self.call}"
        leaf = leaf_text(self.leaf) if self.leaf else ""
        return f"{path_text(self.path)}{port}{leaf}{call}"


def path_text(path: str) -> str:
    """Write a path so that it prints and can be parsed again.

    >>> path_text("fc"), path_text("")
    ('fc', '(root)')
    """
    return _NAMED_ROOT if path == ROOT else path or ROOT


def paths_above(path: str) -> list[str]:
    """Return the paths of the modules that a module is inside of, the next one first.

    >>> paths_above("layers.0.fc")
    ['layers.0', 'layers', '']
    """
    names = path.split(".") if path else []
    return [".".join(names[:end]) for end in reversed(range(len(names)))]


@dataclass(frozen=True, slots=True)
class SiteText:
    """The parts of a site or glob as text; `port` is None if the text has no port."""

    path: str
    port: str | None
    leaf: Leaf
    call: int | None


def parse_site_text(text: str, paths: Container[str] = ()) -> SiteText:
    """Parse the text of a site or glob.

        >>> parse_site_text("h.*:output[0]#2")
        SiteText(path='h.*', port='output', leaf=(0,), call=2)

    Args:
        text: the site or glob.
        paths: the known paths; `(root)` is the root unless a module has this name.

    Raises:
        SelectionError: the text does not follow the grammar, or names an unknown port.
    """
    match = _GRAMMAR.fullmatch(text)
    if match is None:
        raise _malformed_error(text, "it cannot be read")
    port, call = match["port"], match["call"]
    if port is not None and port not in PORTS:
        raise SelectionError(
            f"the port in {text!r} must be one of {', '.join(PORTS)}, got {port!r}."
            f"\nWrite {match['path'] or path_text('')}:output, or"
            f" {match['path'] or path_text('')} alone, for the output."
        )
    if call is not None and not (call.isdecimal() and len(call) < 10):
        raise _malformed_error(text, f"the call must be a number such as #0, got {call!r}")
    keys = list(_LEAF_KEY.finditer(match["leaf"]))
    if "".join(key[0] for key in keys) != match["leaf"]:
        why = f"a leaf must be a name, a number or a quoted key, got {match['leaf']!r}"
        raise _malformed_error(text, why)
    roots = {ROOT: ROOT if ROOT in paths else "", _NAMED_ROOT: ROOT}
    path = roots.get(match["path"], match["path"])
    if path.startswith(f"{ROOT}@") and path not in paths and ROOT not in paths:
        path = path.removeprefix(ROOT)  # the root's own operations are `@NAME`
    return SiteText(path, port, tuple(map(_leaf_key, keys)), None if call is None else int(call))


def _leaf_key(match: re.Match[str]) -> Key:
    if match["number"] is not None:
        return int(match["number"])
    # Quoted keys are written by repr, so they are parsed as Python literals.
    return match["name"] or str(ast.literal_eval(match["text"]))


def _malformed_error(text: str, why: str) -> SelectionError:
    return SelectionError(
        f"malformed selector {text!r}: {why}."
        "\nThe form is PATH[:PORT][LEAF][#CALL], as in 'h.*:output[0]' or 'block#2'."
    )


def glob_to_regex(pattern: str) -> re.Pattern[str]:
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
        elif token in ("*", "?"):
            out.append("[^.]" + "*" * (token == "*"))
        elif token[0] == "[" and len(token) > 2:
            out.append(_translate_brackets(token, pattern))
        elif token[0] == "{":
            options = token[1:-1].split(",")
            out.append("(?:" + "|".join(glob_to_regex(option).pattern for option in options) + ")")
        else:
            out.append(re.escape(token))
    return re.compile("".join(out), re.DOTALL)  # a module's name may hold any character


def _translate_brackets(token: str, pattern: str) -> str:
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
