"""A table as text, in a width."""

from __future__ import annotations

import pytest

from hookline.display.results import Printout
from hookline.display.text_table import Heading


def test_columns_give_way_in_their_order_and_are_named():
    headings = (Heading("site", "path"), Heading("memory", "number", 1), Heading("FLOPs", "number"))
    printout = Printout(headings=headings, rows=[["a" * 20, "123 KiB", "9" * 10]])
    assert printout.text(40).splitlines() == [
        "site                       FLOPs",
        "--------------------------------",
        "aaaaaaaaaaaaaaaaaaaa  9999999999",
        "",
        "Left out at 40 columns: memory. A wider",
        "terminal shows them.",
    ]


@pytest.mark.parametrize("way", [0, 2])
def test_a_column_that_cannot_fit_makes_no_other_give_way(way):
    headings = Heading("site", "path"), Heading("n", "number", 1), Heading("output", "text", way)
    printout = Printout(headings=headings, rows=[["a" * 20, "1", "b" * 20]])
    assert printout.text(40).splitlines()[0] == "site                  n"
    assert "Left out at 40 columns: output." in printout.text(40)


def test_a_path_with_a_newline_stays_on_its_line():
    headings = (Heading("site", "path"), Heading("type"))
    lines = Printout(headings=headings, rows=[["a\nb", "Linear"]]).text().splitlines()
    assert lines[2:] == ["a\\nb  Linear"]


def test_wide_characters_take_two_columns():
    headings = (Heading("site", "path"), Heading("type"))
    lines = Printout(headings=headings, rows=[["層", "Linear"], ["fc", "ReLU"]]).text().splitlines()
    assert lines[2:] == ["層    Linear", "fc    ReLU"]


def test_prose_without_room_beside_stands_below_its_row():
    headings = Heading("site", "path"), Heading("n", "number"), Heading("why", "prose")
    rows = [["a" * 16, "1234567890", "one two three four five six seven eight"], ["b", "1", ""]]
    assert Printout(headings=headings, rows=rows).text(40).splitlines() == [
        "site                       n",
        "    why",
        "----------------------------",
        "aaaaaaaaaaaaaaaa  1234567890",
        "    one two three four five six seven",
        "    eight",
        "b                          1",
    ]
