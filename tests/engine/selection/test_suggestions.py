"""no_match: what is said where a selector matches nothing, word for word."""

from __future__ import annotations

import ast
import re
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize, prune

import hookline as hl


class Parts(nn.Module):
    """Modules of several kinds, and lists of them."""

    def __init__(self):
        super().__init__()
        self.block = nn.ModuleDict({"conv": nn.Conv2d(1, 1, 1), "norm": nn.LayerNorm(2)})
        self.head = nn.Linear(2, 2)
        self.many = nn.ModuleList(nn.Linear(1, 1) for _ in range(4))
        self.relu = nn.ReLU()


MODULES = (
    "\nIts 10 modules begin: block, block.conv, block.norm, head, many, many.0, many.1, many.2, …."
)
PARAMETERS = (
    "\nIts 14 parameters begin: block.conv.weight, block.conv.bias, block.norm.weight,"
    " block.norm.bias, head.weight, head.bias, many.0.weight, many.0.bias, …."
)


def said(model, selector, **options):
    with pytest.raises(hl.SelectionError) as caught:
        hl.select(model, selector, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("selector", "says"),
    [
        ("conv", "'conv' matches no module of Parts. Did you mean '**.conv', at any depth?"),
        (
            "Linear",
            "'Linear' matches no module of Parts. For every Linear, give the type itself:"
            " nn.Linear, not its name.",
        ),
        (
            "head.weight",
            "'head.weight' matches no module of Parts. It is a parameter; its gradient is"
            " 'head.weight:grad'.",
        ),
        ("haed", "'haed' matches no module of Parts. Did you mean 'head'?"),
        (
            "mny.0",
            "'mny.0' matches no module of Parts. Did you mean 'many.0', 'many.3',"
            " 'many.2', 'many.1'?",
        ),
        ("zzz", "'zzz' matches no module of Parts."),
        (re.compile("zzz"), "re.compile('zzz') matches no module of Parts."),
        (lambda path, module: False, "the predicate <lambda> matches no module of Parts."),
        (nn.Linear(1, 1), "this Linear matches no module of Parts."),
        (
            nn.GELU,
            "GELU matches no module of Parts. Its types: Conv2d, LayerNorm, Linear, ModuleDict,"
            " ModuleList, Parts, ReLU.",
        ),
    ],
)
def test_what_is_near_and_what_is_there_are_named(selector, says):
    assert said(Parts(), selector) == says + MODULES


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("blocks.0.hook_resid_pre", ".resid_pre.0"),
        ("blocks.*.attn.hook_attn_scores", ".scores"),
        ("blocks.1.mlp.hook_post:grad_output", ".mlp_act.1:grad_output"),
        ("hook_embed", ".embed"),
        ("resid_mid", ".resid_mid"),
    ],
)
def test_names_of_transformer_lens_lead_to_the_parts(name, part):
    advice = f" In a transformer, write {part!r} after hl.anatomy(model)."
    assert said(Parts(), name) == f"{name!r} matches no module of Parts.{advice}{MODULES}"


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("flatten", "A call of torch's flatten is '@flatten'."),
        ("head.add_1", "Did you mean 'head'? A call of torch's add is 'head@add#1'."),
        ("relu_2", "Did you mean 'relu'? A later call of it is 'relu#2'."),
    ],
)
def test_names_of_torch_fx_lead_to_the_calls(name, advice):
    assert said(Parts(), name) == f"{name!r} matches no module of Parts. {advice}{MODULES}"


def test_a_dict_of_new_names_is_refused_for_its_keys():
    assert said(Parts(), {"head": "feature"}) == (
        "a selector must be of a known kind, got dict(head=str)."
        "\nGive a glob such as 'layer4.*', a compiled regex, a module type, a module, a parameter,"
        " a function (path, module) -> bool, or a list of these, such as a dict's keys."
    )


def test_a_slice_of_a_list_is_no_module_but_what_it_holds():
    model = Parts()
    slice_of_many = model.many[1:3]
    assert said(model, slice_of_many) == (
        "this ModuleList matches no module of Parts. Give what it holds as a list: 'many.1',"
        f" 'many.2'.{MODULES}"
    )
    assert len(hl.select(model, list(slice_of_many))) == 2


def test_parameters_are_named_where_gradients_were_asked_for():
    assert said(Parts(), "zzz:grad") == "'zzz:grad' matches no parameter of Parts." + PARAMETERS
    assert said(Parts(), "head.bais", ports="grad") == (
        "'head.bais' matches no parameter of Parts. Did you mean 'head.bias', 'head.weight'?"
        + PARAMETERS
    )


def test_eight_paths_are_all_named_and_nine_are_cut():
    eight = nn.Sequential(*(nn.Identity() for _ in range(8)))
    assert said(eight, "zzz").endswith("\nIts 8 modules begin: 0, 1, 2, 3, 4, 5, 6, 7.")
    eight.append(nn.Identity())
    assert said(eight, "zzz").endswith("\nIts 9 modules begin: 0, 1, 2, 3, 4, 5, 6, 7, ….")


@pytest.mark.parametrize(
    ("model", "selector", "advice"),
    [
        (nn.Linear(1, 1), "zzz", "Its only module is the root, Linear: select it with ''."),
        (
            nn.ModuleList(),
            "z",
            "Its only module is the root, ModuleList: give a model with a forward.",
        ),
        (
            nn.ReLU(),
            "z:grad",
            "Select a module's gradient, as in ':grad_output': it has no parameters.",
        ),
        (nn.ModuleList(), "z:grad", "It has no parameters."),
        (
            nn.ModuleList([nn.ReLU()]),
            "z:grad",
            "Select a module's gradient, as in '**:grad_output': it has no parameters.",
        ),
        (nn.PReLU(), "z:grad", "Its 1 parameter begins: weight."),
        (nn.ModuleList(), nn.ModuleList, "Select a module that has a forward: it holds none."),
        (nn.ModuleList([nn.ModuleList([nn.ReLU()])]), "0", "Select a module inside it: '0.*'."),
        (
            nn.ModuleList([nn.ModuleList([nn.ReLU()])]),
            nn.ModuleList,
            "Select a module inside it: '**'.",
        ),
        (
            nn.ModuleList([nn.ModuleList([nn.ReLU()])]),
            "0:grad",
            "Select a parameter, or a module that has one.",
        ),
    ],
)
def test_what_a_small_model_has_is_told_what_fails_not_proposed(model, selector, advice):
    assert said(model, selector).splitlines()[1] == advice


@pytest.mark.parametrize(
    ("selector", "says"),
    [
        ("conv:input", "Did you mean '**.conv:input', at any depth?"),
        ("weight:grad", "Did you mean '**.weight:grad', at any depth?"),
        ("haed:input[0]", "Did you mean 'head:input[0]'?"),
        ("ModuleList", "of Parts.\nIts"),  # nothing flows through lists, so they are not proposed
        ("manny", "of Parts. Did you mean 'many.3', 'many.2', 'many.1', 'many.0'?"),
        ("Parts", "of Parts.\nIts"),  # it has no forward
        ("Mine", "give the type itself: Mine, not its name."),
        ("Linear:grad", "give the type itself: nn.Linear, ports='grad', not its name."),
    ],
)
def test_what_is_proposed_would_match(selector, says):
    model = Parts()
    model.mine = type("Mine", (nn.Identity,), {})()
    assert says in said(model, selector)


def test_a_type_of_the_same_name_is_told_by_its_module():
    model = nn.Sequential(nn.Linear(1, 1))
    mine = type("Linear", (nn.Module,), {})
    assert said(model, mine).startswith(
        "Linear matches no module of Sequential. Its types: Sequential,"
        " torch.nn.modules.linear.Linear."
    )


def test_twelve_types_are_named_and_thirteen_are_cut():
    kinds = [type(f"Kind{n:02}", (nn.Identity,), {}) for n in range(12)]
    model = nn.ModuleList(kind() for kind in kinds)
    model.__class__ = type("Kind12", (nn.ModuleList,), {})
    assert "Kind10, Kind11, …." in said(model, nn.GELU)
    del model[11]
    assert "Kind10, Kind12.\n" in said(model, nn.GELU)


def test_what_is_matched_but_has_no_such_port_says_what_has():
    assert said(Parts(), "relu:grad") == (
        "ReLU at 'relu' has no parameters.\nFor the gradient of its output: 'relu:grad_output'."
    )
    assert said(Parts(), "many") == (
        "nothing flows through 'many': ModuleList only holds other modules and has no forward."
        "\nSelect a module inside it: 'many.*'."
    )


@pytest.mark.parametrize(
    ("tensor", "got"),
    [
        (torch.ones(2), "got Tensor[2]."),
        (
            torch.ones(2, requires_grad=True) * 2,
            "got Tensor[2] (it was computed, as a parametrized weight is).",
        ),
    ],
)
def test_a_tensor_that_is_not_a_parameter_says_where_tensors_go(tensor, got):
    assert said(Parts(), tensor) == (
        f"a tensor as a selector must be a parameter of Parts, {got}\nInputs go to the model, and a"
        " selector names modules. For the gradient of a tensor: hl.attach(), line.grad(tensor, fn)."
    )


def test_a_computed_weight_names_what_it_is_computed_from():
    model = Parts()
    prune.l1_unstructured(model.head, "weight", amount=1)
    parametrize.register_parametrization(model.many[0], "weight", nn.Identity())
    assert said(model, "head.weight").startswith(
        "'head.weight' matches no module of Parts. It is computed before each call; the"
        " gradients of its parameters are 'head.weight_orig:grad'.\n"
    )
    assert said(model, "many.0.weight").startswith(
        "'many.0.weight' matches no module of Parts. It is computed by a parametrization: select"
        " 'many.0.parametrizations.weight' for the computed value,"
        " 'many.0.parametrizations.weight:grad_output' for its gradient, or"
        " for those of the parameters: 'many.0.parametrizations.weight.original:grad'.\n"
    )
    # Of the model itself, there is nothing before the name.
    assert "are 'weight_orig:grad'.\n" in said(model.head, "weight")


def test_tensors_that_were_given_by_name_are_called_tensors():
    one, other = torch.ones(1, requires_grad=True), torch.ones(2, requires_grad=True)
    with (
        pytest.raises(hl.SelectionError) as caught,
        hl.attach({"one": one, "other": other}) as line,
    ):
        line.grad("zzz", print)
    assert str(caught.value) == (
        "'zzz' matches no tensor of tensors.\nIts 2 tensors begin: one, other."
    )


class Fields(NamedTuple):
    logits: torch.Tensor


class Annotated(nn.Module):
    def forward(self, x) -> Fields | tuple:
        return self.fields(x)

    def fields(self, x):
        return Fields(x)


class Keys(nn.Module):
    def forward(self, x) -> dict[str, torch.Tensor]:
        return {"logits": x, "hidden": x * 2}


class Built(nn.Module):
    def forward(self, x):
        return Fields(x)


class Pairs(nn.Module):
    def forward(self, logits) -> tuple[torch.Tensor, ...]:
        return {"logits": logits}["logits"], logits


@pytest.mark.parametrize("kind", [Annotated, Keys, Built])
def test_a_part_of_an_output_is_written_behind_the_port(kind):
    for model, above in ((nn.Sequential(kind()), "0"), (kind(), "(root)")):
        part = f"{above}:output.logits"
        assert f"Part of an output is written {part!r}." in said(model, f"{above}.logits")
        with hl.record(model, part) as run:
            model(torch.ones(1))
        assert run[part].tolist() == [1.0]


def test_a_part_that_an_output_cannot_have_is_not_proposed():
    model = nn.Sequential(Pairs(), Keys(), nn.Linear(2, 2), nn.LSTM(2, 2))
    for name in ("0.logits", "1.weights", "2.logits", "3.q", "1.hiddn", "(root).logits", "logits"):
        assert "Part of an output" not in said(model, name)
    assert "Part of an output" not in said(model, "1.logits", ports="grad")


class Functions(nn.Module):
    def forward(self, x):
        return torch.relu(x)


@pytest.mark.trap(33)
def test_who_selects_modules_of_functions_is_told_there_are_none():
    model = Functions()
    assert not [module for module in model.modules() if isinstance(module, nn.ReLU)]  # and no word
    with pytest.raises(hl.SelectionError, match="ReLU"):
        hl.record(model, nn.ReLU)
    with pytest.raises(hl.SelectionError, match="matches no module of LSTM"):
        hl.record(nn.LSTM(3, 4), "cell")  # torch runs all of it as one operation


def test_a_module_deeper_than_written_is_proposed_at_any_depth():
    model = nn.Sequential(Parts())
    assert "Did you mean '0.**.conv', at any depth?" in said(model, "0.conv")
    assert "Did you mean '0.**.conv:input', at any depth?" in said(model, "0.conv:input")
    assert hl.select(model, "0.**.conv")


def test_an_index_behind_a_list_of_modules_is_proposed_as_a_path():
    assert said(Parts(), "many[2]").endswith("\nSelect a module inside it: 'many.2'.")
    assert said(Parts(), "many[7]").endswith("\nSelect a module inside it: 'many.*'.")


def test_the_parts_of_the_module_that_was_named_are_listed():
    model = nn.Sequential(Parts(), Parts())
    assert "'*.block' has '*.block.conv', '*.block.norm'." in said(model, "*.block.q")
    assert "'**.many' has '**.many.0', '**.many.1', '**.many.2', '**.many.3'." in said(
        model, "many.query"
    )
    assert "Did you mean '0.block.conv:input', '0.block.norm:input'?" in said(
        model, "0.block.cnv:input"
    )
    assert "'0.head' has '0.head.weight:grad', '0.head.bias:grad'." in said(model, "0.head.q:grad")
    model[0].many.append(nn.ReLU())
    assert "'0.many.3', …." in said(model, "0.many.query")


class Calls(nn.Module):
    def forward(self, x):
        return x


def parametrized():
    layer = nn.Linear(1, 1)
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    return layer


def pruned():
    return prune.l1_unstructured(nn.Linear(1, 1), "weight", amount=1)


NAMES = st.sampled_from(["a", "b", "ab", "conv", "weight", "q", "x y", "a:b", "c[0]", "(root)"])
LEAVES = st.sampled_from([lambda: nn.Linear(1, 1), nn.ReLU, Keys, Built, parametrized, pruned])


@st.composite
def trees(draw, depth=3):
    """A model of random modules, some of which only hold others."""
    if not depth or draw(st.booleans()):
        return draw(LEAVES)()
    model = draw(st.sampled_from([Calls, nn.ModuleList, nn.ModuleDict]))()
    for name in draw(st.lists(NAMES, min_size=1, max_size=3, unique=True)):
        part = draw(trees(depth - 1))
        if isinstance(model, nn.ModuleList):
            model.append(part)
        else:
            model.add_module(name, part)
    return model


@st.composite
def slips(draw, model):
    """A selector that is near to a path of the model."""
    paths = [*dict(model.named_modules()), *dict(model.named_parameters())]
    segments = draw(st.sampled_from(paths)).split(".")
    for _ in range(draw(st.integers(1, 2))):
        at = draw(st.integers(0, len(segments)))
        words = draw(
            st.lists(st.one_of(NAMES, st.sampled_from(["*", "Linear", "logits"])), max_size=1)
        )
        segments[at : at + draw(st.integers(0, 1))] = words
    rests = ["", "", ":grad", ":input", ":grad_output", ":output[0]", "#1", "[0]"]
    return ".".join(segments) + draw(st.sampled_from(rests))


TEXT = re.compile(r"""(?<!\w)(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")( has )?""")
TYPE = re.compile(r"the type itself: (?:nn\.)?(\w+)(?:, ports='(\w+)')?")


def proposed(message, selector, model):
    """The selectors that a message proposes, each with its ports."""
    head, _, advice = message.partition("\n")
    if "matches no" in head:
        advice = message.removeprefix(repr(selector))
    kinds = {type(module).__name__: type(module) for module in model.modules()}
    for name, port in TYPE.findall(advice):
        yield kinds[name], port or None
    for match in TEXT.finditer(TYPE.sub("", advice)):
        if not match[1]:
            yield ast.literal_eval(match[0]), None


@given(st.data())
def test_each_proposal_selects_a_site(data):
    model = data.draw(trees())
    selector = data.draw(slips(model))
    ports = data.draw(st.sampled_from(["output", "grad", ("output", "grad_output")]))
    try:
        hl.select(model, selector, ports)
        message = ""
    except hl.SelectionError as error:
        message = str(error)
    if re.search("matches no|nothing flows|has no parameters", message):  # else it cannot be read
        for proposal, port in proposed(message, selector, model):
            assert len(hl.select(model, proposal, port or ports)), message
