"""Write the page of all public signatures, each with the first sentence of its docstring."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hookline as hl
import hookline.data
import hookline.models

HEAD = (
    "# All signatures\n\nEvery public name on one page, for a quick look and for programs. The"
    " [API reference](api/index.md) has the arguments, an example and the errors of each, and"
    " the defaults that are `...` here.\n"
)
ENTRY = re.compile(r"^::: hookline\.(\S+)$", re.MULTILINE)


def signatures_page(api: Path) -> str:
    """Give the page: a section for each page of the API reference, a line for each entry of it."""
    pages = sorted(api.glob("*.md"), key=lambda path: (path.stem != "verbs", path.stem))
    texts = [path.read_text("utf-8") for path in pages]
    return "\n".join([HEAD, *(section for text in texts for section in _sections(text))])


def _sections(page: str) -> Iterator[str]:
    names = ENTRY.findall(page)
    if names:
        title = page.partition("\n")[0].removeprefix("# ")
        yield "\n".join([f"## {title}", "", *map(_line, names), ""])


def _line(name: str) -> str:
    thing: Any = hl
    for part in name.split("."):
        thing = getattr(thing, part)
    shown = f"hl.{name}".removeprefix("hl.models.").removeprefix("hl.data.")
    text = " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split())
    sentence = re.split(r"(?<=\.) (?=[A-Z`])", text)[0]
    return f"- `{shown}{_signature(thing)}`: {sentence}"


def _signature(thing: Any) -> str:
    """Give the names and defaults of what a user calls; classes are returned, not called."""
    if not (inspect.isfunction(thing) or inspect.ismethod(thing)):
        return ""
    signature = inspect.signature(thing)
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for key, parameter in signature.parameters.items()
        if key != "self"
    ]
    text = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    options = ", ".join(f"{name}: {kind} = ..." for name, kind in _options(thing))
    return text.replace("**options", options) if options else text


def _options(thing: Any) -> Iterator[tuple[str, str]]:
    """Yield the names and types of the options that a function takes as a TypedDict."""
    options = inspect.signature(thing).parameters.get("options")
    if match := options and re.fullmatch(r"Unpack\[(\w+)\]", options.annotation):
        for name, kind in thing.__globals__[match[1]].__annotations__.items():
            yield name, kind.__forward_arg__
