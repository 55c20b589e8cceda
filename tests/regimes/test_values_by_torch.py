"""Values in each regime: recorded, measured, changed and shown as torch's own hooks have them."""

from __future__ import annotations

import contextvars
import io
import runpy
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrizations, prune
from torch.testing import assert_close

import hookline as hl
from by_torch import assert_printed, assert_values_are_torchs, measured, nth, seen_by_torch, tripled
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


def step(model, x=ROWS):
    out = model(x)
    out.square().sum().backward()
    return out


@pytest.mark.cell("autocast", "record", "statistics", "edit", "raw hooks", "features", "watch")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("path", ["0", "1", ""])
def test_under_autocast(path, dtype):
    def cast(model):
        with torch.autocast("cpu", dtype=dtype):
            return model(ROWS)

    assert_values_are_torchs(rows_net, cast, path)


@pytest.mark.cell(
    "activation checkpointing", "record", "statistics", "edit", "raw hooks", "features", "watch"
)
@pytest.mark.parametrize("path", ["0", "1"])
@pytest.mark.parametrize("is_reentrant", [True, False])
def test_under_checkpointing(path, is_reentrant):
    def checkpointed():
        model = Checkpointed(*rows_net())
        model.is_reentrant = is_reentrant
        return model

    assert_values_are_torchs(checkpointed, step, path, plain=lambda: NotCheckpointed(*rows_net()))


@pytest.mark.cell("torch.compile", "record", "statistics", "edit", "raw hooks", "features", "watch")
@pytest.mark.cell(
    "activation checkpointing in compiled code",
    "record",
    "statistics",
    "edit",
    "raw hooks",
    "features",
    "watch",
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.compiles
def test_in_compiled_code(compiled_block):
    model, run, plain = compiled_block
    assert_values_are_torchs(
        lambda: model, lambda _: step(run), "block.linear", plain=(lambda: plain, step)
    )


@pytest.mark.cell(
    "torch.func.grad, vjp", "record", "statistics", "edit", "raw hooks", "features", "watch"
)
@pytest.mark.parametrize("path", ["0", "1"])
def test_under_grad_of_torch_func(path):
    def silent():
        return rows_net().requires_grad_(False)

    def of_input(model):
        x = ROWS.clone().requires_grad_()
        model(x).square().sum().backward()
        return x.grad

    assert_values_are_torchs(
        silent, lambda model: grad(lambda x: model(x).square().sum())(ROWS), path,
        plain=(silent, of_input),
    )  # fmt: skip


@pytest.mark.cell("torch.func.vmap", "record", "edit", "raw hooks", "features", "watch")
@pytest.mark.parametrize("path", ["0", "1"])
def test_under_vmap(path):
    assert_values_are_torchs(
        rows_net, lambda model: vmap(model)(ROWS), path, ["record", "edit", "raw hooks", "watch"],
        plain=(rows_net, lambda model: model(ROWS)),
    )  # fmt: skip
    model = rows_net()
    with seen_by_torch(model, path) as came:
        model(ROWS)
    found = vmap(lambda row: hl.features(model, row, path)[path])(ROWS)
    assert_close(found, came[0])


@pytest.mark.cell(
    "lazy modules, before their first run",
    "record",
    "statistics",
    "edit",
    "raw hooks",
    "features",
    "watch",
)
@pytest.mark.parametrize("path", ["0", "1"])
def test_on_the_first_run_of_lazy_modules(path):
    def seeded(model):
        torch.manual_seed(0)
        return model(ROWS)

    def first_run(model):
        """Without the parameters' gradients: there are no parameters yet to reset."""
        out = seeded(model)
        return [out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))]

    class Fresh(nn.Sequential):
        def zero_grad(self, set_to_none=True):
            """Nothing: lazy parameters have no gradient."""

    assert_values_are_torchs(lambda: Fresh(*lazy_net()), first_run, path)


@pytest.mark.cell(
    "parametrized weights", "record", "statistics", "edit", "raw hooks", "features", "watch"
)
@pytest.mark.parametrize(
    "change",
    [parametrizations.weight_norm, parametrizations.orthogonal, parametrizations.spectral_norm],
)
@pytest.mark.parametrize("path", ["0", "0.parametrizations.weight"])
def test_with_parametrized_weights(path, change):
    assert_values_are_torchs(partial(rows_net, change), step, path)


@pytest.mark.cell(
    "pruning; old `weight_norm` and `spectral_norm`",
    "record",
    "statistics",
    "edit",
    "raw hooks",
    "features",
    "watch",
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
def test_with_pruned_and_normed_weights(change):
    assert_values_are_torchs(partial(rows_net, change), step, "0")


@pytest.mark.cell(
    "modules with their own `__getattr__`, `__setattr__`",
    "record",
    "statistics",
    "edit",
    "raw hooks",
    "features",
    "watch",
)
@pytest.mark.parametrize("path", ["inner.0", "inner"])
def test_with_modules_that_have_attributes_of_their_own(path):
    assert_values_are_torchs(lambda: Delegating(rows_net()), step, path)


@pytest.mark.cell(
    "TransformerEncoder, torch's fast path on", "record", "statistics", "edit", "raw hooks", "watch"
)
@pytest.mark.cell(
    "TransformerEncoder, torch's fast path off",
    "record",
    "statistics",
    "edit",
    "raw hooks",
    "features",
    "watch",
)
@pytest.mark.parametrize("path", ["layers.0", "layers.0.linear1", "layers.1.norm2"])
def test_with_encoder_layers(path):
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))

    def without_gradients(model):
        with torch.no_grad():
            return model(x)

    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        assert_values_are_torchs(lambda: encoder().eval(), without_gradients, path)
        model = encoder().eval()
        with seen_by_torch(model, path) as came:
            bare = without_gradients(model)
        with seen_by_torch(model, path, change=tripled):
            expected = without_gradients(model)
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
    file = io.StringIO()
    with pytest.warns(hl.HooklineWarning, match="fast path"):
        with hl.record(model, path) as run, hl.record(model, path, keep=measured) as numbers:
            assert_close(without_gradients(model), bare)
    assert_close((run[path], numbers[path]), (came[0], measured(came[0])))
    with pytest.warns(hl.HooklineWarning, match="fast path"), hl.watch(model, path, file=file):
        without_gradients(model)
    assert_printed(file.getvalue(), came)
    with pytest.warns(hl.HooklineWarning, match="fast path"), hl.edit(model, path, tripled):
        assert_close(without_gradients(model), expected)
    line = hl.attach(model)
    line.forward(path, lambda module, args, output: tripled(output))
    with pytest.warns(hl.HooklineWarning, match="fast path"), line:
        assert_close(without_gradients(model), expected)


@pytest.mark.cell(
    "TransformerEncoder, with gradients",
    "record",
    "statistics",
    "edit",
    "raw hooks",
    "features",
    "watch",
)
@pytest.mark.parametrize("path", ["layers.0", "layers.0.linear1", "layers.1.norm2"])
def test_with_encoder_layers_and_gradients(path):
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
    assert_values_are_torchs(encoder, partial(step, x=x), path)


@pytest.mark.cell("MultiheadAttention", "record", "statistics", "edit", "raw hooks", "features")
@pytest.mark.parametrize("part", [0, 1])
def test_with_attention(part):
    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x):
            out, weights = self.attention(x, x, x)
            return out.sum() + weights.sum()

    assert_values_are_torchs(
        Attending, partial(step, x=ROWS[None]), "attention",
        ["record", "statistics", "edit", "raw hooks", "features"], part=nth(part),
    )  # fmt: skip


@pytest.mark.cell(
    "tensor subclasses", "record", "statistics", "edit", "raw hooks", "features", "watch"
)
@pytest.mark.parametrize("path", ["0", "1"])
def test_with_tensor_subclasses(path):
    def tagged(model):
        return step(model, ROWS.as_subclass(Tagged))

    assert_values_are_torchs(rows_net, tagged, path)


@pytest.mark.cell(
    "torchao, int8 weights", "record", "statistics", "edit", "raw hooks", "features", "watch"
)
@pytest.mark.parametrize("path", ["0", "1"])
def test_with_int8_weights_of_torchao(path):
    model = int8_net()

    def through(model):
        x = torch.linspace(-1, 1, 128).view(2, 64).requires_grad_()
        out = model(x)
        return out, *torch.autograd.grad(out.square().sum(), x)

    assert_values_are_torchs(lambda: model, through, path)


@pytest.mark.cell("DataParallel", "record", "statistics", "edit", "raw hooks", "features", "watch")
@pytest.mark.parametrize("path", ["0", "1"])
def test_with_data_parallel_on_the_cpu(path):
    assert_values_are_torchs(lambda: nn.DataParallel(rows_net()), step, path, plain=rows_net)


@pytest.mark.cell(
    "no_grad, inference_mode", "record", "statistics", "edit", "raw hooks", "features", "watch"
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("path", ["0", "1"])
def test_without_gradients(path, mode):
    def run(model):
        with mode():
            return model(ROWS)

    assert_values_are_torchs(rows_net, run, path)


@pytest.mark.cell(
    "dynamically quantised", "record", "statistics", "edit", "raw hooks", "features", "watch"
)
@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor, torch.quantize_per_channel")
@pytest.mark.parametrize("path", ["0", "1"])
def test_with_dynamically_quantised_layers(path):
    def quantised():
        return torch.ao.quantization.quantize_dynamic(rows_net(), {nn.Linear}, dtype=torch.qint8)

    assert_values_are_torchs(quantised, lambda model: model(ROWS), path)


@pytest.mark.cell(
    "torch.fx.GraphModule", "record", "statistics", "edit", "raw hooks", "features", "watch"
)
@pytest.mark.parametrize("path", ["0", "1"])
def test_with_a_traced_model(path):
    assert_values_are_torchs(lambda: torch.fx.symbolic_trace(rows_net()), step, path)


@pytest.mark.cell(
    "AveragedModel (EMA, SWA)", "record", "statistics", "edit", "raw hooks", "features", "watch"
)
@pytest.mark.parametrize("path", ["0", "1"])
def test_with_an_averaged_model(path):
    averaged = torch.optim.swa_utils.AveragedModel
    assert_values_are_torchs(
        lambda: averaged(rows_net()), step, path, plain=(rows_net, step),
    )  # fmt: skip


@pytest.mark.cell(
    "a forward replaced on the instance",
    "record",
    "statistics",
    "edit",
    "raw hooks",
    "features",
    "watch",
)
@pytest.mark.parametrize("path", ["0", "1"])
def test_with_a_forward_replaced_on_the_instance(path):
    def replaced():
        model = rows_net()
        own = model[0].forward
        model[0].forward = lambda x: own(x) * 2
        return model

    assert_values_are_torchs(replaced, step, path)


@pytest.mark.cell(
    "modules that call themselves recursively", "record", "statistics", "edit", "raw hooks", "watch"
)
@pytest.mark.parametrize("path", ["linear", ""])
def test_with_modules_that_call_themselves(path):
    def recursive():
        torch.manual_seed(0)
        return Recursive(4)

    assert_values_are_torchs(
        recursive, step, path, ["record", "statistics", "edit", "raw hooks", "watch"]
    )


@pytest.mark.cell(
    "`no_grad` or `enable_grad` inside forward",
    "record",
    "statistics",
    "edit",
    "raw hooks",
    "features",
    "watch",
)
@pytest.mark.parametrize("path", ["0", "1"])
def test_where_the_model_switches_gradients(path):
    class Switching(nn.Sequential):
        def forward(self, x):
            with torch.no_grad():
                x = self[0](x)
            return self[2](self[1](x))

    assert_values_are_torchs(lambda: Switching(*rows_net()), step, path)


def in_threads(*actions):
    barrier = threading.Barrier(len(actions), timeout=60)

    def work(action):
        barrier.wait()
        for _ in range(20):
            found = action()
        return found

    with ThreadPoolExecutor(len(actions)) as pool:
        return list(pool.map(work, actions))


@pytest.mark.cell(
    "several threads that share a model", "record", "statistics", "edit", "features", "watch"
)
@pytest.mark.parametrize("path", ["0", "1"])
def test_in_threads_that_share_a_model(path):
    model = rows_net()
    with torch.no_grad():
        with seen_by_torch(model, path) as came:
            bare = model(ROWS)
        with seen_by_torch(model, path, change=tripled):
            expected = model(ROWS)

    def run(line):
        with torch.no_grad(), line as attached:
            return model(ROWS), attached

    def watched():
        file = io.StringIO()
        run(hl.watch(model, path, file=file))
        return file.getvalue()

    found = in_threads(
        lambda: run(hl.edit(model, path, tripled))[0],
        lambda: run(hl.record(model, path)),
        lambda: run(hl.record(model, path, keep=measured)),
        lambda: hl.features(model, ROWS, path)[path],
        watched,
    )
    assert_close(found[0], expected)
    for out, attached in found[1:3]:
        assert torch.equal(out, bare)
        assert_close(attached[path], came[0] if attached is found[1][1] else measured(came[0]))
    assert_close(found[3], came[0])
    assert_printed(found[4], came)
    assert not torch.equal(expected, bare)


@pytest.mark.cell("async tasks", "record", "edit")
def test_in_contexts_of_their_own():
    model = rows_net()
    with seen_by_torch(model, "1") as came:
        bare = model(ROWS)
    with seen_by_torch(model, "1", change=tripled):
        expected = model(ROWS)

    def attached(line):
        return line.__enter__()

    contexts = [contextvars.copy_context() for _ in range(2)]
    run, edit = hl.record(model, "1"), contexts[1].run(hl.edit, model, "1", tripled)
    contexts[1].run(edit.__enter__)
    recording = attached(run)
    assert torch.equal(model(ROWS), bare)
    assert_close(contexts[1].run(model, ROWS), expected)
    run.remove()
    contexts[1].run(edit.remove)
    assert torch.equal(recording["1"], came[0])


@pytest.mark.cell("torch.func.grad, vjp", "edit")
def test_an_edit_under_functional_call():
    model = rows_net()
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights):
        return functional_call(model, weights, (ROWS,)).square().sum()

    with seen_by_torch(model, "1", change=tripled):
        model(ROWS).square().sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    with hl.edit(model, "1", tripled):
        found = grad(loss)(weights)
    assert_close(found, expected)
    assert not torch.equal(found["0.weight"], grad(loss)(weights)["0.weight"])


child = runpy.run_path(str(HERE / "test_processes.py"))["child"]


@pytest.mark.cell("`os.fork` while hooks are attached", "record", "edit", "features", "watch")
@pytest.mark.processes
def test_in_a_forked_child():
    model = rows_net().requires_grad_(False)
    with seen_by_torch(model, "1") as came, seen_by_torch(model, "0") as first:
        bare = model(ROWS)
    with seen_by_torch(model, "1", change=tripled):
        expected = model(ROWS)
    file = io.StringIO()
    with hl.edit(model, "1", tripled) as edit, hl.watch(model, "0", file=file):

        def action():
            edited = model(ROWS)
            edit.remove()
            features = hl.features(model, ROWS, "1")["1"]
            return edited.tolist(), features.tolist(), file.getvalue()

        edited, features, text = child(action)
        assert_close(torch.tensor(edited), expected)
        assert_close(torch.tensor(features), came[0])
        assert_printed(text, first * 2)
        assert file.getvalue() == ""
        assert_close(model(ROWS), expected)
    assert_printed(file.getvalue(), first)
    assert not torch.equal(expected, bare)
