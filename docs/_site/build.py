"""Build the documentation as a site: `python docs/_site/build.py`, or `make docs`.

The pages of `docs/` come as they are, and the README as the first page. The tutorials are executed.
The scripts, the changelog, the measurements and the notes for contributors become pages; the
package becomes a list of its files, the API reference a list of signatures. Links that leave
`docs/` lead to these pages. The site is then checked: a broken link, a page that the navigation
lacks, and anything that a browser would fetch from another machine are errors. `llms.txt` lists
every section of the site, `llms-full.txt` holds the text of all pages.
"""

from __future__ import annotations

import argparse
import base64
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import yaml
from check import faults_of_links, faults_of_navigation
from llms import write_texts
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook
from signatures import signatures_page

import hookline as hl
import hookline.data
import hookline.models
from files import files_page

ROOT = Path(__file__).parent.parent.parent
FENCE = re.compile(r"^(```.*?^```)$", re.MULTILINE | re.DOTALL)
ENTRY = re.compile(r"^::: (hookline\S*)$", re.MULTILINE)
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#])")


class BuildError(Exception):
    """The site cannot be built, or something in it leads nowhere."""


def source_pages() -> dict[str, str]:
    """Map files and folders of the repository to the pages that are made from them."""
    scripts = sorted((ROOT / "examples").glob("*.py"))
    return {
        "README.md": "index.md",
        "CHANGELOG.md": "changelog.md",
        "CONTRIBUTING.md": "contributing.md",
        "SECURITY.md": "security.md",
        "benchmarks/README.md": "measurements.md",
        "src/hookline": "files.md",
        "docs/api": "signatures.md",
        "examples/README.md": "examples/index.md",
        "examples/tutorial.ipynb": "tutorial.md",
        "examples/tutorial_sweep.ipynb": "tutorial-sweep.md",
        "examples/tutorial_port.ipynb": "tutorial-port.md",
        **{f"examples/{one.name}": f"examples/{one.stem}.md" for one in scripts},
    }


def build(out: Path, config: Path = ROOT / "mkdocs.yml") -> None:
    """Build the site in a folder, in place of what is there."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        settings = yaml.safe_load(config.read_text("utf-8"))
        assemble(config.parent / settings["docs_dir"], work / "docs")
        pages = list(pages_of(settings["nav"]))
        if faults := faults_of_navigation(work / "docs", [uri for _, uri in pages]):
            raise BuildError("\n".join(faults))
        texts = {uri: (work / "docs" / uri).read_text("utf-8") for _, uri in pages}
        for uri, text in texts.items():
            (work / "docs" / uri).write_text(with_entries(text), "utf-8")
        settings["plugins"][-1]["mkdocstrings"]["handlers"]["python"]["paths"] = [str(ROOT / "src")]
        (work / "mkdocs.yml").write_text(yaml.safe_dump(settings, sort_keys=False), "utf-8")
        generate(work)
        open_without_server(work / "site")
        write_texts(texts, work / "site", pages)
        if faults := faults_of_links(work / "site"):
            raise BuildError("\n".join(faults))
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(work / "site", out)


def pages_of(nav: list[Any], part: str = "") -> Iterator[tuple[str, str]]:
    """Give the pages of the navigation in its order, each with its part of the site."""
    for entry in nav:
        if isinstance(entry, str):
            yield part, entry
        else:
            ((title, inner),) = entry.items()
            if isinstance(inner, str):
                yield part, inner
            else:
                yield from pages_of(inner, part or title)


def assemble(docs: Path, to: Path) -> None:
    """Copy the pages to a folder, with those that are made from other files."""
    shutil.copytree(docs, to, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for page in to.rglob("*.md"):
        uri = page.relative_to(to).as_posix()
        text = within_site(page.read_text("utf-8"), uri, f"docs/{uri}")
        page.write_text(text, "utf-8")
    tutorials = executed(ROOT / source for source in source_pages() if source.endswith(".ipynb"))
    for source, uri in source_pages().items():
        path = ROOT / source
        target = to / uri
        target.parent.mkdir(exist_ok=True)
        if path.is_dir():
            page = signatures_page if source == "docs/api" else files_page
            target.write_text(page(path), "utf-8")
        elif path.suffix == ".py":
            target.write_text(
                f"# {path.name}\n\n```python\n{path.read_text('utf-8')}```\n", "utf-8"
            )
        elif path.suffix == ".ipynb":
            nbformat.write(tutorials[path], to / path.name)
            target.write_text(
                within_site(tutorial_page(path, tutorials[path], to), uri, source), "utf-8"
            )
        else:
            target.write_text(within_site(path.read_text("utf-8"), uri, source), "utf-8")


def executed(paths: Iterable[Path]) -> dict[Path, NotebookNode]:
    """Execute notebooks in one kernel, which starts and imports once: each begins without names."""
    notebooks = {path: nbformat.read(path, as_version=4) for path in paths}
    whole = new_notebook()
    for notebook in notebooks.values():
        begins = new_code_cell("%reset -f\nget_ipython().execution_count = 1")
        whole.cells += [begins, *notebook.cells]
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        quiet = ["--Application.log_level=40"]  # the kernel warns of its own port otherwise
        options = {"timeout": 300, "coalesce_streams": True, "extra_arguments": quiet}
        NotebookClient(whole, resources=resources, **options).execute()
    for notebook in notebooks.values():
        cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
        for number, cell in enumerate(cells, 1):
            cell.execution_count = number
    return notebooks


def tutorial_page(path: Path, notebook: NotebookNode, to: Path) -> str:
    """Give the page of an executed notebook; a folder gets its figures."""
    parts = [f'<a href="{path.name}" download>Download this notebook</a>']
    figures = 0
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                figures += 1
                name = f"{path.stem}-{figures}.png"
                (to / name).write_bytes(base64.b64decode(data["image/png"]))
                parts.append(
                    f'<img class="output" alt="The figure of the cell above" src="{name}">'
                )
            elif "text/html" in data:
                parts.append(f'<div class="output">{data["text/html"]}</div>')
            else:
                parts.append(f"```text\n{data['text/plain'].rstrip()}\n```")
    link, title, *rest = parts
    return "\n\n".join([title, link, *rest]) + "\n"


def outside_code(markdown: str, change: Callable[[str], str]) -> str:
    """Change a page's text, and leave its blocks of code as they are."""
    parts = FENCE.split(markdown)
    return "".join(part if k % 2 else change(part) for k, part in enumerate(parts))


def within_site(markdown: str, uri: str, source: str) -> str:
    """Lead links to files of the repository to the pages that are made from these files."""
    pages = source_pages()

    def to(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        page = pages.get(target, target.removeprefix("docs/"))
        return posixpath.relpath(page, posixpath.dirname(uri) or ".")

    return outside_code(markdown, lambda text: LINK.sub(to, text))


def with_entries(markdown: str) -> str:
    """Lead each entry of the API reference to the place where its name is defined.

    The generator reads source files, where `hookline.verbs.record` is a package; the name that
    users import from it is a function.
    """

    def entry(match: re.Match[str]) -> str:
        shown = match[1].replace("hookline.", "hl.", 1)
        shown = shown.removeprefix("hl.models.").removeprefix("hl.data.")
        options = f"      heading: {shown}\n      toc_label: {shown}"
        return f"::: {definition(match[1])}\n    options:\n{options}"

    return ENTRY.sub(entry, markdown)


def definition(name: str) -> str:
    """Find the dotted path of the place where a public name is defined."""
    thing: Any = hl
    for part in name.split(".")[1:]:
        thing = getattr(thing, part)
    thing = getattr(thing, "fget", None) or getattr(thing, "func", thing)  # of a property
    return f"{thing.__module__}.{thing.__qualname__}"


def generate(work: Path) -> None:
    """Run the generator, strictly. To look for garbage takes it a fifth of its time."""
    start = "import gc; gc.disable(); from zensical.main import cli; cli()"
    command = [sys.executable, "-c", start, "build", "--strict", "--clean"]
    done = subprocess.run(
        [*command, "--config-file", "mkdocs.yml"],
        cwd=work,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = COLOUR.sub("", done.stdout + done.stderr)
        faults, _, crash = said.partition("Traceback (most recent call last):")
        raise BuildError("\n".join([faults.rstrip(), *crash.rstrip().splitlines()[-1:]]))


def open_without_server(site: Path) -> None:
    """Lead links to folders to their index, and take off what only a server uses."""
    (site / "404.html").unlink(missing_ok=True)
    for page in site.rglob("*.html"):
        home = posixpath.relpath("index.html", page.parent.relative_to(site).as_posix())
        text = page.read_text("utf-8")
        page.write_text(re.sub(r'href="\./(?:\.\.|\.)?"', f'href="{home}"', text), "utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build the documentation as a site.")
    parser.add_argument("--out", type=Path, default=ROOT / "site", help="the folder to write")
    chosen = parser.parse_args()
    try:
        build(chosen.out)
    except BuildError as error:
        sys.exit(str(error))
    print(f"The documentation: {(chosen.out / 'index.html').resolve()}")
