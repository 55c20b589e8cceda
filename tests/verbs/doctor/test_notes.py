"""Facts that the doctor notes about a model and its regime; and that it leaves all as it was."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

import hookline as hl

X = torch.ones(3, 2)


def said(found: hl.Diagnosis, about: str) -> list[tuple[str, str]]:
    return [(note.what, note.remedy) for note in found.notes if note.about == about]


# -- notes ---------------------------------------------------------------------------------------


def test_a_plain_model_in_eval_mode_gets_no_note():
    assert hl.doctor(nn.Sequential(nn.Linear(2, 2), nn.ReLU()).eval(), X).notes == ()


def test_training_mode_is_noted_with_what_it_changes():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.BatchNorm1d(2))
    found = hl.doctor(model, X)
    ((what, remedy),) = said(found, "training mode")
    assert what.startswith("1 dropout at random and 1 batch norm on the batch's own statistics")
    assert "model.eval() for features" in remedy
    assert not said(found, "mode")  # all modules are in one
    assert found.environment["mode"] == "training"
    assert hl.doctor(model.eval(), X).notes == ()


def test_a_mixture_of_modes_is_noted():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    model[1].eval()
    found = hl.doctor(model, X)
    assert said(found, "mode")[0][0] == ("2 of 3 modules are in training mode, the others in eval")
    assert found.environment["mode"] == "mixed"


def test_shared_modules_and_tied_parameters_are_noted():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    model.again = model[0]
    found = hl.doctor(model, X, "0", ports=("output", "grad"))
    ((what, _),) = said(found, "shared")
    assert "0 is also again" in what
    assert "0.weight is also" in what
    assert "1.weight" in what
    assert not said(hl.doctor(model, X, "1"), "shared")


def test_torchs_fast_path_is_noted_until_it_is_switched_off():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(1, 3, 8)
    with torch.no_grad():
        found = hl.doctor(model, x, "layers.*.linear1")
        ((what, _),) = said(found, "fast path")
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            assert not said(hl.doctor(model, x, "layers.*.linear1"), "fast path")
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert found.ok
    assert what.startswith("torch runs each of layers.0, layers.1 as one operation")
    assert not said(hl.doctor(model, x), "fast path")  # with gradients there is none


def test_hooks_of_others_are_noted_and_those_that_replace_values():
    def doubles(module, args, output):
        return output * 2

    def looks(module, args, output):
        return None

    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model[1].register_forward_hook(looks)
    ((what, remedy),) = said(hl.doctor(model, X), "other hooks")
    assert what.startswith("1 hook of other code: forward ")
    assert "looks on 1 (yours)" in what
    assert "hl.inventory(model)" in remedy
    handle = model[0].register_forward_hook(doubles)
    _, (what, remedy) = said(hl.doctor(model, X), "other hooks")
    assert "doubles on 0 returned a value, which replaces" in what
    assert remedy == "return None in that hook, if the replacement is not meant"
    handle.remove()
    assert len(said(hl.doctor(model, X), "other hooks")) == 1


def test_lines_of_hookline_are_no_hooks_of_other_code():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with hl.edit(model, "0", lambda value: value * 2):
        assert said(hl.doctor(model, X), "other hooks") == []


def test_a_hook_of_others_that_raises_is_blamed():
    def broken(module, args):
        raise ValueError("not today")

    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    handle = model[1].register_forward_pre_hook(broken)
    found = hl.doctor(model, X)
    assert found.failure.what.startswith("1 (ReLU), which got Tensor[3, 2]: ValueError: not today")
    assert "raised by the forward_pre hook" in found.failure.what
    assert f"broken ({__file__}:" in found.failure.what
    handle.remove()
    assert hl.doctor(model, X).ok


def test_a_backward_hook_before_in_place_is_blamed_not_lines():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Linear(2, 2))
    handle = model[0].register_full_backward_hook(lambda module, grad_input, grad_output: None)
    found = hl.doctor(model, X, "0:grad_output")
    assert "a full backward hook is registered before an in-place operation" in found.failure.what
    assert "line.backward(...)" in found.failure.remedy
    assert any("full backward hooks are on 0" in what for what, _ in said(found, "other hooks"))
    handle.remove()
    assert hl.doctor(model, X, "0:grad_output").ok


def test_recurrent_modules_and_values_of_several_parts_are_noted():
    model = nn.Sequential(nn.LSTM(2, 2))
    found = hl.doctor(model, X, "0")
    assert said(found, "recurrent")[0][0].startswith("the steps and gates of 0 run inside one")
    ((what, remedy),) = said(found, "structures")
    assert "0 gives tuple(Tensor[3, 2], tuple(Tensor[1, 2], Tensor[1, 2]))" in what
    assert remedy == "select a part, '0:output[0]'"
    assert not said(hl.doctor(model, X, "0:output[0]"), "structures")


def test_a_value_with_keys_is_selected_by_its_keys():
    class Named(nn.Module):
        def forward(self, x):
            return {"half": x / 2, "whole": x}

    class Words(nn.Module):
        def forward(self, x):
            return ["none", "of", "them"]

    for part in (Named(), Words()):
        model = nn.Sequential(part)
        ((_, remedy),) = said(hl.doctor(model, X, "0"), "structures")
        assert remedy == "select a part of it by its keys"


def test_mixed_dtypes_and_the_meta_device_are_noted():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    assert said(hl.doctor(model), "dtypes")[0][0] == "parameters are float32 (2), bfloat16 (2)"
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    assert said(hl.doctor(model), "meta device")[0][0].startswith("2 tensors hold shapes alone")
    assert hl.doctor(model, X.to("meta")).ok
    mixed = nn.Sequential(nn.Linear(2, 2), model)
    assert said(hl.doctor(mixed), "meta device")


def test_checkpointing_wrappers_and_flags_are_noted():
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)), nn.ReLU())
    found = hl.doctor(model, X, "*", ports=("output", "grad_output"))
    assert found.ok
    assert "CheckpointWrapper runs its module again" in said(found, "checkpointing")[0][0]
    flagged = nn.Sequential(nn.Linear(2, 2))
    flagged.gradient_checkpointing = True
    assert (
        "gradient_checkpointing is on in 1 module"
        in said(hl.doctor(flagged), "checkpointing")[0][0]
    )
    assert not said(hl.doctor(flagged.eval()), "checkpointing")


def test_data_parallel_is_noted():
    found = hl.doctor(DataParallel(nn.Linear(2, 2)), X)
    assert "threads of their own" in said(found, "DataParallel")[0][0]


def test_of_a_distributed_model_the_inner_one_is_run_alone(tmp_path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(nn.Linear(2, 2))
        found = hl.doctor(model, X, ports=("output", "grad"))
        assert found.ok
        assert found.model_type == "Linear"
        model(X).sum().backward()  # raises if the reducer still waits for the doctor's backward
        model(X).sum().backward()
        # A reducer that outlives its group joins gloo's thread with the GIL held, and that thread
        # may wait for the GIL.
        del model
    finally:
        dist.destroy_process_group()


def test_a_sharded_parameter_is_told_with_what_sees_its_gradient(tmp_path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
        found = hl.doctor(model, X, "weight:grad")["weight:grad"]
        seen = []
        with hl.attach(model) as line:
            line.accumulated("weight", seen.append)
            model(X).sum().backward()
    finally:
        dist.destroy_process_group()
    assert (found.verdict, len(seen)) == ("never", 1)
    assert found.why.startswith("it is sharded (a DTensor)")
    assert "line.accumulated(selector, fn)" in found.remedy


@pytest.fixture
def uncounted(fresh_dynamo):
    """Nothing left for the tests that count tensors."""
    yield
    torch.compiler.reset()
    for _ in range(3):  # what goes with compiled code goes in steps
        gc.collect()


class Chain(nn.Sequential):
    """With a forward of its own: before torch 2.15 dynamo leaves torch's own alone."""

    def forward(self, x):
        for part in self:
            x = part(x)
        return x


# Dynamo looks at the .grad of whatever comes into a graph, with or without hooks.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_model_is_diagnosed_in_its_compiled_code(uncounted):
    model = Chain(nn.Linear(2, 2), nn.LSTM(2, 2))
    model.compile(backend="eager")
    found = hl.doctor(model, X, ["0:grad_output", "1", "1:grad_output"])
    assert found["0:grad_output"].verdict == "fires"
    assert found["1"].verdict == "fires"
    if torch.__version__ < (2, 15):  # which compiles the LSTM by itself
        assert found["1:grad_output"].verdict == "fires"  # of a value with several parts
        assert hl.doctor(model, X, ["0:grad_output", "1:grad_output[0]"]).ok
    what, remedy = said(found, "compiled")[0]
    assert what.startswith("the model is compiled: lines work inside")
    assert what.endswith("raw backward hooks (line.backward, line.backward_pre) do not")
    assert "'fc:grad_output'" in remedy
    assert found.environment["dynamo"] == "has compiled code"


class Two(nn.Module):
    def forward(self, x):
        y = x.tanh()
        return y, y * 3


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_gradient_lost_in_a_part_compiled_alone_is_said(uncounted):
    model = nn.Sequential(nn.Linear(2, 2), Two())
    model[1].compile(backend="aot_eager")
    found = hl.doctor(model, lambda: sum(model(X)).sum(), "1:grad_output")["1:grad_output"]
    assert found.why.startswith("code that was compiled by itself returned it together")
    assert found.remedy.startswith("compile the model as a whole, or select a part")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_in_compiled_code_no_layer_is_said_to_detach(uncounted):
    model = Chain(nn.Linear(2, 2), nn.Linear(2, 2))
    model.compile(backend="eager")
    found = hl.doctor(model, lambda: model(X).detach().sum(), "0:grad_output")
    assert found["0:grad_output"].verdict == "never"
    assert "detached inside" not in found["0:grad_output"].why
    assert found["0:grad_output"].why.startswith("no backward could be run")


def test_the_environment_is_told():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = hl.doctor(nn.Linear(2, 2).eval(), X)
    told = found.environment
    assert told["torch"] == torch.__version__
    assert told["autocast"] == "cpu bfloat16"
    assert (told["mode"], told["gradients"], told["parameters"]) == ("eval", "on", "cpu, float32")
    assert hl.doctor(nn.Linear(2, 2)).environment["autocast"] == "off"


def test_a_torch_that_is_too_old_is_noted(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.4.1")
    with pytest.warns(hl.HooklineWarning, match=r"^torch 2\.4\.1 is older"):
        diagnosis = hl.doctor(nn.Linear(2, 2))
    ((what, remedy),) = said(diagnosis, "torch")
    assert what == "2.4.1 is older than the versions that hookline is tested with"
    assert remedy == "pip install 'torch>=2.11'"


# -- it leaves no trace --------------------------------------------------------------------------


class Restless(nn.Module):
    """Changes whatever a forward can change of its own model and of its input."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.drop = nn.Dropout()
        self.steps = 0
        self.register_buffer("n", torch.zeros(1))

    def forward(self, x, fail=False):
        x += 1
        self.steps += 1
        self.cache = x
        self.n = self.n + 1
        self.register_buffer("late", torch.zeros(1), persistent=False)
        x = self.drop(self.norm(self.fc(x)))
        if fail:
            raise ValueError("half-way")
        return x


@pytest.mark.parametrize("fail", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_nothing_is_changed(left_as_found, fail, training):
    torch.manual_seed(0)
    model = Restless().train(training)
    model.norm.weight.grad = torch.ones(2)
    x = torch.randn(3, 2, requires_grad=True) * 1
    before, input_before = left_as_found(model), x.detach().clone()
    buffers = [id(buffer) for buffer in model.buffers()]
    attributes = copy.copy(vars(model))
    ports = ("input", "output", "grad_input", "grad_output", "grad")
    found = hl.doctor(model, (x, fail), ports=ports)
    assert (found.failure is not None) == fail
    assert left_as_found(model) == before
    assert [id(buffer) for buffer in model.buffers()] == buffers
    assert vars(model) == attributes
    assert torch.equal(x, input_before)
    assert model.fc.weight.grad is None
    assert torch.equal(model.norm.weight.grad, torch.ones(2))
    assert model.norm.num_batches_tracked == 0


def test_an_input_by_name_is_not_written_to_and_gets_no_gradient():
    model = Restless().eval()
    x = torch.randn(3, 2, requires_grad=True)
    before = x.detach().clone()
    scaled = x * 1  # a leaf that requires a gradient may not be written to in place
    assert hl.doctor(model, {"x": scaled}, "fc", ports=("grad_input", "grad")).ok
    assert torch.equal(scaled, before)
    assert x.grad is None


def test_an_interrupt_leaves_nothing_either(left_as_found):
    class Interrupting(nn.Module):
        def forward(self, x):
            raise KeyboardInterrupt

    model = nn.Sequential(nn.BatchNorm1d(2), Interrupting())
    before = left_as_found(model)
    with pytest.raises(KeyboardInterrupt):
        hl.doctor(model, X)
    assert left_as_found(model) == before


def test_a_line_already_on_stays_on_and_sees_the_doctors_runs(net, image):
    with hl.record(net, "fc") as run:
        net(image)
        assert hl.doctor(net, image).ok
        net(image)
    assert run.report().fired[0][1] == len(run.passes) == 4  # two of them the doctor's
    assert torch.equal(run.passes[0]["fc"], run.passes[-1]["fc"])
