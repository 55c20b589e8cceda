"""features: as far as the wanted sites, and no further."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hookline as hl
from hookline.verbs.record.partial_forward import PartialForward
from zoo import Sized


class Counter:
    """Counts how many modules have run."""

    def __init__(self, net):
        self.ran = []
        self.handles = [
            module.register_forward_pre_hook(lambda m, a, path=path: self.ran.append(path))
            for path, module in net.named_modules()
        ]

    def remove(self):
        for handle in self.handles:
            handle.remove()


@pytest.mark.parametrize("order", [["layer1", "stem"], ["stem", "layer1"]])
def test_the_forward_stops_when_the_last_wanted_site_has_fired(net, image, order):
    counter = Counter(net)
    feats = hl.features(net, image, order)
    counter.remove()
    assert "layer1.1.relu" in counter.ran
    assert not any(path.startswith(("layer2", "fc")) for path in counter.ran)
    assert torch.equal(feats["stem"], net.stem(image))
    assert torch.equal(feats["layer1"], net.layer1(net.stem(image)))
    assert feats.passes[0].failed is False


def test_nothing_is_left_on_the_model(net, image, left_as_found):
    before = left_as_found(net)
    hl.features(net, image, "layer1.0.conv")
    assert left_as_found(net) == before


def test_inputs_come_in_every_form(net, image, holder):
    wanted = net.stem(image)
    for inputs in (image, (image,), {"x": image}, lambda: net(image)):
        assert torch.equal(hl.features(net, inputs, "stem")["stem"], wanted)
    assert hl.features(holder, {"x": torch.ones(2)}, "inner:input.mask")["inner:input.mask"].all()


def test_inputs_that_require_gradients_want_the_graph(net, image):
    image.requires_grad_()
    with pytest.warns(hl.HooklineWarning, match=r"an input requires gradients.*\n.*detach=False"):
        assert not hl.features(net, (image,), "stem")["stem"].requires_grad
    hl.features(net, image, "stem", detach=True)
    with torch.no_grad():
        hl.features(net, {"x": image}, "stem")
    hl.features(net, image, "stem", detach=False)["stem"].square().sum().backward()
    given = image.detach().clone().requires_grad_()
    net.eval().stem(given).square().sum().backward()
    assert torch.equal(image.grad, given.grad)


def test_it_works_when_the_model_is_called_inside_other_code(net, image):
    reached = []

    def pipeline():
        try:
            net(image)
            reached.append("after")
        except Exception:
            reached.append("swallowed")
        finally:
            reached.append("cleaned up")

    feats = hl.features(net, pipeline, "layer1")
    assert reached == ["cleaned up"]
    assert torch.equal(feats["layer1"], net.layer1(net.stem(image)))


def test_code_that_swallows_everything_still_gives_the_values(net, image):
    def pipeline():
        for _ in range(2):
            try:
                net(image)
            except BaseException:
                continue

    feats = hl.features(net, pipeline, "stem")
    assert torch.equal(feats.passes[0]["stem"], net.stem(image))


def test_a_named_call_is_waited_for(looped):
    x = torch.ones(1, 2)
    feats = hl.features(looped, x, "block#2")
    assert torch.equal(feats["block#2"], looped.block(looped.block(looped.block(x))))
    assert torch.equal(hl.features(looped, x, "block")["block"], looped.block(x))


def test_a_module_that_ran_several_times_is_ambiguous(looped):
    feats = hl.features(looped, torch.ones(1, 2), ["block", "head"])
    with pytest.raises(hl.AmbiguousError, match="block#0"):
        feats["block"]


def test_a_site_that_is_never_reached_is_an_error_that_says_why(net, image):
    net.unused = torch.nn.Linear(1, 1)
    with pytest.raises(hl.NotRecordedError, match=r"unused was selected.*not reached"):
        hl.features(net, image, ["stem", "unused"])


def test_the_root_itself_can_be_wanted(net, image):
    assert torch.equal(hl.features(net, image, "")[""], net(image))


def test_an_error_of_the_model_passes_through(net):
    with pytest.raises(RuntimeError, match="to have 3 channels"):
        hl.features(net, torch.zeros(1, 4, 8, 8), "fc")


def test_features_inside_features_stop_only_their_own_model(net, image):
    feats = {}

    def pipeline():
        feats["inner"] = hl.features(net, image, "stem")
        net(image)

    feats["outer"] = hl.features(net, pipeline, "layer2")
    assert feats["outer"].passes[-1]["layer2"].shape == (2, 4, 8, 8)


def test_features_taken_inside_of_others_stop_the_model_for_both(net, image):
    def pipeline():
        hl.features(net, image, "layer2")  # reaches the stem first, and is not to go on
        raise AssertionError("the outer features did not stop it")

    assert torch.equal(hl.features(net, pipeline, "stem")["stem"], net.stem(image))


def test_a_line_around_features_has_the_pass_that_they_left(net, image):
    with hl.record(net, ["stem", "layer1.0"]) as run:
        hl.features(net, image, "stem")
        net.stem(image)  # by itself, after a pass that is over
        net(image)
    assert [one.order for one in run.passes] == [["stem"], ["stem"], ["stem", "layer1.0"]]
    assert not any(one.failed for one in run.passes)


def test_options_are_those_of_record(net, image):
    feats = hl.features(net, image, "layer1", keep=lambda t: t.mean((2, 3)), dtype=torch.float16)
    assert feats["layer1"].shape == (2, 4)
    assert feats["layer1"].dtype is torch.float16


def test_wrong_options_are_refused_as_record_refuses_them(net, image):
    with pytest.raises(hl.AttachError, match=r"dtype must be a torch.dtype, got"):
        hl.features(net, image, "stem", dtype="float16")


class Stop(Exception):
    """Of a hook that has what it wants."""


@pytest.mark.trap(41)
def test_stopping_early_keeps_no_activation_alive():
    model = Sized()

    def hook(module, args, output):
        raise Stop

    handle = model.head.register_forward_hook(hook)
    try:
        model(torch.ones(4, 3))
    except Stop as stop:
        held = stop
    handle.remove()
    assert model.n_alive() == 1  # by the frames of its traceback
    del held
    assert model.n_alive() == 0
    features = hl.features(model, torch.ones(4, 3), "head")
    assert model.n_alive() == 0
    assert torch.equal(features["head"], model(torch.ones(4, 3)))


def test_a_gradient_is_no_feature_and_it_is_said(net, image, left_as_found):
    before = left_as_found(net)
    with pytest.raises(
        hl.SelectionError, match="sites of the forward, got fc:grad_output"
    ) as caught:
        hl.features(net, image, ["stem", "fc:grad_output"])
    assert "hl.record(model, 'fc:grad_output')" in str(caught.value)
    assert left_as_found(net) == before


class Dropping(nn.Module):
    """Dropout, batch norm, a part that stays in eval mode, and a train() that does more."""

    def __init__(self):
        super().__init__()
        self.drop, self.norm = nn.Dropout(0.5), nn.BatchNorm1d(4)
        self.frozen = nn.Dropout(0.5)
        self.trained = 0

    def forward(self, x):
        return self.frozen(self.norm(self.drop(x)))

    def train(self, mode=True):
        self.trained += 1
        return super().train(mode)


@pytest.fixture
def dropping() -> Dropping:
    model = Dropping()
    model.frozen.training = False
    return model


def test_the_model_runs_in_eval_mode_and_gets_its_own_back(dropping, left_as_found):
    x = torch.randn(8, 4)
    before = left_as_found(dropping)
    feats = [hl.features(dropping, x, "norm")["norm"] for _ in range(2)]
    assert left_as_found(dropping) == before
    assert torch.equal(*feats)
    expected = nn.BatchNorm1d(4).eval()(x)
    assert torch.equal(feats[0], expected)


def test_the_mode_is_put_back_when_the_model_raises(dropping, left_as_found):
    before = left_as_found(dropping)
    with pytest.raises(RuntimeError):
        hl.features(dropping, torch.ones(8, 5), "frozen")
    with pytest.raises(hl.NotRecordedError):
        hl.features(dropping, lambda: None, "norm")
    assert left_as_found(dropping) == before


def test_the_models_own_mode_is_kept_when_asked_for(dropping):
    x = torch.ones(64, 4)
    feats = hl.features(dropping, x, "drop", eval=False)["drop"]
    assert set(feats.unique().tolist()) == {0.0, 2.0}


def test_a_loaders_batches_are_run_one_after_the_other(net):
    images = torch.randn(5, 3, 8, 8)
    counter = Counter(net)
    feats = hl.features(net, DataLoader(images, batch_size=2), ["stem", "layer1"])
    counter.remove()
    assert "layer2" not in counter.ran
    assert counter.ran.count("stem") == len(feats.passes) == 3
    for number, batch in enumerate(images.split(2)):
        assert torch.equal(feats.passes[number]["stem"], net.stem(batch))
    assert torch.equal(feats.cat("stem"), torch.cat([net.stem(one) for one in images.split(2)]))
    assert feats.cat("layer1").shape == (5, 4, 8, 8)


def test_a_loader_in_a_progress_bar_gives_batches(net):
    images, tqdm = torch.randn(5, 3, 8, 8), pytest.importorskip("tqdm").tqdm
    for batches in (DataLoader(images, batch_size=2), images.split(2)):
        feats = hl.features(net, tqdm(batches, disable=True), "stem")
        assert torch.equal(feats.cat("stem"), torch.cat([net.stem(x) for x in images.split(2)]))


def test_what_torch_compile_leaves_on_a_model_is_no_state(net, image):
    net._is_torch_compile, net.forward = True, net.forward
    counter = Counter(net)
    hl.features(net, iter([image]), "stem")
    counter.remove()
    assert "layer1" not in counter.ran


def test_an_iterators_batches_come_in_every_form(holder):
    x = torch.ones(2)
    for batch in (x, (x,), {"x": x}):
        feats = hl.features(holder, iter([batch, batch]), "inner:output.pair.left")
        assert feats.cat("inner:output.pair.left").tolist() == [2.0] * 4


def test_batches_with_labels_say_how_to_give_the_inputs_alone(net):
    data = TensorDataset(torch.randn(5, 3, 8, 8), torch.arange(5))
    loader = DataLoader(data, batch_size=2)
    with pytest.raises(
        hl.InputError, match=r"got list\(Tensor\[2, 3, 8, 8\], Tensor\[2\]\)"
    ) as caught:
        hl.features(net, loader, "stem")
    remedy = str(caught.value).split("each batch: ")[1].rstrip(".")
    feats = eval(remedy.replace("...", "'stem'"), {"hl": hl, "model": net, "loader": loader})
    assert feats.cat("stem").shape == (5, 4, 8, 8)
    with pytest.raises(hl.InputError, match=r"got a data set \(TensorDataset\).\n.*DataLoader"):
        hl.features(net, data, "stem")


def test_a_loader_without_batches_is_refused(net):
    for loader in (DataLoader(torch.zeros(0, 3, 8, 8)), iter(())):
        with pytest.raises(hl.InputError, match="at least one batch, got none"):
            hl.features(net, loader, "stem")


def test_a_list_is_one_argument_and_an_error_says_so(net, image):
    class TakesList(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, images):
            return [self.net(one) for one in images]

    feats = hl.features(TakesList(), [image, image], "net.stem#1")
    assert torch.equal(feats["net.stem#1"], net.stem(image))
    with pytest.raises(TypeError) as caught:
        hl.features(net, [image, image], "stem")
    assert caught.value.__notes__[:2] == [
        "hookline: a list is one argument of the model.\nGive several arguments as a tuple, and a"
        " batch with labels without them, such as batch[0].",
        "hookline: to run a list of batches one after the other, give iter(batches).",
    ]


def test_a_loaders_lists_of_one_tensor_are_tensors(net):
    images = torch.randn(5, 3, 8, 8)
    loader = DataLoader(TensorDataset(images), batch_size=2)
    feats = hl.features(net, loader, "stem")
    assert len(feats.passes) == 3
    assert torch.equal(feats.cat("stem"), torch.cat([net.stem(one) for one in images.split(2)]))


def test_a_batch_that_does_not_reach_a_site_is_named(net, image):
    class Chooses(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.rare = net, nn.Identity()

        def forward(self, x):
            return self.rare(x) if x.shape[0] == 2 else x

    batches = [image, image[:1]]
    with pytest.raises(hl.NotRecordedError, match=r"rare must have a value .* none for batch 1"):
        hl.features(Chooses(), iter(batches), "rare")
    with pytest.raises(hl.NotRecordedError, match="rare was selected, but has no value"):
        hl.features(Chooses(), iter(batches[::-1]), "rare")


def test_a_model_whose_features_were_interrupted_runs_to_its_end():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    runner = PartialForward(model, "0", "features", {})
    with pytest.warns(hl.HooklineWarning, match="line was dropped while its hooks were on"):
        del runner  # as where Ctrl-C came before the block
        gc.collect()
    assert model(torch.ones(1, 2)).shape == (1, 2)
    assert not model[0]._forward_hooks


class Counting(nn.Module):
    """Adds how often its last module has run to the input of its first one."""

    def __init__(self, is_shared=False):
        super().__init__()
        self.first = nn.Identity()
        self.last = self.first if is_shared else nn.Identity()
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x):
        y = self.last(self.first(x + self.n) * 10)
        self.n += 1
        return y


def test_state_behind_the_last_site_goes_on_from_batch_to_batch():
    feats = hl.features(Counting(), iter(torch.zeros(3, 2, 1)), "first")
    assert feats.cat("first").flatten().tolist() == [0, 0, 1, 1, 2, 2]


def test_batch_norm_behind_the_last_site_learns_in_training_mode():
    def model():
        norm = nn.BatchNorm1d(1)
        return nn.Sequential(norm, nn.Identity(), norm)

    trained, plain = model(), model()
    batches = torch.randn(4, 8, 1)
    feats = hl.features(trained, iter(batches), "1", eval=False)
    for batch in batches:
        plain(batch)
    assert torch.equal(trained[0].running_mean, plain[0].running_mean)
    assert len(feats.passes) == 4


def test_a_run_to_the_end_keeps_the_first_calls_alone():
    feats = hl.features(Counting(is_shared=True), iter(torch.ones(3, 2, 1)), "first")
    assert [record["first"].flatten().tolist() for record in feats.passes] == [
        [1, 1], [2, 2], [3, 3],
    ]  # fmt: skip
