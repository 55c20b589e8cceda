"""Make the README's links absolute in what is published: an index page has no files beside it.

hatchling runs this as it reads `pyproject.toml`. The address is `Source` of `[project.urls]`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

FENCE = re.compile(r"^(```.*?^```)$", re.MULTILINE | re.DOTALL)
# An image or a link whose target has no scheme and is no anchor of the page itself.
LINK = re.compile(r"(!?)(\[[^\]]*\])\((?![a-z]+:|#)([^)\s]+)\)")


def absolute(text: str, source: str, version: str) -> str:
    """Return a page of the root of the repository with absolute links, code left as it is.

    Args:
        text: the page, in Markdown.
        source: the address of the repository.
        version: the version, whose tag is `v` and this.
    """

    def replaced(match: re.Match[str]) -> str:
        image, label, path = match.groups()
        return f"{image}{label}({source}/{'raw' if image else 'blob'}/v{version}/{path})"

    parts = FENCE.split(text)
    return "".join(part if n % 2 else LINK.sub(replaced, part) for n, part in enumerate(parts))


class LongDescription(MetadataHookInterface):
    """Hand the README with absolute links to hatchling."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the readme of the package."""
        root = Path(self.root)
        version = re.search(
            r'VERSION = "([^"]+)"', (root / "src/hookline/util/version.py").read_text("utf-8")
        )
        assert version is not None
        text = (root / "README.md").read_text("utf-8")
        text = absolute(text, metadata["urls"]["Source"], version[1])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
