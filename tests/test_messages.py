"""Messages are the interface: the exact words of those that people meet most."""

from __future__ import annotations

import ast
import re

import pytest
import torch

import hookline as hl
from hookline.errors import warn
from package_source import parsed, texts


def said(action) -> str:
    with pytest.raises(hl.HooklineError) as caught:
        action()
    assert len(str(caught.value).splitlines()) <= 3
    return str(caught.value)


def test_a_selector_that_matches_nothing(net):
    assert said(lambda: hl.record(net, "layer1.0.cnov")) == (
        "'layer1.0.cnov' matches no module of SmallNet. Did you mean 'layer1.0.conv',"
        " 'layer1.0.bn', 'layer1.0.relu'?"
        "\nIts 21 modules begin: stem, layer1, layer1.0, layer1.0.conv, layer1.0.bn,"
        " layer1.0.relu, layer1.1, layer1.1.conv, …."
    )


def test_names_in_messages_move_no_cursor_and_turn_nothing_round():
    model = torch.nn.Sequential()
    model.add_module("a\x1b[2J\u202e", torch.nn.Linear(2, 2))
    escaped = r"a\x1b[2J\u202e"
    assert escaped in said(lambda: hl.record(model, "b"))
    with pytest.warns(hl.HooklineWarning, match=re.escape(escaped)):
        warn("a\x1b[2J\u202e")


def test_a_value_that_was_overwritten(net, image):
    with hl.record(net, "layer1.0.bn") as run:
        net(image)
    assert said(lambda: run["layer1.0.bn"]) == (
        "layer1.0.bn was overwritten in place after it was recorded (by an in-place operation"
        " such as ReLU(inplace=True) or +=).\nRecord a copy: hl.record(..., copy=True)."
    )


def test_an_ambiguous_look_up(looped):
    with hl.record(looped, "block") as run:
        looped(torch.ones(1, 2))
    assert said(lambda: run["block"]) == (
        "'block' ran 3 times in pass 0."
        "\nWrite 'block#0' to 'block#2' for one call, or .calls('block') for all."
    )
    with hl.record(looped, "head") as run:
        looped(torch.ones(1, 2))
        looped(torch.ones(1, 2))
    assert said(lambda: run["head"]) == (
        "'head' has a value in each of 2 passes."
        "\nWrite run.passes[0]['head'] for one of them, or run.stack('head') for all."
    )


def test_a_site_that_was_never_selected(net, image):
    with hl.record(net, "fc") as run:
        net(image)
    assert said(lambda: run["fcc"]) == (
        "'fcc' was never selected. Did you mean 'fc'?"
        "\nLook up one that was, or select this one too when recording."
    )


def test_an_edit_that_changes_the_structure(net, image):
    def run():
        with hl.edit(net, "fc", lambda t: t[0]):
            net(image)

    assert said(run) == (
        "the edit at fc would change the value's structure: expected Tensor[2, 5] float32 on cpu,"
        " got Tensor[5] float32 on cpu."
        "\nReturn a value of the same form (for a part of it, select a leaf such as ':output[0]'),"
        " or use a raw hook: hl.attach(model), line.forward(...)."
    )


def test_a_hooks_own_error_names_its_site(net, image):
    def fail(value):
        raise ValueError("mine")

    with hl.edit(net, "layer1.0.conv", fail), pytest.raises(ValueError, match="mine") as caught:
        net(image)
    assert caught.value.__notes__ == ["hookline: raised by the hook at layer1.0.conv (Conv2d)"]


def test_a_hooks_own_error_shows_the_structure_it_got():
    model = torch.nn.TransformerEncoderLayer(4, 2).train()
    with hl.edit(model, "self_attn:input", lambda t: t * 2.0), pytest.raises(TypeError) as caught:
        model(torch.zeros(3, 1, 4))
    note = caught.value.__notes__[0]
    assert note.startswith(
        "hookline: raised by the hook at self_attn:input (MultiheadAttention), which was given"
        " dict(query=Tensor[3, 1, 4], key=Tensor[3, 1, 4], "
    )
    assert note.endswith("\nSelect one tensor of it, such as 'self_attn:input.query'.")
    with hl.edit(model, "self_attn:input.query", lambda t: t * 2.0):
        model(torch.zeros(3, 1, 4))


@pytest.mark.parametrize("model", [None, 3, "net", b"", [], object(), torch.nn.Linear, print])
@pytest.mark.parametrize(
    ("verb", "arguments"),
    [
        *[(verb, ()) for verb in ("select", "inventory", "profile", "check", "monitor", "watch")],
        *[(verb, (torch.ones(2),)) for verb in ("summary", "doctor", "cam")],
        ("record", ()),
        ("features", (torch.ones(2), "*")),
        ("extract", ([torch.ones(2)], "*", "never")),
    ],
)
def test_what_is_not_a_model_is_refused_in_two_lines(verb, arguments, model):
    text = said(lambda: getattr(hl, verb)(model, *arguments))
    assert text.startswith(f"hl.{verb} must be given a model (an nn.Module)")
    where = "of this class, Linear(...)" if model is torch.nn.Linear else "itself"
    assert f", got {type(model).__name__}.\nGive the model {where}" in text


@pytest.mark.parametrize("ports", [None, 3, 1.5, "outptu", b"output", [], ("output", 3), print])
def test_what_is_not_a_port_is_refused_with_those_that_there_are(net, ports):
    message = said(lambda: hl.record(net, "fc", ports=ports))
    assert message.startswith("ports must")
    assert "input, output, grad_input, grad_output, grad, got" in message
    assert len(message.splitlines()) == 2


@pytest.mark.parametrize(
    ("verb", "arguments", "advice"),
    [
        ("record", {"retain_grad": True}, "Write ports=('output', 'grad_output').\nGive some of"),
        ("record", {"names_filter": "fc"}, "Give the modules as the selector.\nGive some of"),
        ("record", {"stop": True}, "hl.features(model, inputs, selector) stops after the last"),
        ("edit", {"selector": "fc", "edit_output": id}, "Write hl.edit(model, selector, change)."),
        ("monitor", {"log": "all"}, "Write ports=('grad', 'value').\nGive some of ports=, every="),
        ("monitor", {"evry": 3}, "Did you mean every=?\nGive some of ports=, every="),
        ("summary", {"input_size": (1, 3)}, "Write hl.summary(model, torch.rand(1, 3, 224, 224))."),
        ("cam", {"inputs": None, "targets": [3]}, "Write target=, a class or one for each image."),
    ],
)
def test_arguments_of_other_packages_have_the_name_here(net, verb, arguments, advice):
    with pytest.raises(TypeError) as caught:
        getattr(hl, verb)(net, **arguments)
    unknown = list(arguments)[-1]
    begin = f"hl.{verb}() got an unexpected keyword argument {unknown!r}. {advice}"
    assert str(caught.value).startswith(begin)
    assert not hl.inventory(net).to_dict()["hooks"]


def test_advice_names_no_argument_that_a_verb_lacks(net):
    with pytest.raises(TypeError) as caught:
        hl.sweep(net, None, "fc", float, position=1)
    assert str(caught.value).startswith(
        "hl.sweep() got an unexpected keyword argument 'position'.\nGive some of each=, clean="
    )


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("TraceDict", "hl.record(model, selector)"),
        ("GradCAM", "hl.cam(model, images)"),
        ("load_model", "from hookline.models import load_model"),
    ],
)
def test_names_of_other_packages_lead_to_the_call_here(name, call):
    with pytest.raises(AttributeError) as caught:
        getattr(hl, name)
    assert str(caught.value) == f"module 'hookline' has no attribute {name!r}.\nUse {call}."
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'\Z"):
        hl.nothing  # noqa: B018


def test_calls_in_place_of_other_names_are_of_this_package():
    calls = [call for call in hl._ELSEWHERE if call.startswith("hl.")]
    assert all(call[3:].partition("(")[0] in hl.__all__ for call in calls)
    assert not set(hl._CALL_OF) & {*hl.__all__}


@pytest.mark.parametrize("norm_type", [None, "2", [], True, print])
def test_what_is_not_the_kind_of_a_norm_is_refused(net, norm_type):
    message = said(lambda: hl.clip(net, norm=1.0, norm_type=norm_type))
    assert message.startswith(f"norm_type must be a number, got {norm_type!r}.\nGive")


@pytest.mark.parametrize("option", ["copy", "detach", "keep", "every_thread"])
@pytest.mark.parametrize("given", [torch.ones(2), 3, "yes", [True]])
def test_what_is_not_a_switch_or_a_function_is_refused(net, option, given):
    message = said(lambda: hl.record(net, "fc", **{option: given}))
    assert re.match(rf"{option}= must be (True|False|a function)", message)
    assert len(message.splitlines()) == 2


@pytest.mark.parametrize("given", [None, 3, [], torch.ones(1)])
def test_what_is_not_a_folder_is_refused(net, given):
    with pytest.warns(hl.HooklineWarning), hl.record(net, "fc") as run:
        pass
    expected = f"a recording's folder must be a path, got {type(given).__name__}.\nGive its name"
    for use in (hl.open, run.save):
        with pytest.raises(hl.FolderError, match=re.escape(expected)):
            use(given)


# "X is no Y" and "there is no Y" say neither what is expected nor what is there.
PATTERN = re.compile(r"\b([Ii]s|[Aa]re|was|were) no\b(?! longer)", re.ASCII)


def texts_of(source):
    """The texts of a file that are not docstrings, those of an f-string put together."""
    tree = parsed(source)
    left_out = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            left_out.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            left_out.update(part for part in node.values if isinstance(part, ast.Constant))
            yield (
                node.lineno,
                "".join(
                    part.value if isinstance(part, ast.Constant) else "0" for part in node.values
                ),
            )
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and node not in left_out:
            yield node.lineno, node.value


@pytest.mark.slow
def test_no_message_says_only_what_something_is_not():
    assert [text for _, text in texts_of('raise E(f"{x} is no y")') if PATTERN.search(text)]
    found = [
        f"{module}:{line}: {text}"
        for module, source in texts().items()
        for line, text in texts_of(source)
        if PATTERN.search(text)
    ]
    assert not found, "\n".join(found)
