"""A check finds the first value that is not finite, and says nothing where all is well."""

from __future__ import annotations

import contextlib
import gc
import math
import pickle
import threading
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hookline as hl
import zoo
from hookline.engine.pytree import tree
from hookline.models import load_demo_digits, load_model
from hookline.verbs.check import forward
from thoroughness import tries


class Applied(nn.Module):
    """A function between two linear layers."""

    def __init__(self, function, after=lambda x: x):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.mid, self.last = nn.Linear(4, 4), Function(function), nn.Linear(4, 4)
        self.after = after

    def forward(self, x):
        return self.last(self.after(self.mid(self.first(x))))


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def no_alarm(model, *args, run=None, steps=2, **kwargs):
    """Train under a check: nothing is raised, and nothing is found."""
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=1e-3) if parameters else None
    with hl.check(model) as line:
        for _ in range(steps):
            output = (run or model)(*args, **kwargs)
            found = [one for _, one in tree.tensors(output) if one.requires_grad]
            if found and optimizer is not None:
                sum(one.float().square().mean() for one in found).backward()
                optimizer.step()
                optimizer.zero_grad()
    assert line.findings == []
    return line


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=50))


def padded():
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1, 3:] = 0
    return {"input_ids": torch.arange(12).view(2, 6), "attention_mask": mask}


def bert():
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    return BertModel(BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                                intermediate_size=32, vocab_size=50))  # fmt: skip


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    return T5ForConditionalGeneration(
        T5Config(d_model=32, d_kv=16, d_ff=32, num_layers=2, num_heads=2, vocab_size=50,
                 decoder_start_token_id=0)
    )  # fmt: skip


def resnet():
    from hookline.models.torchvision_import import import_torchvision

    torch.manual_seed(0)
    return import_torchvision().models.resnet18()


IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
SWALLOWED = "The error was caught on its way; line.findings has the first 100 findings"


def raised(action):
    """The finding of the error that the action raises."""
    with pytest.raises(hl.NonFiniteError) as caught:
        action()
    return caught.value.finding


REAL = {
    "SmallNet": (zoo.SmallNet, (IMAGE,), {}),
    "Looped": (zoo.Looped, (torch.ones(1, 2),), {}),
    "Holder": (zoo.Holder, (torch.ones(2),), {}),
    "steps": (zoo.steps, (torch.ones(2, 8),), {}),
    "Residual": (lambda: zoo.Residual(nn.Linear(4, 4)), (X,), {}),
    "Asking": (zoo.Asking, (X,), {}),
    "Delegating": (lambda: zoo.Delegating(nn.Linear(4, 4)), (X,), {}),
    "rows": (zoo.rows_net, (zoo.ROWS,), {}),
    "Checkpointed": (lambda: zoo.Checkpointed(*[nn.Linear(4, 4) for _ in range(3)]), (X,), {}),
    "BlockInRegion": (lambda: zoo.BlockInRegion(is_checkpointed=True), (zoo.ROWS,), {}),
    "encoder": (zoo.encoder, (torch.ones(2, 3, 8),), {}),
    "Recursive": (zoo.Recursive, (torch.ones(2, 3),), {}),
    "LSTM": (lambda: nn.LSTM(4, 3, num_layers=2), (torch.zeros(5, 1, 4),), {}),
    "attention": (lambda: nn.MultiheadAttention(4, 2), (X[:, None],) * 3, {}),
    "digits": (lambda: load_model("demo:digits").model, (load_demo_digits()[0],), {}),
    "resnet18": (resnet, (torch.randn(2, 3, 32, 32),), {}),
    "gpt2": (gpt2, (), {**padded(), "labels": torch.arange(12).view(2, 6)}),
    "bert": (bert, (), padded()),
    "t5": (t5, (), {**padded(), "labels": torch.arange(12).view(2, 6)}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_no_false_alarm_on_the_zoo(name):
    make, args, kwargs = REAL[name]
    model = make()
    no_alarm(model, *args, **kwargs)
    if name == "Checkpointed":
        return  # torch warns of a reentrant checkpoint without gradients
    with torch.no_grad():
        no_alarm(model.eval(), *args, **kwargs)


@pytest.mark.slow
def test_no_false_alarm_while_a_model_generates():
    model = gpt2().eval()
    with hl.check(model) as line:
        model.generate(
            **padded(), max_new_tokens=4, pad_token_id=0, do_sample=True, top_k=5,
            output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
    assert line.findings == []


def causal(x):
    return torch.full((3, 3), -math.inf).triu(1)


class Masks(nn.Module):
    """A leaf that yields a mask of -inf, and another that adds it."""

    def __init__(self):
        super().__init__()
        self.mask, self.add, self.soft = Function(causal), zoo.Two(), nn.Softmax(-1)
        self.register_buffer("other", torch.full((3, 3), -math.inf).triu(1))

    def forward(self, x, given=None):
        scores = x @ x.T + self.mask(x) + self.other
        scores = scores if given is None else scores + given
        return self.soft(scores) @ x


def test_masks_of_minus_infinity_are_meant():
    no_alarm(Masks(), X)
    no_alarm(Masks(), X, given=torch.full((3, 3), -math.inf).triu(1))


def test_memory_that_was_never_written_is_no_alarm():
    def workspace(x):
        return torch.empty(4).fill_(math.nan), x

    no_alarm(Applied(workspace, after=lambda both: both[1]), X)

    def scratch(x):
        memory = torch.empty(6, 4)
        memory[:3] = x
        return memory

    no_alarm(Applied(scratch, after=lambda memory: memory[:3]), X)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_new_memory_that_differs_in_the_repeated_run_is_no_alarm(steps):
    def scratch(x):
        memory = torch.empty(6, 4)
        if not torch._C._len_torch_dispatch_stack():  # in the first run; another's is as it comes
            memory.detach().numpy()[:] = math.nan
        memory[:3] = x
        return memory

    model = Applied(scratch, after=lambda memory: memory[:3])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        no_alarm(model, X, steps=steps)


@pytest.fixture
def nan_in_new_memory():
    """torch fills new memory with NaN, as it may be at any time."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("nan_in_new_memory")
def test_new_memory_that_is_moved_and_returned_is_no_alarm():
    def cache(x):
        memory = torch.empty(6, 4)
        memory[:3] = x
        return torch.cat([memory.t().contiguous(), memory.clone().t()], 1)

    with torch.no_grad():
        no_alarm(nn.Sequential(nn.Linear(4, 4), Function(cache)), X)


@pytest.mark.usefixtures("nan_in_new_memory")
@pytest.mark.parametrize(
    ("compute", "operation"),
    [
        (lambda x, memory: x + memory, "aten.add.Tensor"),
        (lambda x, memory: memory.mul_(0.0), "aten.mul_.Tensor"),
        (lambda x, memory: x @ memory.T, "aten.mm.default"),
    ],
)
def test_what_is_computed_from_new_memory_is_found(compute, operation):
    def work(x):
        return compute(x, torch.empty_like(x).view_as(x))

    model = nn.Sequential(nn.Linear(4, 4), Function(work))
    with torch.no_grad(), pytest.raises(hl.NonFiniteError) as caught, hl.check(model):
        model(X)
    assert caught.value.finding.operation == operation


def test_a_model_that_returns_masked_scores_is_no_alarm():
    def top(x):
        return x.masked_fill(x < x.amax(-1, keepdim=True), -math.inf)

    model = nn.Sequential(nn.Linear(4, 4), Function(top))
    with torch.no_grad():
        no_alarm(model, X, steps=3)


def test_a_nan_beside_masked_scores_is_found():
    def top(x):
        return x.masked_fill(x < x.amax(-1, keepdim=True), -math.inf)

    model = nn.Sequential(nn.Linear(4, 4), Function(top))
    with torch.no_grad(), pytest.raises(hl.NonFiniteError) as caught, hl.check(model) as line:
        model(X)
        assert line.findings == []
        model(X / 0 * 0)
    assert caught.value.finding.kind == "input"
    assert len(line.findings) == 1


@pytest.fixture
def n_replays(monkeypatch):
    count = []

    class Counted(forward.Replay):
        def __init__(self, *args):
            count.append(1)
            super().__init__(*args)

    monkeypatch.setattr(forward, "Replay", Counted)
    return count


def test_what_vanishes_is_kept_but_not_raised(n_replays):
    model = Applied(lambda x: x.clamp(min=0).log(), after=lambda y: torch.where(y > -1, y, 0.0))
    with torch.no_grad(), hl.check(model) as line:
        for _ in range(4):
            assert model(X).isfinite().all()
    (finding,) = line.findings
    assert (finding.vanished, finding.path, finding.operation) == (True, "mid", "aten.log.default")
    assert "gone before the pass ended" in str(finding)
    assert len(n_replays) == 1  # the site is known from then on


def test_a_nan_is_raised_where_the_output_has_no_floats():
    model = nn.Sequential(Function(lambda x: x.log()), Function(lambda x: x.argmax(-1)))
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(model):
        model(X)
    assert caught.value.finding.path == "0"


def test_finite_numbers_whose_sum_overflows_are_no_alarm(n_replays):
    model = nn.Sequential(Function(lambda x: torch.full_like(x, 3e38)))
    no_alarm(model, X, steps=5)
    assert len(n_replays) == 1  # from then on their extremes are measured
    half = nn.Sequential(Function(lambda x: torch.full((300, 300), 10.0, dtype=torch.float16)))
    no_alarm(half, X)
    assert len(n_replays) == 1
    with pytest.raises(hl.NonFiniteError), hl.check(model):
        model(X)
        model[0].function = lambda x: torch.full_like(x, 3e38) * 2
        model(X)


def test_a_step_that_a_scaler_skips_is_no_alarm():
    model = zoo.rows_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=100)
    with hl.check(model) as line:
        for _ in range(4):
            optimizer.zero_grad()
            scaler.scale(model(zoo.ROWS).mul(100).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() < 2.0**127
    assert line.findings == []


@pytest.mark.slow
def test_a_scaler_that_skips_all_steps_is_warned_of():
    model = nn.Sequential(nn.Linear(2, 2), Function(lambda x: (x * 1e-30) * 1e30))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=0.99)
    with (
        pytest.warns(UserWarning, match="no optimizer has stepped.* all 40 backwards"),
        hl.check(model) as line,
    ):
        for _ in range(40):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(1, 2)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert [finding.step for finding in line.findings] == [0]


def test_a_step_that_the_loop_skips_is_no_alarm():
    model = zoo.rows_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hl.check(model) as line:
        for scale in (1.0, math.inf, 1.0):
            optimizer.zero_grad()
            (model(zoo.ROWS).square().sum() * scale).backward()
            if math.isfinite(scale):
                optimizer.step()
    assert line.findings == []


def test_a_gradient_that_is_not_finite_stops_the_step():
    model = zoo.rows_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(model):
        (model(zoo.ROWS).square().sum() * math.inf).backward()
        optimizer.step()
    assert caught.value.finding.kind == "loss"
    assert "the loss made it" in str(caught.value)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_without_an_optimizer_gradients_are_judged_at_the_end():
    model = zoo.rows_net()
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(model) as line:
        (model(zoo.ROWS).square().sum() * math.inf).backward()
    assert line.findings == [caught.value.finding]
    assert not any(module._forward_hooks for module in model.modules())


def test_weights_that_are_poisoned_before_are_named_at_once(left_as_found):
    model = zoo.SmallNet()
    with torch.no_grad():
        model.layer1[1].conv.weight[0, 0, 0, 0] = math.nan
    before = left_as_found(model)
    with pytest.raises(hl.NonFiniteError) as caught:
        hl.check(model)
    assert left_as_found(model)[1:] == before[1:] or str(before).count("nan")
    assert str(caught.value) == (
        "the parameter layer1.1.conv.weight must be finite, got 1 NaN of 144 values before the"
        " first step.\nLook at parameter layer1.1.conv.weight; print(error.finding) says more."
    )
    with torch.no_grad():
        model.layer1[1].conv.weight.zero_()
    model.layer2[0].bn.running_var[1] = math.nan
    with pytest.raises(hl.NonFiniteError) as caught:
        hl.check(model)
    assert caught.value.finding.path == "layer2.0.bn.running_var"


def test_the_report_survives_a_trainer_that_swallows_the_error():
    model = Applied(lambda x: x.log())

    def train():
        with hl.check(model) as line:
            for _ in range(2):
                with contextlib.suppress(Exception):
                    model(X)
        return line

    with pytest.warns(hl.HooklineWarning, match=r"mid .*made by log") as said:
        line = train()
    assert [one.operation for one in line.findings] == ["aten.log.default"] * 2
    assert len(said) == 1


def test_an_input_that_the_model_overwrites():
    def overwrite(x):
        return x.sub_(10.0).log()

    model = nn.Sequential(Function(overwrite))

    def use():
        with torch.no_grad(), hl.check(model) as line:
            # Copies are kept from the first on.
            return line, raised(lambda: model(X.clone())), raised(lambda: model(X.clone()))

    with pytest.warns(hl.HooklineWarning, match=SWALLOWED):
        line, first, second = use()
    assert "overwritten in place" in str(first)
    assert (first.path, first.operation) == ("0", None)
    assert second.operation == "aten.log.default"
    assert line.findings == [first, second]


def test_the_maker_is_told_apart_from_those_who_pass_it_on():
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)], Function(lambda x: x / 0 * 0),
                          *[nn.Linear(4, 4) for _ in range(3)])  # fmt: skip
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(model):
        model(X)
    finding = caught.value.finding
    assert (finding.path, finding.function) == ("3", "div")
    assert finding.passed_on == ("4", "5", "6")
    assert "\n  passed on by: 4, 5, 6\n" in f"{finding}\n"


def test_only_the_first_sites_that_passed_it_on_are_printed():
    layers = [nn.Identity() for _ in range(7)]
    for n_passed, printed in ((6, "1, 2, 3, 4, 5, 6"), (7, "1, 2, 3, 4, 5, 6, …")):
        model = nn.Sequential(Function(lambda x: x / 0 * 0), *layers[:n_passed])
        with pytest.raises(hl.NonFiniteError) as caught, hl.check(model):
            model(X)
        assert f"\n  passed on by: {printed}\n" in f"{caught.value.finding}\n"


def test_a_call_of_a_shared_module_is_numbered():
    class Thrice(nn.Module):
        def __init__(self):
            super().__init__()
            self.root = Function(lambda x: x.sqrt())

        def forward(self, x):
            return self.root(self.root(self.root(x) - 1))

    with pytest.raises(hl.NonFiniteError) as caught, hl.check(Thrice()) as line:
        line._line.root(torch.tensor([4.0, 0.25]))
    assert (caught.value.finding.site, caught.value.finding.call) == ("root#1", 1)


def test_dropout_and_batch_norm_repeat_themselves():
    torch.manual_seed(3)
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.Dropout(0.5), Function(lambda x: 1 / x))
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(model):
        for _ in range(3):
            model[3].function = torch.sin if _ < 2 else (lambda x: 1 / x)
            model(X)
    finding = caught.value.finding
    assert (finding.step, finding.path, finding.operation) == (2, "3", "aten.reciprocal.default")
    assert int(norm.num_batches_tracked) == 3  # the repeated run leaves nothing behind


def test_a_batch_norm_poisoned_by_its_batch_is_not_blamed():
    model = nn.Sequential(nn.Linear(4, 4), Function(lambda x: x.log()), nn.BatchNorm1d(4))
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(model):
        model(X)
    assert caught.value.finding.path == "1"


def test_outputs_and_randomness_stay_as_they_are():
    model = load_model("demo:digits").model.train()
    x, _ = load_demo_digits()
    torch.manual_seed(0)
    plain, state = model(x), torch.get_rng_state()
    torch.manual_seed(0)
    with hl.check(model):
        assert torch.equal(model(x), plain)
    assert torch.equal(torch.get_rng_state(), state)


def trained(check):
    torch.manual_seed(0)
    model = load_model("demo:digits").model.train()
    x, y = load_demo_digits()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with hl.check(model) if check else contextlib.nullcontext():
        for _ in range(tries(500, gate=150)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.state_dict()


@pytest.mark.slow
def test_hundreds_of_steps_give_the_same_weights_bit_for_bit():
    one, other = trained(check=True), trained(check=False)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_nothing_stays_behind(net, image, left_as_found):
    before = left_as_found(net)
    with torch.no_grad(), hl.check(net):
        net(image)
    assert left_as_found(net) == before
    with contextlib.suppress(KeyError), torch.no_grad(), hl.check(net):
        net(image)
        raise KeyError
    assert left_as_found(net) == before
    with contextlib.suppress(hl.NonFiniteError), torch.no_grad(), hl.check(net):
        net(image / 0)
    assert left_as_found(net) == before


@pytest.mark.slow
def test_a_ctrl_c_leaves_nothing_behind(left_as_found, interrupted):
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = left_as_found(net)

    def use():
        with torch.no_grad(), contextlib.suppress(hl.NonFiniteError), hl.check(net.eval()):
            net(X / 0)
        net.train()

    step = 1
    while interrupted(step, ("hookline.verbs.check", "hookline.engine.passes.repeated_run"), use):
        with warnings.catch_warnings():  # of a line that nobody holds
            warnings.simplefilter("ignore")
            gc.collect()
        net.train()
        assert left_as_found(net) == before, step
        step += 97
    assert step > 1000


def test_a_model_is_freed_with_its_check(net, image):
    with torch.no_grad(), hl.check(net) as line:
        net(image)
    gone = weakref.ref(net.layer1)
    net.layer1 = nn.Identity()
    gc.collect()
    assert gone() is None
    assert line.findings == []


def test_a_caught_error_keeps_no_value_of_the_run():
    for _ in range(2):  # what torch imports for the first error keeps its frames
        gc.collect()
        gc.disable()
        try:
            net, x = Applied(lambda x: x.log()), X.clone()
            gone = weakref.ref(net), weakref.ref(x)
            with contextlib.suppress(hl.NonFiniteError), hl.check(net) as line:
                net(x).sum().backward()
            del net, x
            alive = [reference() for reference in gone]
        finally:
            gc.enable()
    assert alive == [None, None]
    assert len(line.findings) == 1


def test_an_error_pickles_with_its_finding():
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(Applied(lambda x: x.log())) as line:
        line._line.root(X)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert again.finding == caught.value.finding
    assert type(again.finding).from_json(again.finding.as_json()) == again.finding


def test_other_lines_see_the_run_once():
    model = Applied(lambda x: x.log())
    with contextlib.suppress(hl.NonFiniteError), hl.record(model) as run, hl.check(model):
        model(X)
    assert len(run.passes) == 1
    assert [len(run.calls(path)) for path in ("first", "mid", "last")] == [1, 1, 1]


def test_an_edit_is_made_in_the_repeated_run():
    model = Applied(lambda x: x)
    with (
        pytest.raises(hl.NonFiniteError) as caught,
        hl.edit(model, "mid", lambda x: x.log()),
        hl.check(model),
    ):
        model(X)
    assert caught.value.finding.operation == "aten.log.default"


def test_a_checkpointed_module_is_counted_once():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), Function(lambda x: x)

        def forward(self, x):
            x = checkpoint(self.a, x, use_reentrant=False)
            return self.b(checkpoint(self.b, x, use_reentrant=False))

    model = Twice()
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(model) as line:
        model(X).sum().backward()
        model.b.function = lambda x: x.log()
        model(X)
    assert (caught.value.finding.step, caught.value.finding.call) == (1, 0)
    assert line.report().passes == 2


def test_under_autocast():
    model = Applied(lambda x: x * 1e30 * 1e30)
    with (
        pytest.raises(hl.NonFiniteError) as caught,
        hl.check(model) as line,
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        model(X)
    assert caught.value.finding.operation == "aten.mul.Tensor"
    assert caught.value.finding.inputs[0].dtype == "bfloat16"
    assert len(line.findings) == 1


def test_integers_are_measured_and_never_suspects():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("ids", torch.tensor([2**40]))

        def forward(self, x, labels):
            return nn.functional.cross_entropy(x, labels)

    model = Net()
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(model):
        model(torch.ones(2, 3), torch.tensor([-100, -100]))
    finding = caught.value.finding
    assert finding.inputs[1].moments.max == -100
    assert finding.parameters[0].moments.max == 2**40
    assert finding.suspect is None


def test_gradients_accumulate_over_several_backwards():
    model = Applied(lambda x: (x * 0).sqrt() + x)
    clean = Applied(lambda x: x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    del clean
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(model):
        model.mid.function, bad = torch.sin, model.mid.function
        model(X).sum().backward()
        model.mid.function = bad
        model(X).sum().backward()
        model.mid.function = torch.sin
        model(X).sum().backward()
        optimizer.step()
    assert (caught.value.finding.step, caught.value.finding.function) == (1, "SqrtBackward0")


class SecondCall(nn.Module):
    """Takes the logarithm of a negative number in the second call of its part, in place."""

    def __init__(self):
        super().__init__()
        self.log, self.relu = Function(lambda x: x.log_()), nn.ReLU(inplace=True)
        self.passes = 0

    def forward(self, x):
        self.passes += 1
        return self.relu(self.log(self.log(x) + (0 if self.passes < 2 else -9)))


def test_an_operation_in_place_in_a_second_call_and_a_second_run():
    model = SecondCall()
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(model):
        for _ in range(3):
            model(torch.full((3, 2), 9.0))
    finding = caught.value.finding
    assert (finding.site, finding.step, finding.operation) == ("log#1", 1, "aten.log_.default")
    assert finding.inputs[0].moments.max < 0  # as it was before it was written to


def test_structures_and_recurrent_layers():
    model = nn.Sequential(nn.LSTM(2, 2), Function(lambda both: both[0] / 0), nn.LSTM(2, 2))
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(model):
        model(torch.ones(3, 2))
    assert (caught.value.finding.path, caught.value.finding.function) == ("1", "div")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_code_has_no_breaks_and_compiles_once(fresh_dynamo):
    from torch._dynamo.utils import counters

    model = zoo.rows_net()
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    with hl.check(model) as line:
        for _ in range(4):
            run(zoo.ROWS).square().mean().backward()
    assert line.findings == []
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert not counters["recompile"]


@pytest.mark.parametrize(
    "kind",
    [
        lambda x: x.bfloat16(),
        lambda x: x.double(),
        lambda x: torch.complex(x, x),
        lambda x: (x, x.half()),
        lambda x: {"a": x, "b": x > 0},
        lambda x: [x[:0], x],
    ],
    ids=["bfloat16", "float64", "complex", "tuple", "dict", "empty"],
)
def test_outputs_of_every_kind_in_compiled_code(kind, fresh_dynamo):
    model = nn.Sequential(nn.Identity(), Function(kind))
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    with hl.check(model) as line:
        run(X)
    assert line.findings == []
    with pytest.raises(hl.NonFiniteError), hl.check(model):
        run(X / 0)


def test_infinities_that_are_meant_in_compiled_code(fresh_dynamo, n_replays):
    def top(x):
        return x.masked_fill(x < x.amax(-1, keepdim=True), -math.inf)

    model = nn.Sequential(nn.Linear(4, 4), Function(top))
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad(), pytest.raises(hl.NonFiniteError) as caught, hl.check(model):
        for _ in range(4):
            run(X)
        assert len(n_replays) == 1
        run(X / 0 * 0)
    assert caught.value.finding.kind == "input"


def test_each_thread_is_checked_with_every_thread():
    model = Applied(lambda x: x.log())
    raised = []

    def work():
        try:
            model(X)
        except hl.NonFiniteError as error:
            raised.append(error.finding)

    def train(**options):
        with hl.check(model, **options) as line:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        return line

    with pytest.warns(hl.HooklineWarning, match="hl.check on Applied saw nothing: .* another thr"):
        assert train().findings == raised == []
    with pytest.warns(hl.HooklineWarning, match=SWALLOWED):
        line = train(every_thread=True)
    assert [one.operation for one in raised] == ["aten.log.default"]
    assert line.findings == raised


class Parts(nn.Module):
    """Is never called itself, as many a Lightning module."""

    def __init__(self):
        super().__init__()
        self.net = Applied(torch.tanh)


def test_a_model_of_which_only_parts_are_called(monkeypatch):
    model = Parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.net.first.weight.detach().clone()
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(model):
        model.net.mid.function = torch.log
        model.net(X).square().mean().backward()
        optimizer.step()
    assert torch.equal(model.net.first.weight, before)
    assert caught.value.finding.path == "net.mid"
    assert "hl.check(m.net)" in str(caught.value.finding)
    monkeypatch.setattr(forward, "_MOST_SUMS", 20)
    with torch.no_grad(), pytest.raises(hl.NonFiniteError), hl.check(model):
        for step in range(100):
            model.net(X)
            assert step < 10


def test_optimizer_steps_count_where_only_parts_are_called():
    model, last = Parts(), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(model):
        for last in range(4):
            if last == 2:
                model.net.mid.function = torch.log
            model.net(X).square().mean().backward()
            optimizer.step()
    assert caught.value.finding.step == last == 2


def test_a_removed_line_raises_what_is_pending():
    model = zoo.rows_net()
    line = hl.check(model)
    (model(zoo.ROWS).square().sum() * math.inf).backward()
    with pytest.raises(hl.NonFiniteError):
        line.remove()
    line.remove()
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("model", [3, {"a": torch.ones(2)}, hl.EVERYWHERE, None])
def test_what_is_not_a_model_is_refused(model):
    with pytest.raises(hl.AttachError, match="must be given a model"):
        hl.check(model)


def test_a_line_says_how_much_it_has_found():
    model = nn.Sequential(nn.Identity())
    with hl.check(model) as line:
        model(torch.ones(2))
    assert repr(line).endswith("; 0 findings")
    with pytest.raises(hl.NonFiniteError), hl.check(model) as line:
        model(torch.tensor([math.inf, 1.0]))
    assert repr(line).endswith("; 1 finding")
