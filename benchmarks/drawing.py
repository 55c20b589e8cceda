"""Drawing the channels of three layers of ResNet-34 from one recording of a photograph."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import torch

import hookline as hl
from benchmarks.models import resnet34
from benchmarks.timing import Clock, Contender, Measure, Plan, Result, run_rounds

_LAYERS = (0, 15, 30)  # of the 36 convolutions, in the order in which they run

# A whole figure in a process that has drawn none: matplotlib is imported, too.
_FIRST = """
import io, json, time, torch
import hookline as hl
conv = torch.nn.Conv2d(3, 64, 7, 2, 3)
with torch.no_grad(), hl.record(conv) as run:
    conv(torch.randn(1, 3, 224, 224))
start = time.perf_counter()
hl.plots.channels(run, "(root)").savefig(io.BytesIO())
print(json.dumps(time.perf_counter() - start))
"""


def drawing_row(name: str, plan: Plan) -> Result:
    """The row of the table: an 8 x 8 grid as a PNG, seconds each."""
    title = "draw 8 x 8 channels of a layer of ResNet-34 on a photograph, as a PNG"
    result = Result(name, title, None, 2.0)
    case = resnet34()
    with hl.record(case.model, case.selector) as run:
        case.model(_photograph())
    sites = run.passes[0].order
    contenders = [
        Contender(
            "hookline" if number == _LAYERS[0] else f"hookline at {number}",
            f'hl.plots.channels(run, "{sites[number]}").savefig(...)',
            _draw(run, sites[number]),
        )
        for number in _LAYERS
    ]
    run_rounds(result, contenders, plan)
    for number in _LAYERS:
        shape = "x".join(map(str, run[sites[number]].shape[1:]))
        contender = "hookline" if number == _LAYERS[0] else f"hookline at {number}"
        seconds = result.spread(contender).median
        result.notes.append(f"layer {number}, {sites[number]}, {shape}: {seconds:.2f} s")
    done = subprocess.run(
        [sys.executable, "-c", _FIRST], capture_output=True, text=True, check=True
    )
    first = json.loads(done.stdout)
    result.notes.append(
        f"the first figure of a process, import of matplotlib and all: {first:.2f} s"
    )
    return result


def _draw(run: hl.Recording, site: str) -> Measure:
    def measure(calls: int, clock: Clock) -> float:
        start = clock()
        for _ in range(calls):
            out = io.BytesIO()
            hl.plots.channels(run, site).savefig(out, format="png")
            assert len(out.getvalue()) > 10_000
        return (clock() - start) / calls

    return measure


def _photograph() -> torch.Tensor:
    """scikit-image's cat as ResNet-34 gets it; shape `(1, 3, 224, 224)`."""
    from PIL import Image
    from skimage import data

    from hookline.models import load_model

    loaded = load_model("torchvision:resnet34", weights="none")
    assert loaded.preprocess is not None
    picture: torch.Tensor = loaded.preprocess(Image.fromarray(data.chelsea()))
    return picture[None]
