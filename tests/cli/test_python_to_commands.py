"""Advice is in the words of the command line."""

from __future__ import annotations

import numpy as np
import pytest
from typer.testing import CliRunner

from hookline.cli.app import app
from hookline.cli.python_to_commands import PHRASES, python_to_commands
from package_source import texts

NETS = """
from torch import nn

class Sum(nn.Module):
    def forward(self, a, b):
        return a + b

def two():
    return Sum()

def one():
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU()).eval()
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Give names={'a.b': 'c d'}.", "Give --names 'a.b=c d'."),
        ("Give dims=0 for all, or dims={'*.q': -1}.", "Give --dims 0 for all, or --dims '*.q=-1'."),
        ('Give tokens=({"ids": …}, {"ids": …}).', "Give --tokens FILE."),
        ("Give floor=hl.compare(run, other).", "Give --floor DIR."),
        ("only must be names, got 'x'.", "--only must be names, got 'x'."),
        ("hl.doctor(model, x, 'h.*') says", "hookline doctor MODEL INPUT --at 'h.*' says"),
        ("give some: hl.doctor(model, inputs)", "give some: hookline doctor MODEL INPUT"),
        ("hl.inventory(model) lists them", "hookline hooks MODEL lists them"),
        ("hl.summary(model) lists them.", "hookline summary MODEL lists them."),
        ("Give --names a=b.", "Give --names a=b."),
        ("Call f(x, names={'a': 'b'}).", "Call f(x, names={'a': 'b'})."),
        ("with hl.record(model) as run:", "with hl.record(model) as run:"),
        ("runs/tokens=128 is no folder", "runs/tokens=128 is no folder"),
        ("tokens=128 is no folder", "tokens=128 is no folder"),
        ("Did you mean 'floor=2'?", "Did you mean 'floor=2'?"),
        ("in only=30.5/run of 2", "in only=30.5/run of 2"),
    ],
)
def test_calls_and_arguments_become_commands_and_options(text, words):
    assert python_to_commands(text) == words


def test_phrases_that_are_replaced_stand_in_messages():
    others = "".join(
        text for module, text in texts().items() if module != "hookline.cli.python_to_commands"
    )
    assert [part for phrase in PHRASES for part in phrase.split("…") if part not in others] == []


@pytest.mark.parametrize(
    ("command", "advice"),
    [
        ("compare a.npz b.npz", "Map the names of b to those of a, such as --names q=p."),
        ("compare a.npz b.npz --names q=z", "Give --names THEIRS=OURS; a has"),
        ("operations nets.py:one x.npy *", "hookline operations MODEL INPUT 0."),
        ("anatomy nets.py:one", "Write hookline anatomy MODEL INPUT."),
        ("inspect nets.py:two x.npy", "Give a file of arrays by these names"),
        ("inspect nets.py:one t.txt", "the texts of t.txt need a tokenizer"),
        ("extract nets.py:one nope --at 0 --to s", "got 'nope'.\nCheck the path.\n"),
        ("compare a.npz b.npz --dims 0", "Give the folder that all ranks saved.\n"),
        ("findings no\x1b[2J", "hookline: no\\x1b[2J is not a recording"),
    ],
)  # fmt: skip
def test_commands_advise_in_their_own_words(tmp_path, monkeypatch, command, advice):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "t.txt").write_text("a text\n")
    np.save("x.npy", np.ones((3, 2), np.float32))
    np.savez("a.npz", p=np.ones(2), r=np.ones(3))
    np.savez("b.npz", q=np.ones(2), s=np.ones(3))
    done = CliRunner().invoke(app, command.split())
    assert advice in done.stderr
