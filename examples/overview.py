"""Draw the outputs of a network for one digit, their gradients, and the effect of an edit.

The picture has three rows. `hl.record` gives the outputs of four layers, and the gradients of these
outputs. For the third row, `hl.edit` multiplies the output of one block by zero.

    python examples/overview.py                 print the scores
    python examples/overview.py overview.png    also draw the picture
"""

import sys

import torch

import hookline as hl
from hookline.models import load_demo_digits, load_model

SITES = ["stem", "block1", "block2", "block3"]
SEVEN = 7

model = load_model("demo:digits").model
images, _ = load_demo_digits()
digit = images[SEVEN : SEVEN + 1]

with hl.record(model, SITES, ports=("output", "grad_output"), copy=True) as run:
    scores = model(digit)
    scores[0, SEVEN].backward()

with (
    hl.edit(model, "block2", hl.edits.scale(0)),
    hl.record(model, SITES, copy=True) as silent,
    torch.no_grad(),
):
    changed = model(digit)

print(f"score of the 7: {scores.softmax(1)[0, SEVEN]:.2f}")
print(f"with block2 silent: {changed.softmax(1)[0, SEVEN]:.2f}, now a {changed.argmax()}")


def draw(path):
    """Draw the picture: a row for each call of hookline, a column for each layer."""
    from matplotlib.figure import Figure

    back = {site: run[f"{site}:grad_output"] for site in SITES}
    rows = [
        ('hl.record(model, ["stem", "block*"])   values, forward', run, scores),
        ('hl.record(..., ports="grad_output")    gradients of the score of the 7, backward', back),
        ('hl.edit(model, "block2", hl.edits.scale(0))   one block silent', silent, changed),
    ]
    figure = Figure(figsize=(11, 6.6), dpi=140, facecolor="white", layout="constrained")
    for part, (title, values, *result) in zip(figure.subfigures(3), rows, strict=True):
        part.suptitle(title, x=0.01, ha="left", fontsize=11, family="monospace", weight="bold")
        first, *between, last = part.subplots(1, 6, width_ratios=[1, 1, 1, 1, 1, 1.2])
        for axes, site in zip(between, SITES, strict=True):
            picture(axes, site, mosaic(values[site][0]), cmap="RdBu_r", vmin=-1, vmax=1)
        if result:
            picture(first, "input", digit[0, 0], cmap="Greys")
            bars(last, result[0].detach().softmax(1)[0])
        else:
            first.set_axis_off()
            last.set_axis_off()
    figure.savefig(path)
    print("written:", path)


def picture(axes, name, values, **colours):
    """Draw a two-dimensional value, with its name below."""
    axes.imshow(values, **colours)
    axes.set(xticks=[], yticks=[])
    axes.set_xlabel(name, fontsize=10, family="monospace")
    axes.spines[:].set_visible(False)


def bars(axes, chances):
    """Draw the ten probabilities, the largest in red."""
    best = chances.argmax()
    axes.barh(range(10), chances, color=["tab:red" if k == best else "silver" for k in range(10)])
    axes.set(xlim=(0, 1), xticks=[], yticks=range(10))
    axes.tick_params(length=0, labelsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("softmax", fontsize=10, family="monospace")
    axes.spines[:].set_visible(False)


def mosaic(value):
    """Arrange nine channels of a value three by three, each scaled to its largest element."""
    channels = value[:9].detach()
    channels = channels / channels.abs().amax((1, 2), keepdim=True).clamp(min=1e-12)
    size = channels.shape[-1]
    padded = torch.nn.functional.pad(channels, (1, 1, 1, 1), value=0.0)
    return padded.view(3, 3, size + 2, size + 2).permute(0, 2, 1, 3).flatten(0, 1).flatten(1)


if sys.argv[1:]:
    draw(sys.argv[1])
