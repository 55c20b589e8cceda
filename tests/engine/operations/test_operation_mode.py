"""The function mode that hands a module's own calls to operations."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import hookline as hl
from hookline.engine.torch_private.graph.function_modes import n_modes


class Block(nn.Module):
    """Calls functions in each way: operators, in place, in a helper, in a module made here."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.outer = nn.Linear(4, 4)

    def forward(self, x):
        y = F.relu(self.inner(x))
        y = nn.Softmax(dim=-1)(_helped(y))
        z = self.outer(y) * 2
        z.sigmoid_()
        return z + x


def _helped(x):
    return torch.tanh(x)


class Net(nn.Module):
    def __init__(self, use_reentrant=None):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.use_reentrant = use_reentrant

    def forward(self, x):
        for block in self.blocks:
            if self.use_reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return F.gelu(x)


OPERATIONS = ["relu", "tanh", "softmax", "mul", "sigmoid_", "add"]
SITES = [f"blocks.{k}@{name}" for k in range(2) for name in OPERATIONS] + ["@gelu"]


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return Net()


@pytest.fixture(scope="module")
def x():
    return torch.randn(3, 4)


def _by_hand(block, x):
    y = F.relu(block.inner(x))
    tanh = torch.tanh(y)
    softmax = tanh.softmax(-1)
    mul = block.outer(softmax) * 2
    return {
        "relu": y, "tanh": tanh, "softmax": softmax, "mul": mul, "sigmoid_": mul.sigmoid(),
        "add": mul.sigmoid() + x,
    }  # fmt: skip


def _oracle(net, x):
    values = {}
    for k, block in enumerate(net.blocks):
        found = _by_hand(block, x)
        values |= {f"blocks.{k}@{name}": value for name, value in found.items()}
        x = found["add"]
    return {**values, "@gelu": F.gelu(x)}


def test_each_own_call_is_recorded_and_no_call_of_a_child(net, x):
    bare = net(x)
    with hl.record(net, SITES, copy=True) as run:
        out = net(x)
    assert torch.equal(out, bare)
    for site, value in _oracle(net, x).items():
        (recorded,) = run.calls(site)  # one: the ReLU inside is a call of its own module
        assert torch.equal(recorded, value), site


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_edit_changes_what_follows(net, x, name):
    with hl.edit(net, f"blocks.1@{name}", lambda value: value * 0 + 0.5):
        out = net(x)
    first, second = net.blocks
    before = _by_hand(first, x)["add"]
    expected = _replaced(second, before, name)
    assert torch.allclose(out, F.gelu(expected), atol=1e-6)


def _replaced(block, x, name):
    half = lambda value, this: value * 0 + 0.5 if this == name else value  # noqa: E731
    y = half(F.relu(block.inner(x)), "relu")
    y = half(half(torch.tanh(y), "tanh").softmax(-1), "softmax")
    z = half(half(block.outer(y) * 2, "mul").sigmoid(), "sigmoid_")
    return half(z + x, "add")


def test_an_edit_of_an_in_place_call_has_right_gradients(net, x):
    x = x.clone().requires_grad_()
    with hl.edit(net, "blocks.1@sigmoid_", lambda value: value * 3):
        net(x).sum().backward()
    grad, x.grad = x.grad, None
    before = _by_hand(net.blocks[0], x)["add"]
    found = _by_hand(net.blocks[1], before)
    F.gelu(found["sigmoid_"] * 3 + before).sum().backward()
    assert torch.allclose(grad, x.grad)


def test_inplace_arguments_and_out_are_written_to_as_well():
    class InPlace(nn.Module):
        def forward(self, x):
            y, z = x.clone(), torch.empty_like(x)
            F.relu(y, True)
            torch.mul(x, 2, out=z)
            return y + z

    model, x = InPlace(), torch.tensor([-1.0, 2.0])
    with hl.edit(model, "@relu", lambda value: value + 10):
        assert model(x).tolist() == [8.0, 16.0]
    with hl.edit(model, "@mul", lambda value: value + 10):
        assert model(x).tolist() == [8.0, 16.0]


def test_gradients_of_operations_are_autograds(net, x):
    sites = ["blocks.0@tanh:grad_output", "blocks.1@mul:grad_input"]
    with hl.record(net, sites) as run:
        net(x).sum().backward()
    found = _by_hand(net.blocks[0], x)
    second = _by_hand(net.blocks[1], found["add"])
    loss = F.gelu(second["add"]).sum()
    wanted = torch.autograd.grad(loss, [found["tanh"], second["mul"]], retain_graph=True)
    assert torch.allclose(run[sites[0]], wanted[0])
    assert run[sites[1]]["input"].shape == (3, 4)


def test_inputs_have_the_names_of_arguments(net, x):
    with hl.record(net, ["blocks.0@add:input.other", "blocks.0@softmax:input"]) as run:
        net(x)
    assert torch.equal(run["blocks.0@add:input.other"], x)
    assert run["blocks.0@softmax:input"]["dim"] == -1


def test_a_call_is_chosen_by_its_number():
    class Twice(nn.Module):
        def forward(self, x):
            return (x + 1).exp().exp()

    model = Twice()
    with hl.record(model, "@exp#1") as run:
        out = model(torch.zeros(1))
    assert torch.equal(run["@exp#1"], out)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_calls_are_those_of_the_plain_model(x, use_reentrant):
    torch.manual_seed(0)
    plain = Net()
    torch.manual_seed(0)
    net = Net(use_reentrant)
    x = x.clone().requires_grad_()
    both = []
    for model in (plain, net):
        with hl.record(model, [*SITES, "blocks.0@tanh:grad_output"], copy=True) as run:
            with hl.edit(model, "blocks.1@softmax", hl.edits.scale(0.5)):
                model(x).sum().backward()
        both.append(run)
        grad, x.grad = x.grad, None
        both.append(grad)
    first, grad, second, again = both
    assert torch.equal(grad, again)
    for site in [*SITES, "blocks.0@tanh:grad_output"]:
        assert len(first.calls(site)) == len(second.calls(site)) == 1
        assert torch.equal(first[site], second[site]), site


def test_a_hook_registered_later_makes_no_own_calls(net, x):
    with hl.record(net, "blocks.0@relu", copy=True) as run:
        before = net.blocks[0].register_forward_pre_hook(_call_relu)
        after = net.blocks[0].register_forward_hook(_call_relu, prepend=True)
        net(x)
        before.remove()
        after.remove()
    assert len(run.calls("blocks.0@relu")) == 1


def _call_relu(module, args, output=None):
    torch.relu(args[0])


def test_lines_of_two_threads_see_their_own_runs(net, x):
    found = {}

    def work(name, scale):
        with hl.record(net, "blocks.0@tanh", copy=True) as run:
            net(x * scale)
        found[name] = run

    threads = [threading.Thread(target=work, args=(k, k + 1.0)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k, run in found.items():
        (value,) = run.calls("blocks.0@tanh")
        assert torch.equal(value, _by_hand(net.blocks[0], x * (k + 1.0))["tanh"])


def test_another_thread_runs_as_without_the_line(net, x):
    bare, out = net(x), []
    with hl.edit(net, "blocks.0@tanh", lambda value: value * 0) as line:
        thread = threading.Thread(target=lambda: out.append(net(x)))
        thread.start()
        thread.join()
        net(x)
    assert torch.equal(out[0], bare)
    assert line.report().n_fired == 1


def test_two_lines_on_one_module_share_its_mode(net, x):
    with hl.edit(net, "blocks.0@tanh", lambda value: value * 0):
        with hl.record(net, "blocks.0@tanh") as run:
            net(x)
        assert run["blocks.0@tanh"].abs().max() == 0
        net(x)
    assert n_modes() == 0


def test_a_line_that_ends_in_the_forward_leaves_no_mode(net, x):
    lines = []

    def end(module, args, output):
        lines[0].remove()

    handle = net.blocks[0].inner.register_forward_hook(end)
    lines.append(hl.record(net, ["blocks.0@tanh", "blocks.0.outer"]))
    with pytest.warns(hl.HooklineWarning):
        net(x)
    handle.remove()
    assert n_modes() == 0


def test_a_mode_that_ctrl_c_has_left_is_dropped(net, x):
    def interrupt(module, args):
        raise KeyboardInterrupt

    with hl.record(net, "blocks.1@tanh") as run:
        handle = net.blocks[1].outer.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            net(x)
        handle.remove()
        assert n_modes() == 1
        with _Other():
            net(x)
            assert n_modes() == 1  # the other mode stays
    assert n_modes() == 0
    assert len(run.passes) == 2


class _Other(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_an_earlier_hook_that_raises_turns_no_other_mode_off(net, x):
    def fail(value):
        raise ZeroDivisionError

    with hl.record(net, "blocks.0@tanh"), hl.edit(net, "blocks.0:input", fail), _Other():
        with pytest.raises(ZeroDivisionError):
            net(x)
        assert n_modes() == 1


class Operators(nn.Module):
    """Python tries another operator, or compares identities, where one raises a TypeError."""

    def forward(self, x):
        y = x * 1
        y += 1
        return torch.where(torch.as_tensor(y == 2), y, -y)


@pytest.mark.parametrize("name", ["mul", "add_", "eq"])
def test_an_error_in_an_operator_is_not_hidden(name):
    operators = Operators()
    with hl.edit(operators, f"@{name}", lambda t: t[:1]), pytest.raises(hl.StructureError):
        operators(torch.ones(2, 3))


@pytest.mark.parametrize("name", ["mul", "add_", "eq"])
def test_a_type_error_in_an_operator_is_not_hidden(name):
    def fails(value):
        raise TypeError("it fails")

    operators = Operators()
    for line in (
        hl.edit(operators, f"@{name}", fails),
        hl.record(operators, f"@{name}:input", keep=fails),
    ):
        with line, pytest.raises(hl.AttachError, match=rf"@{name}\S* raised TypeError: it fails"):
            operators(torch.ones(2, 3))


def test_an_operator_of_another_class_is_still_tried():
    class Offset:
        def __radd__(self, tensor):
            return tensor.add(2)

    class Adds(nn.Module):
        def forward(self, x):
            return x + Offset()

    adds = Adds()
    with hl.record(adds, "@add") as run:
        assert torch.equal(adds(torch.ones(2)), torch.full((2,), 3.0))
    assert torch.equal(run["@add"], torch.full((2,), 3.0))


def test_copies_of_a_model_with_hooks_are_bare(net, x):
    bare = net(x)
    with hl.edit(net, ["blocks.*@tanh", "@gelu"], lambda value: value * 0):
        copies = [copy.deepcopy(net), pickle.loads(pickle.dumps(net))]
        for model in copies:
            assert torch.equal(model(x), bare)
            assert len(hl.inventory(model)) == 0
        net(x)
    assert len(hl.inventory(net)) == 0


def test_modules_without_an_operation_stay_bare(net):
    line = hl.record(net, "blocks.0@tanh")
    paths = {entry.path for entry in hl.inventory(net)} - {""}
    with pytest.warns(hl.HooklineWarning):
        line.remove()
    assert paths == {"blocks.0", "blocks.0@tanh"}


def test_raw_hooks_on_an_operation_are_called(net, x):
    calls = []
    with hl.attach(net) as line:
        line.forward_pre("blocks.0@tanh", lambda module, args: calls.append(len(args)))
        line.forward("blocks.0@tanh", lambda module, args, output: calls.append(output.shape))
        line.backward("blocks.0@tanh", lambda module, gi, go: calls.append(gi[0].shape))
        net(x).sum().backward()
    assert calls == [1, (3, 4), (3, 4)]


def test_hooks_on_events_of_modules_are_refused_on_operations(net):
    with hl.attach(net) as line:
        with pytest.raises(hl.SelectionError, match=r"Select the module itself: 'blocks\.0'"):
            line.state_dict("blocks.0@tanh", lambda *event: None)


def test_everywhere_sees_modules_and_no_operations(net, x):
    kinds = set()
    with hl.record(net, "blocks.0@tanh"), hl.attach(hl.EVERYWHERE) as line:
        line.forward(None, lambda module, args, output: kinds.add(type(module)))
        net(x)
    assert kinds == {nn.Linear, nn.ReLU, nn.Sequential, nn.Softmax, Block, Net}
