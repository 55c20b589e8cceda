"""Class maps against formulas written out by hand, and what a call leaves behind."""

from __future__ import annotations

import importlib.util
import json
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import interpolate

import hookline as hl
from hookline.models import load_demo_digits, load_model


class Small(nn.Module):
    """Maps of half the image's size, an in-place ReLU after them, four classes."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1, stride=2)
        self.bn = nn.BatchNorm2d(6)
        self.relu = nn.ReLU(inplace=True)
        self.conv = nn.Conv2d(6, 5, 3, padding=1)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(5, 4)

    def front(self, x):
        return self.bn(self.stem(x))

    def back(self, maps):
        maps = self.conv(maps.relu())
        return self.head(self.dropout((maps * maps.sigmoid()).mean((2, 3))))

    def forward(self, x):
        maps = self.conv(self.relu(self.front(x)))
        return self.head(self.dropout((maps * maps.sigmoid()).mean((2, 3))))


@pytest.fixture
def small():
    torch.manual_seed(7)
    net = Small().double()
    net.bn.running_mean.copy_(torch.randn(6))
    return net.eval()


@pytest.fixture
def x():
    return torch.randn(3, 3, 12, 16, generator=torch.Generator().manual_seed(5)).double()


def by_hand(net, x, classes):
    """The maps before the in-place ReLU, and the gradient of each image's score there."""
    with torch.no_grad():
        maps = net.front(x)
    leaf = maps.clone().requires_grad_()
    out = net.back(leaf)
    scores = torch.stack([out[k, c] for k, c in enumerate(classes)])
    return maps, torch.autograd.grad(scores.sum(), leaf)[0], scores.detach()


def raw_by_hand(method, net, x, classes):
    a, g, _ = by_hand(net, x, classes)
    n_places = a.shape[2] * a.shape[3]
    found = []
    for k, c in enumerate(classes):
        if method == "gradcam":
            alpha = [g[k, i].sum() / n_places for i in range(6)]
            found.append(sum(w * a[k, i] for i, w in enumerate(alpha)))
        elif method == "gradcam++":
            total = torch.zeros_like(a[k, 0])
            for i in range(6):
                g2, g3 = g[k, i] ** 2, g[k, i] ** 3
                alpha = g2 / (2 * g2 + a[k, i].sum() * g3)
                alpha[g[k, i] == 0] = 0
                total += (alpha * g[k, i].clamp(min=0)).sum() * a[k, i]
            found.append(total)
        elif method == "layercam":
            found.append(sum(g[k, i].clamp(min=0) * a[k, i] for i in range(6)))
        elif method == "hirescam":
            found.append(torch.einsum("chw,chw->hw", g[k], a[k]))
        elif method == "eigencam":
            places = a[k].reshape(6, -1).T
            _, vectors = torch.linalg.eigh(places.T @ places)
            one = (places @ vectors[:, -1]).reshape(a.shape[2:])
            found.append(one if one.sum() >= 0 else -one)
        else:
            scores = []
            for i in range(6):
                mask = interpolate(
                    a[k : k + 1, i : i + 1], x.shape[2:], mode="bilinear", align_corners=False
                )
                mask = (mask - mask.min()) / (mask.max() - mask.min())
                with torch.no_grad():
                    scores.append(net(x[k : k + 1] * mask)[0, c])
            weights = torch.exp(torch.stack(scores)) / sum(map(torch.exp, scores))
            found.append(sum(w * a[k, i] for i, w in enumerate(weights)))
    return torch.stack(found)


def from_0_to_1(maps):
    low, high = maps.amin((1, 2), keepdim=True), maps.amax((1, 2), keepdim=True)
    return (maps - low) / (high - low)


def enlarged(raw):
    scaled = from_0_to_1(raw.clamp(min=0))
    return interpolate(scaled[:, None], (12, 16), mode="bilinear", align_corners=False)[:, 0]


METHODS = ["gradcam", "gradcam++", "layercam", "hirescam", "eigencam", "scorecam"]


@pytest.mark.parametrize("method", METHODS)
def test_each_method_is_its_formula_written_out_by_hand(small, x, method):
    classes = [2, 0, 3]
    found = hl.cam(small, x, "bn", classes, method=method)
    expected = raw_by_hand(method, small, x, classes)
    assert found.layers == ("bn",)
    assert found.targets == (2, 0, 3)
    torch.testing.assert_close(found.raw["bn"], expected)
    torch.testing.assert_close(found.scores, by_hand(small, x, classes)[2])
    torch.testing.assert_close(found.maps, from_0_to_1(enlarged(expected)).float())
    assert found.maps.dtype is torch.float32
    assert found.maps.amin((1, 2)).tolist() == [0, 0, 0]
    assert found.maps.amax((1, 2)).tolist() == [1, 1, 1]


def grad_cam_numbers():
    path = Path(__file__).parent / "grad_cam_numbers" / "make.py"
    spec = importlib.util.spec_from_file_location("make_grad_cam_numbers", path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


NUMBERS = grad_cam_numbers()


@pytest.mark.parametrize("case", NUMBERS.CASES)
def test_the_maps_are_those_of_the_package_grad_cam(case):
    expected = torch.tensor(json.loads(NUMBERS.NUMBERS.read_text())[case], dtype=torch.float64)
    method = case.partition(" ")[0]
    found = hl.cam(NUMBERS.network(), NUMBERS.images(), NUMBERS.CASES[case], [2, 0], method=method)
    torch.testing.assert_close(found.maps, expected, atol=5e-7, rtol=0, check_dtype=False)
    assert expected.std() > 0.1


def test_several_layers_are_averaged_after_scaling(small, x):
    both = hl.cam(small, x, ["stem", "conv"], 1)
    parts = [hl.cam(small, x, name, 1).raw[name] for name in ("stem", "conv")]
    assert torch.equal(both.raw["stem"], parts[0])
    assert torch.equal(both.raw["conv"], parts[1])
    mean = (enlarged(parts[0]) + enlarged(parts[1])) / 2
    torch.testing.assert_close(both.maps, from_0_to_1(mean).float())
    assert both.layers == ("stem", "conv")


def test_targets_are_classes_functions_or_the_highest(small, x):
    with torch.no_grad():
        out = small(x)
    highest = hl.cam(small, x)
    assert highest.targets == tuple(out.argmax(1).tolist())
    torch.testing.assert_close(highest.scores, out.amax(1))
    by_number = hl.cam(small, x, target=2)
    assert by_number.targets == (2, 2, 2)
    for target in ([2, 2, 2], torch.tensor([2, 2, 2]), torch.tensor(2)):
        assert torch.equal(hl.cam(small, x, target=target).maps, by_number.maps)
    for function in (lambda out: out[:, 2], lambda out: out[:, 2].sum()):
        found = hl.cam(small, x, target=function)
        assert torch.equal(found.maps, by_number.maps)
        assert found.targets == (None, None, None)
    contrast = hl.cam(small, x, "bn", lambda out: out[:, 2] - out[:, 0])
    expected = hl.cam(small, x, "bn", 2).raw["bn"] - hl.cam(small, x, "bn", 0).raw["bn"]
    torch.testing.assert_close(contrast.raw["bn"], expected)
    masked = hl.cam(small, x, "bn", lambda out: out[:, 2], method="scorecam")
    assert torch.equal(masked.maps, hl.cam(small, x, "bn", 2, method="scorecam").maps)


class Answers(nn.Module):
    """A model whose answer is the network's, wrapped up."""

    def __init__(self, net, wrap):
        super().__init__()
        self.net = net
        self.wrap = wrap

    def forward(self, x, scale=None):
        y = self.net(x)
        return self.wrap(y if scale is None else y * scale[:, None])


class Output:
    def __init__(self, logits):
        self.loss, self.logits = None, logits


@pytest.mark.parametrize(
    "wrap",
    [Output, lambda y: (y, None), lambda y: [y], lambda y: {"loss": None, "logits": y}],
    ids=["attribute", "tuple", "list", "dict"],
)
def test_the_scores_are_found_in_any_output(small, x, wrap):
    expected = hl.cam(small, x, "bn", [1, 2, 3])
    found = hl.cam(Answers(small, wrap), x, "net.bn", [1, 2, 3])
    assert torch.equal(found.maps, expected.maps)


def test_inputs_are_a_tensor_a_tuple_or_names(small, x):
    model, scale = Answers(small, Output), torch.tensor([1.0, 2.0, 3.0])
    expected = hl.cam(small, x, "bn")
    for inputs in ((x,), (x, scale), {"x": x, "scale": scale}):
        found = hl.cam(model, inputs, "net.bn")
        torch.testing.assert_close(found.maps, expected.maps)


def test_what_goes_with_an_image_goes_with_its_masked_versions(small, x):
    model, scale = Answers(small, Output), torch.tensor([1.0, 20.0, 300.0])
    together = hl.cam(model, (x, scale), "net.bn", method="scorecam", batch_size=4)
    for k in range(3):
        alone = hl.cam(model, (x[[k]], scale[[k]]), "net.bn", method="scorecam")
        torch.testing.assert_close(together.maps[k], alone.maps[0])
    plain = hl.cam(small, x, "bn", method="scorecam")
    assert not torch.allclose(together.maps[2], plain.maps[2])


def test_images_of_a_batch_do_not_depend_on_one_another(small, x):
    together = hl.cam(small, x)
    for k in range(3):
        alone = hl.cam(small, x[k : k + 1])
        torch.testing.assert_close(alone.maps[0], together.maps[k], atol=1e-6, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_the_model_is_left_as_it_was_in_training_with_gradients(small, x, method, left_as_found):
    small.train()
    small.dropout.eval()
    small(x).sum().backward()
    grads = [p.grad.clone() for p in small.parameters()]
    x.requires_grad_()
    before, pixels = left_as_found(small), x.detach().clone()
    found = hl.cam(small, x, method=method)
    assert left_as_found(small) == before
    assert all(torch.equal(p.grad, g) for p, g in zip(small.parameters(), grads, strict=True))
    assert x.grad is None
    assert torch.equal(x, pixels)
    small.eval()
    assert torch.equal(hl.cam(small, x, method=method).maps, found.maps)  # it ran in eval mode
    assert not found.maps.requires_grad
    assert not found.scores.requires_grad


def test_nothing_is_left_after_an_error(small, x, left_as_found):
    before = left_as_found(small.train())
    for wrong in (lambda: hl.cam(small, x, "head"), lambda: hl.cam(small, x, target=99)):
        with pytest.raises(hl.HooklineError):
            wrong()
        assert left_as_found(small) == before


def test_it_works_without_gradients_and_with_frozen_parameters(small, x):
    expected = hl.cam(small, x).maps
    for parameter in small.parameters():
        parameter.requires_grad_(False)
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            assert torch.equal(hl.cam(small, x.clone()).maps, expected)
    assert all(p.grad is None for p in small.parameters())


class FixedStem(Small):
    """A stem that is not trained: no gradient comes back to the images."""

    def forward(self, x):
        maps = self.conv(self.relu(self.front(x).detach()))
        return self.head(self.dropout((maps * maps.sigmoid()).mean((2, 3))))


def test_layers_above_a_stem_that_is_cut_off_have_their_maps(small, x):
    fixed = FixedStem().double().eval()
    fixed.load_state_dict(small.state_dict())
    for method in ("gradcam", "layercam"):
        assert torch.equal(
            hl.cam(fixed, x, "conv", method=method).maps,
            hl.cam(small, x, "conv", method=method).maps,
        )
    assert hl.cam(fixed, x).layers == ("conv",)
    assert all(parameter.grad is None for parameter in fixed.parameters())
    with pytest.raises(hl.InputError, match="must depend on bn, got no gradient"):
        hl.cam(fixed, x, "bn")


def test_it_works_inside_other_lines(small, x):
    expected = hl.cam(small, x).maps
    with hl.record(small, "bn", ports=("output", "grad_output"), copy=True) as run:
        found = hl.cam(small, x)
    assert torch.equal(found.maps, expected)
    assert len(run.passes) == 2  # one to find the layer, one for the map
    with hl.edit(small, "conv", hl.edits.scale(2.0)):
        assert hl.cam(small, x, "conv", 0).scores.tolist() != found.scores.tolist()


def test_a_model_may_write_to_its_input(x):
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(3))
    model.double()(x.clone())
    kept = x.clone()
    assert hl.cam(model, x).layers == ("1",)
    assert torch.equal(x, kept)


@pytest.mark.slow
def test_the_maps_of_the_digits_point_at_what_counts():
    """To hide the fifth of the pixels that the map points at costs more than to hide any fifth."""
    from sklearn.datasets import load_digits  # it takes seconds to load

    digits = load_digits()
    model = load_model("demo:digits").model
    images = torch.tensor(digits.images[:100, None]).float() / 16
    with torch.no_grad():
        classes = model(images).argmax(1)

    def score(hidden):
        masked = images.flatten(2).masked_fill(hidden[:, None], 0.0).unflatten(2, (8, 8))
        with torch.no_grad():
            return model(masked).gather(1, classes[:, None]).mean().item()

    def fifth(order):
        return torch.zeros(100, 64, dtype=torch.bool).scatter(1, order[:, :13], value=True)

    generator = torch.Generator().manual_seed(0)
    at_random = [
        score(fifth(torch.rand(100, 64, generator=generator).argsort(1))) for _ in range(5)
    ]
    whole = score(torch.zeros(100, 64, dtype=torch.bool))
    for method in METHODS:
        maps = hl.cam(model, images, "block2", classes, method=method).maps.flatten(1)
        pointed = score(fifth(maps.argsort(1, descending=True)))
        assert whole - pointed > 1.3 * (whole - min(at_random)), method


def test_the_demo_says_which_layer_it_used():
    images, _ = load_demo_digits()
    found = hl.cam(load_model("demo:digits").model, images)
    assert repr(found) == (
        "ClassMaps of 8 images 8 x 8, by gradcam at block3: classes 0, 1, 2, 3, 4, 5, 6, 7"
    )


class Noisy(nn.Module):
    """A model with noise from a generator that no verb can put back."""

    def __init__(self, share):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.noise = lambda: share * torch.rand(5, generator=generator)
        torch.manual_seed(0)
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)

    def forward(self, x):
        return self.fc(self.conv(x).relu().mean((2, 3))) * (1 + self.noise())


def test_scores_of_runs_that_do_not_repeat_are_said():
    images = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    with pytest.warns(hl.HooklineWarning, match="the run did not repeat itself: the same images"):
        hl.cam(Noisy(1.0), images, target=1, method="scorecam")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hl.cam(Noisy(1e-4), images, target=1, method="scorecam")  # as a GPU may round


@pytest.mark.parametrize("method", ["gradcam", "eigencam", "scorecam"])
def test_a_model_that_writes_to_its_inputs_leaves_yours(method, x):
    class Writing(Small):
        def forward(self, x, mask):
            return super().forward(x.mul_(2) * mask.mul_(0.5).clone())

    model, mask = Writing().double().eval(), torch.ones(3, 1, 1, 1, dtype=torch.float64)
    before = x.clone()
    maps = hl.cam(model, (x, mask), "conv", method=method)
    assert torch.equal(x, before)
    assert torch.equal(maps.images, before)
    assert mask.eq(1).all()
    torch.testing.assert_close(maps.scores, Small.forward(model, x).amax(1).detach())
