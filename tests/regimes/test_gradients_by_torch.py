"""Gradients in each regime: recorded, changed and clipped as torch's own hooks do, by numbers."""

from __future__ import annotations

import copy
import runpy
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.func import grad, vmap
from torch.nn.utils import parametrizations, prune
from torch.testing import assert_close

import hookline as hl
from by_torch import (
    assert_gradients_are_torchs,
    clipped_by_torch,
    gradients_of,
    hooked_by_torch,
    nth,
    raw_hook,
    triple,
)
from zoo import (
    ROWS,
    Checkpointed,
    Delegating,
    NotCheckpointed,
    Recursive,
    Tagged,
    encoder,
    int8_net,
    lazy_net,
    rows_net,
)

HERE = Path(__file__).parent
both_ports = pytest.mark.parametrize("site", ["0:grad_output", "2:grad_input"])


def step(model, x=ROWS):
    model(x).square().sum().backward()


@pytest.mark.cell("autocast", "gradients", "edit gradients", "raw hooks", "clip")
@both_ports
def test_under_autocast(site):
    def cast(model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(ROWS).square().sum()
        loss.backward()

    assert_gradients_are_torchs(rows_net, cast, site)


@pytest.mark.cell("activation checkpointing", "gradients", "edit gradients", "raw hooks", "clip")
@pytest.mark.parametrize("site", ["0:grad_output", "1:grad_output", "1:grad_input", "2:grad_input"])
@pytest.mark.parametrize("is_reentrant", [True, False])
def test_under_checkpointing(site, is_reentrant):
    def checkpointed():
        model = Checkpointed(*rows_net())
        model.is_reentrant = is_reentrant
        return model

    assert_gradients_are_torchs(
        checkpointed, step, site, plain=lambda: NotCheckpointed(*rows_net())
    )


@pytest.mark.cell("torch.compile", "gradients", "edit gradients", "clip")
@pytest.mark.cell(
    "activation checkpointing in compiled code", "gradients", "edit gradients", "clip"
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("site", ["block:grad_input", "block.linear:grad_output"])
@pytest.mark.compiles
def test_in_compiled_code(site, compiled_block):
    model, run, plain = compiled_block

    def cleared(one):
        one.zero_grad()
        step(run if one is model else one)

    assert_gradients_are_torchs(
        lambda: model, cleared, site, ["gradients", "edit gradients", "clip"], plain=lambda: plain
    )


def of_input(model):
    x = ROWS.clone().requires_grad_()
    model(x).square().sum().backward()
    return [x.grad]


def silent(model):
    """Without what backward leaves in the parameters: transforms leave nothing there."""
    return model.requires_grad_(False)


@pytest.mark.cell("torch.func.grad, vjp", "gradients", "edit gradients", "raw hooks", "clip")
@both_ports
def test_under_grad_of_torch_func(site):
    def transformed(model):
        return [grad(lambda x: model(x).square().sum())(ROWS)]

    assert_gradients_are_torchs(
        lambda: silent(rows_net()), transformed, site, plain=(lambda: silent(rows_net()), of_input)
    )


@pytest.mark.cell("torch.func.vmap", "edit gradients", "clip")
@both_ports
def test_each_example_under_vmap_is_clipped_and_edited_by_itself(site):
    def mapped(model):
        return [vmap(grad(lambda x: model(x).square().sum()))(ROWS)]

    def one_by_one(model):
        found = []
        for row in ROWS:
            x = row.clone().requires_grad_()
            model(x).square().sum().backward()
            found.append(x.grad)
        return [torch.stack(found)]

    assert_gradients_are_torchs(
        lambda: silent(rows_net()), mapped, site, ["edit gradients", "clip"],
        plain=(lambda: silent(rows_net()), one_by_one),
    )  # fmt: skip


def seeded(model):
    torch.manual_seed(0)
    step(model)


@pytest.mark.cell("torch.func.vmap", "gradients", "statistics")
@both_ports
def test_gradients_of_each_example_under_vmap_are_recorded(site):
    model, plain = silent(rows_net()), silent(rows_net())
    with hooked_by_torch(plain, site) as came:
        for row in ROWS:
            plain(row.clone().requires_grad_()).square().sum().backward()
    with hl.record(model, site) as run, hl.record(model, site, keep=torch.norm) as norms:
        vmap(grad(lambda x: model(x).square().sum()))(ROWS)
    assert_close(run[site], torch.stack(came))
    assert_close(norms[site], torch.stack([one.norm() for one in came]))


@pytest.mark.cell(
    "lazy modules, before their first run", "gradients", "edit gradients", "raw hooks"
)
@both_ports
def test_on_the_first_run_of_lazy_modules(site):
    assert_gradients_are_torchs(lazy_net, seeded, site)


@pytest.mark.cell("parametrized weights", "gradients", "edit gradients", "raw hooks", "clip")
@pytest.mark.parametrize(
    "change",
    [parametrizations.weight_norm, parametrizations.orthogonal, parametrizations.spectral_norm],
)
@both_ports
def test_with_parametrized_weights(site, change):
    assert_gradients_are_torchs(partial(rows_net, change), step, site)


@pytest.mark.cell(
    "pruning; old `weight_norm` and `spectral_norm`",
    "gradients",
    "edit gradients",
    "raw hooks",
    "clip",
)
@pytest.mark.filterwarnings("ignore:.*weight_norm` is deprecated")
@pytest.mark.parametrize(
    "change",
    [
        lambda module: prune.l1_unstructured(module, "weight", 0.5),
        nn.utils.weight_norm,
        nn.utils.spectral_norm,
    ],
    ids=["prune", "weight_norm", "spectral_norm"],
)
@both_ports
def test_with_pruned_and_normed_weights(site, change):
    assert_gradients_are_torchs(partial(rows_net, change), step, site)


@pytest.mark.cell("pruning; old `weight_norm` and `spectral_norm`", "clip")
def test_a_pruned_parameters_gradient_is_clipped_as_torch_does():
    change = partial(prune.l1_unstructured, name="weight", amount=0.5)
    bare = gradients_of(rows_net(change), step)
    model = rows_net(change)
    with hl.clip(model, norm=0.1):
        assert_close(gradients_of(model, step), clipped_by_torch(bare, norm=0.1))


@pytest.mark.cell(
    "modules with their own `__getattr__`, `__setattr__`",
    "gradients",
    "edit gradients",
    "raw hooks",
    "clip",
)
@pytest.mark.parametrize("site", ["inner.0:grad_output", "inner.2:grad_input"])
def test_with_modules_that_have_attributes_of_their_own(site):
    assert_gradients_are_torchs(lambda: Delegating(rows_net()), step, site)
    bare, model = gradients_of(Delegating(rows_net()), step), Delegating(rows_net())
    with hl.clip(model, total_norm=0.1):
        assert_close(gradients_of(model, step), clipped_by_torch(bare, total_norm=0.1))


@pytest.mark.cell("torch.fx.GraphModule", "gradients", "edit gradients", "raw hooks", "clip")
@both_ports
def test_with_a_traced_model(site):
    assert_gradients_are_torchs(lambda: torch.fx.symbolic_trace(rows_net()), step, site)


@pytest.mark.cell("AveragedModel (EMA, SWA)", "gradients", "edit gradients", "raw hooks", "clip")
@both_ports
def test_with_an_averaged_model(site):
    averaged = torch.optim.swa_utils.AveragedModel
    assert_gradients_are_torchs(lambda: averaged(rows_net()), step, site, plain=rows_net)


@pytest.mark.cell(
    "a forward replaced on the instance", "gradients", "edit gradients", "raw hooks", "clip"
)
@both_ports
def test_with_a_forward_replaced_on_the_instance(site):
    def replaced():
        model = rows_net()
        own = model[0].forward
        model[0].forward = lambda x: own(x) * 2
        return model

    assert_gradients_are_torchs(replaced, step, site)


@pytest.mark.cell(
    "modules that call themselves recursively", "gradients", "edit gradients", "raw hooks"
)
def test_with_modules_that_call_themselves():
    def recursive():
        torch.manual_seed(0)
        return Recursive(4)

    site = "linear:grad_output"
    assert_gradients_are_torchs(recursive, step, site, ["edit gradients", "raw hooks"])
    model, plain = recursive(), recursive()
    with hooked_by_torch(plain, site) as came:
        step(plain)
    with hl.record(model, site) as run:
        step(model)
    assert len(came) == 3
    assert_close(run.calls(site), came[::-1])  # what is called last has its gradient first


@pytest.mark.cell(
    "`no_grad` or `enable_grad` inside forward", "gradients", "edit gradients", "raw hooks"
)
def test_where_the_model_switches_gradients():
    class Switching(nn.Sequential):
        def forward(self, x):
            with torch.no_grad():
                x = self[0](x)
            with torch.enable_grad():
                return self[3](self[2](self[1](x)))

    def switching():
        return Switching(*rows_net(), nn.Linear(3, 2))

    for site in ("2:grad_output", "3:grad_input"):
        assert_gradients_are_torchs(switching, step, site)


@pytest.mark.cell("MultiheadAttention", "gradients", "edit gradients", "clip")
@pytest.mark.parametrize("part", [0, 1])
def test_with_attention(part):
    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.stem = nn.Linear(4, 4)
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x):
            x = self.stem(x)
            out, weights = self.attention(x, x, x)
            return out.sum() + weights.square().sum()

    verbs = ["gradients", "edit gradients", "clip"]
    through = partial(step, x=ROWS[None])
    site = f"attention:grad_output[{part}]"
    assert_gradients_are_torchs(Attending, through, site, verbs, part=nth(part))


@pytest.mark.cell("DataParallel", "gradients", "edit gradients", "raw hooks", "clip")
@both_ports
def test_with_data_parallel_on_the_cpu(site):
    assert_gradients_are_torchs(lambda: nn.DataParallel(rows_net()), step, site, plain=rows_net)


@pytest.mark.cell(
    "TransformerEncoder, with gradients", "gradients", "edit gradients", "raw hooks", "clip"
)
@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize(
    "site", ["layers.0:grad_output", "layers.1.linear2:grad_input", "layers.1.linear1:grad_output"]
)
def test_with_encoder_layers(site, is_training):
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
    assert_gradients_are_torchs(lambda: encoder().train(is_training), partial(step, x=x), site)


@pytest.mark.cell("tensor subclasses", "gradients", "edit gradients", "raw hooks", "clip")
@both_ports
def test_with_tensor_subclasses(site):
    def tagged(model):
        model(ROWS.as_subclass(Tagged)).square().sum().backward()

    assert_gradients_are_torchs(rows_net, tagged, site)


@pytest.fixture(scope="module")
def torchao_model():
    pytest.importorskip("torchao")
    return int8_net()


@pytest.mark.cell("torchao, int8 weights", "gradients", "edit gradients", "raw hooks", "clip")
@both_ports
def test_with_int8_weights_of_torchao(site, torchao_model):
    def through(model):
        model.zero_grad()
        x = torch.linspace(-1, 1, 128).view(2, 64).requires_grad_()
        model(x).square().sum().backward()
        return [x.grad]

    assert_gradients_are_torchs(lambda: torchao_model, through, site)


@pytest.mark.cell(
    "several threads that share a model", "gradients", "edit gradients", "raw hooks", "clip"
)
@both_ports
def test_in_threads_that_share_a_model(site):
    model, barrier = silent(rows_net()), threading.Barrier(4, timeout=60)
    with hooked_by_torch(model, site) as came:
        bare = of_input(model)
    bound = came[0].norm().item() / 4
    expected = []
    for change in (triple, triple, lambda g: clipped_by_torch([g], norm=bound)[0], None):
        with hooked_by_torch(model, site, change):
            expected += of_input(model)

    def raw():
        line = hl.attach(model)
        raw_hook(line, site)
        return line

    def work(attached):
        barrier.wait()
        for _ in range(20):
            with attached() as line:
                found = of_input(model)
        return found[0], line

    lines = (
        lambda: hl.edit(model, site, triple), raw, lambda: hl.clip(model, site, norm=bound),
        lambda: hl.record(model, site),
    )  # fmt: skip
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(work, lines))
    assert_close([grad for grad, _ in found], expected)
    assert_close(found[3][1][site], came[0])
    assert not torch.equal(expected[0], bare[0])


child = runpy.run_path(str(HERE / "test_processes.py"))["child"]


@pytest.mark.cell(
    "`os.fork` while hooks are attached", "gradients", "edit gradients", "raw hooks", "clip"
)
@both_ports
@pytest.mark.processes
def test_in_a_forked_child(site):
    model = rows_net()
    with hooked_by_torch(model, site) as came:
        bare = gradients_of(model, step)
    bound = came[0].norm().item() / 4
    with hl.record(model, site) as run:

        def action():
            gradients_of(model, step)
            return run[site].tolist()

        assert_close(torch.tensor(child(action)), came[0])
        assert not run.passes  # nothing of it comes back
        model.zero_grad()
        gradients_of(model, step)
    assert_close(run[site], came[0])
    model.zero_grad()
    changes = {"edit": triple, "raw": triple}
    changes["clip"] = lambda grad: clipped_by_torch([grad], norm=bound)[0]
    for verb, change in changes.items():
        by_hand = copy.deepcopy(model)
        with hooked_by_torch(by_hand, site, change):
            expected = gradients_of(by_hand, step)
        line = {
            "edit": lambda: hl.edit(model, site, triple), "raw": lambda: hl.attach(model),
            "clip": lambda: hl.clip(model, site, norm=bound),
        }[verb]()  # fmt: skip
        with line as attached:
            if verb == "raw":
                raw_hook(attached, site)
            found = child(lambda: [grad.tolist() for grad in gradients_of(model, step)])
            gradients_of(model, step)
            model.zero_grad()
        assert_close([torch.tensor(grad) for grad in found], expected)
        assert not all(map(torch.equal, map(torch.tensor, found), bare))
