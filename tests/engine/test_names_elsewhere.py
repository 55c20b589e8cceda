"""names_elsewhere: each part of a transformer that it advises is one that hl.anatomy may name."""

from __future__ import annotations

import hookline as hl
from hookline.engine import names_elsewhere
from hookline.engine.names_elsewhere import call_named_elsewhere, part_named_elsewhere
from hookline.verbs.anatomy.proven_names import NAMES


def test_each_advised_part_is_a_name_of_the_anatomy():
    short = [*names_elsewhere._SHORT_PARTS, *names_elsewhere._LENS_PARTS.values()]
    assert {*names_elsewhere._PARTS, *short} <= set(NAMES)
    assert part_named_elsewhere("q", "") is None  # too short to be meant
    assert part_named_elsewhere("blocks.0.ln1.hook_scale", "") is None


def test_a_call_is_advised_only_in_a_module(net):
    assert call_named_elsewhere("nowhere.add", ["layer1"]) == ""
    assert call_named_elsewhere("layer1.conv", ["layer1"]) == ""
    assert hl.select(net, "layer1.0@add#1").sites[0].path == "layer1.0@add"
