"""Selectors."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hookline as hl
from hookline.engine.selection.site import glob_to_regex


def paths(model, selector, **options):
    return [str(site) for site in hl.select(model, selector, **options)]


@pytest.mark.parametrize(
    ("pattern", "matches", "refuses"),
    [
        ("*", ["a", ""], ["a.b"]),
        ("a.*", ["a.b", "a.1"], ["a", "a.b.c", "ab"]),
        ("**", ["a", "a.b.c", ""], []),
        ("a.**", ["a.b", "a.b.c"], ["a", "ab.c"]),
        ("**.b", ["b", "a.b", "a.c.b"], ["ab", "a.xb"]),
        ("a.**.b", ["a.b", "a.x.b", "a.x.y.b"], ["ab", "a.xb", "axb"]),
        ("{a,b.c}.d", ["a.d", "b.c.d"], ["b.d"]),
        ("h.{1*,2}", ["h.1", "h.12", "h.2"], ["h.21"]),
        ("fc*", ["fc", "fc2"], ["fc.1", "xfc"]),
        ("a.b+", ["a.b+"], ["a.bb"]),
        ("h.?", ["h.1", "h.x"], ["h.", "h.12", "h.1.a", "h1"]),
        ("?.b", ["a.b"], [".b", "a.c"]),
        ("h.[0-9]", ["h.0", "h.9"], ["h.a", "h.10", "h.[0-9]"]),
        ("h.[0-9][!0].q", ["h.11.q", "h.1a.q"], ["h.10.q", "h.1.q", "h.1..q"]),
        ("h.[1^]", ["h.1", "h.^"], ["h.2"]),
        ("[!a]b", ["cb"], ["ab", ".b"]),
        ("a[[]0[]]", ["a[0]"], ["a0"]),
        ("a[?*]", ["a?", "a*"], ["ab"]),
        ("{a,h?}.[xy]", ["a.x", "h1.y"], ["h.x", "a.z"]),
    ],
)
def test_globs(pattern, matches, refuses):
    regex = glob_to_regex(pattern)
    assert all(regex.fullmatch(path) for path in matches)
    assert not any(regex.fullmatch(path) for path in refuses)


segment = st.text("ab1", min_size=1, max_size=2)


@given(st.lists(segment, min_size=1, max_size=4), st.data())
def test_a_path_matches_itself_with_any_segment_starred(segments, data):
    path = ".".join(segments)
    k = data.draw(st.integers(0, len(segments) - 1))
    starred = ".".join([*segments[:k], "*", *segments[k + 1 :]])
    assert glob_to_regex(path).fullmatch(path)
    assert glob_to_regex(starred).fullmatch(path)
    assert glob_to_regex("**." + segments[-1]).fullmatch(path)
    assert glob_to_regex(path + ".**").fullmatch(path) is None
    assert glob_to_regex(path + ".**").fullmatch(path + ".x.y")


@given(st.text("ab.[]?*!-^1\\", min_size=1, max_size=6), st.text("ab[]?*!-^1\\", max_size=6))
def test_a_name_whose_signs_are_quoted_matches_itself_alone(name, other):
    quoted = "".join(f"[{sign}]" if sign in "[]?*" else sign for sign in name)
    regex = glob_to_regex(quoted)
    assert regex.fullmatch(name)
    assert bool(regex.fullmatch(other)) == (name == other)


def test_every_kind_of_selector(net):
    blocks = ["layer1.0", "layer1.1", "layer2.0", "layer2.1"]
    assert paths(net, "layer*.*") == blocks
    assert paths(net, re.compile(r"layer\d\.\d$")) == blocks
    assert paths(net, type(net.layer1[0])) == blocks
    assert paths(net, net.layer1[1]) == ["layer1.1"]
    assert paths(net, lambda path, module: path.count(".") == 1) == blocks
    assert paths(net, ["layer2.1", "layer1.0"]) == ["layer1.0", "layer2.1"]
    assert paths(net, "") == ["(root)"]
    assert len(paths(net, None)) == len(list(net.modules()))


def test_a_site_selects_itself(net):
    texts = ["layer1.0:input[0]", "layer1.0#1", "fc.weight:grad", "layer2.1@add", ""]
    for text in texts:
        sites = list(hl.select(net, text))
        assert list(hl.select(net, sites[0])) == list(hl.select(net, sites)) == sites
    signs = nn.ModuleDict({"a[0]": nn.Linear(1, 1), "a0": nn.ReLU(), "b:c": nn.ReLU()})
    for site in hl.select(signs, None):
        assert list(hl.select(signs, site)) == [site]


def test_selections_combine(net):
    conv = hl.select(net, nn.Conv2d)
    layer1 = hl.select(net, "layer1.**")
    assert paths(net, conv & layer1) == ["layer1.0.conv", "layer1.1.conv"]
    assert paths(net, conv - layer1) == ["stem", "layer2.0.conv", "layer2.1.conv"]
    assert paths(net, (conv & layer1) | "fc") == ["layer1.0.conv", "layer1.1.conv", "fc"]
    assert "stem" in conv
    assert "fc" not in conv


def test_a_whole_covers_its_parts_when_selections_combine(net):
    leaves = hl.select(net, "layer*.*:output[0]")
    assert [str(site) for site in leaves & "layer1.*"] == [
        "layer1.0:output[0]",
        "layer1.1:output[0]",
    ]
    assert [str(site) for site in hl.select(net, "layer1.*") & leaves] == [
        "layer1.0:output[0]",
        "layer1.1:output[0]",
    ]
    assert [str(site) for site in hl.select(net, ["fc#1", "stem"]) - "fc"] == ["stem"]


def test_an_empty_or_stale_selection_is_refused(net, left_as_found):
    empty = hl.select(net, "fc") & "stem"
    fc = hl.select(net, "fc")
    net.fc = nn.Linear(4, 5)
    before = left_as_found(net)
    with pytest.raises(hl.SelectionError, match="the selection is empty"):
        hl.record(net, empty)
    with pytest.raises(hl.SelectionError, match="the model changed"):
        hl.record(net, fc)
    assert left_as_found(net) == before


def test_ports_leaves_and_calls_follow_a_glob(net):
    assert paths(net, "layer1.*:input#1") == ["layer1.0:input#1", "layer1.1:input#1"]
    assert paths(net, "layer1.*[0]") == ["layer1.0:output[0]", "layer1.1:output[0]"]
    assert paths(net, "fc", ports=("input", "output")) == ["fc:input", "fc"]
    assert paths(net, "fc:output", ports="input") == ["fc"]


def test_a_shared_module_is_one_site_found_by_either_path():
    shared = nn.Linear(1, 1)
    model = nn.Sequential()
    model.add_module("a", shared)
    model.add_module("b", shared)
    (site,) = hl.select(model, "b")
    assert (site.path, site.aliases) == ("a", ("b",))
    assert paths(model, "*") == ["a"]


def test_paths_with_signs_of_the_grammar_can_be_selected():
    model = nn.ModuleDict({"a:b": nn.Linear(1, 1), "c#1": nn.Linear(1, 1)})
    assert [site.path for site in hl.select(model, "a:b")] == ["a:b"]
    assert [site.path for site in hl.select(model, "c#1")] == ["c#1"]
    model = nn.ModuleDict(
        {"a[0]": nn.Linear(1, 1), "a0": nn.ReLU(), "b?": nn.ReLU(), "bc": nn.ReLU()}
    )
    assert paths(model, "a[0]") == ["a[0]"]
    assert [site.path for site in hl.select(model, "b?:input")] == ["b?"]
    assert [site.path for site in hl.select(model, "a[[]0[]]:input")] == ["a[0]"]


@pytest.mark.parametrize("text", ["", ":output", "(root)", "(root):output"])
def test_every_way_to_write_the_root_selects_it(net, text):
    selection = hl.select(net, text)
    assert [(site.path, str(site)) for site in selection] == [("", "(root)")]
    assert text in selection
    assert (hl.select(net, None) - text).sites == hl.select(net, None).sites[1:]
    assert repr(selection).splitlines()[2].startswith("  (root) ")


def test_a_module_called_root_in_parentheses_is_selected():
    model = nn.ModuleDict({"(root)": nn.Linear(1, 1)})
    for text in ("(root)", "(root):output", "[(]root)"):
        (site,) = hl.select(model, text)
        assert site.path == "(root)"
        assert hl.select(model, str(site)).sites == (site,)
    assert [site.path for site in hl.select(model, "(root):grad", ports="grad")] == [
        "(root).weight", "(root).bias",
    ]  # fmt: skip


def test_a_bracket_of_a_path_and_one_of_a_leaf_are_told_apart(net):
    def parts(text):
        return [(site.path, site.leaf) for site in hl.select(net, text)]

    assert parts("layer[12]:output") == [("layer1", ()), ("layer2", ())]
    assert parts("layer[1-2]") == [("layer1", ()), ("layer2", ())]
    assert parts("layer[1-2].[0]") == [("layer1.0", ()), ("layer2.0", ())]
    assert parts("layer[12].[01]:input") == parts("layer*.*:input")
    assert parts("layer?.[0-9].conv") == parts("layer*.*.conv")
    assert parts("layer[12].*") == parts("layer*.*")
    assert parts("layer[12].**.conv") == parts("layer*.**.conv")
    assert parts("layer1[0]") == parts("layer1:output[0]") == [("layer1", (0,))]
    assert parts("layer?[0]") == [("layer1", (0,)), ("layer2", (0,))]
    assert parts("layer[1-2]:output[0]") == [("layer1", (0,)), ("layer2", (0,))]
    assert parts('layer[1-2]["a"].b') == [("layer1", ("a", "b")), ("layer2", ("a", "b"))]


def test_an_error_in_a_function_that_selects_says_its_argument(net):
    def count(path, module):
        return len(module) + len(3)

    with pytest.raises(TypeError, match="len") as caught:
        hl.select(net, count)
    assert "called with (path, module), here ('', SmallNet)" in caught.value.__notes__[0]


def test_leaf_modules_and_biases_alone_can_be_selected(net):
    leaves = [site.path for site in hl.select(net, lambda path, m: not list(m.children()))]
    assert leaves == [name for name, m in net.named_modules() if not list(m.children())]
    biases = [name for name, _ in net.named_parameters() if name.endswith(".bias")]
    assert [site.path for site in hl.select(net, "**.bias", ports="grad")] == biases
    assert paths(net, "**.bias:grad") == [f"{name}:grad" for name in biases]
    assert paths(net, "layer?.**.conv.weight:grad") == [
        f"{name}:grad" for name, _ in net.named_parameters()
        if name.startswith("layer") and name.endswith("conv.weight")
    ]  # fmt: skip


def test_mere_holders_are_left_out_of_wide_selections():
    model = nn.Sequential(nn.Linear(1, 1))
    model.parts = nn.ModuleList([nn.Linear(1, 1)])
    assert paths(model, "**") == ["(root)", "0", "parts.0"]
    with pytest.raises(hl.SelectionError, match=r"nothing flows through 'parts'.*\n.*'parts\.\*'"):
        hl.select(model, "parts")


@pytest.mark.parametrize(
    ("selector", "said"),
    [
        ("layer9", "Did you mean 'layer"),
        ("layer1.0.cnv", "Did you mean 'layer1.0.conv'"),
        ("0.conv", "Did you mean '**.0.conv', at any depth?"),
        ("Conv2d", "give the type itself: nn.Conv2d"),
        ("zzz*", "'zzz*' matches no module of SmallNet"),
        (nn.LSTM, "LSTM matches no module of SmallNet. Its types: AdaptiveAvgPool2d"),
        (re.compile("zzz"), "re.compile('zzz') matches no module"),
        (nn.Linear(1, 1), "this Linear matches no module"),
        (["fc", "zzz"], "'zzz' matches no module"),
        ([], "empty"),
        (3, "a selector must be of a known kind, got 3"),
        (torch.softmax, "must take (path, module), got softmax"),
        (lambda module: True, "must take (path, module), got <lambda>"),
        ("layer[9-0].0", "must run upwards"),
        ("layer1[0:2]", "got '[0:2]'"),
        (torch.zeros(1), "must be a parameter of"),
        (int, "must be a subclass of nn.Module, got int"),
        ("fc:outptu", "got 'outptu'"),
        ("{fc", "are closed"),
        ("{a,{b}}", "do not nest"),
        ("fc#²", "must be a number such as #0"),
        ("fc#" + "9" * 30, "must be a number such as #0"),
        (re.compile(b"fc"), "not from bytes"),
    ],
)
def test_a_selector_that_cannot_be_used_says_why_in_three_lines(net, selector, said):
    with pytest.raises(hl.SelectionError) as caught:
        hl.select(net, selector)
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3


def test_a_selection_of_another_model_is_refused(net):
    other = hl.select(nn.Sequential(nn.Linear(1, 1)), "0")
    with pytest.raises(hl.SelectionError, match="another model"):
        hl.select(net, other)


def test_unknown_ports_are_refused(net):
    with pytest.raises(hl.SelectionError, match="got 'gradient'"):
        hl.select(net, "fc", ports=("gradient",))
    with pytest.raises(hl.SelectionError, match="must name at least one of"):
        hl.select(net, "fc", ports=())


def test_a_selection_prints_its_sites_and_types(net):
    assert repr(hl.select(net, "fc")) == "Selection of 1 site\n  site  type\n  fc    Linear"


def test_a_parameters_gradient_is_selected_by_its_path(net):
    assert paths(net, "fc.bias:grad") == ["fc.bias:grad"]
    assert paths(net, "fc*.bias:grad") == ["fc.bias:grad"]
    assert paths(net, "**.bn.weight", ports="grad")[:2] == [
        "layer1.0.bn.weight:grad", "layer1.1.bn.weight:grad",
    ]  # fmt: skip
    assert paths(net, re.compile(r"stem\.bias$"), ports="grad") == ["stem.bias:grad"]


def test_a_module_stands_for_all_parameters_in_it(net):
    both = ["fc.weight:grad", "fc.bias:grad"]
    assert paths(net, "fc:grad") == both
    assert paths(net, "f*", ports="grad") == both
    assert paths(net, nn.Linear, ports="grad") == both
    assert paths(net, net.fc, ports="grad") == both
    assert paths(net, lambda path, module: path == "fc", ports="grad") == both
    inside = [f"layer1.0.{name}:grad" for name, _ in net.layer1[0].named_parameters()]
    assert paths(net, "layer1.0", ports="grad") == inside
    everything = [f"{name}:grad" for name, _ in net.named_parameters()]
    for selector in (None, "**", "", net):
        assert paths(net, selector, ports="grad") == everything


def test_a_parameter_selects_its_own_gradient_whatever_the_ports(net):
    assert paths(net, net.fc.bias) == ["fc.bias:grad"]
    assert paths(net, [net.fc.bias, "stem"]) == ["stem", "fc.bias:grad"]


def test_tied_parameters_are_one_site_with_aliases():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    (site,) = hl.select(model, "1.weight:grad")
    assert (site.path, site.aliases) == ("0.weight", ("1.weight",))


def test_a_modules_ports_come_in_the_order_in_which_they_flow(net):
    ports = ("grad", "grad_output", "grad_input", "output", "input")
    assert paths(net, "fc", ports=ports) == [
        "fc:input", "fc", "fc:grad_input", "fc:grad_output", "fc.weight:grad", "fc.bias:grad",
    ]  # fmt: skip


def test_gradient_selections_combine(net):
    found = hl.select(net, "fc", ports="grad") | "stem.bias:grad"
    assert [str(site) for site in found - "fc.weight:grad"] == ["stem.bias:grad", "fc.bias:grad"]
    assert [str(site) for site in found & net.fc.bias] == ["fc.bias:grad"]


@pytest.mark.parametrize(
    ("selector", "ports", "says"),
    [
        ("fc.bias", "output", "It is a parameter; its gradient is 'fc.bias:grad'"),
        ("fc.bais:grad", "output", "matches no parameter of SmallNet. Did you mean 'fc.bias:"),
        ("pool:grad", "output", "AdaptiveAvgPool2d at 'pool' has no parameters"),
        (nn.ReLU, "grad", "ReLU at 'layer1.0.relu' has no parameters"),
        ("fc.bias:grad[0]", "output", "has no leaves and no calls"),
        ("fc.bias:grad#1", "output", "has no leaves and no calls"),
        ("fc.bias:grad_output", "output", "matches no module"),
        ("fc", "gradient", "got 'gradient'"),
    ],
)
def test_a_gradient_selector_that_cannot_be_used_says_why(net, selector, ports, says):
    with pytest.raises(hl.SelectionError, match=re.escape(says)) as caught:
        hl.select(net, selector, ports=ports)
    assert len(str(caught.value).splitlines()) <= 3


def test_a_selection_of_parameters_that_were_replaced_is_refused(net):
    found = hl.select(net, "fc", ports="grad")
    net.fc.bias = nn.Parameter(torch.zeros(5))
    with pytest.raises(hl.SelectionError, match=r"fc\.bias:grad is no longer there"):
        hl.record(net, found)
