"""What cam says of what it cannot map: each message names the thing and says what to do."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hookline as hl
from hookline.models import load_demo_digits, load_model


@pytest.fixture(scope="module")
def model():
    return load_model("demo:digits").model


@pytest.fixture(scope="module")
def x():
    return load_demo_digits()[0]


def said(error, action) -> str:
    with pytest.raises(error) as caught:
        action()
    message = str(caught.value)
    assert 2 <= len(message.splitlines()) <= 3
    return message


def test_a_method_that_there_is_not(model, x):
    assert said(hl.InputError, lambda: hl.cam(model, x, method="Grad-CAM")) == (
        "method must be one of gradcam, gradcam++, layercam, hirescam, eigencam, scorecam, got"
        " 'Grad-CAM'.\nDid you mean 'gradcam' or 'gradcam++'?"
    )
    assert "'scorecam' or" in said(hl.InputError, lambda: hl.cam(model, x, method="score_cam"))
    none = said(hl.InputError, lambda: hl.cam(model, x, method=3))
    assert none.endswith(", got 3.\nGive method='gradcam', or leave it out.")


def test_a_layer_without_maps(model, x):
    assert said(hl.SelectionError, lambda: hl.cam(model, x, ["block3", "pool2"])) == (
        "pool2 (AdaptiveAvgPool2d) must return maps of 8 images of 8 x 8, got Tensor[8, 40, 1, 1]."
        "\nName a layer that returns (batch, channels, height, width), or give reshape=,"
        " a function from its output to that; without layer= the last one is found."
    )
    one = said(hl.SelectionError, lambda: hl.cam(model, x[:1], "pool2"))
    assert "must return maps of 1 image of 8 x 8, got" in one
    assert "'block3'" in said(hl.SelectionError, lambda: hl.cam(model, x, "blok3"))
    assert said(hl.SelectionError, lambda: hl.cam(model, x, "block3:input")) == (
        "layer= must name outputs of layers, got block3:input.\nName the layer alone: 'block3'."
    )


def test_a_model_without_maps(x):
    flat = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    assert said(hl.SelectionError, lambda: hl.cam(flat, x)) == (
        "a layer of Sequential must return maps of its 8 x 8 images, got none: (batch, channels,"
        " height, width), channels last, or tokens of square patches."
        "\nName one with layer=, and with reshape= a function from its output to maps."
    )


def test_a_reshape_that_gives_no_maps(model, x):
    message = said(hl.InputError, lambda: hl.cam(model, x, reshape=lambda t: t.flatten(2)))
    assert message == (
        "reshape= must return maps of Tensor[8, 40, 4, 4] from block3, got Tensor[8, 40, 16]."
        "\nReturn a tensor of shape (8, channels, height, width)."
    )
    message = said(hl.InputError, lambda: hl.cam(model, x, reshape=3))
    assert message.startswith("reshape= must be a function, got 3.\nGive a function")


@pytest.mark.parametrize(
    ("inputs", "remedy"),
    [
        (torch.zeros(1, 8, 8), "Make the single image a batch: x[None]."),
        (torch.zeros(2, 1, 8, 8, dtype=torch.uint8), "Prepare the images as in training"),
        (torch.zeros(0, 1, 8, 8), "Give the images as the model takes them"),
        (torch.zeros(8), "Give the images as the model takes them"),
        (torch.zeros(2, 1, 8, 8).numpy(), "Make the array a tensor"),
    ],
)
def test_inputs_that_hold_no_images(model, inputs, remedy):
    message = said(hl.InputError, lambda: hl.cam(model, inputs))
    assert message.splitlines()[1].startswith(remedy)


@pytest.mark.parametrize("method", ["gradcam", "eigencam", "scorecam"])
@pytest.mark.parametrize("target", [10, -1, [0, 1, 2, 3, 4, 5, 6, 10]])
def test_a_class_out_of_range(model, x, target, method):
    message = said(hl.InputError, lambda: hl.cam(model, x, target=target, method=method))
    wrong = target if isinstance(target, int) else 10
    assert message == (
        f"target must be one of the model's 10 classes, 0 to 9, got {wrong}."
        "\nGive one of these, or None for each image's highest class."
    )


@pytest.mark.parametrize("target", [[1, 2], torch.tensor([3]), []])
def test_classes_that_are_not_one_for_each_image(model, x, target):
    assert said(hl.InputError, lambda: hl.cam(model, x, target=target)) == (
        "target= must name one class for each of 8 images, got"
        f" {len(target)} class{'es' * (len(target) != 1)}."
        "\nGive one class for each image, or a single number for all."
    )


@pytest.mark.parametrize("target", ["cat", True, 1.5, [1.0] * 8, torch.ones(8)])
def test_a_target_that_is_no_class(model, x, target):
    message = said(hl.InputError, lambda: hl.cam(model, x, target=target))
    assert message.startswith(f"target must be the number of a class, got {target!r}.\nGive")


@pytest.mark.slow
def test_a_function_that_returns_something_else(model, x):
    for function, text in (
        (lambda out: out, "Tensor[8, 10]"),
        (lambda out: out.argmax(1), "Tensor[8]"),
        (lambda out: 3, "3"),
    ):
        message = said(hl.InputError, lambda f=function: hl.cam(model, x, target=f))
        assert message == (
            f"target= must return a score for each image, got {text} for the model's output,"
            " Tensor[8, 10]."
            "\nReturn one floating number for each image, shape (8,), or a single one, shape ()."
        )
    total = lambda out: out[:, 0].sum()  # noqa: E731
    message = said(hl.InputError, lambda: hl.cam(model, x, target=total, method="scorecam"))
    assert "must return the score of each masked image for scorecam, got one" in message
    one = hl.cam(model, x, target=total, method="scorecam", batch_size=1)
    together = hl.cam(model, x, target=0, method="scorecam")
    torch.testing.assert_close(one.maps, together.maps, atol=1e-5, rtol=0)
    assert "batch_size must be a positive integer, got 0." in said(
        hl.InputError, lambda: hl.cam(model, x, method="scorecam", batch_size=0)
    )


@pytest.mark.parametrize(
    ("inputs", "remedy"),
    [
        (torch.zeros(1, 8, 8), "Make the single image a batch: x[None]."),
        (torch.zeros(2, 1, 8, 8, dtype=torch.uint8), "Prepare the images as in training"),
        (torch.zeros(2, 64), "Give the images as the model takes them"),
        (torch.zeros(0, 1, 8, 8), "Give the images as the model takes them"),
        (torch.zeros(2, 1, 8, 8).numpy(), "Make the array a tensor: torch.from_numpy"),
        ("cat.png", "Give the images as the model takes them"),
    ],
)
def test_inputs_without_images(model, inputs, remedy):
    message = said(hl.InputError, lambda: hl.cam(model, inputs))
    assert message.startswith("inputs must hold images, a floating tensor of shape (batch,")
    assert f"\n{remedy}" in message


class Net(nn.Module):
    def __init__(self, answer):
        super().__init__()
        self.conv, self.other = nn.Conv2d(1, 3, 3), nn.Conv2d(1, 3, 3)
        self.answer = answer

    def forward(self, x):
        return self.answer(self.conv(x), self.other(x).mean((2, 3)))


def test_an_output_without_class_scores(x):
    boxes = Net(lambda maps, other: {"boxes": maps})
    assert said(hl.InputError, lambda: hl.cam(boxes, x)) == (
        "the model must return class scores of shape (batch, classes), got"
        " dict(boxes=Tensor[8, 3, 6, 6]).\nGive a function of its output that returns one number"
        " for each image: target=lambda out: ..."
    )
    found = hl.cam(boxes, x, "conv", lambda out: out["boxes"].square().sum((1, 2, 3)))
    assert found.scores.shape == (8,)
    eigen = hl.cam(boxes, x, "conv", method="eigencam")  # needs no class
    assert eigen.targets == (None,) * 8
    assert eigen.scores is None


def test_a_score_without_a_gradient(x):
    detached = Net(lambda maps, other: maps.mean((2, 3)).detach())
    assert said(hl.InputError, lambda: hl.cam(detached, x, "conv")).startswith(
        "the score must have a gradient, got none: the model, or target=, runs under no_grad()"
    )
    cut = Net(lambda maps, other: maps.mean((2, 3)).detach() + other)
    assert said(hl.InputError, lambda: hl.cam(cut, x, "conv")).startswith(
        "the score must depend on conv, got no gradient there: the score does not use it,"
    )


# Torch says so of each reentrant checkpoint that is run without gradients.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_reentrant_checkpoint_says_what_to_give_instead(x):
    def answer(maps, other):
        return checkpoint(model.last, maps, use_reentrant=True).mean((2, 3))

    model = Net(answer)
    model.last = nn.Conv2d(3, 4, 3)
    with pytest.raises(RuntimeError, match="use_reentrant") as failed:
        hl.cam(model, x, "conv")
    (note,) = failed.value.__notes__
    assert "use_reentrant=False" in note
    assert "eigencam" in note
    assert hl.cam(model, x, "conv", method="eigencam").layers == ("conv",)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_numbers_that_are_not_finite(x):
    bad = Net(lambda maps, other: maps.mean((2, 3)) * float("nan"))
    assert "the score must be finite" in said(hl.InputError, lambda: hl.cam(bad, x, "conv"))
    hidden = Net(lambda maps, other: (maps * 1e38 * 1e38).clamp(-1, 1).mean((2, 3)))
    with pytest.raises(hl.InputError, match="the map at conv must be finite"):
        hl.cam(hidden, x, "conv", 0, reshape=lambda t: t * float("inf"))


def test_a_map_of_nothing_is_warned_of(x):
    against = Net(lambda maps, other: -maps.square().mean((2, 3)))
    with pytest.warns(hl.HooklineWarning, match="hirescam at conv finds no place that raises"):
        found = hl.cam(against, x, "conv", 0, method="hirescam")
    assert found.maps.abs().max() == 0
    with pytest.warns(hl.HooklineWarning, match="every place lowers the score"):
        hl.cam(against, x, "conv", 0, method="hirescam")
    none = Net(lambda maps, other: maps.mean((2, 3)) * 0)
    with pytest.warns(hl.HooklineWarning, match="does not depend on the layer"):
        hl.cam(none, x, "conv", 0)


@pytest.mark.slow
def test_models_in_which_no_hook_fires(model, x):
    traced = torch.jit.trace(model, x)
    assert "scripted or traced" in said(hl.AttachError, lambda: hl.cam(traced, x))
    with pytest.raises(hl.AttachError, match=r"hl.cam must be given a model .*, got function"):
        hl.cam(lambda x: x, x)
    lazy = nn.Sequential(nn.LazyConv2d(3, 3), nn.Flatten())
    assert "lazy" in said(hl.InputError, lambda: hl.cam(lazy, x))
