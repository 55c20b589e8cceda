"""Writes numbers.json: the maps of the package grad-cam (pytorch-grad-cam) on a small network.

    pip install -c constraints.txt ".[bench]" && python tests/verbs/cam/grad_cam_numbers/make.py

The package draws in OpenCV, 150 MB, so the tests need its numbers and not the package.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

NUMBERS = Path(__file__).parent / "numbers.json"
CASES = {
    "gradcam": ["1"],
    "gradcam++": ["1"],
    "layercam": ["1"],
    "hirescam": ["1"],
    "gradcam of two layers": ["1", "3"],
    # Masks are enlarged otherwise there: compared at a layer that is as large as the image.
    "scorecam": ["0"],
}


def network():
    """Three layers, in numbers that no random generator makes; float64 is alike on every CPU."""
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.Conv2d(4, 6, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(6, 5, 3, padding=1),
        nn.Tanh(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(20, 3),
    )
    with torch.no_grad():
        for k, parameter in enumerate(net.parameters()):
            parameter.copy_(waves(parameter.shape, 1.3 + k))
        net[-1].weight.mul_(100)  # the package adds constants to small gradients
    return net.double().eval()


def images():
    return waves((2, 3, 12, 10), 0.7) + 0.1


def waves(shape, step):
    n = torch.Size(shape).numel()
    return (torch.arange(n, dtype=torch.float64) * step).sin().reshape(shape)


def main():
    from hookline.models.torchvision_import import import_torchvision

    import_torchvision()
    import pytorch_grad_cam as package
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    kinds = {
        "gradcam": package.GradCAM,
        "gradcam++": package.GradCAMPlusPlus,
        "layercam": package.LayerCAM,
        "hirescam": package.HiResCAM,
        "scorecam": package.ScoreCAM,
    }
    numbers = {}
    for case, layers in CASES.items():
        net = network()
        kind = kinds[case.partition(" ")[0]]
        with kind(net, [net[int(layer)] for layer in layers]) as cam:
            numbers[case] = cam(images(), [ClassifierOutputTarget(k) for k in (2, 0)]).tolist()
    rounded = {
        case: [[[round(x, 7) for x in row] for row in one] for one in maps]
        for case, maps in numbers.items()
    }
    NUMBERS.write_text(json.dumps(rounded, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
