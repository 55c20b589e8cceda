"""Numbers with their nouns."""

from __future__ import annotations

from hookline.engine.words import plural


def test_nouns_follow_their_number():
    assert plural(1, "pass", "passes") == "1 pass"
    assert plural(1200, "pass", "passes") == "1,200 passes"
    assert [plural(n, "site") for n in (0, 1, 2)] == ["0 sites", "1 site", "2 sites"]
