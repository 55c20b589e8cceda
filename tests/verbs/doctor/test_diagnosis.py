from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.verbs.doctor.diagnosis import SiteVerdict

X = torch.ones(3, 2)


class Idle(nn.Module):
    """Three layers that run, one that overwrites, and six that do not run."""

    def __init__(self):
        super().__init__()
        self.used = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Linear(2, 2))
        self.idle = nn.ModuleList(nn.Linear(2, 2) for _ in range(6))

    def forward(self, x):
        return self.used(x)


@pytest.fixture
def found() -> hl.Diagnosis:
    return hl.doctor(Idle().eval(), X, "**", ports=("output", "grad_output"))


def test_the_head_counts_the_verdicts(found):
    head = str(found).splitlines()[0]
    assert head == ("hl.doctor on Idle: 22 sites, 10 fire, 12 never; ran forward and backward")
    head = str(hl.doctor(nn.Linear(2, 2), None)).splitlines()[0]
    assert head == "hl.doctor on Linear: 1 site, 0 fire, 0 never, 1 unknown; ran nothing"


def test_silent_sites_come_first_and_like_ones_share_a_reason(found):
    lines = [line.rstrip() for line in str(found).splitlines()[2:]]
    names = [line.split()[0] for line in lines if line and not line.startswith(" ")]
    silent = [f"idle.{k}{port}" for k in range(6) for port in ("", ":grad_output")]
    assert names[:15] == ["site", "-" * len(lines[1]), *silent, "used.0"]
    assert sum("not reached: (root) ran and did not call it" in line for line in lines) == 1
    assert "overwritten in place later" in lines[14]
    assert any("-> record copies: hl.record(..., copy=True)" in line for line in lines)


def test_each_site_has_its_verdict_beside_it_few_are_all_shown(found):
    table = str(found).split("\n\n")[1]
    cells = [line.split()[:2] for line in table.splitlines()[2:] if not line.startswith(" ")]
    assert sorted(cells) == sorted([str(one.site), one.verdict] for one in found.sites)


def test_of_many_sites_some_are_shown_and_the_rest_are_counted():
    model = nn.Sequential(*[nn.Identity() for _ in range(25)])
    lines = str(hl.doctor(model.eval(), X, "*")).splitlines()[4:9]
    assert [line.split() for line in lines] == [
        *([str(k), "fires"] for k in range(4)), ["and", "21", "more", "fires"]
    ]  # fmt: skip


def test_notes_and_the_environment_stand_below(found):
    text = str(found)
    assert "backward   run from the sum of the outputs" in text
    assert text.rsplit("\n\n", maxsplit=1)[-1].startswith(f"torch {torch.__version__}; python 3.")
    assert "mode eval; gradients on; autocast off" in text


def test_without_reasons_there_is_no_column_for_them():
    text = str(hl.doctor(nn.Linear(2, 2).eval(), X))
    assert text.splitlines()[2:5] == ["site    verdict", "---------------", "(root)  fires"]


def test_a_failure_is_shown_with_what_to_do():
    lines = str(hl.doctor(nn.Linear(5, 5), X)).splitlines()
    at = lines.index("The run failed")
    assert lines[at + 1].startswith("(root) (Linear), which got Tensor[3, 2]: RuntimeError: ")
    assert any(line.startswith("-> give the inputs that it expects") for line in lines[at:])


def test_a_model_of_many_causes_is_cut_and_says_so(found):
    sites = [SiteVerdict(hl.Site(f"m.{number}"), 0, f"cause {number}") for number in range(30)]
    text = str(hl.Diagnosis("Net", "forward", tuple(sites)))
    assert "cause 23" in text
    assert "cause 24" not in text
    assert "and 6 more rows: see .sites" in text


def test_a_path_is_not_markup_and_the_text_is_narrow_ascii():
    model = nn.ModuleDict({"[bold]x[/bold]": nn.Linear(2, 2)})
    text = str(hl.doctor(nn.Sequential(model), None))
    assert "0.[bold]x[/bold]" in text
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 80


def test_the_data_holds_every_site_by_itself(found):
    data = json.loads(json.dumps(found.to_dict()))
    assert len(data["sites"]) == 22
    assert data["ok"] is False
    assert data["sites"][0] == {
        "site": "(root)", "type": "Idle", "verdict": "fires", "calls": 1, "why": "", "remedy": "",
    }  # fmt: skip
    assert data["failure"] is None
    assert data["notes"][0]["about"] == "backward"
    assert data["environment"]["mode"] == "eval"
