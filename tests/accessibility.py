"""What axe has to say against a page."""

from __future__ import annotations

from axe_playwright_python.sync_playwright import Axe


def faults_of(page) -> list[tuple[str, str]]:
    """The rules that a page breaks, each with the first element that does."""
    violations = Axe().run(page).response["violations"]
    return [(fault["id"], fault["nodes"][0]["html"]) for fault in violations]
