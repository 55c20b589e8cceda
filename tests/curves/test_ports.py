"""The port of a monitored site."""

from __future__ import annotations

import pytest

from hookline.curves.ports import path_and_port


@pytest.mark.parametrize(
    ("site", "parts"),
    [
        ("(root)", ("(root)", "output")),
        ("a:b:grad_output", ("a:b", "grad_output")),
        ("h.0:output[0]", ("h.0", "output")),
        ("h:output.logits", ("h", "output")),
        ("x\ny.weight:update", ("x\ny.weight", "update")),
    ],
)
def test_a_site_is_split_into_path_and_port(site, parts):
    assert path_and_port(site) == parts
