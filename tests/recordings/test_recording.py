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
    with pytest.raises(hl.NotRecordedError, match=r"ran 3 times .* no call #3.\n.*'block#2'"):
        thrice["block#3"]


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
    assert list(run) == ["fc"]
    assert next(iter(run.passes[0])) == "fc"


def test_batches_of_different_sizes_cannot_be_stacked_and_the_message_joins_them(net, image):
    with hl.record(net, "fc") as run:
        net(image)
        net(image[:1])
    with pytest.raises(ValueError, match=r"torch.cat\(\[one\['fc'\] for one in run.passes\]\)"):
        run.stack("fc")


def test_a_site_that_fired_in_one_of_several_passes_is_not_ambiguous(net, image):
    with hl.record(net, ["layer1", "fc"]) as run:
        net(image)
        net.layer1(net.stem(image))
    assert run["fc"].shape == (2, 5)


def test_sites_that_were_never_selected_are_refused_with_close_ones(net, image):
    with hl.record(net, "layer1.**") as run:
        net(image)
    with pytest.raises(hl.NotRecordedError) as caught:
        run["layer1.0.cnv"]
    assert "'layer1.0.cnv' was never selected" in str(caught.value)
    assert "layer1.0.conv" in str(caught.value)
    with pytest.raises(hl.NotRecordedError, match=r"recorded there: 'layer1\.0'"):
        run["layer1.0:input"]


def test_a_leaf_of_a_whole_value_can_be_looked_up(holder):
    with hl.record(holder) as run:
        holder(torch.ones(2))
    assert run["inner:output.pair.left"].tolist() == [2.0, 2.0]
    with pytest.raises(hl.SiteError, match="has no leaf"):
        run["inner:output.nothing"]


def test_an_alias_finds_the_shared_module():
    shared = nn.Linear(1, 1)
    model = nn.Sequential()
    model.add_module("a", shared)
    model.add_module("b", shared)
    with hl.record(model, "*") as run:
        model(torch.ones(1))
    assert torch.equal(run["b#1"], run["a#1"])
    assert run.sites[0].aliases == ("b",)


def test_a_recording_can_be_read_while_its_line_is_still_on(net, image):
    with hl.record(net, ["fc", "stem"]) as run:
        with pytest.raises(hl.NotRecordedError, match="the model has not run"):
            run["fc"]
        net(image)
        assert run["fc"].shape == (2, 5)


def test_paths_with_signs_of_the_grammar_are_looked_up_as_they_stand():
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
    assert run.passes[0].order == ["early", "late#0", "late#1", ":output"]
    assert all(key in run for key in run.passes[0].order)


def test_it_prints_as_what_it_holds(thrice):
    assert repr(thrice) == "Recording of 2 sites: 1 pass, 4 values"


def test_what_is_no_site_or_no_pass_says_how_to_look_up(net, image):
    with hl.record(net, "layer1") as run:
        net(image)
    with pytest.raises(hl.NotRecordedError, match=r"0 is no site.\n.* run\['layer1'\]; passes by"):
        run[0]
    with pytest.raises(IndexError, match="there is no pass 3; 1 pass ran, from 0 on"):
        run.passes[3]
    assert torch.equal(run.passes[-1]["layer1"], run.passes[0]["layer1"])


def test_the_line_is_not_the_recording_and_says_so(net, image):
    line = hl.record(net, "layer1")
    net(image)
    with pytest.raises(TypeError, match=r"this is the line.*\n.*line.recording"):
        line["layer1"]
    assert repr(line).endswith("1 site, 1 pass, 1 fired, 0 never; attached")
    line.remove()
    assert line.recording["layer1"] is not None
