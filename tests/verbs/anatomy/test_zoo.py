"""The causal types of transformers: each is proven, or refused for a known reason."""

from __future__ import annotations

import pytest

import hookline as hl
from causal_zoo import CANNOT, build, names, texts
from thoroughness import tries

# The types that are refused as a whole, and a word of the reason.
REFUSED = {
    "deepseek_v4": "matmul",  # hyper-connections
    "gemma3n_text": "getitem",  # predicts several streams from each other
    "hrm_text": "no stack of blocks",  # runs its blocks in cycles
    "hy_v4": "mixes 4 streams",
    "inkling2_text": "no stack of blocks",  # reads the streams of many blocks
    "reformer": "has 2 streams",  # reversible
    "xlm": "no stack of blocks",  # has no module for a block
}
# The types of which some part has no name.
PARTLY = {
    "inkling_text",  # convolutions mix tokens again, after attention and after the MLP
    "longcat_flash",  # two attentions and three MLPs a block
    "rwkv",  # its MLP also mixes tokens
    "xmod",  # adapters are MLPs, too
}
GATE = [
    "bloom", "cohere2", "deepseek_v3", "falcon", "gemma4_text", "glm4", "gpt_oss", "jamba",
    "minicpm3", "nemotron_h", "olmo3", "qwen3_next", "xlnet",
]  # fmt: skip
OUTS = ("attn_out", "cross_attn_out", "mixer_out", "mlp_out")


# A type that looks for a compiler when it is built.
NAMES = [
    pytest.param(name, marks=[pytest.mark.processes] * (name == "rwkv"))
    for name in tries(sorted({*names()} - {*CANNOT} - {*REFUSED}), gate=GATE)
]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_each_part_of_each_block_is_proven(name):
    parts = hl.anatomy(build(name), texts())
    rows = {row["name"]: row for row in parts.to_dict()["parts"]}
    layers = list(range(parts.n_layers))
    assert rows["resid_pre"]["layers"] == rows["resid_post"]["layers"] == layers
    named = {layer for out in OUTS if out in rows for layer in rows[out]["layers"]}
    assert named == set(layers) or name in PARTLY
    assert max(row["error"] or 0.0 for row in rows.values()) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", tries(sorted(REFUSED), gate=["hy_v4"]))
def test_what_is_no_single_stream_is_refused(name):
    with pytest.raises(hl.SelectionError, match=REFUSED[name]):
        hl.anatomy(build(name), texts())


def test_most_types_run():
    assert len({*names()} - {*CANNOT} - {*REFUSED} - PARTLY) >= 115
