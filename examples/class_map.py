"""Find the pixels that raise the score of a digit's class, and test whether the map is right.

Without hookline, you keep the output of a layer and its gradient with two hooks, which goes wrong
if an in-place ReLU follows. `backward()` also fills the `.grad` of every parameter. Then you
compute the weighted sum and resize it. `hl.cam` does all this, and leaves no hook and no gradient.

The script hides the pixels that the map marks, and compares the scores with random pixels hidden.

    python examples/class_map.py             print the maps
    python examples/class_map.py maps.png    also write them as a picture
"""

import sys

import torch

import hookline as hl
from hookline.models import load_demo_digits, load_model

SHADES = " .:-=+*#%@"
N_HIDDEN = 13  # pixels of 64: a fifth

model = load_model("demo:digits").model
images, _ = load_demo_digits()

cam = hl.cam(model, images, "block2", method="layercam")
print(cam)


def rows(picture):
    """Convert a picture from 0 to 1 to lines of text, with two characters for each pixel."""
    levels = (picture * (len(SHADES) - 1)).round().int().tolist()
    return ["".join(SHADES[level] * 2 for level in line) for line in levels]


for digit in (3, 7):
    print(f"\nthe digit {digit}          what speaks for class {cam.targets[digit]}")
    pairs = zip(rows(images[digit, 0]), rows(cam.maps[digit]), strict=True)
    print("\n".join(f"  {left}    {right}" for left, right in pairs))


def score_without(order):
    """Compute the mean score of the digits' classes with the first pixels of an order dark."""
    hidden = torch.zeros(8, 64, dtype=torch.bool).scatter(1, order[:, :N_HIDDEN], value=True)
    with torch.no_grad():
        scores = model(images.flatten(2).masked_fill(hidden[:, None], 0.0).view_as(images))
    return scores.gather(1, torch.tensor(cam.targets)[:, None]).mean().item()


torch.manual_seed(0)
pointed = score_without(cam.maps.flatten(1).argsort(1, descending=True))
at_random = sum(score_without(torch.rand(8, 64).argsort(1)) for _ in range(20)) / 20
print(f"\nmean score {cam.scores.mean():.2f}")
print(f"with the fifth of the pixels hidden that the map points at {pointed:.2f}")
print(f"with a fifth hidden at random, 20 times {at_random:.2f}")

if sys.argv[1:]:
    cam.save(sys.argv[1])
    print("written:", sys.argv[1])
