"""Blocks of queries: what verbs make of a pattern that no one holds whole."""

from __future__ import annotations

import dataclasses
import io

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hookline as hl
from hookline.engine.attention import pattern
from hookline.statistics.value_statistics import BLOCK_NUMEL
from tensor_memory import Alive

TOKENS = 1024
BLOCK = 1 << 17  # scores, so 128 queries
CHUNKS = 3 * 8 * BLOCK_NUMEL  # which statistics copy in float64


class Attention(nn.Module):
    """Calls the kernel of torch."""

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Calls:
    """A statistic that does not add up over blocks: the number of updates."""

    def start(self, value):
        return torch.zeros(1, dtype=torch.float64)

    def update(self, slots, value):
        return slots + 1

    def merge(self, slots, other):
        return slots + other

    def result(self, slots):
        return slots[0].item()


class Blocks(Calls):
    """The same, which says that it takes blocks."""

    takes_blocks = True


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(pattern, "_BLOCK", BLOCK)


@pytest.fixture
def values():
    torch.manual_seed(0)
    return torch.randn(3, 1, 1, TOKENS, 4)


def monitored(site, stats, values, ports="output"):
    model = Attention()
    with hl.monitor(model, site, ports=ports, stats=stats) as seen:
        model(*values)
    return seen[site]


def watched(site, values):
    model, out = Attention(), io.StringIO()
    with hl.watch(model, site, file=out):
        model(*values)
    return out.getvalue().rpartition("  ")[0].rstrip()  # the time differs


STATISTICS = {
    "moments": hl.stats.moments(compile=False),
    "quantiles": hl.stats.quantiles(),
    "histogram": hl.stats.histogram(),
    "covariance": hl.stats.covariance(),
}


@pytest.mark.parametrize("site", ["@pattern", "@scores"])
def test_what_is_measured_of_blocks_is_that_of_the_whole(monkeypatch, values, site):
    few = values[..., :100, :]
    whole = {name: monitored(site, stat, few).results[0] for name, stat in STATISTICS.items()}
    text = watched(site, few)
    monkeypatch.setattr(pattern, "_BLOCK", 1)
    for name, statistic in STATISTICS.items():
        blocks = monitored(site, statistic, few).results[0]
        for field in dataclasses.fields(blocks):
            numbers = getattr(blocks, field.name), getattr(whole[name], field.name)
            assert np.allclose(*map(np.asarray, numbers), equal_nan=True), (name, field.name)
    assert watched(site, few) == text


@pytest.mark.parametrize("site", ["@pattern", "@scores"])
def test_monitor_and_watch_hold_two_blocks_at_most(small_blocks, values, site):
    ports = "output", "grad_output", "grad_input"
    with Alive() as alive:
        monitored(site, hl.stats.moments(compile=False), values, ports)
        watched(site, values)
    assert alive.peak < 3 * 4 * BLOCK + CHUNKS
    values.requires_grad_()  # in training
    with Alive() as alive:
        monitored(site, hl.stats.moments(compile=False), values)
    assert alive.peak < 3 * 4 * BLOCK + CHUNKS


def test_a_statistic_takes_blocks_only_if_it_says_so(small_blocks, values):
    assert monitored("@pattern", Calls(), values).results == [1]
    assert monitored("@pattern", Blocks(), values).results == [TOKENS * TOKENS / BLOCK]


def test_a_gradient_of_the_pattern_needs_the_whole(small_blocks, values):
    values.requires_grad_()
    model = Attention()
    with hl.monitor(model, "@pattern", ports=("output", "grad_output"), stats=Blocks()) as seen:
        model(*values).sum().backward()
    assert [seen[site].results for site in seen.sites] == [[1], [1]]


def test_blocks_tell_the_shape_and_dtype_of_the_whole(values):
    for dtype in (torch.bfloat16, torch.float32):
        q, k, v = values.to(dtype)
        given = pattern.KernelArguments(q, k[..., :30, :], v[..., :30, :], torch.zeros(1, 30))
        for is_pattern in (True, False):
            blocks = pattern.QueryBlocks(given, is_pattern).detached()
            whole = torch.cat(list(blocks), blocks.query_dim)
            assert (blocks.shape, blocks.dtype) == (whole.shape, whole.dtype)
