"""Write what coding assistants read: the text of each page, `llms.txt` and `llms-full.txt`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from markdown.extensions.toc import slugify

import hookline as hl
import hookline.data
import hookline.models

FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^(#{1,3}) (.*)$", re.MULTILINE)
ENTRY = re.compile(r"^::: (hookline\S*)$", re.MULTILINE)
ENDS = ((re.compile(r"</t[dh]>(?=<t[dh])"), " | "), (re.compile(r"<br>|</(p|tr)>"), "\n"))
HTML = re.compile(r"<(style|svg)\b.*?</\1>|<[a-z/][^>]*>", re.DOTALL)
# The calls that a section shows: what an assistant is to find.
CALLS = re.compile(
    r"\bhl\.[a-z]\w*(?:\.[a-z]\w*)?(?=\()|\b(?:line|run)\.[a-z_]+(?=\()|\bload_\w+(?=\()"
    r"|\bhookline (?:demo|inspect|view|summary|doctor|hooks)\b"
)
HEAD = (
    "# hookline\n\n> hookline shows, measures and changes the values inside any PyTorch model, in"
    " the forward and in the backward pass. The model's code stays as it is.\n\nInstall hookline"
    " from a checkout with `pip install .`, and import it with `import hookline as hl`. Each entry"
    " below links to a section of the documentation and names the calls in that section. The text"
    " of all pages is in [llms-full.txt](llms-full.txt).\n"
)


def write_texts(sources: dict[str, str], site: Path, pages: Sequence[tuple[str, str]]) -> None:
    """Write the text of each page into the site, then the list of sections and the whole."""
    texts = {uri: plain_text(source) for uri, source in sources.items()}
    for uri, text in texts.items():
        (site / uri).write_text(text, "utf-8")
    whole = (f"<!-- {uri} -->\n\n{text.strip()}\n" for uri, text in texts.items())
    (site / "llms-full.txt").write_text("\n\n".join(whole), "utf-8")
    (site / "llms.txt").write_text(index_of(pages, texts), "utf-8")


def plain_text(markdown: str) -> str:
    """Give a page as Markdown: docstrings where entries stand, and no HTML."""
    text = ENTRY.sub(lambda match: docstring_of(match[1]), markdown)
    codes = FENCE.findall(text)
    return "".join(
        without_html(part) + code
        for part, code in zip(FENCE.split(text), [*codes, ""], strict=True)
    )


def without_html(text: str) -> str:
    """Take HTML off; each row of a table becomes a line."""
    for end, sign in ENDS:
        text = end.sub(sign, text)
    return HTML.sub("", text)


def docstring_of(name: str) -> str:
    """Give a public name's signature and docstring as Markdown."""
    thing: Any = hl
    for part in name.split(".")[1:]:
        thing = getattr(thing, part)
    signature = ""
    if callable(thing):
        try:
            signature = str(inspect.signature(thing)).replace("'", "")
        except (TypeError, ValueError):
            signature = "(...)"
    shown = name.replace("hookline.", "hl.", 1)
    shown = shown.removeprefix("hl.models.").removeprefix("hl.data.")
    return f"## {shown}\n\n```python\n{shown}{signature}\n```\n\n{inspect.getdoc(thing) or ''}"


def index_of(pages: Sequence[tuple[str, str]], texts: dict[str, str]) -> str:
    """List the sections of all pages: a link, and the calls that each one shows."""
    lines = [HEAD]
    shown = ""
    for part, uri in pages:
        if part != shown:
            shown = part
            lines.append(f"\n## {part}\n")
        for level, title, text in sections(texts[uri]):
            where = uri if level == 1 else f"{uri}#{slugify(title, '-')}"
            calls = dict.fromkeys(CALLS.findall(text))
            names = ", ".join(f"`{call}`" for call in list(calls)[:6])
            about = " ".join(filter(None, (first_sentence(text), names and f"Calls: {names}.")))
            lines.append(f"{'  ' * (level - 1)}- [{title}]({where}){about and f': {about}'}")
    return "\n".join(lines) + "\n"


def sections(markdown: str) -> Iterator[tuple[int, str, str]]:
    """Give the level, the heading and the text of each section of a page."""
    # A comment in a block of code is no heading.
    hidden = FENCE.sub(lambda match: match[0].replace("#", " "), markdown)
    found = list(HEADING.finditer(hidden))
    ends = [match.start() for match in found[1:]] + [len(markdown)]
    for match, end in zip(found, ends, strict=True):
        yield len(match[1]), plain_title(match[2]), markdown[match.end() : end]


def first_sentence(text: str) -> str:
    """Give the first sentence of a section's prose; empty where it begins with something else."""
    prose = FENCE.sub("", text).strip().partition("\n\n")[0]
    if not prose or prose[0] in "|-#<!>":
        return ""
    prose = " ".join(re.sub(r"\[(.*?)\]\(.*?\)", r"\1", prose).split())
    return re.split(r"(?<=[.?]) (?=[A-Z`])", prose)[0]


def plain_title(title: str) -> str:
    """Take the signs of Markdown out of a heading."""
    return re.sub(r"[`*]|\]\(.*?\)|\[", "", title).strip()
