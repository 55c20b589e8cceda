"""Print the output shape of every layer of a ResNet-50 while it runs.

A forward hook gets the module, but not its name, so without hookline you need a closure for each
module. A dict from names to shapes would lack 32 calls: each block runs its one ReLU three times.

    python examples/shapes_of_resnet50.py
"""

import torch

import hookline as hl
from hookline.models import load_model

model = load_model("torchvision:resnet50", weights="none").model  # random weights, no download
x = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))

# A container is printed after its submodules. The indentation is the depth of the call.
with torch.inference_mode(), hl.watch(model):
    model(x)
