"""flops: as torch's counter counts, forward and backward, by module."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, weight_norm
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import hookline as hl
from hookline.engine.torch_private.graph.flop_formulas import extra_formulas
from zoo import Checkpointed, SmallNet, encoder, rows_net


def unwrapped(result):
    """The text of a result in one line."""
    return " ".join(str(result).split())


def by_torch(model, *args, **kwargs):
    """torch's count of forward and of both together, with the CPU's attention."""
    counts = []
    for is_whole in (False, True):
        model.zero_grad()
        output = model(*args, **kwargs)  # what the first run alone does is done
        counter = FlopCounterMode(display=False, custom_mapping=extra_formulas())
        with counter:
            output = model(*args, **kwargs)
            if is_whole:
                (output if isinstance(output, torch.Tensor) else output[0]).sum().backward()
        counts.append(counter.get_total_flops())
    return counts


def attention_block():
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)


class Matrices(nn.Module):
    """Products by operators, in a module without children."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 4, 4))

    def forward(self, x):
        y = torch.einsum("bij,bjk->bik", x, self.weight) @ self.weight
        return torch.baddbmm(y, x, self.weight)


class Conv(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 2, 3, groups=2),
            nn.Conv2d(2, 2, 1),
        )  # fmt: skip


def frozen(model):
    model[0].requires_grad_(False)
    return model


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def weight_normed():
    return nn.Sequential(weight_norm(nn.Linear(4, 4)), nn.Linear(4, 2))


CASES = {
    "small": (SmallNet, (2, 3, 8, 8)),
    "rows": (rows_net, (5, 4)),
    "convolutions": (Conv, (2, 3, 9, 9)),
    "matrices": (Matrices, (3, 4, 4)),
    "attention": (attention_block, (2, 5, 16)),
    "encoder": (encoder, (2, 5, 8)),
    "frozen": (lambda: frozen(rows_net()), (5, 4)),
    "weight norm": (weight_normed, (5, 4)),
    "parametrized": (lambda: parametrizations.orthogonal(nn.Linear(4, 4)), (5, 4)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_flops_are_those_of_torchs_counter(name):
    make, shape = CASES[name]
    model, x = make(), torch.randn(shape)
    with hl.profile(model) as prof:
        output = model(x)
        (output if isinstance(output, torch.Tensor) else output[0]).sum().backward()
    forward, whole = by_torch(model, x)
    assert prof.total.flops == (forward, whole - forward, 0)
    assert prof[""].flops == prof.total.flops
    assert forward > 0


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_flops_have_a_column_of_their_own(reentrant):
    class Regions(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.body = nn.Linear(4, 4), rows_net()

        def forward(self, x):
            return checkpoint(self.body, self.stem(x), use_reentrant=reentrant)

    model, x = Regions(), torch.randn(5, 4)
    with hl.profile(model) as prof:
        model(x).sum().backward()
    forward, whole = by_torch(model, x)
    assert prof.total.flops.forward == forward
    assert prof.total.flops.all == whole
    assert prof["body.0"].flops.recompute == 2 * 5 * 4 * 4
    assert prof["stem"].flops.recompute == 0


def test_a_backward_inside_a_forward_is_no_recomputation():
    class Forces(nn.Module):
        def __init__(self):
            super().__init__()
            self.energy = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

        def forward(self, x):
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]

    model = Forces()
    with hl.profile(model) as prof:
        for _ in range(2):
            model(torch.ones(5, 3)).square().sum().backward()
    energy = 2 * 5 * (3 * 8 + 8)
    assert prof["energy"].flops.forward == 2 * energy
    assert prof.total.flops.forward == 2 * (energy + energy)  # the gradient by x takes as many
    assert prof.total.flops.recompute == 0


def test_each_module_has_its_own_flops(net, image):
    counter = FlopCounterMode(display=False)
    with hl.profile(net) as prof:
        net(image).sum().backward()
    with counter:
        net(image)
    counts = {
        path.removeprefix("SmallNet").removeprefix("."): sum(by.values())
        for path, by in counter.get_flop_counts().items()
        if path != "Global"
    }
    assert {row.path: row.flops.forward for row in prof.rows if row.flops.forward} == {
        path: count for path, count in counts.items() if count
    }
    assert sum(row.self_flops.all for row in prof.rows) == prof.total.flops.all


def test_flops_of_several_passes_add_up():
    model = nn.Linear(4, 3)
    with hl.profile(model) as prof:
        for n in (1, 2, 2):
            model(torch.ones(n, 4)).sum().backward()
        with torch.no_grad():
            model(torch.ones(10, 4))
    assert prof.total.flops == (15 * 24, 5 * 24, 0)
    assert prof.per_pass.total.flops.forward == 15 * 24 / 4


def test_inference_has_flops_and_no_backward():
    model = nn.Linear(4, 3)
    with torch.inference_mode(), hl.profile(model) as prof:
        model(torch.ones(2, 4))
    assert prof.total.flops == (48, 0, 0)


def test_an_output_that_no_gradient_reaches_has_no_backward():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 5)

        def forward(self, x):
            return {"a": self.a(x), "b": self.b(x)}

    model = Two()
    with hl.profile(model) as prof:
        model(torch.ones(2, 4))["a"].sum().backward()
    assert prof["a"].flops.backward == 48
    assert prof["b"].flops == (80, 0, 0)


def test_flops_are_those_of_the_keyword_arguments():
    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 5)

        def forward(self, *, x, n=1):
            for _ in range(n):
                y = self.fc(x)
            return y

    model, x = Calls(), torch.ones(2, 4)
    with hl.profile(model) as prof:
        model(x=x)
        model(x=x, n=3)
    expected = by_torch(model, x=x)[0] + by_torch(model, x=x, n=3)[0]
    assert prof[""].flops.forward == expected


def test_a_module_that_runs_outside_the_root_has_flops():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    with hl.profile(model) as prof:
        model[1](model[0](torch.ones(2, 4))).sum().backward()
    assert prof["1"].flops == (24, 48, 0)
    assert prof["0"].flops == (48, 48, 0)


def test_the_models_python_state_is_its_own():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.seen, self.n = nn.Linear(2, 2), [], 0
            self.register_buffer("total", torch.zeros(2))

        def forward(self, x):
            self.n += 1
            self.seen.append(x)
            self.total += x.sum(0).detach()
            return self.fc(x)

    model, x, caught = Counting(), torch.ones(1, 2), []
    model.register_forward_hook(lambda module, args, output: caught.append(output))
    with hl.record(model, "fc") as run, hl.profile(model) as prof:
        model(x)
        assert prof.total.flops.forward == 8
    assert model.n == len(model.seen) == len(caught) == len(run.passes) == 1
    assert model.seen[0] is x
    assert model.total.tolist() == [1, 1]
    assert run.report().n_fired == 1


def test_modes_and_autocast_are_those_of_each_run():
    class Switched(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.kinds = Counter()

        def forward(self, x):
            x = self.fc(x)
            return self.fc(x) if self.training and x.dtype is torch.bfloat16 else x

    model, x = Switched(), torch.ones(1, 4)
    with hl.profile(model) as prof:
        model(x)
        model.eval()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(x)
            model.train()
            model(x)
        model.eval()
    assert prof.total.flops.forward == 4 * 32


@pytest.mark.filterwarnings("ignore::UserWarning")
def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(nn.Linear(1, 1))


@pytest.mark.slow
def test_why_flops_are_missing_is_said():
    class Depends(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x):
            x = self.a(x)
            return self.a(x) if x.sum() > 1e9 else x

    class NoCopy(nn.Linear):
        def __deepcopy__(self, memo):
            raise TypeError("one is enough")

    with hl.profile(Depends()) as prof:
        prof._line.root(torch.ones(1, 4))
    assert prof["a"].flops.forward == 32
    assert prof.table.notes == (
        "FLOPs and peaks are not complete: the model cannot run on shapes alone: its code depends"
        " on the numbers in tensors (aten._local_scalar_dense.default).",
    )
    with hl.profile(NoCopy(4, 4)) as prof:
        prof._line.root(torch.ones(1, 4))
    assert prof.total.flops.all == 0
    assert "the model cannot be copied: TypeError: one is enough" in unwrapped(prof)
    with hl.profile(nn.Sequential(nn.Linear(1, 1), scripted())) as prof:
        prof._line.root(torch.ones(1, 1))
    assert "the model cannot be copied: ModelError: it holds a scripted module." in unwrapped(prof)
    with hl.profile(nn.Identity()) as prof:
        prof._line.root(torch.eye(2).to_sparse())
    assert "the inputs cannot be copied: ModelError: a tensor has layout" in unwrapped(prof)
    with hl.profile(nn.Linear(1, 1)) as prof:
        for n in range(1, 20):
            prof._line.root(torch.ones(n, 1))
    assert "more than 16 different shapes" in unwrapped(prof)
    with hl.profile(nn.Linear(1, 1), flops=False) as prof:
        prof._line.root(torch.ones(1, 1))
    assert not prof.table.notes


def test_a_model_on_the_meta_device_is_counted():
    model = nn.Linear(4, 3, device="meta")
    with hl.profile(model) as prof:
        model(torch.ones(2, 4, device="meta")).sum().backward()
    assert prof.total.flops == (48, 48, 0)


def test_memory_kept_for_backward_is_what_the_graph_saves():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.0), nn.Linear(16, 2))
    x = torch.ones(32, 8)
    with hl.profile(model) as prof:
        model(x).sum().backward()
    kept = {row.path: row.self_activation_bytes for row in prof.rows}
    # The input; the ReLU's output, which the second layer needs, too.
    assert kept == {"": 0, "0": x.nbytes, "1": 32 * 16 * 4, "2": 0, "3": 0}
    assert prof.total.activation_bytes == prof[""].activation_bytes == x.nbytes + 32 * 16 * 4
    with torch.no_grad(), hl.profile(model) as prof:
        model(x)
    assert prof.total.activation_bytes == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_keeps_less(reentrant):
    def kept(is_on):
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        model = nn.Sequential(nn.Linear(8, 8), body)
        if is_on:
            body.forward = lambda x: checkpoint(
                nn.Sequential.forward, body, x, use_reentrant=reentrant
            )
        with hl.profile(model, flops=False) as prof:
            model(torch.ones(64, 8)).sum().backward()
        return prof["1"].activation_bytes

    assert kept(is_on=False) == 3 * 64 * 8 * 4
    assert kept(is_on=True) <= 64 * 8 * 4


def test_packed_tensors_are_not_unpacked():
    unpacked = []
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: [t], lambda t: unpacked.append(1) or t[0]
    ):
        with hl.profile(model) as prof:
            loss = model(torch.ones(1, 4)).sum()
            assert not unpacked
            loss.backward()
    assert prof.total.activation_bytes == 0


def test_the_peak_is_of_what_is_alive_at_once():
    model = nn.Sequential(nn.Identity(), nn.Sequential(nn.ReLU(), nn.ReLU()), nn.ReLU())
    x = torch.ones(1024)
    with torch.no_grad(), hl.profile(model) as prof:
        model(x)
    # Two outputs are alive while an operation makes the second; no more, without gradients.
    assert prof["1.0"].peak_bytes == x.nbytes
    assert prof["1.1"].peak_bytes == prof[""].peak_bytes == 2 * x.nbytes


def test_weights_and_inputs_are_no_part_of_the_peak():
    model = nn.Sequential(nn.Linear(64, 64), nn.Flatten())
    with torch.no_grad(), hl.profile(model) as prof:
        model(torch.ones(2, 64))
    assert prof["0"].peak_bytes == prof[""].peak_bytes == 2 * 64 * 4


def test_the_zoos_checkpointed_model_is_measured():
    model = Checkpointed(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    with hl.profile(model) as prof:
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert prof.total.flops.forward == 64 + 64 + 32
    assert prof.total.flops.recompute == prof["1"].flops.recompute == 64


class Deeper(nn.Module):
    """Calls its layer once more in each pass."""

    def __init__(self):
        super().__init__()
        self.layer, self.n_passes = nn.Linear(2, 2), 0

    def forward(self, x):
        self.n_passes += 1
        for _ in range(self.n_passes):
            x = self.layer(x)
        return x


def test_code_that_does_other_work_on_the_same_shapes_is_said():
    model, x = Deeper(), torch.ones(1, 2)
    with hl.profile(model) as prof:
        model(x)
        assert prof.table.notes == ()
        model(x)
    assert prof.table.notes == (
        "FLOPs and peaks are not those of all passes: layer was called 3 times, and 2 times where"
        " the same shapes were counted.",
    )


class Longer(nn.Module):
    """A model that does more in each pass, by functions."""

    def __init__(self):
        super().__init__()
        self.weight, self.n_passes = nn.Parameter(torch.ones(2, 2)), 0

    def forward(self, x):
        self.n_passes += 1
        for _ in range(self.n_passes):
            x = x @ self.weight
        return x


def test_functions_that_differ_from_pass_to_pass_are_said():
    model, x = Longer(), torch.ones(1, 2)
    with hl.profile(model) as prof:
        for _ in range(3):
            model(x).sum().backward()
    assert prof.table.notes == (
        "FLOPs and peaks are not those of all passes: the run of (root) did not repeat itself: with"
        " inputs of the same shapes it made graphs of 1 to 3 operations for backward.",
    )


@pytest.mark.slow
def test_passes_that_repeat_each_other_have_no_note():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.BatchNorm1d(2), nn.GELU())
    with hl.profile(model) as prof:
        for number in range(4):
            model.train(number % 2 == 0)
            model(torch.ones(3 + number // 2, 2)).sum().backward()
        with torch.no_grad():
            model(torch.ones(3, 2))
    assert prof.table.notes == ()


def test_a_pass_that_did_not_finish_is_said_and_left_out():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with hl.profile(model) as prof:
        model(torch.ones(1, 2))
        with hl.edit(model, "0", interrupt), pytest.raises(MemoryError):
            model(torch.ones(1, 2))
    assert prof.table.notes == (
        "The forward raised in 1 pass: no module's time, FLOPs or calls contain that.",
    )
    assert prof.total.flops.forward == 2 * 2 * 2 * 2
    assert prof["0"].calls == prof["1"].calls == prof.total.passes == 1


def interrupt(tensor):
    raise MemoryError


def test_a_backward_after_the_end_has_no_flops():
    model = nn.Linear(2, 2)
    with hl.profile(model) as prof:
        loss = model(torch.ones(1, 2)).sum()
    loss.backward()
    assert prof.total.flops == (8, 0, 0)


def test_modules_that_came_later_are_said():
    model = nn.Sequential(nn.Linear(2, 2))
    with hl.profile(model) as prof:
        model.append(nn.Linear(2, 2))
        model(torch.ones(1, 2))
    assert prof.table.notes[0].startswith(
        "1 module came into the model in the block, the first at 1"
    )


class Recurrent(nn.Module):
    """A recurrent layer, whose output alone is given on."""

    def __init__(self, kind, **options):
        super().__init__()
        self.layer = kind(6, 3, **options)

    def forward(self, x):
        output = self.layer(x)
        output = output[0] if isinstance(output, tuple) else output
        return output.data if isinstance(output, PackedSequence) else output


@contextlib.contextmanager
def onednn(enabled):
    """Let torch use its fused recurrent layers on the CPU, or not."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(enabled)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


RECURRENT = {
    "LSTM": (nn.LSTM, {}),
    "LSTM, two layers and directions": (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    "LSTM, batch first": (nn.LSTM, {"batch_first": True}),
    "LSTM, projected": (nn.LSTM, {"proj_size": 2}),
    "GRU": (nn.GRU, {"num_layers": 2}),
    "RNN": (nn.RNN, {"bias": False}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_fused_recurrent_layers_have_the_flops_of_unfused_ones(name):
    kind, options = RECURRENT[name]
    model, x = Recurrent(kind, **options), torch.randn(4, 5, 6, requires_grad=True)
    with hl.profile(model) as fused, onednn(True):
        model(x).sum().backward()
    with onednn(False):
        forward, whole = by_torch(model, x)
        with hl.profile(model) as unfused:
            model(x).sum().backward()
        assert unfused.total.flops == (forward, whole - forward, 0)
        assert hl.summary(model, x).flops == forward
    assert fused.total.flops.forward == forward > 0
    # Only the fused layer computes the gradient of the first state, which nobody needs.
    assert whole - forward <= fused.total.flops.backward <= 2 * forward
    assert hl.summary(model, x).flops == forward
    assert fused.table.notes == ()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_packed_sequences_have_the_flops_of_their_rows(kind):
    model, lengths = Recurrent(kind), (5, 1, 3)
    rows = [torch.ones(n, 6) for n in lengths]
    with torch.device("cpu"):  # of the lengths
        packed = pack_sequence(rows, enforce_sorted=False)
    with hl.profile(model) as prof:
        model(packed).sum().backward()
    matrices = sum(one.numel() for one in model.parameters() if one.dim() == 2)
    assert prof["layer"].flops.forward == 2 * sum(lengths) * matrices
    assert prof["layer"].flops.backward > prof["layer"].flops.forward
    assert prof.table.notes == ()


def test_cells_have_flops():
    class Cells(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.LSTMCell(4, 3), nn.GRUCell(3, 2), nn.RNNCell(2, 5)

        def forward(self, x):
            return self.c(self.b(self.a(x)[0]))

    model = Cells()
    with hl.profile(model) as prof:
        model(torch.ones(7, 4)).sum().backward()
    for path, cell in model.named_children():
        matrices = sum(one.numel() for one in cell.parameters() if one.dim() == 2)
        assert prof[path].flops.forward == 2 * 7 * matrices


def test_the_peak_contains_a_layers_workspace_and_kept_inputs():
    model, x = nn.LSTM(16, 16, 2), torch.randn(20, 4, 16)
    with onednn(True), hl.profile(model) as prof:
        model(x)[0].mean().backward()
    made_by_hand = 20 * 4 * 16 * 4
    assert prof.total.activation_bytes > 4 * made_by_hand  # the workspace
    assert prof.total.peak_bytes >= prof.total.activation_bytes + made_by_hand
    with onednn(True), hl.profile(model) as prof:  # a checkpoint keeps no workspace
        checkpoint(model, x, use_reentrant=False)[0].mean().backward()
    assert prof.total.activation_bytes < 4 * made_by_hand
    wide, x = nn.Linear(1000, 1), torch.ones(8, 1000)
    with hl.profile(wide) as prof:
        wide(x).sum().backward()
    assert prof[""].activation_bytes == x.nbytes
    assert prof[""].peak_bytes >= x.nbytes + 8 * 4


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES, *RECURRENT])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning", "ignore:LSTM with projections")
def test_a_peak_is_never_below_what_is_kept(name):
    if name in CASES:
        make, shape = CASES[name]
        model = make()
    else:
        (kind, options), shape = RECURRENT[name], (4, 5, 6)
        model = Recurrent(kind, **options)
    with hl.profile(model) as prof:
        output = model(torch.randn(shape))
        (output if isinstance(output, torch.Tensor) else output[0]).sum().backward()
    assert all(row.peak_bytes >= row.activation_bytes for row in prof.rows)
    assert prof.total.peak_bytes >= prof.total.activation_bytes > 0


class Products(nn.Module):
    """Operations for which torch's counter has no formula."""

    def __init__(self):
        super().__init__()
        self.bilinear = nn.Bilinear(3, 4, 5)
        self.weight = nn.Parameter(torch.ones(4, 3))

    def forward(self, x, y):
        z = self.bilinear(x, y)
        return z.sum() + (self.weight @ x[0]).dot(y[0]) + torch.addmv(y[0], self.weight, x[0]).sum()


def test_products_that_torchs_counter_lacks_are_counted():
    model, x, y = Products(), torch.ones(7, 3), torch.ones(7, 4)
    with hl.profile(model) as prof:
        model(x, y).backward()
    assert prof["bilinear"].flops.forward == 2 * 7 * 5 * 3 * 4 + 2 * 7 * 5 * 4
    assert prof[""].self_flops.forward == 2 * 12 + 2 * 4 + 2 * 12
    assert prof.table.notes == ()


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d])
def test_each_gradient_of_a_convolution_costs_as_its_forward(kind, groups):
    convolution = kind(4, 8, 3, stride=2, groups=groups)
    x = torch.ones(2, 4, *[9] * (convolution.weight.dim() - 2))
    with hl.profile(convolution) as prof:
        for value in (x, x.clone().requires_grad_()):
            output = convolution(value)
            output.sum().backward()
    places = x if kind is nn.ConvTranspose2d else output
    forward = 2 * 2 * places[0, 0].numel() * convolution.weight.numel()
    assert prof.total.flops == (2 * forward, 3 * forward, 0)


class Experts(nn.Module):
    """A product for each group of rows, with the weights of an expert of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 8, 16))

    def forward(self, x):
        ends = torch.tensor([2, 2, len(x)], dtype=torch.int32)
        return nn.functional.grouped_mm(x, self.weight, offs=ends)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_products_of_experts_are_counted_in_each_dtype(dtype):
    experts, x = Experts().to(dtype), torch.ones(6, 8, dtype=dtype, requires_grad=True)
    with hl.profile(experts) as prof:
        experts(x).backward(torch.ones(6, 16, dtype=dtype))
    product = 2 * 6 * 8 * 16
    assert prof.total.flops == (product, 2 * product, 0)
    assert prof.table.notes == ()
    assert prof.total.peak_bytes >= experts.weight.grad.nbytes + 2 * x.nbytes


def test_an_error_that_the_model_catches_is_not_logged(monkeypatch):
    class Tries(nn.Linear):
        def forward(self, x):
            with contextlib.suppress(RuntimeError):
                super().forward(x[:, 1:])
            return super().forward(x)

    logged: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.Logger, "callHandlers", lambda _, record: logged.append(record))
    model, x = Tries(4, 2), torch.ones(3, 4)
    with hl.profile(model) as prof:
        model(x).sum().backward()
    assert prof.total.flops == (48, 48, 0)
    assert logged == []


def test_euclidean_distances_have_the_flops_of_their_product():
    class Distances(nn.Module):
        def forward(self, x, y):
            return torch.cdist(x, y)

    x, y = torch.ones(3, 30, 4), torch.ones(3, 40, 4)
    assert hl.summary(Distances(), (x, y)).flops == 2 * 3 * 30 * 40 * (4 + 2)


@torch.library.custom_op("hookline_tests::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@double.register_fake
def _(x):
    return torch.empty_like(x)


def test_operations_without_a_formula_are_named():
    class Spectrum(nn.Module):
        def forward(self, x):
            return torch.fft.rfft(double(x)).abs()

    model = nn.Sequential(nn.Linear(4, 4), Spectrum())
    with torch.no_grad(), hl.profile(model) as prof:
        model(torch.ones(2, 4))
    (note,) = prof.table.notes
    assert note == (
        "FLOPs leave out hookline_tests::double (in 1), aten::_fft_r2c (in 1): no formula is"
        " known. Register one with torch.utils.flop_counter.register_flop_formula."
    )
    table = hl.summary(model, torch.ones(2, 4))
    assert table.without_formula == ("hookline_tests::double", "aten::_fft_r2c")
    assert "FLOPs leave out hookline_tests::double, aten::_fft_r2c: no formula" in str(table)
    assert "FLOPs leave out" in table._repr_html_()


def test_a_registered_formula_is_used(monkeypatch):
    operation = torch.ops.hookline_tests.double
    monkeypatch.setitem(flop_registry, operation, lambda x, out_val=None: 3 * x.numel())

    class Doubles(nn.Module):
        def forward(self, x):
            return double(x)

    model = Doubles()
    with torch.no_grad(), hl.profile(model) as prof:
        model(torch.ones(2, 4))
    assert prof.total.flops.forward == 24
    assert prof.table.notes == ()


def test_a_block_of_failed_passes_has_its_times_and_no_flops():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with hl.profile(model) as prof, hl.edit(model, "0", interrupt), pytest.raises(MemoryError):
        model(torch.ones(1, 2))
    assert prof["0"].time.forward > 0
    assert prof.total.flops == (0, 0, 0)
    assert prof.table.notes == (
        "The forward raised in each pass: the times are those of what ran before.",
    )


def test_a_kind_whose_first_run_failed_has_memory():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with hl.profile(model) as prof:
        with hl.edit(model, "0", interrupt), pytest.raises(MemoryError):
            model(torch.ones(1, 2))
        model(torch.ones(1, 2)).sum().backward()
    assert prof.total.activation_bytes == 2 * 2 * 4
