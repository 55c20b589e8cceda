"""On a CUDA device: each verb against hand-written hooks, and against the numbers of the CPU."""

from __future__ import annotations

import copy
import math
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import hookline as hl
from by_torch import assert_gradients_are_torchs
from counted_operations import CountedOperations
from hookline.engine import Site
from hookline.verbs.monitor.slots import Slots
from zoo import SmallNet

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="it needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),  # torch's own first one
]
GPU = torch.device("cuda")


class Attention(nn.Module):
    """A block of a small transformer, with dropout."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))


class Language(nn.Module):
    """A small transformer over 50 tokens."""

    def __init__(self, *, checkpointed: bool = False):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.h = nn.ModuleList(Attention() for _ in range(3))
        self.head = nn.Linear(32, 50)
        self.checkpointed = checkpointed

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.h:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)


def language(**options):
    torch.manual_seed(0)
    return Language(**options).to(GPU)


def images():
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1)).to(GPU)


def tokens():
    return torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(1)).to(GPU)


def small_net():
    torch.manual_seed(0)
    return SmallNet().eval().to(GPU)


def by_hand(model, paths, step):
    """Copies of what forward hooks see, by path."""
    seen = {}
    handles = [
        model.get_submodule(path).register_forward_hook(
            lambda module, args, output, path=path: seen.update({path: output.detach().clone()})
        )
        for path in paths
    ]
    step()
    for handle in handles:
        handle.remove()
    return seen


def step_of(model, optimizer=None, scaler=None, data=None):
    """One step of training of a `Language`, under autocast with a scaler."""
    data = tokens() if data is None else data
    with torch.autocast("cuda", torch.float16, enabled=scaler is not None):
        loss = cross_entropy(model(data).flatten(0, 1), data.flatten())
    (loss if scaler is None else scaler.scale(loss)).backward()
    if optimizer is not None and scaler is None:
        optimizer.step()
    elif optimizer is not None:
        scaler.step(optimizer)
        scaler.update()
    if optimizer is not None:
        optimizer.zero_grad()
    return loss


def test_outputs_are_those_of_hooks_written_by_hand():
    net, x = small_net(), images()
    paths = [path for path, module in net.named_modules() if isinstance(module, nn.Conv2d)]
    expected = by_hand(net, paths, lambda: net(x))
    with hl.record(net, nn.Conv2d, copy=True) as run:
        net(x)
    assert list(expected) == [str(site) for site in run.sites]
    for path in paths:
        assert run[path].is_cuda
        assert torch.equal(run[path], expected[path])


def test_values_kept_on_the_cpu_are_whole():
    model, data = language(), tokens()
    expected = by_hand(model, ["h.0", "h.2"], lambda: model.eval()(data))
    with hl.record(model, "h.*", device="cpu") as run:
        for _ in range(20):
            model(data)
    for path in ("h.0", "h.2"):
        for recorded in run.passes:
            assert recorded[path].device.type == "cpu"
            assert torch.equal(recorded[path], expected[path].cpu())


def test_a_value_overwritten_on_the_device_is_an_error():
    net, x = small_net(), images()
    with hl.record(net, "layer1.0.bn") as run:
        net(x)
    with pytest.raises(hl.OverwrittenError):
        run["layer1.0.bn"]


def test_recording_leaves_numbers_and_random_states_as_they_are():
    model, data = language(), tokens()

    def outcome(hooked):
        torch.manual_seed(3)
        if hooked:
            with hl.record(model, ports=("output", "grad_output"), copy=True):
                loss = step_of(model, data=data)
        else:
            loss = step_of(model, data=data)
        grads = [weight.grad.clone() for weight in model.parameters()]
        model.zero_grad()
        return [loss.detach(), *grads, torch.cuda.get_rng_state()]

    bare, hooked = outcome(False), outcome(True)
    assert all(torch.equal(a, b) for a, b in zip(bare, hooked, strict=True))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_are_those_of_hooks_written_by_hand(checkpointed):
    def make():
        return language(checkpointed=checkpointed).eval()

    assert_gradients_are_torchs(make, lambda model: step_of(model) and None, "h.1:grad_output")


def test_an_edit_changes_what_comes_after():
    model, data = language().eval(), tokens()
    direction = torch.randn(32, device=GPU)
    handle = model.h[1].register_forward_hook(lambda module, args, output: output + direction)
    expected = model(data)
    handle.remove()
    with hl.edit(model, "h.1", hl.edits.add(direction)):
        assert torch.equal(model(data), expected)
    assert not torch.equal(model(data), expected)


def test_an_edit_takes_its_tensors_to_the_device():
    model, data = language().eval(), tokens()
    direction = torch.randn(32)
    with hl.edit(model, "h.1", hl.edits.add(direction.to(GPU))):
        expected = model(data)
    with hl.edit(model, "h.1", hl.edits.add(direction)):
        assert torch.equal(model(data), expected)


def test_an_edit_that_returns_a_tensor_of_the_cpu_says_so():
    model = language().eval()
    message = r"the edit at h\.1 .* on cuda:0, got Tensor.* on cpu"
    with hl.edit(model, "h.1", lambda value: value.cpu()):
        with pytest.raises(hl.HooklineError, match=message):
            model(tokens())


def test_statistics_are_those_of_the_cpu():
    model, data = language().eval(), tokens()
    host, moments = copy.deepcopy(model).cpu(), hl.stats.moments()

    def update(value):
        return moments.update(moments.start(value), value)

    def numbers(model, data):
        with hl.record(model, "h.*", keep=update) as run:
            model(data)
        seen = [moments.result(run[f"h.{k}"]) for k in range(3)]
        return [getattr(result, name) for result in seen for name in ("mean", "std", "max")]

    for on_gpu, on_cpu in zip(numbers(model, data), numbers(host, data.cpu()), strict=True):
        assert float(on_gpu) == pytest.approx(float(on_cpu), rel=1e-3, abs=1e-4)


def loss_of_token_3(logits):
    return logits[..., 3].float().mean()


def swept(model, data):
    effects = hl.sweep(model, data, "h.*", loss_of_token_3, clean=data + 1, each={"position": 1})
    return effects.values.ravel().tolist()


def attributed(model, data):
    shares = hl.attribute(model, data, "h.*", loss_of_token_3, clean=data + 1)
    return [row["estimate"] for row in shares.to_dict()["rows"]]


def norms(model, data):
    loss_of_token_3(model(data)).backward()
    with hl.record(model, "h.*", ports=("output", "grad_output")) as run:
        loss_of_token_3(model(data)).backward()
    return [row.norm for row in run.gradients().rows]


@pytest.mark.parametrize("numbers", [swept, attributed, norms])
def test_numbers_of_a_verb_are_those_of_the_cpu(numbers):
    model, data = language().eval(), tokens() % 40
    expected = numbers(copy.deepcopy(model).cpu(), data.cpu())
    assert len(expected) > 2
    assert numbers(model, data) == pytest.approx(expected, rel=1e-2, abs=1e-6)


def test_a_run_on_the_device_and_one_on_the_cpu_are_compared():
    model, data = language().eval(), tokens()
    host, runs = copy.deepcopy(model).cpu(), []
    for each, batch in ((model, data), (host, data.cpu())):
        with hl.record(each, "h.*") as run:
            each(batch)
        runs.append(run)
    assert hl.compare(*runs).first is None


def test_two_models_on_the_device_are_compared():
    model, data = language().eval(), tokens()
    changed = copy.deepcopy(model)
    assert hl.shadow(changed, model, data).first is None
    with torch.no_grad():
        changed.h[1].out.weight.mul_(1.01)
    assert hl.shadow(changed, model, data).first.site == "h.1.out"


@pytest.mark.parametrize("of_model", ["cuda", "cpu"])
@pytest.mark.parametrize("kind", ["tensor", "list"])
def test_data_on_the_device_is_extracted(tmp_path, kind, of_model):
    rows = torch.randn(10, 3, 8, 8, device=GPU)
    net = small_net().to(of_model)
    data = list(rows) if kind == "list" else rows
    store = hl.extract(net, data, "layer1", tmp_path / "store", batch_size=4)
    expected = by_hand(net, ["layer1"], lambda: net(rows[:4].to(of_model)))["layer1"]
    assert torch.equal(store["layer1"][:4], expected.cpu())


def test_what_is_extracted_are_the_values_of_the_device(tmp_path):
    net, rows = small_net(), torch.randn(10, 3, 8, 8)
    expected = by_hand(net, ["layer1"], lambda: net(rows.to(GPU)))["layer1"]
    store = hl.extract(net, rows, "layer1", tmp_path / "store", batch_size=4)
    torch.testing.assert_close(store["layer1"][:].to(GPU), expected, rtol=1e-4, atol=1e-5)


def test_features_stop_early():
    net, x = small_net(), images()
    expected = by_hand(net, ["layer1"], lambda: net(x))
    assert torch.equal(hl.features(net, x, ["layer1"])["layer1"], expected["layer1"])


def test_watch_prints_times_of_the_device(capsys):
    net, x = small_net(), images()
    with hl.watch(net, "layer1"):
        net(x)
    assert "layer1" in capsys.readouterr().out


def test_summary_cam_and_doctor_run():
    net, x = small_net(), images()
    assert "layer2" in str(hl.summary(net, x))
    assert str(hl.doctor(net, x, "layer1*"))
    assert hl.cam(net, x, "layer2").maps.shape[0] == 4


def test_a_copy_on_the_processor_is_compared():
    net, x = small_net(), images()
    row = hl.invariance(net, x, only=["other device"])["other device"]
    assert (row.outcome, row.first) == ("holds", "")
    assert {tensor.device.type for tensor in net.parameters()} == {"cuda"}


class SometimesBad(nn.Module):
    """The square root of what dropout left: its gradient is infinite where that is 0."""

    def forward(self, x):
        return torch.sqrt(torch.dropout(x.abs() + 1, 0.5, train=True))


class Logarithm(nn.Module):
    """The logarithm of numbers below zero, where the first random number says so."""

    def forward(self, x):
        return torch.log(x - 1e3 * (torch.rand((), device=x.device) > 0.5))


def test_a_nan_that_a_random_number_made_is_found():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), Logarithm(), nn.Linear(4, 2)).to(GPU)
    with pytest.raises(hl.NonFiniteError) as raised, hl.check(model):
        for _ in range(50):
            model(torch.randn(3, 4, device=GPU))
    finding = raised.value.finding
    assert (finding.kind, finding.path) == ("forward", "2")
    assert "log" in finding.operation
    assert "torch.log" in finding.line.text


def test_an_infinite_gradient_that_dropout_made_is_found():
    model = nn.Sequential(nn.Linear(4, 4), SometimesBad(), nn.Linear(4, 2)).to(GPU)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(hl.NonFiniteError) as raised, hl.check(model):
        for _ in range(50):
            model(torch.randn(3, 4, device=GPU)).sum().backward()
            optimizer.step()
    finding = raised.value.finding
    assert (finding.kind, finding.path) == ("backward", "1")
    assert "div" in finding.operation


def test_a_step_that_a_grad_scaler_skips_is_no_fault():
    model = language()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40)
    with hl.check(model) as line:
        for _ in range(40):
            step_of(model, optimizer, scaler)
    assert scaler.get_scale() < 2.0**40
    assert [finding for finding in line.findings if not finding.vanished] == []


def test_a_monitors_numbers_are_those_of_the_cpu():
    def curves(device):
        torch.manual_seed(0)
        model = Language().eval().to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with hl.monitor(model, "h.*") as seen:
            for _ in range(3):
                step_of(model, optimizer, data=tokens().to(device))
        return seen

    on_gpu, on_cpu = curves("cuda"), curves("cpu")
    assert on_gpu.sites == on_cpu.sites
    for site in on_gpu.sites:
        for step in range(3):
            expected = on_cpu[site].mean[step]
            assert on_gpu[site].mean[step] == pytest.approx(expected, rel=2e-2, abs=1e-5), site


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_many_tensors_have_the_moments_of_each_alone(dtype):
    moments = hl.stats.moments(compile=False)
    sizes = (1, 4095, 4096, 4097, 300_000, 2**20, 2**20 + 1, 0)
    tensors = [torch.randn(size, device=GPU).to(dtype) for size in sizes]
    tensors[1][::7] = math.nan
    tensors[4][::5] = -math.inf
    for slots, tensor in zip(moments.measure_many(tensors), tensors, strict=True):
        expected = moments.update(moments.start(tensor), tensor)
        torch.testing.assert_close(slots, expected, rtol=1e-11, atol=1e-9)


def test_nothing_waits_for_the_device_where_many_are_measured():
    moments = hl.stats.moments(compile=False)
    tensors = [torch.randn(size, device=GPU) for size in (1, 77, 5000)]  # of a layout that is new
    assert synchronisations(lambda: moments.measure_many(tensors)) == []


def test_values_on_another_stream_are_measured_there():
    slots = Slots((hl.stats.moments(),), 2)
    first, second = (slots.site(Site(name), (n, 0)) for n, name in enumerate("ab"))
    first.add(torch.ones(7, device=GPU))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        second.add(torch.ones(5, device=GPU))
        assert [site is first for site, _ in slots._deferred] == [True]
        assert [int(site.take()[0][0]) for site in (first, second)] == [7, 5]


def test_a_monitored_step_on_a_gpu_takes_few_operations():
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(40)]).to(GPU)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=True)

    def step():
        optimizer.zero_grad()
        model(torch.ones(2, 8, device=GPU)).sum().backward()
        optimizer.step()

    with hl.monitor(model, ports=("output", "value", "grad", "update")) as seen:
        for _ in range(3):
            step()
        with CountedOperations() as counted:
            step()
    assert counted.count < 500  # of which 280 values would take 8,400 by themselves
    assert len(seen["39"].results) == 4


def test_a_monitor_takes_the_scale_out_of_gradients():
    model = language().eval()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with hl.monitor(model, "head.weight:grad") as plain:
        step_of(model, optimizer)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    with hl.monitor(model, "head.weight:grad", scaler=scaler) as scaled:
        step_of(model, optimizer, scaler)
    site = "head.weight:grad"
    assert scaled[site].rms[0] == pytest.approx(plain[site].rms[0], rel=0.05)


def test_a_profile_measures_the_devices_time_and_memory():
    size = 1024
    model = nn.Sequential(nn.Linear(size, 8 * size), nn.ReLU(), nn.Linear(8 * size, 16)).to(GPU)
    x = torch.randn(4096, size, device=GPU)
    for _ in range(3):
        model(x).sum().backward()  # kernels are loaded at their first use
    with hl.profile(model) as prof:
        for _ in range(5):
            model(x).sum().backward()
    root, large, small = prof["(root)"], prof["0"], prof["2"]
    assert large.time.forward > 2 * small.time.forward > 0
    parts = sum(prof[str(k)].time.forward for k in range(3))
    assert parts == pytest.approx(root.time.forward, rel=0.25)
    assert large.flops.forward == 5 * 2 * 4096 * size * 8 * size
    assert root.peak_bytes >= root.activation_bytes > 0


@pytest.mark.compiles
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_code_gives_the_values_of_each_run(mode, fresh_dynamo):
    net = small_net()
    compiled = torch.compile(net, mode=mode)
    batches = [images() + k for k in range(4)]
    with torch.no_grad():
        expected = [by_hand(net, ["layer1", "fc"], lambda x=x: net(x)) for x in batches]
        with hl.record(net, ["layer1", "fc"]) as run:
            for x in batches:
                compiled(x)
        for recorded, values in zip(run.passes, expected, strict=True):
            for path, value in values.items():
                torch.testing.assert_close(recorded[path], value, rtol=1e-2, atol=1e-3)


@pytest.mark.compiles
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_training_gives_gradients(mode, fresh_dynamo):
    model, batches = language().eval(), [(tokens() + k) % 50 for k in range(4)]
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with hl.record(model, "h.*", ports=("output", "grad_output"), copy=True) as eager:
        for data in batches:
            step_of(model, optimizer, data=data)
    compiled = torch.compile(model, mode=mode)
    with hl.record(model, "h.*", ports=("output", "grad_output")) as run:
        for data in batches:  # eager, recorded, replayed
            step_of(compiled, optimizer, data=data)
    for recorded, expected in zip(run.passes, eager.passes, strict=True):
        for site in eager.sites:
            name = str(site)
            torch.testing.assert_close(recorded[name], expected[name], rtol=2e-2, atol=1e-4)


def test_values_on_another_stream_are_whole():
    model, data = language().eval(), tokens()
    expected = by_hand(model, ["h.2"], lambda: model(data))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with hl.record(model, "h.2", device="cpu") as run, torch.cuda.stream(stream):
        for _ in range(10):
            model(data)
    assert all(torch.equal(recorded["h.2"], expected["h.2"].cpu()) for recorded in run.passes)


def test_a_recording_inside_a_captured_graph_follows_its_replays():
    net, x = small_net(), images()
    with torch.no_grad():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            net(x)  # kernels are chosen at the first run, which cannot be captured
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with hl.record(net, "layer1") as run, torch.cuda.graph(graph):
            net(x)
        x.add_(1)
        graph.replay()
        expected = by_hand(net, ["layer1"], lambda: net(x))
    torch.testing.assert_close(run["layer1"], expected["layer1"])


def test_a_saved_recording_is_read_on_a_machine_without_a_device(tmp_path):
    net, x = small_net(), images()
    with hl.record(net, "layer1") as run:
        net(x)
    run.save(tmp_path / "run")
    opened = hl.open(tmp_path / "run")
    assert opened["layer1"].device.type == "cpu"
    assert torch.equal(opened["layer1"], run["layer1"].cpu())


def test_nothing_waits_for_the_device_while_recording():
    model, data, moments = language().eval(), tokens(), hl.stats.moments()
    model(data)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with (
            hl.record(model, "h.*"),
            hl.record(model, "h.*", keep=lambda t: moments.update(moments.start(t), t)),
            hl.edit(model, "h.1", hl.edits.scale(0.5)),
        ):
            model(data)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def synchronisations(step):
    """The lines of code where a step waited for the device, by torch's own count."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [
        f"{Path(warning.filename).stem}:{warning.lineno}"
        for warning in caught
        if "called a synchronizing" in str(warning.message)
    ]


def test_a_check_waits_after_forward_and_before_backward():
    model, data = language().eval(), tokens()
    step_of(model, data=data)
    assert synchronisations(lambda: step_of(model, data=data)) == []
    with hl.check(model):
        step_of(model, data=data)
        assert len(waits := synchronisations(lambda: step_of(model, data=data))) <= 4, waits


def test_a_monitor_waits_for_the_device_where_it_reports():
    model, data = language().eval(), tokens()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hl.monitor(model, every=10):
        for _ in range(2):
            step_of(model, optimizer, data=data)
        assert synchronisations(lambda: step_of(model, optimizer, data=data)) == []


def test_training_under_each_verb_gives_the_same_bits():
    def weights(attached):
        model = language()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        torch.manual_seed(5)
        with warnings.catch_warnings(), attached(model):
            warnings.simplefilter("ignore", hl.HooklineWarning)
            for _ in range(6):
                step_of(model, optimizer)
        return [weight.detach() for weight in model.parameters()]

    torch.use_deterministic_algorithms(True)
    try:
        bare = weights(lambda model: warnings.catch_warnings())
        for attached in (
            lambda model: hl.record(model, ports=("output", "grad_output"), copy=True),
            hl.check,
            hl.monitor,
            hl.profile,
            lambda model: hl.clip(model, norm=math.inf),
            lambda model: hl.edit(model, "h.*", lambda value: value),
        ):
            hooked = weights(attached)
            assert all(torch.equal(a, b) for a, b in zip(bare, hooked, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)
