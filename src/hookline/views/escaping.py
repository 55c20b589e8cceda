"""Texts as HTML: no name in them is markup, or turns round what stands beside it. Imports words."""

from __future__ import annotations

import html

from hookline.engine.words import visible


def escape(text: str) -> str:
    """A text as HTML shows it.

    >>> escape("<script>")
    '&lt;script&gt;'
    """
    return html.escape(visible(text))
