"""Compute features of images, for a nearest-neighbour search and for a linear probe.

Without hookline, people cut the model with `nn.Sequential(*list(model.children())[:-1])`. This
loses what `forward` does between the children, and gives one layer only. `hl.features` gives both
layers, and stops the forward after the last of them.

    python examples/features_for_search.py              random weights, no download
    python examples/features_for_search.py pretrained   trained weights, downloaded once; slower
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import hookline as hl
from hookline.models import load_model

N_IMAGES, N_HELD_OUT = 360, 120


def write_images(folder):
    """Write handwritten digits as PNG files; the end of a file's name is the label."""
    digits = load_digits()
    for k in range(N_IMAGES):
        pixels = (digits.images[k] * 255 / 16).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{k:03}-{digits.target[k]}.png")


def small(picture):
    """Convert a picture to 64 x 64 pixels from -1 to 1, enough for random weights."""
    pixels = np.asarray(picture.convert("RGB").resize((64, 64)), dtype=np.float32)
    return torch.from_numpy(pixels).permute(2, 0, 1) / 127.5 - 1


pretrained = "pretrained" in sys.argv[1:]
resnet = load_model("torchvision:resnet50", weights="default" if pretrained else "none")
prepare = resnet.preprocess if pretrained else small
print(
    "ResNet-50,", "pretrained on ImageNet" if pretrained else "RANDOM weights: it was never trained"
)

with tempfile.TemporaryDirectory() as folder:
    write_images(Path(folder))
    files = sorted(Path(folder).glob("*.png"))
    images = torch.stack([prepare(Image.open(file)) for file in files])
labels = np.array([int(file.stem[-1]) for file in files])

parts_of = {"pixels": [], "layer4": [], "avgpool": []}
with torch.inference_mode():
    for batch in images.split(40):
        feats = hl.features(resnet.model, batch, ["layer4", "avgpool"])
        parts_of["pixels"].append(torch.nn.functional.adaptive_avg_pool2d(batch, 8).flatten(1))
        for layer in feats:
            parts_of[layer].append(feats[layer].flatten(1))

order = np.random.default_rng(0).permutation(N_IMAGES)
known, held_out = order[N_HELD_OUT:], order[:N_HELD_OUT]
print(f"{len(known)} known images, {len(held_out)} held out; right by chance: 10%")
for name, parts in parts_of.items():
    x = torch.cat(parts).numpy()
    search = KNeighborsClassifier(n_neighbors=5).fit(x[known], labels[known])
    probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=1000))
    probe.fit(x[known], labels[known])
    by_search, by_probe = (m.score(x[held_out], labels[held_out]) for m in (search, probe))
    print(f"  {name:8} {x.shape[1]:5} numbers   nearest {by_search:.1%}   probe {by_probe:.1%}")

print("the five known images nearest to some that were held out, by avgpool:")
nearest = search.kneighbors(x[held_out[:4]], return_distance=False)
for query, rows in zip(held_out, nearest, strict=False):
    print(f"  {files[query].name}  ->  {'  '.join(files[known[row]].name for row in rows)}")
