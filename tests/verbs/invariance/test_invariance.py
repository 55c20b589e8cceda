"""`hl.invariance`: clean models hold, planted faults are named, and nothing is left behind."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import hookline as hl
from aligned_models import ids, model
from hookline.display.json_text import json_text
from hookline.engine import hook_dict
from hookline.models.torchvision_import import import_torchvision
from hookline.verbs.invariance.checks import CHECKS

QUICK = [name for name in CHECKS if name != "compiled"]
IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(2))
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))


def outcomes(invariance, outcome):
    return [row.check for row in invariance if row.outcome == outcome]


def vision(name):
    torchvision = import_torchvision()
    torch.manual_seed(0)
    if name == "resnet":
        net = torchvision.models.resnet18(num_classes=10).eval()
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.normal_(module.running_mean)
                nn.init.uniform_(module.running_var, 0.5, 2)
        return net
    net = torchvision.models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64,
        num_classes=10,
    ).eval()  # fmt: skip
    nn.init.normal_(net.heads.head.weight)
    return net


def largest(invariance):
    """The largest error of all compared values but those of coarser numbers and other modes."""
    exact = [row for row in invariance if row.check != "bfloat16" and row.outcome == "holds"]
    return max(row.relative for row in exact)


# -- clean models --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "bert", "t5"])
def test_clean_transformers_hold(name):
    inputs = {"input_ids": ids(3, 8)}
    if name == "t5":
        inputs["decoder_input_ids"] = ids(3, 5, seed=4)
    invariance = hl.invariance(model(name), inputs, only=QUICK)
    assert invariance.ok, invariance
    assert largest(invariance) <= 2e-6
    has_cache = [] if name == "bert" else ["chunks"]
    held = ["twice", "alone", "reordered", "padded right", *has_cache, "after training"]
    assert {*held, "checkpointed", "bfloat16"} <= {*outcomes(invariance, "holds")}
    assert ("padded left" in outcomes(invariance, "holds")) is (name not in ("gpt2", "bert"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", "resnet"])
def test_clean_vision_models_hold(name):
    invariance = hl.invariance(vision(name), IMAGES, only=QUICK)
    assert invariance.ok, invariance
    assert largest(invariance) <= 2e-6
    assert {"alone", "reordered", "checkpointed", "float64"} <= {*outcomes(invariance, "holds")}
    assert invariance["padded left"].why == "the inputs must be ids of tokens"


class Placed(nn.Module):
    """Computes otherwise on a processor with a number, which stands for another device."""

    def __init__(self):
        super().__init__()
        self.fc, self.act = nn.Linear(8, 8), nn.ReLU()
        self.is_elsewhere = False

    def _apply(self, fn, recurse=True):
        self.is_elsewhere = True
        return super()._apply(fn, recurse)

    def forward(self, x):
        return self.act(self.fc(x)) + self.is_elsewhere


@pytest.mark.parametrize(
    ("net", "outcome", "first"),
    [
        (nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), "holds", ""),
        (Placed().eval(), "differs", "(root)"),
    ],
)
def test_a_copy_on_another_device_is_compared(net, outcome, first, monkeypatch):
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda **_: torch.device("cpu", 0))
    row = hl.invariance(net, X, only=["other device"])["other device"]
    assert (row.outcome, row.first) == (outcome, first)


def test_a_complex_parameter_holds_in_float64():
    class Turning(nn.Linear):
        def __init__(self):
            super().__init__(8, 8)
            self.phase = nn.Parameter(torch.polar(torch.ones(5), torch.arange(5.0)))

        def forward(self, x):
            return torch.fft.irfft(torch.fft.rfft(super().forward(x)) * self.phase)

    row = hl.invariance(Turning().eval(), X, only=["float64"])["float64"]
    assert row.outcome == "holds"


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is another device")
def test_a_missing_accelerator_is_said():
    row = hl.invariance(nn.Linear(8, 8).eval(), X, only=["other device"])["other device"]
    assert (row.outcome, row.why) == ("not applicable", "torch finds no accelerator")


@pytest.mark.compiles
def test_a_copy_with_a_compiled_module_in_training_holds():
    net = nn.Sequential(torch.compile(nn.Linear(8, 8)), nn.Dropout(0.5))
    with torch.compiler.set_stance("force_eager"):
        row = hl.invariance(net, X, only=["float64"])["float64"]
    assert (row.outcome, row.why) == ("holds", "")


@pytest.mark.compiles
def test_a_compiled_model_holds():
    invariance = hl.invariance(model("gpt2"), {"input_ids": ids(2, 6)}, only=["compiled"])
    assert outcomes(invariance, "holds") == ["compiled"]
    torch.compiler.reset()


@pytest.mark.compiles
def test_a_compiler_that_computes_otherwise_is_named():
    def faulty(graph, example_inputs):
        for node in graph.graph.nodes:
            if node.target is nn.functional.relu:
                node.target, node.kwargs = nn.functional.gelu, {}
        graph.recompile()
        return graph.forward

    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()
    invariance = hl.invariance(net, X, only=["compiled"], backend=faulty)
    assert (invariance["compiled"].outcome, invariance["compiled"].first) == ("differs", "1")
    torch.compiler.reset()


@pytest.mark.slow
def test_left_padding_without_positions_differs_by_name():
    row = hl.invariance(model("gpt2"), {"input_ids": ids(2, 6)}, only=["padded left"]).rows[0]
    assert (row.outcome, row.first) == ("may differ", "transformer.wpe")
    assert row.why.startswith("the inputs differ: position_ids are 3 in place of 0 at token 0")


@pytest.mark.slow
def test_a_pooler_of_the_first_column_may_differ():
    bert = model("bert")
    invariance = hl.invariance(bert, {"input_ids": ids(2, 6)}, only=["padded with positions"])
    (row,) = invariance.rows
    assert (row.outcome, row.first) == ("may differ", "pooler.dense")
    assert "a fixed column of tokens" in row.why


# -- planted faults ------------------------------------------------------------------------------


class Block(nn.Module):
    """Subtracts the mean of the batch, if asked to."""

    def __init__(self, *, sees_rows=False):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.sees_rows = sees_rows

    def forward(self, x):
        return x + self.fc(x - x.mean(0) if self.sees_rows else x).relu()


def test_rows_that_see_each_other_are_named_at_their_site():
    net = nn.Sequential(Block(), Block(sees_rows=True), Block()).eval()
    invariance = hl.invariance(net, X, only=QUICK)
    assert outcomes(invariance, "differs") == ["alone"]
    row = invariance["alone"]
    assert (row.first, row.suspect, row.why) == ("1.fc:input", "1", "rows see each other")
    assert "1.fc:input (made in 1): rows see each other" in " ".join(str(invariance).split())
    assert not invariance.ok


class Attention(nn.Module):
    def __init__(self, *, is_masked=True):
        super().__init__()
        self.query = nn.Linear(16, 16)
        self.is_masked = is_masked

    def forward(self, x, mask):
        scores = self.query(x) @ x.transpose(1, 2)
        if self.is_masked:
            scores = scores.masked_fill(mask[:, None] == 0, -torch.inf)
        return x + scores.softmax(-1) @ x


class Encoder(nn.Module):
    """Attends in both directions; its config names the id of padding."""

    class config:
        pad_token_id = 0

    def __init__(self, unmasked=None):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList([Attention(is_masked=n != unmasked) for n in range(3)])

    def forward(self, input_ids, attention_mask=None):
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, mask)
        return x


@pytest.mark.slow
def test_a_block_that_ignores_the_mask_is_named():
    invariance = hl.invariance(Encoder(unmasked=1).eval(), ids(3, 7), only=QUICK)
    assert outcomes(invariance, "differs") == ["padded right", "padded left"]
    for row in (invariance["padded right"], invariance["padded left"]):
        assert row.first == "blocks.1"
        assert row.why == "tokens see the padding: the attention_mask is not used there"
    assert hl.invariance(Encoder().eval(), ids(3, 7), only=QUICK).ok


@pytest.mark.slow
def test_a_mask_that_is_not_passed_is_named():
    rows = ids(3, 7)
    rows[1, 5:] = 0
    invariance = hl.invariance(Encoder().eval(), rows, only=QUICK)
    assert outcomes(invariance, "differs") == ["without padding"]
    why = "no attention_mask is given: give attention_mask=(input_ids != 0).long()"
    assert invariance["without padding"].why == why
    mask = (rows != 0).long()
    assert hl.invariance(Encoder().eval(), (rows, mask), only=QUICK).ok


def test_batch_norm_in_training_mode_is_named():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    invariance = hl.invariance(net, IMAGES, only=["twice", "alone", "reordered", "training mode"])
    assert invariance["twice"].outcome == invariance["reordered"].outcome == "holds"
    row = invariance["alone"]
    assert (row.outcome, row.first) == ("differs", "1")
    assert row.why == "batch norm in training mode: 1; call model.eval()"
    assert invariance["training mode"].why == "the model is in training mode"
    assert invariance.findings[0].text.startswith("4 modules in training mode")


def test_a_batch_norm_that_refuses_one_row_is_named():
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    invariance = hl.invariance(net, X, only=["alone"])
    assert str(invariance).startswith("0 of 1 check holds")
    row = invariance.rows[0]
    assert row.outcome == "fails"
    assert row.why.startswith("batch norm in training mode: 1; call model.eval(); ValueError in 1:")


@pytest.mark.parametrize("is_module", [True, False])
def test_dropout_in_training_mode_is_named(is_module):
    class Functional(nn.Module):
        def forward(self, x):
            return nn.functional.dropout(x, 0.5, self.training)

    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5) if is_module else Functional())
    invariance = hl.invariance(net, X, only=["twice", "alone", "bfloat16"])
    row = invariance["twice"]
    assert (row.outcome, row.first) == ("differs", "1")
    names = "dropout in training mode: 1" if is_module else "training mode: (root), 0, 1"
    assert row.why == f"{names}; call model.eval()"
    assert outcomes(invariance, "holds") == ["alone", "bfloat16"]  # without it


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.n = 0

    def forward(self, x):
        self.n += 1
        return x * self.n


class Drawing(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


@pytest.mark.parametrize(
    ("net", "why"),
    [(Counting(), "the model keeps a state from run to run"), (Drawing(), "draws random numbers")],
)
def test_a_model_that_does_not_repeat_itself_is_told(net, why):
    invariance = hl.invariance(net.eval(), X, only=["twice", "alone"])
    assert why in invariance["twice"].why
    assert invariance["alone"].why == "the model does not repeat itself"


class Remembers(nn.Module):
    """Goes on with what a pass in training mode has left."""

    def __init__(self):
        super().__init__()
        self.shift = 0.0

    def forward(self, x):
        if self.training:
            self.shift = 1.0
        return x + self.shift


def test_a_trace_of_a_pass_in_training_mode_is_found():
    net = nn.Sequential(nn.Linear(8, 8), Remembers()).eval()
    invariance = hl.invariance(net, X, only=["after training"])
    row = invariance["after training"]
    assert (row.outcome, row.first) == ("differs", "1")
    assert net[1].shift == 0.0


class Uneven(nn.Module):
    """Gives another gradient when it runs again."""

    def __init__(self):
        super().__init__()
        self.fc, self.n = nn.Linear(8, 8), 0

    def forward(self, x):
        if torch.is_grad_enabled():
            self.n += 1
        return self.fc(x * (1 + (self.n > 2)))


def test_a_block_whose_recomputation_differs_is_found():
    net = nn.Sequential(Uneven(), Uneven())
    for block in net:
        block.n = 1  # the first run with gradients is the second, and its recomputation the third
    row = hl.invariance(net.eval(), X, only=["checkpointed"]).rows[0]
    assert row.outcome == "differs"
    assert row.first.endswith(":grad")


def test_rounding_that_flips_a_choice_is_told_apart():
    class Router(nn.Module):
        def forward(self, x):
            return x.argmax(-1)

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = Router()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return x * self.scale * (1 + self.router(x * self.scale))[:, None]

    x = torch.tensor([[1.0, 1.0001, 0.0], [0.0, 2.0, 1.0]])
    row = hl.invariance(Experts().eval(), x, only=["bfloat16"]).rows[0]
    assert row.outcome == "may differ"
    assert row.why == "rounding flips a near tie: another choice at router"


def as_boxes(y):
    return [{"boxes": row} for row in y]


def as_dict(y):
    return {"rows": y, "flat": (y - y.mean(0)).flatten()}


@pytest.mark.parametrize(
    ("form", "why"),
    [
        (torch.flatten, "(root): no dimensions of rows and tokens in [8], and [32] in b"),
        (torch.t, "(root): no dimensions of rows and tokens in [8, 1], and [8, 4] in b"),
        (torch.mean, "(root): no dimensions of rows and tokens in []"),
        (lambda y: y @ y.T, "(root): shapes [1, 1] and [4, 4]"),
        (as_dict, "(root):output.flat: no dimensions of rows and tokens in [8], and [32] in b"),
        (as_boxes, "(root):output[0].boxes: no dimensions of rows and tokens in [8]"),
        (lambda y: [y.new_ones(len(y), 2)] * len(y), "(root):output[1]: only in b"),
        (lambda y: "text", "the model returns no tensor"),
    ],
)
def test_outputs_that_were_not_compared_do_not_hold(form, why):
    class Shaped(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return form(y if form is as_dict else y - y.mean(0))

    row = hl.invariance(Shaped(8, 8).eval(), X, only=["alone"])["alone"]
    assert (row.outcome, row.why) == ("not applicable", why)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_outputs_are_compared_where_rows_stay_in_place(layout):
    class Nested(nn.Linear):
        def forward(self, x):
            return torch.nested.as_nested_tensor([*super().forward(x)], layout=layout)

    only = ["twice", "alone", "after training"]
    twice, alone, after = hl.invariance(Nested(8, 8).eval(), X[:, None], only=only)
    assert twice.outcome == after.outcome == "holds"
    assert alone.outcome == "not applicable"
    assert alone.why == "(root): no dimensions of rows and tokens in nested tensors"


def test_numbers_of_one_dtype_alone_are_the_reason():
    class Narrow(nn.Linear):
        def forward(self, x):
            x = super().forward(x)
            return x / ((x * 0 + 1 + 1e-3) - 1)  # which is 0 in bfloat16

    (check,) = hl.invariance(Narrow(8, 2).eval(), X, only=["bfloat16"])
    assert (check.outcome, check.relative, check.first) == ("differs", None, "(root)")
    assert check.why == f"{2 * len(X)} elements NaN or infinite in one of the two"


# -- the model afterwards ------------------------------------------------------------------------


def state_of(net):
    tensors = {**net.state_dict(), **{f"{n}.grad": p.grad for n, p in net.named_parameters()}}
    hooks = [
        len(hook_dict(module, kind)) for module in net.modules() for kind in ("forward", "backward")
    ]
    plain = [{key: id(value) for key, value in vars(module).items()} for module in net.modules()]
    modes = [module.training for module in net.modules()]
    return copy.deepcopy(tensors), hooks, plain, modes, torch.get_rng_state()


def assert_same(a, b):
    for name, tensor in a[0].items():
        assert tensor is b[0][name] is None or torch.equal(tensor, b[0][name])
    assert a[1:4] == b[1:4]
    assert torch.equal(a[4], b[4])


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_the_model_is_left_as_it_was(error):
    class Ending(nn.Module):
        n_runs = 0

        def forward(self, x):
            type(self).n_runs += 1
            if type(self).n_runs > 4 and error is not None:
                raise error("now")
            return x

    net = nn.Sequential(
        nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 8))),
        nn.BatchNorm1d(8), nn.Dropout(0.5), Ending(),
    )  # fmt: skip
    net[0].eval()
    net(X).square().sum().backward()
    before = state_of(net)
    inputs = X.clone()
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            hl.invariance(net, inputs, only=QUICK)
    elif error is ValueError:
        assert not hl.invariance(net, inputs, only=QUICK).ok
    else:
        hl.invariance(net, inputs, only=QUICK)
    assert_same(before, state_of(net))
    assert torch.equal(inputs, X)


# -- the result ----------------------------------------------------------------------------------


def test_the_result_prints_and_gives_plain_values():
    net = nn.Sequential(Block(), Block(sees_rows=True)).eval()
    invariance = hl.invariance(net, X, only=["alone", "twice", "chunks"])
    assert [row.check for row in invariance] == ["twice", "alone", "chunks"]
    assert len(invariance) == 3
    data = invariance.to_dict()
    assert json_text(data)
    assert data["rows"] == invariance.to_pandas().to_dict("records") or data["rows"][1]["first"]
    assert (data["ok"], data["findings"][0]["kind"]) == (False, "alone")
    assert "comparison" not in data["rows"][0]
    assert invariance["alone"].comparison["1"].verdict == "differs"
    text = str(invariance)
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith("1 of 2 checks hold")
    assert "Not applicable: chunks (the inputs must be ids of tokens)" in text
    assert "rows see each other" in invariance._repr_html_()
    with pytest.raises(hl.InputError, match=r"must be one of this result, got 'order'.\nGive"):
        invariance["order"]


def test_one_row_and_lists_leave_checks_out():
    net = nn.Linear(8, 2).eval()
    invariance = hl.invariance(net, X[:1], only=["alone", "twice"])
    assert invariance["alone"].why == "the batch has 1 row: give two or more"

    class OfList(nn.Module):
        def forward(self, parts):
            return sum(parts)

    invariance = hl.invariance(OfList(), ([X, X],), only=["reordered"])
    assert invariance["reordered"].why == "the first argument must be a tensor with rows"


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        (X, {"only": ["order"]}, "only must be names of checks, got 'order'"),
        (X, {"only": []}, "only must be names of checks, got \\[\\]"),
        (lambda: None, {}, "inputs must be the arguments of the model, got a function"),
        (iter([X]), {}, "inputs must be the arguments of the model, got a list_iterator"),
    ],
)
def test_what_cannot_be_done_is_refused(inputs, options, message):
    with pytest.raises(hl.InputError, match=message):
        hl.invariance(nn.Linear(8, 2), inputs, **options)


def test_lazy_parameters_are_refused():
    with pytest.raises(hl.InputError, match="no lazy parameters, got weight"):
        hl.invariance(nn.LazyLinear(2), X)


@pytest.mark.parametrize("batch", [X[:0], X * torch.nan])
def test_checks_of_nothing_are_no_success(batch):
    invariance = hl.invariance(nn.Linear(8, 2), batch, only=["twice", "float64"])
    assert {row.outcome for row in invariance} == {"not applicable"}
    assert not invariance.ok


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@torch.no_grad()
def test_a_cache_of_earlier_tokens_is_refused():
    net, tokens = model("gpt2"), ids(3, 6)
    cache = net(tokens[:, :4]).past_key_values
    with pytest.raises(hl.InputError, match=r"got a cache of 4 earlier tokens"):
        hl.invariance(net, {"input_ids": tokens[:, 4:], "past_key_values": cache}, only=["twice"])
    empty = {"input_ids": tokens, "past_key_values": type(cache)()}
    assert hl.invariance(net, empty, only=["twice"]).ok
    assert cache.get_seq_length() == 4


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_a_cache_of_a_fixed_length_is_no_fault_of_the_model():
    from transformers import StaticCache

    net = model("llama")
    cache = StaticCache(config=net.config, max_cache_len=16)
    (row,) = hl.invariance(net, {"input_ids": ids(2, 6), "past_key_values": cache}, only=["chunks"])
    assert row.outcome == "not applicable"
    assert "16 tokens of each row" in row.why


class Switched(nn.Module):
    """Takes a flag by the name of a cache."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 4)

    def forward(self, input_ids, cache):
        return self.embed(input_ids)


def test_an_argument_cache_without_tokens_is_no_cache():
    inputs = {"input_ids": ids(2, 4), "cache": False}
    assert hl.invariance(Switched(), inputs, only=["twice"]).ok


def test_a_model_without_numbers_is_refused():
    with pytest.raises(hl.InputError, match=r"got 0.weight on the meta device.*\nLoad the weights"):
        hl.invariance(nn.Sequential(nn.Linear(8, 2, device="meta")), X)


# -- what a check leaves, and what its batch may be ------------------------------------------------


@pytest.mark.slow
def test_checkpointing_leaves_no_hook():
    net = model("llama")
    hl.invariance(net, ids(2, 6), only="checkpointed")
    assert not any(hook_dict(module, "forward") for module in net.modules())


class Codes(nn.Module):
    """Moves its codes towards what it sees in training mode, as a VQ-VAE does."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Embedding(5, 8)

    def forward(self, x):
        chosen = torch.cdist(x, self.codes.weight).argmin(-1)
        if self.training:
            with torch.no_grad():
                self.codes.weight[chosen] = 0.9 * self.codes.weight[chosen] + 0.1 * x
        return self.codes(chosen)


def test_parameters_that_training_changes_are_put_back():
    torch.manual_seed(0)
    net = Codes().eval()
    before = net.codes.weight.detach().clone()
    result = hl.invariance(net, X, only=["after training", "float64", "reordered"])
    assert torch.equal(net.codes.weight, before)
    assert outcomes(result, "differs") == ["after training"]


class Caching(nn.Linear):
    """Keeps the mean of the first batch that it sees, in a dictionary."""

    def __init__(self):
        super().__init__(8, 8)
        self.cache = {}

    def forward(self, x):
        y = super().forward(x)
        return y + self.cache.setdefault("mean", y.mean(0))


def test_a_cache_of_the_first_batch_hides_nothing():
    net = Caching()
    result = hl.invariance(net, X, only=["alone", "reordered"])
    assert net.cache == {}
    assert not result.ok
    assert result["alone"].outcome == "differs"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_causal_model_that_ignores_the_mask_is_named(name):
    net = model(name)

    class Ignores(type(net)):
        def forward(self, input_ids=None, attention_mask=None, position_ids=None, **options):
            return super().forward(input_ids=input_ids, position_ids=position_ids, **options)

    net.__class__ = Ignores
    result = hl.invariance(net, ids(3, 8), only=["padded left", "padded with positions"])
    assert outcomes(result, "differs") == ["padded left", "padded with positions"]
    assert result["padded left"].why.startswith("tokens see the padding")


@pytest.mark.parametrize("name", ["cached", "cache_hits"])
def test_an_output_whose_name_begins_like_a_cache_is_a_result(name):
    class Named(nn.Identity):
        def forward(self, x):
            return {name: x - x.mean(0)}

    assert hl.invariance(Named(), X, only="alone")["alone"].outcome == "differs"


class Adds(nn.Module):
    """Adds what lies in a dictionary beside the batch."""

    def forward(self, x, more):
        return x + more["bias"]


@pytest.mark.parametrize(
    ("net", "inputs", "outcome"),
    [
        (Adds(), (X, {"bias": X}), "holds"),
        (Adds(), (X[:, :4], {"bias": torch.ones(4, 4)}), "not applicable"),
        (nn.LSTM(8, 8, batch_first=True), (X[:, None], (torch.zeros(1, 4, 8),) * 2),
         "not applicable"),
    ],
)  # fmt: skip
def test_rows_of_all_arguments_are_taken_or_the_check_is_left(net, inputs, outcome):
    for mode in (net.eval(), net.train()):
        result = hl.invariance(mode, inputs, only=["alone", "reordered"])
        assert {row.outcome for row in result} == {outcome}


def test_a_model_that_takes_no_other_number_of_rows_fails():
    class Fixed(nn.Linear):
        def forward(self, x):
            return super().forward(x).view(4, 2, 4)

    for mode in (Fixed(8, 8).eval(), Fixed(8, 8).train()):
        assert hl.invariance(mode, X, only="alone")["alone"].outcome == "fails"


@pytest.mark.slow
def test_chunks_are_checked_with_a_mask():
    inputs = {"input_ids": ids(2, 8), "attention_mask": torch.ones(2, 8, dtype=torch.long)}
    assert hl.invariance(model("gpt2"), inputs, only="chunks")["chunks"].outcome == "holds"


@pytest.mark.compiles
def test_a_compiled_model_is_not_compiled_again():
    net = torch.compile(nn.Linear(8, 8), backend="eager")
    assert hl.invariance(net, X, only="compiled")["compiled"].why == "the model is compiled"


def test_a_default_device_changes_no_check():
    class Positioned(Encoder):
        def forward(self, input_ids, attention_mask=None, position_ids=None):
            return super().forward(input_ids, attention_mask)

    net, rows = Positioned().eval(), ids(3, 7)
    with torch.device("meta"):
        found = hl.invariance(net, rows, only=["padded with positions", "alone", "reordered"])
    assert [row.outcome for row in found] == ["holds"] * 3


@pytest.mark.slow
def test_an_exported_program_gets_its_arguments_by_position():
    x = torch.randn(3, 4)
    program = torch.export.export(nn.Sequential(nn.Linear(4, 2)).eval(), (x,)).module()
    assert hl.invariance(program, x, only=["reordered"]).ok
