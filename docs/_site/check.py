"""Find what is wrong in a built site: links that lead nowhere, pages that nobody reaches."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# What a browser fetches by itself; a link to another machine is for a reader to click.
FETCHED = {"img", "script", "link", "iframe", "source", "video", "audio", "object", "embed"}


class _Page(HTMLParser):
    """The links and the anchors of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[tuple[str, str]] = []
        self.anchors = {"", "__top"}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value is not None:
                self.links.append((tag, value))
            elif name == "id" and value is not None:
                self.anchors.add(value)


def faults_of_links(site: Path) -> list[str]:
    """Name each link of a built site that leads nowhere, or fetches from another machine."""
    pages = {path.resolve(): _Page(path.read_text("utf-8")) for path in site.rglob("*.html")}
    faults = []
    for path, page in pages.items():
        for tag, link in page.links:
            if fault := _fault(tag, link, path, site.resolve(), pages):
                faults.append(f"{path.relative_to(site.resolve())}: {fault}: {link}")
    return sorted(set(faults))


def _fault(tag: str, link: str, path: Path, site: Path, pages: dict[Path, _Page]) -> str | None:
    parts = urlsplit(link)
    if parts.scheme == "data":
        return None
    if parts.scheme or parts.netloc:
        return "fetched from another machine" if tag in FETCHED else None
    if parts.path.startswith("/"):
        return "an absolute path"
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if target.is_dir():
        return "a folder, which a file: address does not open"
    if not target.exists() or not target.is_relative_to(site):
        return "no such file"
    if target in pages and unquote(parts.fragment) not in pages[target].anchors:
        return "no such anchor"
    return None


def faults_of_navigation(docs: Path, nav: list[str]) -> list[str]:
    """Name each page that the navigation lacks, and each of its entries that is not there."""
    there = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    return [
        *(f"mkdocs.yml: nav has no entry for docs/{uri}" for uri in sorted(there - set(nav))),
        *(f"mkdocs.yml: nav names docs/{uri}, which is missing" for uri in _missing(nav, there)),
    ]


def _missing(nav: list[str], there: set[str]) -> Iterator[str]:
    return (uri for uri in nav if uri not in there)
