"""The depth strip as an SVG: outputs in firing order, the trunk as a line, findings as pins."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.display.units import measure
from hookline.findings.depth_strip import INKS, depth_strip_svg
from hookline.recordings.judge_passes import judge_passes

SVG = "{http://www.w3.org/2000/svg}"


class Block(nn.Module):
    """A linear layer beside its input."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.fc(x).relu()


def recorded(change=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(8, 2))
    if change is not None:
        change(model)
    with hl.record(model, **options) as run:
        model(torch.randn(4, 8)).sum().backward()
    return run


def drawn(run):
    findings, survey = judge_passes(run.passes, run.modules, run.report())
    text = depth_strip_svg(survey, findings)
    return ElementTree.fromstring(text.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" '))


def titles(picture):
    return [title.text for title in picture.iter(f"{SVG}title")]


def paths(picture, **attributes):
    found = picture.iter(f"{SVG}path")
    return [p for p in found if all(p.get(name) == value for name, value in attributes.items())]


def test_each_output_tells_its_numbers_in_firing_order():
    run = recorded()
    words = titles(drawn(run))
    assert [text.split()[0] for text in words] == list(run.passes[0].order)
    std = run["2.fc"].std(correction=0).item()
    shown = re.search(r"spread (\S+),", next(t for t in words if t.startswith("2.fc ")))[1]
    assert float(shown) == pytest.approx(std, rel=1e-3)
    assert shown == measure(float(shown))


@pytest.mark.parametrize(
    ("unit", "dtype"),
    [(1e-24, torch.float32), (1e-40, torch.float32), (1e38, torch.float32),
     (1e-300, torch.float64), (1e300, torch.float64)],
)  # fmt: skip
def test_the_norm_of_tiny_and_huge_gradients_is_right(unit, dtype):
    model = nn.Sequential(nn.Identity(), nn.Identity())
    x = torch.ones(64, dtype=dtype, requires_grad=True)
    with hl.record(model, ports=("output", "grad_output"), copy=True) as run:
        model(x).backward(torch.tensor([0.3, -0.4] * 32, dtype=dtype) * unit)
    shown = titles(drawn(run))[0].partition("gradient ")[2]
    assert float(shown) == pytest.approx(0.5 * 32**0.5 * unit, rel=1e-3, abs=0)


def test_integers_and_what_is_not_finite_leave_gaps():
    model = nn.Sequential(*[nn.Identity() for _ in range(5)])
    values = [[0.0, 2.0], [0.0, 3.0], [math.nan, math.nan], [0.0, 4.0], [False, True]]
    with hl.record(model, "*") as run:
        for module, numbers in zip(model, values, strict=True):
            module(torch.tensor(numbers))
    picture = drawn(run)
    (line,) = paths(picture, stroke=INKS["fwd"], fill="none")
    assert re.findall("[ML]", line.get("d")) == ["M", "L", "M"]
    assert titles(picture)[-1] == "4 (Identity): "


def test_the_blocks_are_joined_by_a_line_and_named():
    picture = drawn(recorded())
    (line,) = paths(picture, stroke=INKS["fwd"], fill="none")
    assert line.get("d").count("L") == 3
    assert [t.text for t in picture.iter(f"{SVG}text")][-4:] == ["0", "1", "2", "3"]


def test_a_lane_reaches_from_its_smallest_to_its_largest_number():
    picture = drawn(recorded())
    (points,) = [p for p in paths(picture, stroke=INKS["fwd"]) if "h0" in p.get("d")]
    heights = [float(y) for y in re.findall(r"M\S+ (\S+)h0", points.get("d"))]
    spreads = [float(re.search(r"spread (\S+),", text)[1]) for text in titles(picture)]
    assert len(heights) == len(spreads)
    logs = [math.log10(spread) for spread in spreads]
    share = [(log - min(logs)) / (max(logs) - min(logs)) for log in logs]
    height = max(heights) - min(heights)
    assert height > 10
    for part, y in zip(share, heights, strict=True):
        assert max(heights) - y == pytest.approx(part * height, abs=0.2)


def test_gradients_have_a_lane_where_they_were_recorded():
    assert "Gradient" not in drawn(recorded()).get("aria-label")
    picture = drawn(recorded(ports=("output", "grad_output")))
    assert picture.get("aria-label").endswith("Spread, Zeros, Gradient")
    assert len(paths(picture, stroke=INKS["bwd"], fill="none")) == 1


def test_what_is_not_finite_is_marked_where_a_finding_begins():
    def spoil(model):
        nn.init.constant_(model[2].fc.weight, float("nan"))

    picture = drawn(recorded(spoil))
    (pin,) = picture.iter(f"{SVG}circle")
    bands = [r for r in picture.iter(f"{SVG}rect") if r.get("fill") == INKS["error"]]
    # From the first NaN on; the pin stands in the middle of the first band.
    assert len(bands) == len([text for text in titles(picture) if "NaN or infinity" in text]) == 6
    first = float(bands[0].get("x")) + float(bands[0].get("width")) / 2
    assert float(pin.get("cx")) == pytest.approx(first, abs=0.2)


def test_an_output_of_zeros_fills_its_lane():
    def silence(model):
        nn.init.zeros_(model[1].fc.weight)
        nn.init.zeros_(model[1].fc.bias)

    (full,) = paths(drawn(recorded(silence)), fill=INKS["warning"], opacity="1")
    assert full.get("d").count("M") == 1


def test_a_pin_is_at_the_call_that_the_finding_names(looped):
    with hl.edit(looped, "block#2", hl.edits.scale(math.nan)), hl.record(looped) as run:
        looped(torch.ones(1, 2))
    picture = drawn(run)
    (pin,) = picture.iter(f"{SVG}circle")
    place = [text.split()[0] for text in titles(picture)].index(run.findings()[0].site)
    columns = [rect for rect in picture.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
    left, width = (float(columns[place].get(name)) for name in ("x", "width"))
    assert left < float(pin.get("cx")) < left + width


def test_a_single_output_and_none_have_no_strip():
    model = nn.Linear(2, 2)
    with hl.record(model) as run:
        model(torch.ones(1, 2))
        assert depth_strip_svg(judge_passes(run.passes, run.modules, run.report())[1], ()) == ""


def test_blocks_recorded_alone_are_joined_by_a_line():
    model = nn.Sequential(nn.Sequential(*[Block() for _ in range(3)]), nn.Linear(8, 2))
    with hl.record(model, ["0.*", "1"]) as run:
        model(torch.randn(4, 8))
    lines = paths(drawn(run), **{"stroke-width": "1.6"})
    assert [line.get("d").count("L") for line in lines] == [2]
