"""Write a flame view: the calling contexts as nested bars, as wide as they took time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hookline.display.text import escape_html, escape_invisible, plural
from hookline.display.units import duration
from hookline.engine import path_text
from hookline.files.replace_text import write_file
from hookline.verbs.profile.call_tree import CALLS, PHASES, Context
from hookline.verbs.profile.table import ProfileTable
from hookline.verbs.profile.windows import Costs, Measured


def write_flame(
    path: Path, tops: list[Context], costs: list[list[Costs]], table: ProfileTable
) -> Path:
    """Write the view as one HTML file that loads nothing.

    Args:
        path: the file.
        tops: the tops of the contexts, one for each thread.
        costs: the sums of the costs of the contexts, for each thread.
        table: the table, for the totals.
    """
    types = {row.path: row.module.module_type for row in table.rows}
    measured = Measured(tops, costs, adds=True)
    children = [_bar(context, types, measured) for top in tops for context in top.children.values()]
    total, n_passes = table.total, int(table.total.passes)
    around = [
        ("collectives", total.collectives),
        ("optimizer", total.optimizer),
        ("outside the model", total.outside),
    ]
    children += [_leaf(name, seconds) for name, seconds in around if seconds]
    data = {"name": "all", "type": "", "calls": 0, "self": [0, 0, 0, 0], "children": children}
    # In a script element, "<" could end the element.
    text = json.dumps(data).replace("<", "\\u003c")
    title = f"{table.model_type}: {duration(total.seconds)}, {plural(n_passes, 'pass', 'passes')}"
    page = _PAGE.replace("__TITLE__", escape_html(title)).replace("__DATA__", text)
    return write_file(path, page)


def _bar(context: Context, types: dict[str, str], measured: Measured) -> dict[str, Any]:
    costs = [float(cost) for cost in measured.of([context])[0]]
    return {
        "name": escape_invisible(path_text(context.path or "")),
        "type": types.get(context.path or "", ""),
        "calls": int(costs[CALLS]),
        "self": [*costs[: len(PHASES)], 0],
        "children": [_bar(inner, types, measured) for inner in context.children.values()],
    }


def _leaf(name: str, seconds: float) -> dict[str, Any]:
    return {"name": name, "type": "", "calls": 0, "self": [0, 0, 0, seconds], "children": []}


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>__TITLE__</title>
<style>
:root { color-scheme: light dark; --back: #fff; --text: #1b1f24; --faint: #667; --edge: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --back: #16181d; --text: #e8eaee; --faint: #9aa; --edge: #16181d; } }
body { margin: 1.5rem; background: var(--back); color: var(--text);
  font: 14px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.15rem; margin: 0 0 .25rem; }
p { margin: .25rem 0 .75rem; color: var(--faint); }
fieldset { border: 0; padding: 0; margin: 0 0 .75rem; display: flex; gap: 1rem; flex-wrap: wrap; }
#flame { position: relative; }
#flame button { position: absolute; height: 21px; padding: 0 4px; border: 0; border-radius: 2px;
  box-shadow: inset 0 0 0 .5px var(--edge); overflow: hidden; white-space: nowrap;
  text-overflow: ellipsis; cursor: pointer;
  text-align: left; font: 12px/21px ui-monospace, monospace; color: #111; }
#flame button:focus-visible { outline: 2px solid var(--text); z-index: 1; }
#about { min-height: 3em; font-variant-numeric: tabular-nums; white-space: pre-line; }
</style></head><body>
<h1>__TITLE__</h1>
<p>A bar is a module in the module that called it, as wide as its time. Choose a bar to zoom in;
choose the top bar to zoom out.</p>
<fieldset aria-label="phases">
<label><input type="checkbox" value="0" checked> forward</label>
<label><input type="checkbox" value="1" checked> backward</label>
<label><input type="checkbox" value="2" checked> recompute</label></fieldset>
<div id="about" role="status"></div><div id="flame"></div>
<script>
"use strict";
const data = __DATA__;
const flame = document.getElementById("flame"), about = document.getElementById("about");
const names = ["forward", "backward", "recompute", "around the model"], row = 23;
let phases = [0, 1, 2, 3], zoomed = data;
(function link(bar, above) {
  bar.above = above;
  bar.children.forEach(child => link(child, bar));
})(data, null);
const own = bar => phases.reduce((sum, k) => sum + bar.self[k], 0);
const whole = bar => bar.sum = own(bar) + bar.children.reduce((sum, c) => sum + whole(c), 0);
const text = s => s >= 1 ? s.toFixed(2) + " s" : (s * 1e3).toPrecision(3) + " ms";
function part(bar, k) { return bar.self[k] + bar.children.reduce((s, c) => s + part(c, k), 0); }
function tell(bar) {
  const share = data.sum ? (100 * bar.sum / data.sum).toFixed(1) : "0";
  const lines = [bar.name + (bar.type ? " (" + bar.type + ")" : "") + ": " + text(bar.sum) + ", "
    + share + " %; itself " + text(own(bar)) + (bar.calls ? "; calls " + bar.calls : "")];
  lines.push(names.map((n, k) => [n, part(bar, k)]).filter(e => e[1] > 0)
    .map(e => e[0] + " " + text(e[1])).join(", "));
  about.textContent = lines.join("\\n");
}
function colour(bar) {
  let hash = 0;
  for (const char of bar.type || bar.name) hash = (hash * 31 + char.charCodeAt(0)) % 997;
  return "hsl(" + (15 + hash % 200) + " 65% 70%)";
}
function draw() {
  whole(data);
  flame.textContent = "";
  const width = flame.clientWidth;
  let deepest = 0;
  function place(bar, left, size, depth) {
    if (size < 0.75) return;
    deepest = Math.max(deepest, depth);
    const made = document.createElement("button");
    made.style.cssText = "left:" + left + "px;top:" + depth * row + "px;width:" + size
      + "px;background:" + colour(bar);
    made.textContent = size > 24 ? bar.name.split(".").pop() : "";
    made.setAttribute("aria-label", bar.name + ", " + text(bar.sum));
    made.title = bar.name + ", " + text(bar.sum);
    made.onmouseenter = made.onfocus = () => tell(bar);
    made.onclick = () => { zoomed = bar; draw(); };
    flame.append(made);
    bar.shown = size;
    let at = left;
    for (const child of bar.children) {
      const wide = bar.sum ? size * child.sum / bar.sum : 0;
      place(child, at, wide, depth + 1);
      at += wide;
    }
  }
  const chain = [];
  for (let bar = zoomed.above; bar; bar = bar.above) chain.unshift(bar);
  chain.forEach((bar, depth) => {
    const children = bar.children;
    bar.children = [];
    place(bar, 0, width, depth);
    bar.children = children;
  });
  place(zoomed, 0, width, chain.length);
  flame.style.height = (deepest + 1) * row + "px";
  tell(zoomed);
}
document.querySelectorAll("input").forEach(box => box.onchange = () => {
  phases = [...document.querySelectorAll("input:checked")].map(b => +b.value).concat(3);
  draw();
});
addEventListener("resize", draw);
draw();
</script></body></html>
"""
