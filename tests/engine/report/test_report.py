"""Reports and the warnings at the end of a line."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import hookline as hl


def test_the_report_counts_what_fired(looped):
    with hl.record(looped, ["block", "head"]) as run:
        looped(torch.ones(1, 2))
    report = run.report()
    assert [(str(site), count) for site, count in report.fired] == [("block", 3), ("head", 1)]
    assert report.silent == ()
    text = str(report)
    assert "hl.record on Looped: 2 sites, 1 pass, 2 fired, 0 never; ended" in text
    assert "block  Linear      3" in text


def test_a_site_that_never_fired_is_warned_of_with_the_reason(net, image):
    net.unused = nn.Linear(1, 1)
    with pytest.warns(hl.HooklineWarning, match=r"unused: not reached in this forward") as caught:
        with hl.edit(net, ["fc", "unused"], lambda t: t) as line:
            net(image)
    assert caught[0].filename == __file__
    assert "never: not reached" in str(line.report())


@pytest.mark.parametrize(("n_unused", "rest"), [(3, ""), (5, "2 more.")])
def test_a_warning_names_three_sites_and_counts_the_others(net, image, n_unused, rest):
    net.unused = nn.ModuleList(nn.Linear(1, 1) for _ in range(n_unused))
    with pytest.warns(hl.HooklineWarning) as caught:
        with hl.edit(net, ["fc", "unused.*"], lambda t: t):
            net(image)
    said = str(caught[0].message).partition("\n")[0]
    assert f"{n_unused} of {n_unused + 1} sites never fired: unused.0: " in said
    assert "; unused.2: " in said
    assert "unused.3" not in said
    assert said.partition("; and ")[2] == rest


def test_a_line_in_which_nothing_ran_is_warned_of(net):
    with pytest.warns(hl.HooklineWarning, match="the model did not run while it lasted"):
        with hl.record(net, "fc"):
            pass


def test_a_line_that_is_removed_inside_its_block_warns_once(net):
    with pytest.warns(hl.HooklineWarning) as caught, hl.edit(net, "fc", lambda t: t) as line:
        line.remove()
    assert len(caught) == 1


def test_a_call_that_never_came_says_how_often_the_module_ran(looped):
    with pytest.warns(hl.HooklineWarning, match=r"the module ran 3 times in a pass"):
        with hl.edit(looped, "block#7", lambda t: t):
            looped(torch.ones(1, 2))


class Bypasses(nn.Module):
    """Uses modules and operations in all the ways that hooks do not see."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.direct, self.weights_of = nn.Linear(3, 4), nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        x = torch.relu(self.direct.forward(x)) @ self.weights_of.weight
        return self.attention(x[None], x[None], x[None])[0]


REASONS = {
    "direct": r"direct: not reached in this forward, or its \.forward was called directly",
    "weights_of": r"weights_of: not reached in this forward",
    "attention.out_proj": "uses out_proj's weights without calling it; select its parent",
}


@pytest.mark.trap(33)
@pytest.mark.parametrize("path", REASONS)
def test_hooks_on_what_is_not_called_never_fire_in_silence(path):
    model, fired = Bypasses(), []
    handle = model.get_submodule(path).register_forward_hook(lambda *_: fired.append(1))
    model(torch.ones(4, 3))
    handle.remove()
    assert not fired
    with pytest.warns(hl.HooklineWarning, match=REASONS[path]):
        with hl.record(model, path) as run:
            model(torch.ones(4, 3))
    with pytest.raises(hl.NotRecordedError, match=f"{path} was selected, but has no value"):
        run[path]


def test_no_warning_hides_an_exception(net):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="mine"), hl.record(net, "fc"):
            raise ValueError("mine")


def test_recording_all_does_not_complain_of_what_is_left_out(net, image):
    net.unused = nn.Linear(1, 1)
    with hl.record(net) as run:
        net(image)
    with pytest.raises(hl.NotRecordedError, match="not reached"):
        run["unused"]


def test_what_a_failed_forward_left_out_is_explained(net):
    with pytest.raises(RuntimeError), hl.record(net, ["fc", "stem"]) as run:
        net(torch.zeros(1, 7, 8, 8))
    with pytest.raises(hl.NotRecordedError, match="the forward raised before this had finished"):
        run["fc"]


def test_where_two_reasons_are_possible_it_is_said_who_knows(net, image):
    net.unused = nn.Linear(1, 1)
    line = hl.record(net, ["unused", "fc"])
    with pytest.warns(
        hl.HooklineWarning, match=r"hl\.doctor\(model, inputs, selector\) tells which"
    ):
        with line:
            net(image)
    assert str(line.report()).endswith(
        "\n  hl.doctor(model, inputs, selector) tells which it was, and what to do."
    )
    with hl.record(net, "fc") as run:
        net(image)
    assert "hl.doctor" not in str(run.report())


class Leaving(nn.Module):
    """A module whose second layer is not called."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.used(x)


class LeavingEncoderLayer(nn.TransformerEncoderLayer):
    """An encoder layer with a layer that is not called."""

    def __init__(self):
        super().__init__(2, 1, 2, batch_first=True)
        self.unused = nn.Linear(2, 2)


NOT_REACHED = "not reached in this forward, or its .forward was called directly"


def why_silent(model, selector, run, **options):
    line = hl.record(model, selector, **options)
    run()
    with pytest.warns(hl.HooklineWarning, match="never fired"):
        line.remove()
    return {str(site): why for site, why in line.report().why.items()}


def test_compiled_code_is_not_blamed_for_a_layer_not_called(fresh_dynamo):
    model = torch.compile(Leaving(), backend="eager")
    model(torch.ones(1, 2))
    found = why_silent(model, "unused", lambda: model(torch.ones(1, 2)))
    assert found == {"unused": NOT_REACHED}


@pytest.mark.filterwarnings("ignore:hl.record turned off torch's fast path")
def test_a_fast_path_that_the_line_turned_off_is_not_blamed():
    encoder = nn.TransformerEncoder(LeavingEncoderLayer(), 1, enable_nested_tensor=False).eval()
    with torch.no_grad():
        found = why_silent(encoder, "layers.0.unused", lambda: encoder(torch.ones(1, 3, 2)))
    assert found == {"layers.0.unused": NOT_REACHED}


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_a_script_parameter_without_gradient_is_explained():
    model = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(2, 2))))
    found = why_silent(model, "0.0:grad", lambda: model(torch.ones(1, 2)))
    assert list(found) == ["0.0.weight:grad", "0.0.bias:grad"]
    assert all(why.startswith("no gradient flowed back to it") for why in found.values())


def test_a_parameter_that_was_replaced_is_said_to_be():
    model = nn.Sequential(nn.Linear(2, 2))
    line = hl.record(model, "0.weight:grad")
    model[0].weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.warns(hl.HooklineWarning, match="the values of 0.weight:grad are those of the old"):
        model(torch.ones(1, 2)).sum().backward()
    line.remove()  # and says nothing more
    (why,) = line.report().why.values()
    assert why.startswith("the parameter 0.weight was replaced (another Parameter now)")
    assert why.endswith("; attach after that")


def test_a_head_counts_passes_threads_and_what_was_run_alone(looped):
    with hl.attach(looped) as line:
        line.forward("block", lambda module, args, output: None)
        looped(torch.ones(1, 2))
    assert str(line.report()).splitlines() == [
        "hl.attach on Looped: 1 site, 1 pass, 1 fired, 0 never; ended",
        "  site           type    fired",
        "  block:forward  Linear      3",
    ]


def test_a_graph_module_whose_modules_an_interpreter_calls():
    model = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    with pytest.warns(hl.HooklineWarning, match="the model itself was not called.*Interpreter"):
        with hl.record(model, ["(root)", "0"]):
            torch.fx.Interpreter(model).run(torch.ones(1, 2))


class Mixture(nn.Module):
    """A mixture of experts, of which the router calls those that a token was sent to."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(4))

    def forward(self, x):
        return self.experts[2](x)


def test_an_expert_without_a_token_is_told_as_such():
    model = Mixture()
    with pytest.warns(hl.HooklineWarning, match="no token was routed to this expert") as caught:
        with hl.record(model, nn.Linear) as run:
            model(torch.ones(1, 2))
    assert "3 of 4 sites never fired: experts.0.0: no token was routed" in str(caught[0].message)
    assert "no token was routed" in str(run.report())
