"""Results: one description each, as text of any width, as HTML, as data and as tables of pandas."""

from __future__ import annotations

import html
import io
import json
import math
import re
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hookline as hl
from hookline.display.json_text import json_text
from hookline.display.results import Printout, printout_of
from hookline.display.text_table import Heading
from hookline.models import load_demo_digits, load_model
from small_stores import write_store

X = torch.ones(3, 4)


def profiled(model):
    with hl.profile(model) as prof:
        model(X).sum().backward()
    return prof


def recorded(model):
    with hl.record(model, nn.Linear, ports=("output", "grad_output")) as run:
        model(X).sum().backward()
    return run


def clipped(model):
    with hl.clip(model, norm=1e-6) as line:
        model(X).sum().backward()
    return line.report()


def monitored(model):
    with hl.monitor(model) as seen:
        for _ in range(3):
            model(X)
    return seen


def stored(model):
    return hl.open(str(write_store("memory://results", {"h": torch.ones(3, 2)})))


RESULTS = {
    "summary": (lambda model: hl.summary(model, X), "rows"),
    "inventory": (hl.inventory, "hooks"),
    "profile": (lambda model: profiled(model).table, "rows"),
    "medians": (lambda model: profiled(model).per_pass, "rows"),
    "diagnosis": (lambda model: hl.doctor(model, X), "sites"),
    "gradients": (lambda model: recorded(model).gradients(), "rows"),
    "report": (lambda model: recorded(model).report(), "sites"),
    "recording": (recorded, "sites"),
    "pass": (lambda model: recorded(model).passes[0], "sites"),
    "backward": (lambda model: recorded(model).passes[0].backwards[0], "sites"),
    "selection": (lambda model: hl.select(model, "**"), "sites"),
    "clip": (clipped, "rows"),
    "curves": (monitored, "sites"),
    "store": (stored, "sites"),
}


@pytest.fixture
def model():
    model = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    model[0].register_forward_hook(lambda module, args, output: None)
    return model


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_is_plain_data_and_a_table_of_pandas(name, model):
    make, rows_key = RESULTS[name]
    result = make(model)
    data = result.to_dict()
    assert json.loads(json_text(data))[rows_key]
    frame = result.to_pandas()
    assert list(frame.columns) == list(data[rows_key][0])
    assert len(frame) == len(data[rows_key])


def findings_of(model):
    with hl.record(model) as run, torch.no_grad():
        model(X)
    return run.findings()


# How a result is made of a model, and a model of which it has no row.
MAY_BE_EMPTY = {
    "inventory": (hl.inventory, nn.ReLU()),
    "operations": (
        lambda model: hl.operations(model, X, "1"),
        nn.Sequential(nn.Identity(), nn.Identity()),
    ),
    "findings": (findings_of, nn.Tanh()),
}


@pytest.mark.parametrize("name", MAY_BE_EMPTY)
def test_a_table_without_rows_has_its_columns(name, model):
    make, model_of_none = MAY_BE_EMPTY[name]
    model[0].bias.data.fill_(math.nan)
    full, empty = make(model).to_pandas(), make(model_of_none).to_pandas()
    assert (len(full) > 0, len(empty)) == (True, 0)
    assert [*empty.columns] == [*full.columns]


@pytest.mark.parametrize("name", RESULTS)
def test_a_notebook_says_what_the_text_says(name, model):
    result = RESULTS[name][0](model)
    notebook = re.sub(r"<style>.*?</style>", "", result._repr_html_(), flags=re.DOTALL)
    if name == "recording":  # above its table stand the findings and the strip
        notebook = re.sub(r"\A<div class=\"hookline\"><p>.*?</div>", "", notebook, flags=re.DOTALL)
    notebook = re.sub(r"<[^>]+>", " ", re.sub(r"</?b>", "", notebook))
    text = printout_of(result).text(10_000)
    assert repr(result) == str(result)
    assert set(re.sub("-----+", "", text).split()) == set(html.unescape(notebook).split())


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("name", RESULTS)
def test_the_text_of_a_result_fits(name, width, model):
    lines = printout_of(RESULTS[name][0](model)).text(width).splitlines()
    assert [line for line in lines if len(line) > width and " " in line.strip()] == []


@pytest.mark.parametrize(
    ("make", "sites"),
    [(recorded, ["0", "0:grad_output"]), (stored, ["h"]), (hl.inventory, [])],
)
def test_a_notebook_completes_the_sites_of_a_look_up(make, sites, model):
    assert make(model)._ipython_key_completions_() == sites


def test_class_maps_are_a_picture_with_their_text():
    images, _ = load_demo_digits()
    maps = hl.cam(load_model("demo:digits").model, images[:2])
    shown = maps._repr_html_()
    assert f"<p>{html.escape(repr(maps))}</p>" in shown
    assert '<img src="data:image/png;base64,' in shown


shapes = st.lists(st.integers(1, 10_000), max_size=5).map(str)
words = st.text("abcdefgh", min_size=1, max_size=12)
prose = st.lists(words | shapes, max_size=12).map(" ".join)
CELLS = {
    "text": words,
    "number": st.integers(0, 10**9).map(str),
    "path": st.lists(words, min_size=1, max_size=12).map(".".join),
    "structure": st.lists(shapes, max_size=4).map(", ".join),
    "prose": prose | st.lists(prose, max_size=3).map(lambda texts: [(text, "") for text in texts]),
}


@st.composite
def printouts(draw):
    kinds = ["path", *draw(st.lists(st.sampled_from(sorted(CELLS)), max_size=6))]
    headings = [
        Heading(f"{kind}{place}", kind, place * draw(st.integers(0, 1)))
        for place, kind in enumerate(kinds)
    ]
    rows = draw(st.lists(st.tuples(*[CELLS[kind] for kind in kinds]), min_size=1, max_size=4))
    return Printout(
        title=draw(st.sampled_from(["", "Recording"])),
        head=draw(prose),
        headings=headings,
        rows=rows,
        totals=draw(st.lists(st.tuples(words, prose), max_size=2)),
        notes=draw(st.lists(prose, max_size=2)),
        is_compact=draw(st.booleans()),
    )


def test_lines_after_a_title_hang_within_the_width():
    head = "a a a a a aa aaaaaa aaaaaaaaaaaa a aaaaa aaaaa aaaaaaaaaaaa"
    lines = Printout(title="Recording", head=head).text(40).splitlines()
    assert [line.startswith("  ") for line in lines] == [False, *[True] * (len(lines) - 1)]
    assert max(map(len, lines)) <= 40
    assert " ".join(line.strip() for line in lines) == f"Recording{head}"


def test_a_total_too_long_for_its_place_stands_below_its_label():
    totals = [("a" * 12, "[100, 100, 100, 100, 1000]"), ("b", "c")]
    printout = Printout(headings=[Heading("path0", "path")], rows=[("a",)], totals=totals)
    shown = printout.text(40).splitlines()[-3:]
    assert shown == ["aaaaaaaaaaaa", "  [100, 100, 100, 100, 1000]", "b              c"]


@pytest.mark.slow
@given(printouts(), st.integers(40, 200))
def test_no_line_is_too_wide_and_no_shape_is_broken(printout, width):
    text = printout.text(width)
    for line in text.splitlines():
        rest = line.strip().rstrip(",")
        is_single = re.fullmatch(r"\[[\d, ]*\]|\S+", rest) is not None
        assert len(line) <= width or is_single, (width, line)
        assert re.sub(r"\[[\d, ]*\]", "", line).count("[") == 0  # a shape that is cut
    wide = printout.text(10_000)
    for row in printout.rows:
        assert row[0] in text
        assert all(
            cell in wide
            for cell, heading in zip(row, printout.headings, strict=True)
            if heading.kind in ("text", "number", "path")
        )
    left_out = re.search(r"Left out at \d+ columns: (.*?)\.", " ".join(text.split()))
    named = left_out[1].split(", ") if left_out else []
    filled = [
        heading.name
        for place, heading in enumerate(printout.headings)
        if not place or any(row[place] for row in printout.rows)
    ]
    assert [name for name in filled if name not in re.findall(r"\w+", text)] == []
    assert set(named) <= set(filled)


def test_numbers_of_a_table_are_those_of_its_rows(model):
    prof = profiled(model)
    frame = prof.to_pandas().set_index("path")
    assert frame.loc["0", "flops_forward"] == prof["0"].flops.forward == 2 * 3 * 4 * 2
    assert frame.loc["0", "time_backward"] == prof["0"].time.backward
    assert prof.to_dict()["total"]["seconds"] == prof.total.seconds
    assert hl.summary(model, X).to_dict()["flops"] == prof.total.flops.forward
    (linear,) = [row for row in recorded(model).report().to_dict()["sites"] if row["site"] == "0"]
    assert linear == {"site": "0", "type": "Linear", "fired": 1, "why": ""}


def test_a_missing_pandas_is_said(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError) as caught:
        hl.inventory(model).to_pandas()
    assert str(caught.value) == "to_pandas() needs pandas.\nRun pip install pandas."


@pytest.mark.parametrize(
    ("encoding", "sign"), [("utf-8", "● error"), ("cp1252", "* error"), ("ascii", "* error")]
)
def test_a_result_is_printed_where_stdout_lacks_its_signs(monkeypatch, encoding, sign):
    norm = nn.LayerNorm(4, eps=0)
    with hl.record(norm) as run:
        norm(torch.zeros(2, 4))
    stdout = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    with monkeypatch.context() as context:
        context.setattr(sys, "stdout", stdout)
        print(run.findings(), flush=True)
    assert sign in stdout.buffer.getvalue().decode(encoding)
