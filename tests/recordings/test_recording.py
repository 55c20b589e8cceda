"""Look-ups: one value, or an error that says what to write."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.recordings import Recording


@pytest.fixture
def thrice(looped) -> Recording:
    with hl.record(looped, ["block", "head"]) as run:
        looped(torch.ones(1, 2))
    return run


def test_a_pass_tells_whether_a_site_has_values_also_several(thrice, net, image):
    assert "block" in thrice.passes[0]
    assert "block#3" not in thrice.passes[0]
    with hl.record(net, "layer1.0.bn") as run:
        net(image)
    assert "layer1.0.bn" in run.passes[0]  # it has a value, though an overwritten one


def test_several_calls_are_kept_apart(looped, thrice):
    x = torch.ones(1, 2)
    for call in range(3):
        x = looped.block(x)
        assert torch.equal(thrice[f"block#{call}"], x)
        assert torch.equal(thrice.calls("block")[call], x)
    assert list(thrice) == ["block#0", "block#1", "block#2", "head"]
    assert len(thrice) == 4
    assert "block" in thrice
    assert "block#2" in thrice
    assert "nothing" not in thrice


def test_an_ambiguous_call_shows_the_choices(thrice):
    with pytest.raises(hl.AmbiguousError) as caught:
        thrice["block"]
    text = str(caught.value)
    assert "'block' ran 3 times in pass 0" in text
    assert "'block#0' to 'block#2'" in text
    assert ".calls('block')" in text


def test_a_call_that_does_not_exist_says_how_many_there_are(thrice):
    with pytest.raises(
        hl.NotRecordedError, match=r"ran 3 times .* so its calls are #0 to #2, got #3.\n.*'block#2'"
    ):
        thrice["block#3"]


def test_a_call_that_no_gradient_reached_is_not_said_to_have_one():
    class Cut(nn.Linear):
        def forward(self, x):
            return super().forward(x.detach())

    net = nn.Sequential(layer := Cut(3, 3), layer)
    with hl.record(net, "0", ports="grad_output") as run:
        net(torch.ones(1, 3)).sum().backward()
    assert run["0:grad_output#1"].tolist() == [[1, 1, 1]]
    with pytest.raises(hl.NotRecordedError, match=r"no value of call #0: it has those of #1\.\n"):
        run["0:grad_output#0"]


def test_several_passes_are_kept_apart(net, image):
    with hl.record(net, "fc") as run:
        results = [net(image), net(image * 2)]
    assert torch.equal(run.passes[1]["fc"], results[1])
    assert torch.equal(run.stack("fc"), torch.stack(results))
    with pytest.raises(hl.AmbiguousError) as caught:
        run["fc"]
    assert "run.passes[0]['fc']" in str(caught.value)
    assert "run.stack('fc')" in str(caught.value)
    with pytest.raises(hl.AmbiguousError, match=r"\.calls\('fc'\)"):
        run.calls("fc")
    assert list(run) == ["fc#pass0", "fc#pass1"]
    assert next(iter(run.passes[0])) == "fc"


def test_a_site_that_fired_in_one_of_the_passes_is_unambiguous(net, image):
    with hl.record(net, ["layer1", "fc"]) as run:
        net(image)
        net.layer1(net.stem(image))
    assert run["fc"].shape == (2, 5)


def test_sites_never_selected_are_refused_with_close_ones(net, image):
    with hl.record(net, "layer1.**") as run:
        net(image)
    with pytest.raises(hl.NotRecordedError) as caught:
        run["layer1.0.cnv"]
    assert "'layer1.0.cnv' was never selected. Did you mean 'layer1.0.conv'" in str(caught.value)
    with pytest.raises(hl.NotRecordedError, match=r"Did you mean 'layer1\.0\.conv', "):
        run["0.conv"]
    with pytest.raises(
        hl.NotRecordedError, match=r"Did you mean 'layer1\.0\.bn', 'layer1\.1\.bn'\?"
    ):
        run["bn"]
    with pytest.raises(hl.NotRecordedError, match=r"recorded: 8 sites, such as 'layer1\.0', "):
        run["transformer"]
    with pytest.raises(hl.NotRecordedError, match=r"recorded there: 'layer1\.0'"):
        run["layer1.0:input"]
    with pytest.raises(hl.NotRecordedError, match="a key is one site, not a pattern; recorded: 8"):
        run["layer1.**"]


def test_a_module_as_a_key_is_told_a_site_of_its_type(net, image):
    with hl.record(net, ["stem", "fc"]) as run:
        net(image)
    with pytest.raises(hl.NotRecordedError) as caught:
        run[net.fc]
    assert str(caught.value) == (
        "a key must be a site, got a module (Linear)."
        "\nGive as the key its site, such as 'fc'; passes are in run.passes."
    )


def test_a_part_and_its_layer_as_a_key_are_told_the_text(net, image):
    with hl.record(net, "fc") as run:
        net(image)
    with pytest.raises(hl.NotRecordedError) as caught:
        run["resid_pre", 1]
    assert str(caught.value) == (
        "a key must be a site, got ('resid_pre', 1).\nGive as the key a text such as"
        " '.resid_pre.1', after hl.anatomy(model); passes are in run.passes."
    )


def test_a_leaf_of_a_whole_value_can_be_looked_up(holder):
    with hl.record(holder) as run:
        holder(torch.ones(2))
    assert run["inner:output.pair.left"].tolist() == [2.0, 2.0]
    with pytest.raises(hl.SiteError, match="has no leaf"):
        run["inner:output.nothing"]


@pytest.mark.trap(20)
def test_a_shared_module_is_found_by_each_name_call_by_call():
    model = nn.Sequential()
    model.add_module("first", nn.Linear(1, 1))
    model.add_module("again", model.first)
    x, kept = torch.ones(1), {}
    expected = [model.first(x), model.first(model.first(x))]
    handles = [
        module.register_forward_hook(lambda m, a, output, name=name: kept.update({name: output}))
        for name, module in model.named_modules()
        if name
    ]
    with hl.record(model, "*") as run:
        model(x)
    for handle in handles:
        handle.remove()
    assert kept == {"first": expected[1]}  # one name, one call
    for name in ("first", "again"):
        assert all(map(torch.equal, run.calls(name), expected))
        assert torch.equal(run[f"{name}#1"], expected[1])
        with pytest.raises(hl.AmbiguousError, match=f"{name}#0"):
            run[name]
    assert run.sites[0].aliases == ("again",)


def test_a_recording_can_be_read_while_its_line_is_still_on(net, image):
    with hl.record(net, ["fc", "stem"]) as run:
        with pytest.raises(hl.NotRecordedError, match="the model has not run"):
            run["fc"]
        net(image)
        assert run["fc"].shape == (2, 5)


def test_paths_with_signs_of_the_grammar_are_looked_up():
    model = nn.ModuleDict({"a:b": nn.Linear(1, 1)})
    model.forward = model["a:b"].forward
    with hl.record(model, "a:b") as run:
        model["a:b"](torch.ones(1))
    assert run["a:b"].shape == (1,)


def test_every_key_that_iteration_gives_can_be_looked_up():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleDict({"a:b": nn.Identity(), "c[0]": nn.Identity(),
                                        "d#1": nn.Identity()})  # fmt: skip

        def forward(self, x):
            for part in self.parts.values():
                x = part(part(x))
            return x

    model = Odd()
    with hl.record(model, ports=("input", "output")) as run:
        model(torch.ones(1))
    assert len(dict(run.items())) == len(run) == 14


@pytest.mark.parametrize("port", ["input", "output"])
def test_the_root_is_looked_up_in_every_way_and_its_key_is_shown(net, image, port):
    with hl.record(net, "", ports=port) as run:
        out = net(image)
    is_output = port == "output"
    (key,) = run
    assert key == ("(root)" if is_output else "(root):input")
    for text in ["", ":output", "(root)", "(root):output"] if is_output else [":input", key]:
        assert torch.equal(run[text], out if is_output else image)
        assert torch.equal(run.passes[0][text], run[key])
        assert text in run
    assert key in str(run)
    assert key in str(run.report())


class NamedRoot(nn.Module):
    """Has a module whose name is how the root is written."""

    def __init__(self):
        super().__init__()
        self.add_module("(root)", nn.Linear(1, 1))

    def forward(self, x):
        return self.get_submodule("(root)")(x) + 1


def test_a_module_called_root_in_parentheses_is_not_the_root(tmp_path):
    model = NamedRoot()
    with hl.record(model, ports=("input", "output")) as run:
        out = model(torch.ones(1, 1))
    for one in (run, hl.open(run.save(tmp_path / "run"))):
        assert torch.equal(one[""], out)
        assert torch.equal(one["(root)"], out - 1)
        assert torch.equal(one["(root):output"], out - 1)
        assert torch.equal(one["[(]root)"], out - 1)
        values = dict(one.items())
        assert list(values) == [":input", ":output", "[(]root):input", "[(]root)"]
        assert torch.equal(values[":output"], out)
    assert len(hl.summary(model, torch.ones(1, 1)).rows) == 2


def test_a_site_is_looked_up_by_its_number_through_the_sites(net, image):
    with hl.record(net, ["stem", "fc"]) as run:
        net(image)
    assert torch.equal(run[run.sites[1]], run["fc"])
    assert torch.equal(run.passes[0][run.sites[-1]], run["fc"])


def test_every_value_of_several_passes_has_a_key(net, looped):
    model = nn.ModuleDict({"looped": looped, "once": nn.Linear(2, 1)})
    model.forward = lambda x, times: [model["looped"](x) for _ in range(times)]
    x = torch.ones(1, 2)
    with hl.record(model, ["looped.block", "looped.head", "once"]) as run:
        model(x, 1)
        model(x, 2)
        model["once"](x)
    expected = [f"looped.block#{call}#pass0" for call in range(3)] + ["looped.head#pass0"]
    expected += [f"looped.block#{call}#pass1" for call in range(6)]
    expected += ["looped.head#0#pass1", "looped.head#1#pass1", "once"]
    assert list(run) == expected
    assert len(run) == len(dict(run)) == len(expected)
    for key, value in run.items():
        name, *numbers = key.replace("pass", "").split("#")
        if name == "once":
            assert torch.equal(value, run["once"])
            continue
        *call, number = map(int, numbers)
        assert torch.equal(value, run.passes[number].calls(name)[call[0] if call else 0])
    assert len(run.cat("looped.block#pass1", dim=None)) == 6
    assert torch.equal(run["looped.block#pass1#0"], run["looped.block#0#pass1"])


def test_every_gradient_of_several_backward_passes_has_a_key(looped):
    with hl.record(looped, ["head", "head:grad_output", "block:grad_output"]) as run:
        for _ in range(2):
            loss = looped(torch.ones(1, 2)).sum()
            loss.backward(retain_graph=True)
            (2 * loss).backward()
    assert len(dict(run.items())) == len(run) == 2 * (1 + 2 + 6)
    first = run.passes[0]
    assert len(dict(first.items())) == len(first) == 9
    for key in first.order:
        assert key in run
        assert torch.equal(first[key], run[f"{key}#pass0"])
    for number, one in enumerate(first.backwards):
        for key, value in one.items():
            if ":" in key:
                assert torch.equal(first[f"{key}#backward{number}"], value)
    assert torch.equal(run["head:grad_output#backward1#pass1"], torch.full((1, 1), 2.0))


def test_an_ambiguous_gradient_names_a_key_that_works(looped):
    with hl.record(looped, ["head:grad_output", "block:grad_output"]) as run:
        for _ in range(2):
            loss = looped(torch.ones(1, 2)).sum()
            loss.backward(retain_graph=True)
            loss.backward()
    with pytest.raises(hl.AmbiguousError) as caught:
        run["head:grad_output"]
    assert str(caught.value) == (
        "'head:grad_output' has a value in each of 2 passes."
        "\nWrite run.passes[0]['head:grad_output#backward0'] for one of them."
    )
    assert run.passes[0]["head:grad_output#backward0"].item() == 1
    with pytest.raises(hl.AmbiguousError, match=r"\[0\]\['block:grad_output#0#backward0'\]"):
        run["block:grad_output"]


def test_a_key_of_a_missing_pass_or_backward_says_which_were(looped):
    x = torch.ones(1, 2)
    with hl.record(looped, ["head", "head:grad_output"]) as run:
        looped(x).sum().backward()
        looped(x)
    with pytest.raises(hl.NotRecordedError, match=r"one of the 2 passes.*\n.*'head#pass1'"):
        run["head#pass7"]
    with pytest.raises(hl.NotRecordedError, match=r"this pass, which is pass 0.\n.*'head#pass1'"):
        run.passes[0]["head#pass1"]
    with pytest.raises(hl.NotRecordedError, match="backward 3 of 1"):
        run["head:grad_output#backward3"]
    assert "head#pass1" in run
    assert "head#pass1" not in run.passes[0]
    assert "head#pass2" not in run
    assert "head:grad_output#backward1" not in run
    assert torch.equal(run["head:grad_output#backward0"], run["head:grad_output"])


def test_modules_whose_names_end_like_a_run_are_looked_up():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleDict({"a": nn.Identity(), "a#pass1": nn.Identity()})

        def forward(self, x):
            return self.parts["a#pass1"](self.parts["a"](x) + 1)

    model = Odd()
    with hl.record(model, "parts.*") as run:
        model(torch.zeros(1))
        model(torch.ones(1))
    assert [value.item() for value in run.cat("parts.a", dim=None)] == [0, 1]
    assert [value.item() for value in run.cat("parts.a#pass1", dim=None)] == [1, 2]


def test_a_recording_is_a_mapping_in_every_way(net, image):
    with hl.record(net) as run:
        net(image)
    assert "layer1.0.bn" in run  # it has a value, though an overwritten one
    assert run.get("nowhere", 3) == 3
    with pytest.raises(KeyError):
        run["nowhere"]
    with pytest.raises(hl.OverwrittenError):
        run.get("layer1.0.bn")


def test_a_recording_pickles(net, image):
    with hl.record(net, ["fc", "stem"]) as run:
        net(image)
    again = pickle.loads(pickle.dumps(run))
    assert torch.equal(again["fc"], run["fc"])
    assert str(again.report()) == str(run.report())


def test_leaf_keys_with_signs_are_written_and_read_back():
    model = nn.Sequential(nn.Identity())
    key = "a]'b\\n\""
    with hl.record(model, "0") as run:
        model({key: torch.ones(1)})
    assert run[hl.Site("0", "output", (key,))].item() == 1
    assert run[str(hl.Site("0", "output", (key,)))].item() == 1


def test_passes_know_the_order_in_which_sites_fired(net, image):
    with hl.record(net, ["fc", "stem", "layer1"]) as run:
        net(image)
    assert run.passes[0].order == ["stem", "layer1", "fc"]
    assert [str(site) for site in run.sites] == ["stem", "layer1", "fc"]


def test_the_order_is_that_of_running_not_of_registration():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.late, self.early = nn.Identity(), nn.Identity()

        def forward(self, x):
            return self.late(self.late(self.early(x)))

    model = Backwards()
    with hl.record(model) as run:
        model(torch.ones(1))
    assert run.passes[0].order == ["early", "late#0", "late#1", "(root)"]
    assert all(key in run for key in run.passes[0].order)


def test_what_is_no_site_or_no_pass_says_how_to_look_up(net, image):
    with hl.record(net, "layer1") as run:
        net(image)
    for key, remedy in (
        (0, r"run.sites\[0\], which is 'layer1'"),
        (7, "the site itself.*'layer1'"),
    ):
        with pytest.raises(hl.NotRecordedError, match=rf"must be a site, got {key}.\n.*{remedy}"):
            run[key]
    with pytest.raises(
        IndexError, match="the pass must be one of the 1 pass that ran, from 0 on, got 3"
    ):
        run.passes[3]
    with pytest.raises(TypeError, match=r"by its number, got '0'\.\nWrite run.passes\[0\]"):
        run.passes["0"]
    assert torch.equal(run.passes[-1]["layer1"], run.passes[0]["layer1"])


def test_the_line_is_not_the_recording_and_says_so(net, image):
    line = hl.record(net, "layer1")
    net(image)
    with pytest.raises(TypeError, match=r"got the line.*\n.*line.recording"):
        line["layer1"]
    assert repr(line).endswith("1 site, 1 pass, 1 fired, 0 never; attached")
    line.remove()
    assert line.recording["layer1"] is not None
