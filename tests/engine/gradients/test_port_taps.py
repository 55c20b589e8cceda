"""Gradient taps: values that are written to later, what is left behind, what is set free."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

import hookline as hl
from zoo import Asking, Residual


class Thrice(nn.Module):
    """Takes its input three times, so that the order in which gradients are added up is seen."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.q(x) * self.k(x) + self.v(x)


class Adding(nn.Module):
    """What the inner module returns is changed in place, as residual branches are."""

    def __init__(self, inner):
        super().__init__()
        self.stem, self.inner, self.head = nn.Linear(4, 4), inner, nn.Linear(4, 1)

    def forward(self, x):
        y = self.inner(self.stem(x))
        y += 1
        y *= 2
        return self.head(y)


class InPlace(nn.Module):
    """A composite module that changes its input in place, after another use of it."""

    def __init__(self):
        super().__init__()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        y = x + 1
        return self.act(x) * 2 + y


@pytest.fixture
def x():
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(2))


def loss_of(model, x):
    return model(x).square().sum()


def input_gradients(model, x):
    """What autograd gives for the first input of each module, from plain hooks' edges."""
    edges: dict[str, object] = {}

    def note(path):
        def hook(module, args):
            if args[0].requires_grad:
                edges[path] = get_gradient_edge(args[0])

        return hook

    handles = [m.register_forward_pre_hook(note(path)) for path, m in model.named_modules()]
    loss = loss_of(model, x)
    for handle in handles:
        handle.remove()
    return dict(zip(edges, torch.autograd.grad(loss, list(edges.values())), strict=True))


def bare_gradients(model, x):
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_the_gradients_of_inputs_are_autograds(net, image, mode):
    getattr(net, mode)()
    expected = input_gradients(net, image)
    with hl.record(net, None, ports="grad_input") as run:
        loss_of(net, image).backward()
    assert len(expected) > 10
    assert all(torch.equal(run[f"{path}:grad_input"], grad) for path, grad in expected.items())
    assert run["stem:grad_input"] is None


def test_the_gradient_of_an_input_is_over_all_its_uses(x):
    torch.manual_seed(0)
    model = Residual(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    with hl.record(model, ["inner:grad_input", "stem:grad_output"]) as run:
        loss_of(model, x).backward()
    assert torch.equal(run["inner:grad_input"], run["stem:grad_output"])
    assert torch.equal(run["inner:grad_input"], input_gradients(model, x)["inner"])


def test_a_tensor_given_as_several_arguments_has_one_gradient(x):
    torch.manual_seed(0)
    model = Asking()
    expected = input_gradients(model, x)["attention"]
    with hl.record(model, "attention:grad_input") as run:
        loss_of(model, x).backward()
    found = run["attention:grad_input"]
    assert list(found) == ["query", "key", "value", "mask"]
    assert found["mask"] is None
    assert all(torch.equal(found[name], expected) for name in ("query", "key", "value"))


@pytest.mark.parametrize("ports", ["grad_output", "grad_input", "grad"])
def test_recording_changes_no_bit_of_outputs_and_gradients(net, image, x, ports):
    torch.manual_seed(0)
    models = [
        (net.train(), image),
        (Residual(nn.Sequential(nn.Linear(4, 4), nn.Tanh())), x),
        (Residual(Thrice()), torch.randn(64, 4)),
        (Asking(), x),
        (Adding(nn.Identity()), x),
        (nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), x[None]),
    ]
    for model, given in models:
        buffers = {name: b.clone() for name, b in model.named_buffers()}
        expected = bare_gradients(model, given)
        model.load_state_dict({**model.state_dict(), **buffers})
        with hl.record(model, ports=ports):
            found = bare_gradients(model, given)
        assert all(map(torch.equal, found, expected)), type(model)


# -- values that are written to later -------------------------------------------------------------


@pytest.mark.parametrize("n_dims", [2, 3])  # of a batch of sequences, Linear returns a view
@pytest.mark.parametrize("between", [nn.Identity(), nn.Dropout().eval(), nn.Flatten(0, -2), None])
@pytest.mark.parametrize("ports", ["grad_output", "grad_input", ("grad_output", "grad_input")])
@pytest.mark.trap(44)
def test_an_in_place_layer_hides_no_gradient_before_it(n_dims, between, ports):
    torch.manual_seed(0)
    act = nn.ReLU(inplace=True)
    before = [nn.Linear(4, 4), act] if between is None else [nn.Linear(4, 4), between, act]
    model = nn.Sequential(*before, nn.Linear(4, 2))
    x = torch.randn(*(3, 2, 4)[-n_dims:])
    hidden = model[0](x).detach().requires_grad_()
    (expected,) = torch.autograd.grad(model[-1](hidden.relu()).square().sum(), hidden)
    sites = ["0:grad_output", "1:grad_input"]
    if between is not None:
        sites += ["1:grad_output", "2:grad_input"]
    with hl.record(model, ports=ports) as run:
        loss_of(model, x).backward()
    sites = [site for site in sites if site.partition(":")[2] in ports]
    assert sites
    for site in sites:
        assert torch.equal(run[site].reshape(hidden.shape), expected), site


@pytest.mark.parametrize("inner", [nn.Identity(), nn.Linear(4, 4)])
@pytest.mark.parametrize("ports", ["grad_output", "grad_input", ("grad_output", "grad_input")])
def test_what_is_added_to_after_a_module_has_its_gradient_there(x, inner, ports):
    torch.manual_seed(0)
    model = Adding(inner)
    given = model.stem(x).detach().requires_grad_()
    hidden = inner(given)
    loss = model.head((hidden + 1) * 2).square().sum()
    expected = torch.autograd.grad(loss, [given, hidden])
    with hl.record(model, "inner", ports=ports) as run:
        loss_of(model, x).backward()
    for site, grad in zip(["inner:grad_input", "inner:grad_output"], expected, strict=True):
        assert site not in run or torch.equal(run[site], grad)
    assert len(run) == (2 if isinstance(ports, tuple) else 1)


def test_an_input_a_composite_changes_has_its_whole_gradient(x):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), InPlace(), nn.Linear(4, 1))
    for given in (x, x.expand(2, 3, 4).contiguous()):
        hidden = model[0](given).detach().requires_grad_()
        loss = model[2](hidden.relu() * 2 + (hidden + 1)).square().sum()
        (expected,) = torch.autograd.grad(loss, hidden)
        with hl.record(model, ["1:grad_input", "1.act:grad_input", "0:grad_output"]) as run:
            loss_of(model, given).backward()
        assert len(run) == 3
        assert all(torch.equal(grad, expected) for grad in run.values())


def test_a_part_changed_in_place_has_its_own_gradient_alone(x):
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.part = nn.Linear(4, 4), nn.Hardtanh(inplace=True)

        def forward(self, x):
            whole = self.stem(x)
            self.part(whole[:, 1:3])
            return whole

    torch.manual_seed(0)
    model = Part()
    weights = torch.randn(3, 4)
    hidden = model.stem(x).detach()
    whole = weights.clone()
    whole[:, 1:3] *= ((hidden > -1) & (hidden < 1)).float()[:, 1:3]
    with hl.record(model, ["part:grad_input", "stem:grad_output"]) as run:
        (model(x) * weights).sum().backward()
    assert torch.equal(run["part:grad_input"], whole[:, 1:3])
    assert torch.equal(run["stem:grad_output"], whole)
    with (
        hl.edit(model, "part:grad_input", torch.zeros_like),
        hl.record(model, "stem:grad_output") as run,
    ):
        (model(x) * weights).sum().backward()
    whole[:, 1:3] = 0
    assert torch.equal(run["stem:grad_output"], whole)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("n_dims", [2, 3])
def test_consumers_are_edited_before_producers_are_recorded(inplace, n_dims):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=inplace), nn.Linear(4, 2))
    x = torch.randn(*(3, 2, 4)[-n_dims:])
    with (
        hl.edit(model, "1:grad_input", lambda g: torch.full_like(g, 7)),
        hl.record(model, ["0:grad_output", "1:grad_input"]) as run,
    ):
        model(x).sum().backward()
    assert run["1:grad_input"].unique().tolist() == [7.0]
    assert run["0:grad_output"].unique().tolist() == [7.0]


@pytest.mark.filterwarnings("ignore:Complex modules")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_views_of_every_kind_of_number_are_followed(dtype):
    model = Adding(nn.Identity()).to(dtype)
    with hl.record(model, ["stem:grad_output", "inner:grad_input"]) as run:
        model(torch.ones(2, 3, 4, dtype=dtype)).abs().sum().backward()
    assert run["stem:grad_output"].dtype == dtype
    assert torch.equal(run["stem:grad_output"], run["inner:grad_input"])


def test_gradients_of_written_views_can_be_differentiated_again(x):
    torch.manual_seed(0)
    model = Adding(nn.Identity())
    x = x.expand(2, 3, 4).clone().requires_grad_()
    with hl.record(model, "stem:grad_output", detach=False) as run:
        torch.autograd.grad(loss_of(model, x), x, create_graph=True)
    (again,) = torch.autograd.grad(run["stem:grad_output"].sum(), x)
    assert again.abs().sum() > 0


# -- what is set free -----------------------------------------------------------------------------


class Recurrent(nn.Module):
    """Views, tuples, an in-place layer: whatever a hook could keep alive."""

    def __init__(self):
        super().__init__()
        self.stem, self.same, self.act = nn.Linear(4, 4), nn.Identity(), nn.ReLU(inplace=True)
        self.lstm = nn.LSTM(4, 4)

    def forward(self, x):
        return self.lstm(self.act(self.same(self.stem(x))))[0]


@pytest.mark.parametrize(
    "options",
    [{}, {"copy": True}, {"keep": lambda g: g[:1]}, {"detach": False}],
    ids=["plain", "copy", "keep", "graph"],
)
@pytest.mark.parametrize("ports", [("grad_output", "grad_input"), ("grad_output", "output")])
@pytest.mark.parametrize("steps", ["forward", "backward", "attached for long"])
@pytest.mark.filterwarnings("ignore:hl.record.*no gradient flowed back")  # as it says
def test_a_step_leaves_no_tensor_alive(options, ports, steps):
    model, alive = Recurrent(), []
    if "output" in ports:
        options = {**options, "keep": None}  # which would be given tuples, too

    def step(forward):
        x = torch.randn(3, 2, 4, requires_grad=True)
        y = forward(x)
        alive.extend([weakref.ref(x), weakref.ref(y)])  # the graph holds x
        if steps != "forward":
            torch.autograd.grad(
                y.pow(3).sum(), model.stem.weight, create_graph=not options.get("detach", True)
            )

    gc.collect()
    gc.disable()  # what is freed now, nothing else holds, itself included
    try:
        line = hl.edit(model, None, lambda g: g * 1, ports=("grad_output", "grad_input"))
        line.options.quiet = True
        if steps != "attached for long":
            line.remove()
        for _ in range(5):
            with hl.record(model, None, ports=ports, **options) as run:
                step(model)
            sites = [site for site in ("act", "act:grad_output", "stem:grad_output") if site in run]
            alive += [weakref.ref(run[site]) for site in sites]
            del run
        assert len(alive) == (10 if steps == "forward" else 20) + 5 * ("output" in ports)
        assert not sum(ref() is not None for ref in alive)
        line.remove()
    finally:
        gc.enable()


@pytest.mark.parametrize("has_backward", [True, False])
@pytest.mark.slow
def test_two_hundred_steps_with_lines_attached_keep_nothing(has_backward):
    def bytes_alive():
        gc.collect()
        plain = (torch.Tensor, nn.Parameter)  # not the fake ones that compilers keep
        alive = [t for t in gc.get_objects() if type(t) in plain]
        found = [t.untyped_storage() for t in alive if t.layout is torch.strided]
        by_address = {storage.data_ptr(): storage.nbytes() for storage in found}
        return sum(by_address.values()), len(gc.get_objects())

    model, x = Recurrent(), torch.randn(3, 16, 4)
    line = hl.edit(model, ["stem", "lstm", "act"], lambda g: g * 0.5, ports="grad_output")
    measured = []
    for k in range(200):
        y = model(x)
        if has_backward:
            y.sum().backward()
        del y
        model.zero_grad()
        if k in (20, 199):
            measured.append(bytes_alive())
    line.options.quiet = True  # without a backward it would say so
    line.remove()
    (before, n_before), (after, n_after) = measured
    assert after - before < 1_000_000
    assert n_after - n_before < 400  # objects: two for each step would be too many


# -- copies, and lines that ended -----------------------------------------------------------------


@pytest.mark.parametrize("make", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_with_gradient_hooks_is_inert(net, image, make):
    ports = ("grad_output", "grad_input", "grad")
    with hl.record(net, ports=ports) as run, hl.edit(net, "fc:grad_output", hl.edits.scale(0)):
        other = make(net)
        other(image).sum().backward()
        assert not run.passes
        assert other.fc.weight.grad.abs().sum() > 0
        net(image).sum().backward()
    assert not net.fc.weight.grad.any()
    assert not len(hl.inventory(other))
    assert not len(hl.inventory(net))


def test_a_line_ended_before_backward_leaves_gradients_alone(net, image):
    _, *expected = bare_gradients(net, image)
    net.zero_grad()
    line = hl.record(net, ports=("grad_output", "grad_input", "grad"))
    loss = loss_of(net, image)
    with pytest.warns(hl.HooklineWarning, match="no gradient flowed back"):
        line.remove()
    loss.backward()
    assert not [value for value in line.recording.passes[0].values() if value is not None]
    assert all(torch.equal(p.grad, e) for p, e in zip(net.parameters(), expected, strict=True))


def test_a_parameters_gradient_of_another_thread_says_so():
    model = nn.Linear(2, 1)

    def train():
        model(torch.ones(1, 2)).sum().backward()

    line = hl.record(model, "weight:grad")
    one = threading.Thread(target=train)
    one.start()
    one.join()
    with pytest.warns(hl.HooklineWarning, match=r"its gradient flowed back in another thread"):
        line.remove()
    assert model.weight.grad is not None


class Learned(nn.Module):
    """Gives a parameter to a module, which hands it on by way of an identity."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.query, self.block = nn.Parameter(torch.randn(2, 4)), nn.Module()
        self.block.drop, self.block.fc = nn.Dropout(0.0), nn.Linear(4, 4, bias=False)
        self.block.forward = lambda x: self.block.fc(self.block.drop(x)) + x

    def forward(self):
        return self.block(self.query)


@pytest.mark.parametrize("raw", [[], ["block"], ["block.fc"], ["block", "block.fc"]])
@pytest.mark.parametrize("more", [[], ["block"], ["block.drop"], ["block", "block.drop"]])
def test_a_leafs_gradient_is_the_same_with_outer_modules(more, raw):
    model = Learned().eval()
    with hl.attach(model) as line, hl.record(model, ["block.fc", *more], ports="grad_input") as run:
        for path in raw:
            line.backward(path, lambda module, grad_input, grad_output: None)
        model().sum().backward()
    assert torch.equal(run["block.fc:grad_input"], torch.ones(2, 4) @ model.block.fc.weight)


@pytest.mark.parametrize("more", [[], ["block"], ["block.drop"]])
def test_an_edit_of_a_leafs_gradient_is_recorded_once(more):
    model = Learned().eval()
    edits = {"block.fc:grad_input": lambda g: g * 10} | {
        f"{path}:grad_input": lambda g: g.clone() for path in more
    }
    with hl.record(model, ["block.fc", *more], ports="grad_input") as run, hl.edit(model, edits):
        model().sum().backward()
    through = torch.ones(2, 4) @ model.block.fc.weight
    assert torch.allclose(run["block.fc:grad_input"], 10 * through)
    assert torch.allclose(model.query.grad, 10 * through + 1)
