"""The output shape of every layer of a ResNet-50, printed as it runs.

By hand: a hook that prints `output.shape` is told the module but not its name, so one makes a
closure for each module, usually in a loop in which all closures share the last name. And a dict
from names to shapes would lack 32 of the lines below: each block runs its one ReLU three times.

    python examples/shapes_of_resnet50.py
"""

import torch

import hookline as hl
from hookline.models import load_model

model = load_model("torchvision:resnet50", weights="none").model  # random weights, no download
x = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))

# A container is printed after what it holds; the indentation is the depth of the call.
with torch.inference_mode(), hl.watch(model):
    model(x)
