"""Which layer is found, and how its output is read as maps: real models, their weights random."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint
from PIL import Image
from skimage import data
from torch import nn

import hookline as hl
from hookline.models import load_model
from hookline.models.torchvision_import import import_torchvision


@pytest.fixture(scope="module")
def cat():
    return Image.fromarray(data.chelsea())


@pytest.fixture
def x():
    return torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(2))


def named(name):
    torch.manual_seed(0)
    return load_model(name, weights="none")


def by_hooks(module, run, read):
    """Grad-CAM with torch's own hooks: the activations and gradients of one module, read as maps.

    Its gradient is that of the sum of each image's highest score.
    """
    kept = {}
    handle = module.register_forward_hook(lambda module, args, output: kept.update(a=output))
    try:
        scores = run().amax(1)
    finally:
        handle.remove()
    (gradient,) = torch.autograd.grad(scores.sum(), kept["a"])
    a, g = read(kept["a"].detach()), read(gradient)
    return (g.mean((2, 3), keepdim=True) * a).sum(1)


@pytest.mark.parametrize(
    ("name", "layer", "read"),
    [
        ("torchvision:resnet18", "layer4", lambda t: t),
        ("timm:vit_tiny_patch16_224", "blocks.11.norm1",
         lambda t: t[:, 1:].transpose(1, 2).reshape(1, 192, 14, 14)),
        ("timm:swin_tiny_patch4_window7_224", "norm", lambda t: t.permute(0, 3, 1, 2)),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_the_map_of_a_photograph_is_that_of_hooks_by_hand(cat, name, layer, read):
    loaded = named(name)
    model, image = loaded.model, loaded.preprocess(cat)[None]
    expected = by_hooks(model.get_submodule(layer), lambda: model(image), read)
    found = hl.cam(model, image)
    assert found.layers == (layer,)
    torch.testing.assert_close(found.raw[layer], expected)
    assert found.maps.shape == (1, 224, 224)
    given = hl.cam(model, image, layer, reshape=read)
    assert torch.equal(given.maps, found.maps)
    (overlay,) = found.overlay(cat.crop((76, 0, 376, 300)), alpha=0.4)
    assert overlay.shape == (300, 300, 3)


@pytest.fixture(autouse=True, scope="module")
def torchvision():
    """Torchvision with its operators declared: timm and transformers import it by themselves."""
    return import_torchvision()


def vit_of_torchvision():
    vit = import_torchvision().models.VisionTransformer(
        image_size=64, patch_size=16, num_layers=3, num_heads=2, hidden_dim=32, mlp_dim=64,
        num_classes=5,
    )  # fmt: skip
    nn.init.normal_(vit.heads.head.weight)  # torchvision begins with zeros there
    return vit


def vit_of_timm(**options):
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=64, patch_size=16, embed_dim=32, depth=3, num_heads=2, num_classes=5, **options
    )


def vit_of_transformers():
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64,
        image_size=64, patch_size=16, num_labels=5,
    )  # fmt: skip
    return ViTForImageClassification(config)


def swin_of_transformers():
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=64, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=4,
        num_labels=5,
    )  # fmt: skip
    return SwinForImageClassification(config)


def swin_of_torchvision():
    return import_torchvision().models.SwinTransformer(
        patch_size=[4, 4], embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=[4, 4],
        num_classes=5,
    )  # fmt: skip


def vgg_of_torchvision():
    """Its convolutions; the head with its 100 million weights is a small one."""
    with torch.device("meta"):
        vgg = import_torchvision().models.vgg11()
    vgg.classifier = nn.Linear(512 * 7 * 7, 5)
    vgg.to_empty(device="cpu")
    for parameter in vgg.parameters():
        nn.init.normal_(parameter, std=0.02)
    return vgg


def convnext_of_torchvision():
    import_torchvision()
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt([CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 1)], num_classes=5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "layer", "grid"),
    [
        (vit_of_torchvision, "encoder.layers.encoder_layer_2.ln_1", (4, 4)),
        (vit_of_timm, "blocks.2.norm1", (4, 4)),
        (lambda: vit_of_timm(reg_tokens=4), "blocks.2.norm1", (4, 4)),
        (lambda: vit_of_timm(global_pool="avg"), "norm", (4, 4)),
        (vit_of_transformers, "vit.layers.2.layernorm_before", (4, 4)),
        (swin_of_transformers, "swin.layernorm", (8, 8)),
        (swin_of_torchvision, "permute", (8, 8)),
        (vgg_of_torchvision, "avgpool", (7, 7)),
        (convnext_of_torchvision, "features", (8, 8)),
    ],
    ids=["vit", "timm", "registers", "pooled", "hf-vit", "hf-swin", "swin", "vgg", "convnext"],
)
@pytest.mark.filterwarnings("ignore:(gradcam|scorecam|eigencam) at .* finds no place")
def test_the_layer_and_its_grid_are_found(x, build, layer, grid):
    torch.manual_seed(0)
    model = build().eval()
    found = hl.cam(model, x)
    assert found.layers == (layer,)
    assert found.raw[layer].shape == (2, *grid)
    assert found.raw[layer].abs().min() > 0  # the score flows through all of them
    assert found.maps.shape == (2, 64, 64)


@pytest.mark.slow
def test_a_layer_whose_patches_carry_nothing_is_warned_of(x):
    torch.manual_seed(0)
    vit = vit_of_timm().eval()
    with pytest.warns(hl.HooklineWarning, match="at blocks.2 finds no place .* of image 0, 1"):
        found = hl.cam(vit, x, "blocks.2")
    assert found.maps.abs().max() == 0
    assert hl.cam(vit, x, method="eigencam").layers == ("norm",)  # features are there, even so


@pytest.mark.slow
def test_images_that_are_not_square_give_grids_that_are_not():
    torch.manual_seed(0)
    vit = vit_of_timm(dynamic_img_size=True).eval()
    wide = torch.randn(2, 3, 48, 112)
    assert hl.cam(vit, wide).raw["blocks.2.norm1"].shape == (2, 3, 7)


class Last(nn.Module):
    """ChannelCounts last from the middle on; a pooled head."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.swap = nn.Identity()
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.swap(self.conv(x).permute(0, 2, 3, 1)).mean((1, 2)))


def test_channels_may_be_last():
    torch.manual_seed(0)
    model, x = Last(), torch.randn(2, 3, 6, 9)
    last = hl.cam(model, x, target=lambda out: (out**2).sum(1))
    first = hl.cam(model, x, "conv", lambda out: (out**2).sum(1))
    assert last.layers == ("swap",)
    torch.testing.assert_close(last.raw["swap"], first.raw["conv"])


class TwoHeads(Last):
    """A segmentation, whose auxiliary head runs last."""

    def __init__(self):
        super().__init__()
        self.classifier, self.aux = nn.Conv2d(8, 3, 1), nn.Conv2d(8, 3, 1)

    def forward(self, x):
        x = self.conv(x)
        return {"out": self.classifier(x), "aux": self.aux(x)}


@pytest.mark.parametrize(("head", "layer"), [("out", "classifier"), ("aux", "aux")])
def test_the_layer_is_the_last_of_the_output_that_scores(head, layer):
    torch.manual_seed(0)
    model, x = TwoHeads(), torch.randn(2, 3, 8, 8)
    assert hl.cam(model, x, target=lambda out: out[head][:, 1].sum((1, 2))).layers == (layer,)


class Detector(nn.Module):
    """Reads the patches of its images by 25 queries, as DETR does."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.queries = nn.Parameter(torch.randn(25, 8))
        self.classes = nn.Linear(8, 4)

    def forward(self, x):
        memory = self.encoder(self.patches(x).flatten(2).transpose(1, 2))
        queries = self.decoder(self.queries.expand(len(x), -1, -1), memory)
        return self.classes(queries).amax(1)


def test_the_queries_of_a_detector_are_no_patches(x):
    maps = hl.cam(Detector().eval(), x)
    assert maps.layers == ("encoder",)


class Pairs(nn.Module):
    """A layer that returns a tuple, one that runs twice, and one that never runs."""

    class Two(nn.Module):
        def forward(self, x):
            return x.mean(), x * 2

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.two = self.Two()
        self.idle = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        x = self.conv(self.conv(x).relu())
        return self.two(x)[1].mean((2, 3))


def test_a_call_and_a_part_of_a_value_can_be_named():
    torch.manual_seed(0)
    model, x = Pairs(), torch.rand(2, 3, 6, 6)
    with pytest.raises(hl.AmbiguousError, match=r"conv, which ran 2 times.\n.*'conv#1'"):
        hl.cam(model, x, "conv")
    score = lambda out: out.abs().sum(1)  # noqa: E731
    second = hl.cam(model, x, "conv#1", score)
    assert second.layers == ("conv#1",)
    assert hl.cam(model, x, target=score).layers == ("conv#1",)  # the last call that has maps
    found = hl.cam(model, x, "two", score)
    part = hl.cam(model, x, "two[1]", score)
    torch.testing.assert_close(found.maps, part.maps)
    torch.testing.assert_close(found.maps, second.maps)
    with pytest.raises(hl.NotRecordedError, match="idle was selected, but has no value"):
        hl.cam(model, x, "idle")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype):
    torch.manual_seed(1)
    model, x = Last(), torch.randn(2, 3, 12, 12)
    expected = hl.cam(model, x, target=1)
    found = hl.cam(model.to(dtype), x.to(dtype), target=1)
    assert found.maps.dtype is found.raw["swap"].dtype is torch.float32
    torch.testing.assert_close(found.maps, expected.maps, atol=0.05, rtol=0)
    with torch.autocast("cpu"):
        torch.testing.assert_close(
            hl.cam(model.float(), x, target=1).maps, expected.maps, atol=0.05, rtol=0
        )


# Torch's own, of what flows into compiled code.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("how", ["wrapped", "in place", "one layer"])
@pytest.mark.compiles
def test_a_compiled_model_gives_the_same_map(how, x):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 4, 3),
        nn.Flatten(),
        nn.LazyLinear(3),
    )
    model(x)
    expected = hl.cam(model, x, "0", 1)
    if how == "wrapped":
        compiled = torch.compile(model, backend="aot_eager")
    else:
        compiled = model
        (model if how == "in place" else model[0]).compile(backend="aot_eager")
    compiled(x)
    for method in ("gradcam", "eigencam"):
        found = hl.cam(compiled, x, "0", 1, method=method)
        assert found.layers == ("0",)
        if method == "gradcam":
            torch.testing.assert_close(found.maps, expected.maps)
    torch.testing.assert_close(compiled(x), model(x))
    torch.compiler.reset()


def test_a_checkpointed_layer_gives_the_same_map():
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(inplace=True), nn.Conv2d(6, 4, 3))

    class Net(nn.Module):
        def __init__(self, run):
            super().__init__()
            self.inner, self.run = inner, run

        def forward(self, x):
            return self.run(self.inner, x).square().mean((2, 3))

    x = torch.randn(2, 3, 12, 12)
    plain = Net(lambda layer, x: layer(x))
    again = Net(lambda layer, x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False))
    for layer in (None, "inner.0"):
        expected, found = hl.cam(plain, x, layer, 1), hl.cam(again, x, layer, 1)
        assert found.layers == expected.layers
        assert torch.equal(found.maps, expected.maps)


@pytest.mark.parametrize("layer", [None, "0", "1"])
def test_maps_of_another_aspect_than_the_images_are_first(layer):
    torch.manual_seed(0)
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    conv = nn.Conv2d(1, 8, 3, padding=1, stride=(2, 1))
    model, x = nn.Sequential(conv, nn.ReLU(), pool).eval(), torch.randn(2, 1, 16, 16)
    maps = hl.cam(model, x, layer)
    (raw,) = maps.raw.values()
    module = model[int(maps.layers[0])]
    assert torch.allclose(raw, by_hooks(module, lambda: model(x), lambda t: t), atol=1e-6)
