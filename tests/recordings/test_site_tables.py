"""What a recording and a pass print: a table of shapes, bounded in length."""

from __future__ import annotations

import pickle
import shutil

import torch
from torch import nn

import hookline as hl


def test_a_recording_prints_shapes_dtypes_and_counts_of_sites(looped):
    with hl.record(looped, ["block", "head"]) as run:
        looped(torch.ones(1, 2))
        looped(torch.ones(4, 2))
    assert (
        str(run)
        == repr(run)
        == (
            "Recording of Looped: 2 sites, 2 passes, 8 values\n"
            "  site   type    shape           dtype    calls  passes\n"
            "  block  Linear  [1, 2], [4, 2]  float32      3       2\n"
            "  head   Linear  [1, 1], [4, 1]  float32      1       2"
        )
    )
    assert repr(run.passes[1]) == (
        "Pass 1: 4 values at 2 sites\n"
        "  site   type    shape   dtype    calls\n"
        "  block  Linear  [4, 2]  float32      3\n"
        "  head   Linear  [4, 1]  float32      1"
    )


def test_gradients_of_several_backward_passes_are_of_one_call(looped):
    with hl.record(looped, ["block", "head"], ports=("output", "grad_output")) as run:
        loss = looped(torch.ones(1, 2)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    lines = str(run).splitlines()
    assert lines[2].split() == ["block", "Linear", "[1,", "2]", "float32", "3", "1"]
    assert lines[3].split() == ["block:grad_output", "Linear", "[1,", "2]", "float32", "3", "1"]
    backward = repr(run.passes[0].backwards[1]).splitlines()
    assert backward[0] == "Backward 1 over pass 0: 4 values at 2 sites"
    assert len(backward) == 4


def test_what_varies_is_told_and_what_never_fired_has_no_calls():
    class Varies(nn.Module):
        def __init__(self):
            super().__init__()
            self.part, self.unused = nn.Identity(), nn.Identity()

        def forward(self, values):
            for value in values:
                self.part(value)

    model = Varies()
    line = hl.record(model, ["part", "unused"])
    model([torch.ones(1), (torch.ones(2).half(), None), torch.ones(3).int()])
    model([torch.ones(1)])
    lines = str(line.recording).splitlines()[-3:]
    line._line.options.quiet = True
    line.remove()
    assert lines == [
        "  part    Identity  [1], tuple(Tensor[2],    float32, float16, …  1 to 3       2",
        "                    None), …",
        "  unused  Identity                                                     0       0",
    ]


def test_a_long_recording_prints_a_bounded_table():
    model = nn.Sequential(*[nn.Identity() for _ in range(100)])
    with hl.record(model) as run:
        for n in range(120):
            model(torch.ones(n + 1))
    lines = str(run).splitlines()
    assert len(lines) == 1 + 1 + 24 + 2
    assert lines[-2:] == [
        "  … and 77 more sites: run.sites",
        "  shapes, dtypes and remarks: of the first 100 passes",
    ]
    assert max(map(len, lines)) <= 80


def test_a_pass_in_which_the_model_raised_says_so(net):
    with hl.record(net, "stem") as run:
        try:
            net(torch.ones(1, 4, 8, 8))
        except RuntimeError:
            net.stem(torch.ones(1, 3, 8, 8))
    assert repr(run.passes[0]) == "Pass 0: 0 values at 0 sites; the model raised in it"
    assert "[1, 4, 8, 8]" in repr(run.passes[1])


def test_a_recording_without_passes_is_one_line(net):
    line = hl.record(net, "fc")
    assert repr(line.recording) == "Recording of SmallNet: 1 site, 0 passes, 0 values"
    line._line.options.quiet = True
    line.remove()


def test_an_opened_recording_prints_the_same_without_a_folder(net, tmp_path):
    with hl.record(net, ["stem", "fc"], ports=("output", "input")) as run:
        net(torch.ones(2, 3, 8, 8))
    opened = hl.open(run.save(tmp_path / "run"))
    assert str(opened) == str(run) == str(pickle.loads(pickle.dumps(run)))
    opened = hl.open(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    assert "cannot be read" in str(opened)


def test_names_that_would_turn_the_text_round_are_escaped():
    model = nn.Sequential()
    model.add_module("a\u202eb", nn.Identity())
    with hl.record(model, "*") as run:
        model(torch.ones(1))
    assert "a\\u202eb" in str(run)
    assert "\u202e" not in str(run)
