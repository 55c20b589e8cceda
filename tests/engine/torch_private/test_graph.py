"""graph: what hookline expects of autograd's nodes, of fake tensors and of the FLOP counter."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from hookline.engine.torch_private.graph.compiler_state import (
    filters_guards,
    has_compiled_backward,
    may_use_cudagraph_memory,
)
from hookline.engine.torch_private.graph.fake_model import FakeModel, is_fsdp2, module_flags
from hookline.engine.torch_private.graph.flop_formulas import extra_formulas, may_lack_formula
from hookline.engine.torch_private.graph.nodes import (
    at_end_of_inner_backward,
    memory_key_and_size,
    next_number,
    node_number,
    nodes_below,
    raw_tensors_saved_by,
    running_node,
)
from hookline.engine.torch_private.graph.operation_counter import OperationCounter
from hookline.errors import ModelError


def test_nodes_are_numbered_in_the_order_in_which_they_are_made():
    x = torch.ones(2, requires_grad=True)
    first = next_number()
    y = x * 2
    middle = next_number()
    z = (y + 1).tanh()
    assert node_number(y.grad_fn) == first
    assert middle == first + 1
    assert next_number() == first + 3
    nodes, before = nodes_below([z.grad_fn], middle)
    assert [number for number, _ in nodes] == [first + 2, first + 1]
    assert before is y.grad_fn
    nodes, before = nodes_below([z.grad_fn, None], first)
    assert len(nodes) == 3  # and not the node that accumulates
    assert before is None


def test_backward_runs_nodes_by_descending_number():
    x, seen = torch.ones(2, requires_grad=True), []
    first = next_number()
    side = x * 3
    total = ((x * 2).tanh() * side).sum() + side.sum()
    for number, node in nodes_below([total.grad_fn], first)[0]:
        node.register_prehook(lambda grads, number=number: seen.append(number))
    total.backward()
    assert seen == sorted(seen, reverse=True)
    assert len(seen) == next_number() - first


def test_what_a_node_keeps_is_read_without_unpacking():
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    (kept,) = raw_tensors_saved_by(y.grad_fn)
    assert memory_key_and_size(kept) == memory_key_and_size(y)
    assert memory_key_and_size(y[1:])[0] == memory_key_and_size(y)[0]
    assert memory_key_and_size(y)[1] == 12
    unpacked = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: 7, lambda _: unpacked.append(1)):
        z = x.exp()
    assert list(raw_tensors_saved_by(z.grad_fn)) == []
    assert unpacked == []
    loss = y.sum()
    loss.backward()
    assert list(raw_tensors_saved_by(y.grad_fn)) == []  # freed
    assert memory_key_and_size(torch.eye(3).to_sparse())[1] == 3 * 4 + 6 * 8


def test_the_running_node_and_the_end_of_an_inner_backward():
    x, seen = torch.ones(2, requires_grad=True), []
    assert running_node() is None

    def hook(grad):
        seen.append(running_node())
        at_end_of_inner_backward(lambda: seen.append("end"))

    y = checkpoint(lambda x: (x * 2).clone(), x, use_reentrant=True)
    z = y * 1
    z.register_hook(hook)
    z.sum().backward()
    assert seen == [z.grad_fn, "end"]


def test_the_cpus_attention_has_flops_as_torchs_formulas_count():
    q = torch.ones(1, 2, 4, 8, requires_grad=True)
    with FlopCounterMode(display=False, custom_mapping=extra_formulas()) as counter:
        functional.scaled_dot_product_attention(q, q, q).sum().backward()
    counts = {str(key): value for key, value in counter.get_flop_counts()["Global"].items()}
    forward = 2 * (2 * 2 * 4 * 4 * 8)
    assert sorted(counts.values()) == [forward, 5 * forward // 2]


def test_operations_are_counted_with_the_bytes_that_are_alive():
    seen = []
    x, weight = torch.ones(4, 8), torch.ones(8, 8)
    with OperationCounter(lambda flops, n_bytes: seen.append((flops, n_bytes))).counting():
        y = x @ weight
        z = y.view(8, 4)
        y = y + 1
        del z
        y = y + 1
    assert [flops for flops, _ in seen] == [2 * 4 * 8 * 8, 0, 0, 0]
    assert [n_bytes // 128 for _, n_bytes in seen] == [1, 1, 2, 2]


def test_views_of_what_was_there_before_are_not_made():
    seen = []
    weight, x = torch.ones(8, 4), torch.ones(2, 4)
    with OperationCounter(lambda flops, n_bytes: seen.append(n_bytes)).counting():
        view = weight.t()
        y = x @ view
        y.add_(1)
        parts = y.split(4, dim=1)
        rows = torch.cat(parts)
    assert seen == [0, 64, 64, 64, 128]
    assert rows.nbytes == 64


class Odd(nn.Module):
    """Holds tensors in places of its own."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.tied = self.fc
        self.held = [torch.ones(3), {"more": nn.Parameter(torch.ones(3))}]
        self.register_buffer("scale", torch.ones(3, dtype=torch.float64))

    def forward(self, x):
        return self.fc(x) + self.held[0] + self.held[1]["more"] + self.scale


def test_a_copy_has_shapes_alone_and_runs():
    model, x = Odd(), torch.ones(2, 3)
    copy = FakeModel(model, {"": model, "fc": model.fc})
    inputs = copy.copy_inputs(((x,), {}))
    with copy.runnable_copy(inputs, module_flags(model)) as found:
        output = found.modules[""](*found.args)
        assert output.shape == (2, 3)
        assert output.dtype is torch.float64
        assert output.device.type == "cpu"
        assert type(output).__name__ == "FakeTensor"
        assert found.modules["fc"] is found.modules[""].tied
        assert found.modules["fc"] is not model.fc
    assert x.tolist() == torch.ones(2, 3).tolist()


def test_a_released_copy_keeps_no_part_of_the_model():
    model = Odd()
    held = weakref.ref(model.fc.weight), weakref.ref(model)
    copy = FakeModel(model, {"": model})
    copy.release()
    del model
    gc.collect()
    assert [one() for one in held] == [None, None]
    assert copy is not None


def test_flags_are_those_of_the_model_at_that_time():
    model = Odd()
    copy = FakeModel(model, {"fc": model.fc})
    inputs = copy.copy_inputs(((torch.ones(1, 3),), {}))
    model.eval()
    model.fc.weight.requires_grad_(False)
    flags = module_flags(model)
    model.train()
    with copy.runnable_copy(inputs, flags) as found:
        fc = found.modules["fc"]
        assert not fc.training
        assert [p.requires_grad for p in fc.parameters()] == [False, True]


def test_what_has_no_strides_is_refused():
    model = nn.Linear(2, 2)
    model.register_buffer("sparse", torch.eye(2).to_sparse())
    with pytest.raises(ModelError, match=r"layout torch\.sparse_coo"):
        FakeModel(model, {"": model})
    assert not is_fsdp2(model)


@pytest.mark.parametrize("name", ["_cudnn_rnn", "miopen_rnn"])
def test_fused_layers_of_gpus_have_the_flops_of_their_matrices(name):
    layer, x = torch.nn.LSTM(6, 3, 2, bidirectional=True, proj_size=2), torch.ones(5, 4, 6)
    weights = list(layer.parameters())
    forward = extra_formulas()[getattr(torch.ops.aten, name)]
    backward = extra_formulas()[getattr(torch.ops.aten, f"{name}_backward")]
    matrices = sum(weight.numel() for weight in weights if weight.dim() == 2)
    assert forward(x, weights, 5, None) == 2 * 20 * matrices
    packed = x.reshape(20, 6)[:13]
    assert forward(packed, weights, 5, None) == 2 * 13 * matrices
    assert backward(x, weights, 5, None, [True, True, True, True]) == 4 * 20 * matrices
    assert backward(x, weights, 5, None, [True, True, True, False]) == 2 * 20 * matrices


class GpuLayer(nn.LSTM):
    """Run a layer by the operation of a GPU."""

    def forward(self, x):
        weights, state = self._flat_weights, x.new_zeros(1, x.shape[1], 3)
        rest = (2, 3, 0, 1, False, 0.0, True, False, [], None)
        return torch.ops.aten._cudnn_rnn(x, weights, 4, None, state, state, *rest)[0]


@pytest.mark.parametrize("has_weights", [True, False])
def test_the_backward_of_a_layer_on_a_gpu_has_shapes(has_weights):
    layer, x = GpuLayer(6, 3).requires_grad_(has_weights), torch.ones(5, 4, 6, requires_grad=True)
    copy, counts = FakeModel(layer, {"": layer}), []
    counter = OperationCounter(lambda n_flops, _: counts.append(n_flops))
    with (
        copy.runnable_copy(copy.copy_inputs(((x,), {})), module_flags(layer)) as run,
        counter.counting(),
    ):
        fake = run.modules[""]
        fake(*run.args).sum().backward()
    matrices = 4 * 3 * (6 + 3)
    assert sum(counts) == 2 * 20 * matrices * (3 if has_weights else 2)
    assert run.args[0].grad.shape == x.shape
    for weight in fake.parameters():
        assert (weight.grad is not None) == has_weights


def test_the_nodes_of_a_copy_run_in_one_thread():
    model = nn.Linear(2, 2)
    copy = FakeModel(model, {"": model})
    with copy.runnable_copy(((), {}), module_flags(model)):
        assert not torch._C._is_multithreading_enabled()
    assert torch._C._is_multithreading_enabled()


@pytest.mark.parametrize("n_heads", [4, 2])
@pytest.mark.parametrize("name", ["flash", "cudnn"])
def test_attention_on_a_gpu_has_flops_for_each_query(name, n_heads):
    operation = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention")
    query, key, value = (
        torch.ones(2, n, 10, 8, device="meta", requires_grad=True) for n in (4, n_heads, n_heads)
    )
    counter = FlopCounterMode(display=False, custom_mapping=extra_formulas())
    with counter:
        result = operation(query, key, value, *((None, True) if name == "cudnn" else ()))
        result[0].sum().backward()
    product = 2 * 2 * 4 * 10 * 10 * 8
    assert counter.get_total_flops() == (2 + 5) * product


def test_products_in_a_given_dtype_have_flops():
    left, right = torch.ones(3, 4, 6), torch.ones(3, 6, 5)
    aten, table = torch.ops.aten, extra_formulas()
    assert table[aten.bmm](left, right, torch.float32, out_val=None) == 2 * 3 * 4 * 6 * 5
    for name, batch in (("addmm", 1), ("baddbmm", 3)):
        parts = (left, right) if batch > 1 else (left[0], right[0])
        flops = table[getattr(aten, name)](left, *parts, torch.float32, out_val=None)
        assert flops == 2 * batch * 4 * 6 * 5


@pytest.mark.parametrize(
    ("name", "sizes", "flops"),
    [
        ("baddbmm_", ((3, 4, 5), (3, 4, 6), (3, 6, 5)), 2 * 3 * 4 * 6 * 5),
        ("addbmm_", ((4, 5), (3, 4, 6), (3, 6, 5)), 2 * 3 * 4 * 6 * 5),
        ("addmm_", ((4, 5), (4, 6), (6, 5)), 2 * 4 * 6 * 5),
    ],
)
def test_products_in_place_count_each_matrix_of_a_batch(name, sizes, flops):
    out, left, right = map(torch.ones, sizes)
    with FlopCounterMode(display=False, custom_mapping=extra_formulas()) as counter:
        getattr(out, name)(left, right)
    assert counter.get_total_flops() == flops


def test_fused_attention_has_the_flops_of_its_products():
    attention, x = torch.nn.MultiheadAttention(16, 2, batch_first=True).eval(), torch.ones(3, 5, 16)
    counts = []
    for has_grad in (False, True):  # torch fuses attention where no gradient is needed
        with FlopCounterMode(display=False, custom_mapping=extra_formulas()) as counter:
            with torch.set_grad_enabled(has_grad):
                attention(x, x, x, need_weights=False)
        counts.append((counter.get_total_flops(), len(counter.get_flop_counts()["Global"])))
    assert counts[0][0] == counts[1][0] == 2 * 4 * 15 * 16 * 16 + 4 * 3 * 5 * 5 * 16
    assert counts[0][1] != counts[1][1]


def test_every_product_of_torch_has_a_formula_or_is_named():
    known = {*flop_registry, *extra_formulas()}
    products = "_fft_c2c linalg_qr _cdist_forward conv_tbc _weight_int4pack_mm quantized_lstm"
    for name in f"{products} cholesky_solve _linalg_svd addmm_ mv bmm".split():
        operation = getattr(torch.ops.aten, name)
        assert operation in known or may_lack_formula(operation), name
    others = "relu softmax native_layer_norm upsample_linear1d embedding_bag index_select view"
    for name in f"{others} _thnn_fused_lstm_cell linalg_vector_norm lu_unpack sigmoid".split():
        assert not may_lack_formula(getattr(torch.ops.aten, name)), name
    assert may_lack_formula(torch.ops.quantized.linear)
    assert not may_lack_formula(torch.ops.prims.add)


def test_a_backward_that_was_compiled_is_counted():
    counters.clear()
    assert not has_compiled_backward()
    with compiled_autograd._enable(lambda graph: graph):
        torch.ones(2, requires_grad=True).sum().backward()
    assert has_compiled_backward()


def test_a_compiled_module_tells_of_its_filter_of_guards():
    model = nn.Linear(2, 2)
    assert not filters_guards(torch.compile(model))
    skip = {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}
    assert filters_guards(torch.compile(model, options=dict(skip)))
    assert filters_guards(torch.compile(model, backend="eager", options=skip))


def test_the_memory_of_cuda_graphs_is_told_from_others(monkeypatch):
    # Without it, a later run would overwrite the recorded values of compiled code.
    from torch._inductor import cudagraph_trees

    containers = {}
    monkeypatch.setattr(cudagraph_trees.local, "tree_manager_containers", containers)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    containers[0] = cudagraph_trees.TreeManagerContainer(0)
    assert not may_use_cudagraph_memory()
    containers[0].tree_manager = SimpleNamespace()
    assert may_use_cudagraph_memory()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert not may_use_cudagraph_memory()


def test_a_thread_that_cannot_tell_takes_memory_for_graphs(monkeypatch):
    from torch._inductor import cudagraph_trees

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(may_use_cudagraph_memory).result()
        # It was not told of any graphs meanwhile.
        assert not pool.submit(hasattr, cudagraph_trees.local, "tree_manager_containers").result()
