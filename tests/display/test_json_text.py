"""JSON of results."""

from __future__ import annotations

import json
import math

import hookline as hl
from hookline.display.json_text import json_text


def test_numbers_that_json_lacks_are_strings():
    data = {
        "a": [math.nan, math.inf, -math.inf, 1.5],
        3: {"site": hl.Site("fc")},
        "b": (None, True),
    }
    assert json.loads(json_text(data)) == {
        "a": ["NaN", "Infinity", "-Infinity", 1.5], "3": {"site": "fc"}, "b": [None, True]
    }  # fmt: skip
