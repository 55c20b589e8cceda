"""Numbers with their nouns."""

from __future__ import annotations

import pytest

from hookline.display.text import (
    escape_invisible,
    first_line,
    plural,
    shorten,
    type_and_line,
)


def test_nouns_follow_their_number():
    assert plural(1, "pass", "passes") == "1 pass"
    assert plural(1200, "pass", "passes") == "1,200 passes"
    assert [plural(n, "site") for n in (0, 1, 2)] == ["0 sites", "1 site", "2 sites"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("layer4.0", "layer4.0"),
        ("Schicht ä 層 \u2003x", "Schicht ä 層 \u2003x"),
        ("two\nlines\tand", "two\nlines\tand"),
        ("layer\u202egnp.1", r"layer\u202egnp.1"),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("zero\u200bwidth", r"zero\u200bwidth"),
        ("half \ud800", r"half \ud800"),
    ],
)
def test_marks_that_are_not_seen_are_written_out(text, shown):
    assert escape_invisible(text) == shown


@pytest.mark.parametrize(
    ("text", "most", "shown"),
    [
        ("layers.0.attn", 13, "layers.0.attn"),
        ("layers.0.attn", 10, "lay…0.attn"),
        ("layers.0.attn", 7, "la…attn"),
        ("two\nlines", 10, r"two\nlines"),
    ],
)
def test_the_middle_of_a_long_path_is_cut_out(text, most, shown):
    assert shorten(text, most) == shown
    assert len(shorten(text, most)) <= most


def test_a_long_line_of_an_error_is_cut_in_another_message():
    assert first_line(ValueError("a" * 2000)) == "a" * 1000 + "…"
    assert type_and_line(ValueError("a" * 1000)) == "ValueError: " + "a" * 1000
