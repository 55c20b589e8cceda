"""Each cause for which a site stays silent: it is named, and the remedy makes it fire."""

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hookline as hl

X = torch.ones(3, 2)


class Past(nn.Module):
    """Calls two modules in every way in which hooks do not see it, or as modules."""

    def __init__(self, how: str):
        super().__init__()
        self.how = how
        self.a = nn.Linear(2, 2)
        self.relu = nn.ReLU()

    def forward(self, x):
        if self.how == "forward":
            return self.relu.forward(self.a.forward(x))
        if self.how == "weights":
            return F.linear(x, self.a.weight, self.a.bias).relu()
        if self.how == "transposed":
            return (x @ self.a.weight.T + self.a.bias).relu()
        if self.how == "never":
            return x
        return self.relu(self.a(x))


def never(found: hl.Diagnosis, site: str) -> tuple[str, str]:
    assert found[site].verdict == "never"
    assert not found.ok
    return found[site].why, found[site].remedy


def test_sites_that_fire_are_counted(looped):
    found = hl.doctor(looped, X)
    assert found.ok
    assert {str(one.site): one.verdict for one in found.sites} == {
        "(root)": "fires", "block": "fires 3 x", "head": "fires",
    }  # fmt: skip
    assert found.ran == "forward"
    assert not any(one.why or one.remedy for one in found.sites)


def test_a_direct_call_of_forward_is_told_with_its_line():
    found = hl.doctor(Past("forward"), X)
    for site in ("a", "relu"):  # one without parameters, too
        why, remedy = never(found, site)
        assert why.startswith("its .forward was called directly")
        assert f"{__file__}:" in why
        assert remedy.startswith("call the module itself there: module(x)")
    assert hl.doctor(Past("call"), X).ok


@pytest.mark.parametrize("how", ["weights", "transposed"])
def test_weights_used_without_their_module_are_told_with_the_op(how):
    why, remedy = never(hl.doctor(Past(how), X), "a")
    operation = {"weights": "linear", "transposed": ".T"}[how]
    assert why.startswith(f"not called: its weights were used directly, by {operation} (")
    assert f"{__file__}:" in why
    assert "call the module there" in remedy
    assert hl.doctor(Past("call"), X).ok


@pytest.mark.parametrize(
    "use",
    [lambda x, a: F.linear(x, weight=a.weight), lambda x, a: torch.cat([x, a.weight])],
    ids=["by name", "in a list"],
)
def test_weights_used_by_name_or_in_a_list_are_told(use):
    class Uses(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(2, 2, bias=False)

        def forward(self, x):
            return use(x, self.a)

    why, remedy = never(hl.doctor(Uses(), X, "a"), "a")
    assert why.startswith("not called: its weights were used directly, by ")
    assert f"{__file__}:" in why
    assert remedy == "call the module there: module(x); or select the module around it"


def test_the_module_around_a_direct_use_is_named():
    model = nn.Sequential(Past("weights"))
    why, remedy = never(hl.doctor(model, X, "0.a"), "0.a")
    assert why.startswith("not called: its weights were used directly, by linear in 0 (")
    assert remedy.endswith("or select the module around it, '0'")
    assert hl.doctor(model, X, "0").ok


def test_asking_a_weight_for_its_shape_is_no_use_of_it():
    class Shape(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(2, 2)

        def forward(self, x):
            return x.to(self.a.weight.dtype).reshape(-1, self.a.weight.shape[1])

    assert (
        never(hl.doctor(Shape(), X, "a"), "a")[0] == "not reached: (root) ran and did not call it"
    )


def test_a_class_whose_own_call_passes_hooks_by_is_told():
    class Own(nn.Linear):
        through_torch = False

        def __call__(self, x):
            return super().__call__(x) if self.through_torch else self.forward(x)

    model = nn.Sequential(Own(2, 2))
    why, remedy = never(hl.doctor(model, X), "0")
    assert why == "Own has a __call__ of its own that calls forward directly, past its hooks"
    assert "super().__call__" in remedy
    Own.through_torch = True
    assert hl.doctor(model, X).ok


def test_a_module_nothing_calls_is_told_with_a_likely_caller():
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(2))

        def forward(self, x):
            return self.blocks[int(x.sum() > 0)](x)

    model = Branch()
    found = hl.doctor(model, X)
    assert never(found, "blocks.0")[0] == "not reached: (root) ran and did not call it"
    why, remedy = never(found, "blocks.0.0")
    assert why == "not reached: nothing called blocks.0 (Sequential), which holds it"
    assert "the branch that calls it" in remedy
    assert hl.doctor(model, -X, "blocks.0.**").ok


def test_a_module_of_the_other_mode_is_told():
    class Auxiliary(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.auxiliary = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            return (self.head(x), self.auxiliary(x)) if self.training else self.head(x)

    model = Auxiliary().eval()
    why, remedy = never(hl.doctor(model, X), "auxiliary")
    assert why == "only called in training mode, and the model is in eval mode"
    assert remedy == "model.train()"
    assert not model.head.training
    assert hl.doctor(model.train(), X).ok


def test_attentions_out_proj_is_told_and_its_parent_fires():
    model = nn.MultiheadAttention(2, 1)
    inputs = (X, X, X)
    why, remedy = never(hl.doctor(model, inputs, "out_proj"), "out_proj")
    assert why == "MultiheadAttention uses out_proj's weights without calling it"
    assert "select its parent, the attention itself" in remedy
    found = hl.doctor(model, inputs, ":output[0]")
    assert found.ok


def test_transformers_fused_attention_is_told():
    class Attention(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.config = config
            self.attn_dropout = nn.Dropout(0.1)

        def forward(self, x):
            fused = self.config._attn_implementation == "sdpa"
            return x if fused else self.attn_dropout(x)

    config = SimpleNamespace(_attn_implementation="sdpa")
    model = nn.Sequential()
    model.attn = Attention(config)
    why, remedy = never(hl.doctor(model, X), "attn.attn_dropout")
    assert why.startswith(
        "sdpa attention computes the pattern and its dropout inside one operation"
    )
    assert remedy == 'model.set_attn_implementation("eager")'
    config._attn_implementation = "eager"
    assert hl.doctor(model, X).ok


def test_a_fused_attention_that_is_not_called_is_not_blamed():
    class Spare(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = nn.Sequential(nn.Dropout(0.1))
            self.attn.config = SimpleNamespace(_attn_implementation="sdpa")

        def forward(self, x):
            return x

    why, _ = never(hl.doctor(Spare(), X), "attn.0")
    assert "sdpa" not in why


def test_a_holder_that_is_named_is_told_and_what_it_holds_fires():
    class Held(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(2, 2)])
            self.scales = nn.ParameterList([nn.Parameter(torch.ones(2))])

        def forward(self, x):
            return self.layers[0](x) * self.scales[0]

    found = hl.doctor(Held(), X, ["layers", "scales"])
    why, remedy = never(found, "layers")
    assert why == "ModuleList is a container only: it has no forward, and is never called"
    assert remedy == "select the modules or parameters in it: 'layers.*'"
    assert never(found, "scales")[1] == "select the modules or parameters in it: 'scales:grad'"
    assert hl.doctor(Held(), X, ["layers.*", "scales:grad"]).ok


def test_a_script_module_is_told():
    with pytest.warns((DeprecationWarning, FutureWarning), match="script"):
        scripted = torch.jit.script(nn.Linear(2, 2))
    model = nn.Sequential(scripted, nn.ReLU())
    why, remedy = never(hl.doctor(model, X), "0")
    assert why.startswith("a ScriptModule: torch refuses hooks on its modules, or never calls them")
    assert "before torch.jit.script" in remedy
    assert never(hl.doctor(scripted, X, "*" if list(scripted.children()) else None), "(root)")
    assert hl.doctor(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), X).ok


def test_a_call_that_does_not_come_is_told_with_how_many_do(looped):
    why, remedy = never(hl.doctor(looped, X, ["block#3", "block#2"]), "block#3")
    assert why == "the module ran 3 times in a pass, so call #3 never came"
    assert remedy == "count calls from 0: 'block#0' is the first"
    assert hl.doctor(looped, X, "block#0").ok


def test_a_missing_leaf_is_told_and_the_others_are_still_seen(looped):
    found = hl.doctor(looped, X, ["head:output[1]", "block"])
    why, _ = never(found, "head:output[1]")
    assert "has no leaf" in why
    assert found["block"].verdict == "fires 3 x"


def test_a_missing_leaf_alone_is_told(looped):
    why, _ = never(hl.doctor(looped, X, "head:output[1]"), "head:output[1]")
    assert "has no leaf" in why


def test_without_inputs_nobody_knows_but_what_is_so_anyhow():
    model = nn.Sequential(nn.MultiheadAttention(2, 1))
    found = hl.doctor(model)
    assert found["0"].verdict == "unknown"
    assert found["0"].why == "no inputs given"
    assert found["0.out_proj"].verdict == "never"
    assert found.ran == "nothing"
    assert not found.ok


def test_a_lazy_model_is_not_run_and_fires_once_it_has_been():
    model = nn.Sequential(nn.LazyLinear(2))
    found = hl.doctor(model, X)
    assert found["0"].verdict == "unknown"
    assert found["0"].why == "0.weight is lazy: the first run of the model creates it for good"
    assert found["0"].remedy == "run the model once yourself, then call hl.doctor again"
    assert isinstance(model[0].weight, nn.UninitializedParameter)
    model(X)
    assert hl.doctor(model, X).ok


def test_a_function_that_does_not_call_the_model_is_told(net, image):
    why, remedy = never(hl.doctor(net, lambda: nn.Linear(2, 2)(X), "fc"), "fc")
    assert why == "the model did not run: the given function never called it"
    assert remedy.startswith("call this very model there")
    assert hl.doctor(net, lambda: net(image), "fc").ok


def test_what_is_overwritten_later_is_to_be_copied(net, image):
    found = hl.doctor(net, image)
    assert found.ok
    overwritten = [str(one.site) for one in found.sites if "overwritten in place" in one.why]
    assert overwritten == [f"layer{i}.{k}.bn" for i in (1, 2) for k in (0, 1)]
    assert found["layer1.0.bn"].remedy == "record copies: hl.record(..., copy=True)"
    with hl.record(net, "layer1.0.bn") as run:
        net(image)
    with pytest.raises(hl.OverwrittenError):
        run["layer1.0.bn"]
    with hl.record(net, "layer1.0.bn", copy=True) as run:
        net(image)
    assert run["layer1.0.bn"].shape == (2, 4, 8, 8)


def test_a_forward_that_raises_is_told_with_module_and_arguments(net):
    found = hl.doctor(net, torch.zeros(1, 7, 8, 8))
    assert not found.ok
    assert found.failure.what.startswith(
        "stem (Conv2d), which got Tensor[1, 7, 8, 8]: RuntimeError"
    )
    assert found["stem"].why == "the forward raised before this had finished"
    assert found["fc"].why == "the forward raised before it came here"


def test_an_error_of_hookline_in_the_models_own_forward_is_told():
    class Recording(nn.Linear):
        def forward(self, x):
            with hl.record(self, "nowhere"):
                return super().forward(x)

    found = hl.doctor(nn.Sequential(Recording(2, 2)), X)
    assert found["0"].verdict == "never"
    assert found.failure.about == "hookline"
    assert "'nowhere'" in found.failure.what


def test_what_fired_before_a_forward_raised_is_told():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(5, 5))
    found = hl.doctor(model, X)
    assert found["0"].verdict == "fires"
    assert found["1"].verdict == "never"
    assert not found.ok


def test_beside_a_profiler_the_reason_is_what_a_line_can_tell():
    sys.setprofile(lambda *_: None)
    try:
        found = hl.doctor(Past("forward"), X, "a")
        assert sys.getprofile() is not None
    finally:
        sys.setprofile(None)
    assert found["a"].why == "not reached in this forward, or its .forward was called directly"
    assert found["a"].remedy.startswith("ask about the uncompiled model, and without a profiler")
    assert any(note.about == "profiler" for note in found.notes)


def test_a_selector_without_match_and_a_wrong_model_raise(net):
    with pytest.raises(hl.SelectionError, match="matches no module"):
        hl.doctor(net, None, "fcc")
    with pytest.raises(hl.AttachError, match=r"hl[.]doctor must be given a model"):
        hl.doctor(torch.ones(2))
    with pytest.raises(KeyError, match="stem must be a selected site"):
        hl.doctor(net, None, "fc")["stem"]


class Branches(nn.Module):
    """A model that calls one of two layers, by something that a run does not put back."""

    def __init__(self, chosen):
        super().__init__()
        self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)
        self.chosen = chosen

    def forward(self, x):
        return (self.one if next(self.chosen) else self.two)(x)


DIFFERS = "was called in one run and not in another"


@pytest.mark.parametrize(
    "pattern", [(1, 0), (0, 1), (0, 0, 1), (1, 1, 0), (1, 1, 1, 0), (1, 1, 1, 1, 0)]
)
@pytest.mark.parametrize("selector", [None, "one", "two"])
def test_a_run_that_does_not_repeat_itself_is_said(pattern, selector):
    found = hl.doctor(Branches(itertools.cycle(pattern)), torch.ones(1, 2), selector)
    for site in found.sites:
        assert site.calls == 1 or site.why.startswith("the run did not repeat itself: ")
        assert site.calls == 1 or DIFFERS in site.why
    silent = any(not site.calls for site in found.sites)
    noted = [note for note in found.notes if note.about == "the runs"]
    assert bool(noted) >= silent
    assert all(DIFFERS in note.what for note in noted)


def test_a_parameter_of_a_run_that_differs_is_not_explained():
    model = Branches(itertools.cycle((1, 0, 0)))
    found = hl.doctor(model, torch.ones(1, 2), "one", ports="grad")
    assert all(DIFFERS in site.why for site in found.sites)


def test_a_choice_by_torchs_generator_repeats_itself():
    class Drops(Branches):
        def forward(self, x):
            return (self.one if torch.rand(()) < 0.5 else self.two)(x)

    for seed in range(4):
        torch.manual_seed(seed)
        found = hl.doctor(Drops(None), torch.ones(1, 2))
        assert not [note for note in found.notes if note.about == "the runs"]
        assert sum(site.calls for site in found.sites) == 2
        assert not any("mode" in site.why for site in found.sites)
