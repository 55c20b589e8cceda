"""Inside torch.func: values come out plain, gradients right or refused."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap
from torch.utils.checkpoint import checkpoint

import hookline as hl
from hookline.engine.torch_private.modes import is_wrapped

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

PORTS = ("grad_output", "grad_input")


def is_plain(tensor):
    return not is_wrapped(tensor) and not tensor.requires_grad and tensor.data_ptr()


def values(run):
    assert all(value is None or is_plain(value) for value in run.values())
    return {site: value for site, value in run.items() if value is not None}


def same(found, expected):
    assert list(found) == list(expected)
    for site in expected:
        torch.testing.assert_close(found[site], expected[site], rtol=1e-4, atol=1e-6)
    return True


def loss(net, x):
    return net(x).square().sum()


def by_batch(net, image):
    """What is recorded of a batch without torch.func; net's in-place layers are copied in time."""
    x = image.clone().requires_grad_()
    with hl.record(net, ports=("output", *PORTS), copy=True) as run:
        loss(net, x).backward()
    net.zero_grad()
    return values(run)


GRADS = {
    "grad": lambda net, x: grad(lambda x: loss(net, x))(x),
    "grad, functional_call": lambda net, x: grad(
        lambda state, x: functional_call(net, state, (x,)).square().sum(), argnums=(0, 1)
    )(dict(net.named_parameters()), x),
    "vjp": lambda net, x: vjp(lambda x: loss(net, x), x)[1](torch.tensor(1.0)),
    "grad of grad": lambda net, x: grad(lambda x: grad(lambda x: loss(net, x))(x).sum())(x),
}


@pytest.mark.trap(28)
@pytest.mark.cell(
    "torch.func.grad, vjp",
    "record",
    note="After the transform, recorded values are plain tensors.",
)
@pytest.mark.parametrize("name", [*GRADS, "jvp", "jacrev", "jacfwd"])
def test_values_come_out_plain_whatever_the_transform(name, net, image, left_as_found):
    transform = {
        **GRADS,
        "jvp": lambda net, x: jvp(net, (x,), (x,)),
        "jacrev": lambda net, x: jacrev(net)(x),
        "jacfwd": lambda net, x: jacfwd(net)(x[:, :, :2, :2]),
    }[name]
    if name == "jacfwd":
        image = image[:, :, :2, :2]
    before, leaked = left_as_found(net), []
    with hl.record(net, copy=True) as expected:
        net(image)
    handle = net.stem.register_forward_hook(lambda module, args, output: leaked.append(output))
    with hl.record(net, copy=True) as run:
        transform(net, image)
    handle.remove()
    assert is_wrapped(leaked[0])  # a hook by hand
    assert same(values(run), values(expected))
    assert left_as_found(net) == before


@pytest.mark.cell("torch.func.grad, vjp", "gradients")
@pytest.mark.parametrize("name", ["grad", "grad, functional_call", "vjp"])
def test_gradients_are_autograds_in_place_layers_included(name, net, image):
    expected = by_batch(net, image)
    with hl.record(net, ports=PORTS) as run:
        GRADS[name](net, image)
    assert same(values(run), {key: value for key, value in expected.items() if ":grad" in key})


def test_of_nested_derivatives_the_innermost_is_recorded(net, image):
    expected = by_batch(net, image)
    with hl.record(net, ports=PORTS) as run:
        GRADS["grad of grad"](net, image)
    assert same(values(run), {key: value for key, value in expected.items() if ":grad" in key})


@pytest.mark.parametrize("name", ["grad", "vjp", "vmap of grad"])
def test_raw_backward_hooks_are_given_what_they_are_elsewhere(name, net, image):
    def seen(run):
        found = []

        def note(module, grad_input, grad_output):
            found.append((type(module), grad_input[0].clone(), grad_output[0].clone()))

        with hl.attach(net) as line:
            line.backward("**", note)
            run()
        return found

    x = image.clone().requires_grad_()
    expected = seen(lambda: loss(net, x).backward())
    transform = {
        **GRADS, "vmap of grad": lambda net, x: vmap(grad(lambda x: loss(net, x[None])))(x)
    }[name]  # fmt: skip
    found = seen(lambda: transform(net, image))
    assert [kind for kind, *_ in found] == [kind for kind, *_ in expected]
    if name == "vmap of grad":
        return  # wrappers of a transform that is over: the next test looks inside
    for (_, *some), (_, *others) in zip(found, expected, strict=True):
        for one, other in zip(some, others, strict=True):
            torch.testing.assert_close(one + 0, other)


def test_raw_backward_hooks_on_several_tensors_are_refused():
    class Both(nn.Module):
        def forward(self, a, b):
            return a * b

    model = Both()
    with hl.attach(model) as line:
        line.backward("", lambda *a: None)
        with pytest.raises(hl.AttachError, match=r"several tensors, and under torch.func a raw"):
            grad(lambda x: model(x, x * 2).sum())(torch.ones(2))
    with hl.record(model, ":grad_output") as run:
        grad(lambda x: model(x, x * 2).sum())(torch.ones(2))
    assert run[":grad_output"].tolist() == [1, 1]


@pytest.mark.cell("torch.func.grad, vjp", "edit", "edit gradients")
def test_edits_of_values_and_gradients_are_as_without_transforms(net, image):
    change = hl.edits.scale(0.5)
    for site in ("layer1.0.bn", "layer1.0.bn:grad_output", "fc:grad_input"):
        x = image.clone().requires_grad_()
        with hl.edit(net, site, change):
            loss(net, x).backward()
        with hl.edit(net, site, change):
            found = GRADS["grad"](net, image)
        torch.testing.assert_close(found, x.grad)
        assert not torch.allclose(found, GRADS["grad"](net, image))
    with hl.clip(net, "fc", norm=1e-3, ports="grad_output") as line:
        GRADS["grad"](net, image)
    assert line.report().clipped == 1
    torch.testing.assert_close(
        line.report().rows[0].largest, by_batch(net, image)["fc:grad_output"].norm().item()
    )


@pytest.mark.cell("torch.func.grad, vjp", "statistics", "features", "watch")
def test_statistics_and_features_are_right_inside_and_outside(net, image, capsys):
    with hl.record(net, "fc", keep=lambda t: t.norm()) as run:
        GRADS["grad"](net, image)
    torch.testing.assert_close(run["fc"], net(image).detach().norm())
    inside = grad(lambda x: hl.features(net, x, ["fc"], detach=False)["fc"].square().sum())(image)
    torch.testing.assert_close(inside, GRADS["grad"](net, image))
    with hl.watch(net, "fc"):
        GRADS["grad"](net, image)
    assert f"mean {net(image).mean().item():.4g}" in capsys.readouterr().out


def test_a_value_with_its_graph_is_part_of_the_loss_inside(net, image):
    def penalised(x):
        with hl.record(net, "stem", detach=False) as run:
            net(x)
        return run["stem"].square().sum()

    x = image.clone().requires_grad_()
    net.stem(x).square().sum().backward()
    torch.testing.assert_close(grad(penalised)(image), x.grad)


def test_a_value_overwritten_inside_transforms_is_refused_too(net, image):
    for transform in (GRADS["grad"], lambda net, x: vmap(net)(x[:, None])):
        with hl.record(net, ["layer1.0.bn", "stem"]) as run:
            transform(net, image)
        assert is_plain(run["stem"])
        with pytest.raises(hl.OverwrittenError, match=r"layer1\.0\.bn was overwritten in place"):
            run["layer1.0.bn"]


@pytest.mark.cell(
    "torch.func.grad, vjp",
    "gradients",
    note="A parameter's gradient is not recorded, because the transform returns it. If selected, a"
    " warning says so.",
)
def test_a_parameters_gradient_is_what_the_transform_returns(net, image):
    with pytest.warns(
        hl.HooklineWarning, match="torch.func returns gradients, and accumulates none"
    ):
        with hl.record(net, "fc", ports="grad"):
            GRADS["grad, functional_call"](net, image)


def test_a_silent_parameter_says_so_of_a_module_run_by_hand_too():
    model = nn.Sequential(nn.Linear(2, 1), nn.ReLU())

    def loss(x):
        return model[0](x).sum()  # no run of the model

    with pytest.warns(
        hl.HooklineWarning, match="torch.func returns gradients, and accumulates none"
    ):
        with hl.record(model, "0", ports=("output", "grad")):
            torch.func.grad(loss)(torch.ones(2))


@pytest.mark.trap(28)
@pytest.mark.cell(
    "torch.func.vmap",
    "record",
    "statistics",
    note="The recording holds the whole batch, along the first dimension. A `keep=` function"
    " gets one example at a time.",
)
def test_under_vmap_the_whole_batch_is_recorded_batch_in_front():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    x = torch.randn(5, 4)
    expected = model(x).detach()
    with hl.record(model, ports=("output", "input")) as run:
        vmap(model)(x)
    assert is_plain(run["1"])
    torch.testing.assert_close(run["1"], expected)
    assert torch.equal(run["0:input"], x)
    with hl.record(model, "1") as run:
        vmap(model, in_dims=1, out_dims=1)(x.T)
    torch.testing.assert_close(run["1"], expected)
    with hl.record(model, "1", keep=lambda t: (t.sum(), t.shape), copy=True) as run:
        vmap(model)(x)
    torch.testing.assert_close(run["1"][0], expected.sum(dim=1))
    assert run["1"][1] == (3,)
    with hl.record(model, "1", dtype=torch.float64) as run:
        vmap(vmap(model), in_dims=1)(x.reshape(5, 1, 4).expand(5, 2, 4))
    torch.testing.assert_close(run["1"], expected.double().expand(2, 5, 3), atol=1e-6, rtol=1e-5)


def test_a_value_that_does_not_depend_on_the_batch_has_none():
    model = nn.Sequential(nn.Linear(4, 3))
    constant = torch.randn(4)
    with hl.record(model, "0") as run:
        vmap(lambda x: model(constant) + x.sum())(torch.ones(5, 2))
    torch.testing.assert_close(run["0"], model(constant).detach())


@pytest.mark.cell(
    "torch.func.vmap",
    "record",
    note="For an ensemble by `stack_module_state`, the recording holds all members, along the"
    " first dimension.",
)
def test_an_ensemble_is_recorded_member_by_member():
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(4, 3), nn.ReLU()) for _ in range(3)]
    base, x = nn.Sequential(nn.Linear(4, 3), nn.ReLU()), torch.randn(2, 4)
    state = stack_module_state(models)
    with hl.record(base) as run:
        vmap(lambda state, x: functional_call(base, state, (x,)), (0, None))(state, x)
    torch.testing.assert_close(run["1"], torch.stack([model(x) for model in models]).detach())


@pytest.mark.cell(
    "torch.func.vmap",
    "gradients",
    note="Gradients that are computed inside `vmap`, as in `vmap(grad(f))`, are recorded.",
)
def test_gradients_of_each_example_are_those_of_it_alone(net, image):
    alone = []
    for one in image:
        alone.append(by_batch(net, one[None]))
    expected = {key: torch.stack([of[key] for of in alone]) for key in alone[0] if ":grad" in key}
    with hl.record(net, ports=PORTS) as run:
        vmap(grad(lambda x: loss(net, x[None])))(image)
    assert same(values(run), expected)
    with hl.record(net, "fc:grad_output") as run:
        rows = jacrev(net)(image)
    assert run["fc:grad_output"].shape == (10, 2, 5)
    torch.testing.assert_close(run["fc:grad_output"].reshape(10, 10), torch.eye(10))
    assert rows.shape == (2, 5, *image.shape)


@pytest.mark.cell(
    "torch.func.vmap",
    "gradients",
    "raw hooks",
    refused="AttachError",
    note="Hooks on gradients raise `AttachError` if the model runs in `vmap` without `grad`"
    " inside it.",
)
@pytest.mark.parametrize("port", ["grad_output", "grad_input", "raw"])
def test_gradients_that_flow_past_one_examples_value_are_refused(port, net, image):
    def attached():
        if port != "raw":
            return hl.record(net, "fc", ports=port)
        line = hl.attach(net)
        line.backward("fc", lambda *a: None)
        return line

    with attached(), pytest.raises(hl.AttachError) as caught:
        vmap(lambda x: net(x[None]))(image)
    assert "under vmap gradients flow through the whole batch" in str(caught.value)
    assert "vmap(grad(f))" in str(caught.value)
    with hl.watch(net, "fc"):  # gradients if there are any
        vmap(lambda x: net(x[None]))(image)


@pytest.mark.cell("torch.func.vmap", "edit", "features", "watch")
def test_edits_and_features_under_vmap_are_those_of_the_batch(net, image):
    for change in (
        hl.edits.scale(0.5),
        hl.edits.add(1.0),
        hl.edits.replace(0.3),
        hl.edits.clamp(0, 1),
    ):
        with hl.edit(net, "layer1", change):
            torch.testing.assert_close(vmap(lambda x: net(x[None])[0])(image), net(image))
    with (
        hl.edit(net, "fc", hl.edits.noise(0.1)),
        pytest.raises(RuntimeError, match="vmap: called random"),
    ):
        vmap(lambda x: net(x[None]))(image)
    found = vmap(lambda x: hl.features(net, x[None], ["fc"])["fc"][0])(image)
    torch.testing.assert_close(found, net(image).detach())
    with hl.edit(net, "fc:grad_output", lambda g: g * 0):
        assert not vmap(grad(lambda x: loss(net, x[None])))(image).any()
    with hl.clip(net, "fc", norm=1e-3, ports="grad_output") as line:
        vmap(grad(lambda x: loss(net, x[None])))(image)
    (row,) = line.report().rows
    assert (row.seen, row.clipped) == (2, 2)
    norms = [by_batch(net, one[None])["fc:grad_output"].norm().item() for one in image]
    torch.testing.assert_close(row.largest, max(norms))


def test_a_transform_inside_the_models_forward_leaks_nothing(tmp_path):
    class PerExample(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 2)

        def forward(self, x):
            return vmap(self.inner)(x), grad(lambda x: self.inner(x).sum())(x)

    model, x = PerExample(), torch.randn(4, 3)
    with hl.record(model, "inner", copy=True) as run:
        model(x)
    for value in run.calls("inner"):
        assert is_plain(value)
        torch.testing.assert_close(value, model.inner(x).detach())
    assert run.to_dict()["sites"][0]["shape"] == "[4, 2]"
    assert hl.open(run.save(tmp_path / "run")).calls("inner")[0].shape == (4, 2)
    assert not run.lost


def test_an_edit_under_vmap_in_a_checkpoint_is_of_both_runs():
    inner, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    model = nn.Sequential(inner)
    model.forward = lambda x: checkpoint(vmap(inner), x, use_reentrant=True)
    with hl.edit(model, "0", hl.edits.scale(2.0)):
        model(x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * inner.weight.sum(0).expand(3, 4))


def test_what_one_vmap_recorded_is_plain_under_the_next(net, image):
    with hl.record(net, "fc") as run:
        vmap(lambda x: net(x[None]))(image)
    shapes = []
    vmap(lambda x: (shapes.append(run["fc"].shape), x)[1])(image)
    assert shapes == [(2, 1, 5)]


def test_recordings_of_transforms_are_saved_copied_and_freed(net, image, tmp_path):
    with hl.record(net, "fc") as run:
        vmap(lambda x: net(x[None]))(image)
    run.save(tmp_path / "run")
    assert not run.lost
    assert torch.equal(hl.open(tmp_path / "run")["fc"], run["fc"])
    gc.collect()
    gc.disable()
    try:
        alive = weakref.ref(run)
        value = weakref.ref(run._log.passes[0].log[0][1])
        del run
        assert alive() is None
        assert value() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("transform", ["grad", "vmap of grad", "jacrev"])
def test_written_views_have_their_own_gradients_under_transforms(transform):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    sequences = torch.randn(2, 3, 4)  # of which linear returns a view

    def recorded(action):
        with hl.record(model, ports=PORTS) as run:
            action()
        return values(run)

    def backward(x, loss):
        x = x.clone().requires_grad_()
        return recorded(lambda: loss(model(x)).backward())

    if transform == "grad":
        found = recorded(lambda: grad(lambda x: model(x).sum())(sequences))
        expected = backward(sequences, torch.sum)
    elif transform == "vmap of grad":
        found = recorded(lambda: vmap(grad(lambda x: model(x[None]).sum()))(sequences))
        each = [backward(one[None], torch.sum) for one in sequences]
        expected = {site: torch.stack([of[site] for of in each]) for site in each[0]}
    else:
        found = recorded(lambda: jacrev(lambda x: model(x).sum(dim=(0, 1)))(sequences))
        each = [backward(sequences, lambda y, k=k: y[..., k].sum()) for k in range(2)]
        expected = {site: torch.stack([of[site] for of in each]) for site in each[0]}
    assert same(found, expected)
