"""Format the cells of a table row as HTML.

They are formatted here, not in a template, because a table of 2,000 rows has 25,000 cells.
"""

from __future__ import annotations

from hookline.display.html import escape
from hookline.views.page.columns import Column
from hookline.views.page.tree_rows import Row
from hookline.views.page.values import ValueEntry


def cells_html(row: Row, chosen: list[Column], link: str, strip_link: str) -> str:
    """Format all cells of a row except the first; every text is escaped.

    Args:
        row: the row.
        chosen: the columns.
        link: the address of the row's page.
        strip_link: the address of its feature maps, used if they are not drawn yet.
    """
    kind = escape(row.module_type)
    parts = [f'<td class="type" title="{kind}">{kind}</td>']
    seen = row.seen
    if seen is not None and seen.problem:
        span = len(chosen) - 2
        parts.append(f'<td class="problem" colspan="{span}">{escape(seen.problem)}</td>')
        return "".join(parts)
    for column in chosen[2:]:
        kind, style, content = column.key, "", ""
        if column.is_number:
            kind += " number"
        if seen is not None:
            if column.key == "maps":
                content = _maps(row, seen, link, strip_link)
            else:
                content = escape(column.text(row))
            if column.key == "non-finite" and seen.non_finite:
                kind += " bad"
            if column.key == "zeros" and seen.statistics is not None:
                style = f' style="--share: {seen.statistics.zeros or 0:.4f}"'
        parts.append(f'<td class="{kind}"{style}>{content}</td>')
    return "".join(parts)


def _maps(row: Row, seen: ValueEntry, link: str, strip_link: str) -> str:
    form = seen.form
    if form is None:
        return ""
    source = seen.strip.source if seen.strip is not None else strip_link
    coarse = ' class="coarse"' if form.height < 24 else ""
    label = escape(f"Feature maps of {row.label}, larger")
    return (
        f'<a href="{escape(link)}" aria-label="{label}"><img src="{escape(source)}" alt=""'
        f' loading="lazy" width="{form.width * form.tiles}" height="{form.height}"'
        f' style="--tiles: {form.tiles}"{coarse}></a>'
    )
