from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console
from torch import nn

import hookline as hl
from hookline.cli import terminal
from hookline.display.results import printout_of


def printed_in_colour(result, monkeypatch) -> str:
    console = Console(width=100, file=io.StringIO(), force_terminal=True, color_system="standard")
    monkeypatch.setattr(terminal, "out", console)
    terminal.print_result(result)
    return console.file.getvalue()


class Partial(nn.Module):
    """A container, a module that does not run, one that raises if asked, one with two names."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.again = self.blocks[0]
        self.unused = nn.Linear(2, 2)
        self.bad = nn.Linear(9, 9)

    def forward(self, x, fail=False):
        for block in self.blocks:
            x = block(block(x))
        return self.bad(x) if fail else x


def line_of(text: str, name: str) -> str:
    return next(line for line in text.splitlines() if line.split()[:1] == [name])


def test_a_summary_shows_each_module_under_its_parent(net, image):
    text = str(hl.summary(net, image))
    names = [line[: line.index("  ", 8)].rstrip() for line in text.splitlines()[2:8]]
    assert names[:3] == ["(root)", "  stem", "  layer1"]
    stem = line_of(text, "stem").split()
    assert stem == [
        "stem", "Conv2d", "[2,3,8,8]", "[2,4,8,8]", "112", "27.6", "k",
    ]  # fmt: skip
    assert "Left out at 80 columns: memory. A wider terminal shows them." in text
    wide = line_of(printout_of(hl.summary(net, image)).text(100), "stem").split()
    assert wide == [*stem, "2.00", "KiB"]


def test_totals_follow_the_modules(net, image):
    net.fc.requires_grad_(False)
    text = str(hl.summary(net, image))
    total = sum(p.numel() for p in net.parameters())
    assert f"Parameters         {total}, {total - 25} trainable" in text
    assert "Input              1.50 KiB" in text
    assert "Output dtype       float32 throughout" in text
    assert "FLOPs              " in text


def test_without_a_run_there_are_no_columns_of_a_run(net):
    text = str(hl.summary(net))
    assert text.splitlines()[0].split() == ["module", "type", "parameters"]
    assert "Activations" not in text
    assert "not run" not in text


def test_modules_that_did_not_run_say_so_and_containers_do_not(monkeypatch):
    table = hl.summary(Partial(), torch.zeros(1, 4))
    text = str(table)
    assert "not run" in line_of(text, "unused")
    assert "not run" not in line_of(text, "blocks")
    grey = [line for line in printed_in_colour(table, monkeypatch).split("\n") if "unused" in line]
    assert "\x1b[2m" in grey[0]


def test_a_module_with_two_names_shows_the_other():
    assert "shared with again" in str(hl.summary(Partial(), torch.zeros(1, 4)))


def test_many_names_are_counted_rather_than_listed():
    shared = nn.Linear(2, 2)
    table = hl.summary(nn.Sequential(*[shared] * 6))
    assert "shared with 1, 2 and 3 more" in str(table)


def test_several_calls_are_counted(looped):
    assert "Linear x3" in line_of(str(hl.summary(looped, torch.zeros(1, 2))), "block")


def test_dtypes_get_a_column_where_they_differ():
    class Mixed(nn.Sequential):
        def forward(self, x):
            return super().forward(x).half()

    text = str(hl.summary(Mixed(nn.Linear(2, 2)), torch.zeros(1, 2)))
    assert "float16" in line_of(text, "(root)")
    assert "float32" in line_of(text, "0")
    assert "throughout" not in text


def test_a_failure_is_the_last_thing_said():
    table = hl.summary(Partial(), {"x": torch.zeros(1, 4), "fail": True})
    text = str(table)
    assert "raised" in line_of(text, "bad")
    first, second = text.rsplit("\n\n", maxsplit=1)[-1].splitlines()[:2]
    assert first == "The run failed"
    assert second.startswith("bad (Linear), which got Tensor[1, 4]: RuntimeError")
    assert "FLOPs    " not in text.split("Parameters  ")[1]  # they were never summed up


def test_long_paths_are_whole_in_text():
    name = "a_very_long_name_" * 12
    model = nn.Sequential()
    model.add_module(name, nn.Linear(2, 2))
    assert name in str(hl.summary(model, torch.zeros(1, 2)))


def test_text_holds_no_colour_codes_and_no_trailing_spaces(net, image):
    text = str(hl.summary(net, image))
    assert "\x1b" not in text
    assert all(line == line.rstrip() for line in text.splitlines())
    assert text.isascii()  # it can be printed wherever stdout goes


@pytest.mark.parametrize("name", ["[red]x[/red]", "[/]", ":smile:"])
def test_names_are_not_taken_for_markup(name):
    model = nn.Sequential()
    model.add_module(name, nn.ReLU())
    assert name in str(hl.summary(model))


def test_a_residual_network_fits_a_terminal_of_80_columns(net):
    text = str(hl.summary(net, torch.zeros(1, 3, 224, 224)))
    assert max(map(len, text.splitlines())) <= 80


def test_a_report_shows_what_fired_and_why_the_rest_did_not(strange_run):
    text = str(strange_run.report())
    head = "hl.record on Strange: 9 sites, 1 pass, 8 fired, 1 never; ended"
    assert text.splitlines()[0] == head
    assert "never: not reached in this forward" in line_of(text, "unused")
    assert line_of(text, "blocks.0").split() == ["blocks.0", "Conv2d", "2"]


def test_a_report_in_which_all_fired_gives_no_reasons(looped):
    with hl.record(looped) as run:
        looped(torch.zeros(1, 2))
    assert "never: " not in str(run.report())


def test_an_inventory_shows_whose_a_hook_is():
    model = nn.Sequential(nn.Linear(2, 2))

    def mine(module, args, output):
        pass

    model[0].register_forward_hook(mine)
    text = printout_of(hl.inventory(model)).text(300)
    assert line_of(text, "0").split()[:3] == ["0", "forward", "yours"]
    assert "mine" in line_of(text, "0")
    assert "test_tables.py" in line_of(text, "0")


def test_an_empty_inventory_says_so():
    assert str(hl.inventory(nn.Linear(2, 2))) == "no hooks on 1 module"


def test_in_a_notebook_text_is_text_and_nothing_is_displayed(monkeypatch):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    table = hl.summary(nn.Linear(2, 3))
    assert repr(table) == str(table)
    assert "Linear" in str(table)


def test_what_is_made_to_be_read_reads_so_at_a_prompt():
    model, x = nn.Linear(2, 3), torch.ones(1, 2)
    with hl.clip(model, norm=0.1) as clipped, hl.record(model, ports="grad") as run:
        model(x).sum().backward()
    flow, clips, found = run.gradients(), clipped.report(), hl.doctor(model, x)
    for shown in (run.report(), hl.inventory(model), flow, clips, found, hl.summary(model, x)):
        assert repr(shown) == str(shown)
        assert "Linear" in repr(shown) or "weight" in repr(shown) or "1 module" in repr(shown)


@pytest.mark.parametrize("width", [60, 80])
def test_in_a_narrow_terminal_a_long_name_has_a_line_of_its_own(width):
    name = "the_projection_of_the_attention_" * 2
    model = nn.Sequential()
    model.add_module(name, nn.Linear(8, 64))
    lines = printout_of(hl.summary(model, torch.zeros(2, 8))).text(width).splitlines()
    number = next(number for number, line in enumerate(lines) if "Linear" in line)
    for word in ("[2,8]", "[2,64]", "576"):
        assert word in lines[number]
    assert lines[number - 1].strip() == name
