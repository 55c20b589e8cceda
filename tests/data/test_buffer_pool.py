"""Memory of batches: used again only when nothing refers to it."""

from __future__ import annotations

import gc
import pickle

import pytest
import torch

from hookline.data.buffer_pool import REUSED_BYTES, BufferPool

LARGE = torch.ones(REUSED_BYTES // 2)


def test_memory_is_used_again_once_a_batch_is_gone():
    memory = BufferPool()
    places = {memory.empty_like(LARGE[: len(LARGE) - n]).data_ptr() for n in range(3)}
    assert len(places) == 1
    assert places.pop() % 64 == 0  # as torch's own


@pytest.mark.parametrize(
    "kept", [lambda t: t, lambda t: t[5:6].view(2, 2), lambda t: t.numpy()[:1], torch.asarray]
)
def test_memory_that_anything_refers_to_is_left_alone(kept):
    memory = BufferPool()
    part = kept(memory.empty_like(LARGE.view(-1, 4)).fill_(1))
    gc.collect()
    for _ in range(3):
        memory.empty_like(LARGE).fill_(2)
    assert set(part.flatten().tolist()) == {1.0}


def test_batches_of_any_form_are_as_torchs_own():
    memory = BufferPool()
    for dtype in (torch.bool, torch.bfloat16, torch.complex64, torch.float8_e4m3fn):
        like = torch.zeros(2, REUSED_BYTES, dtype=dtype)
        empty = memory.empty_like(like)
        assert (empty.dtype, empty.shape) == (dtype, like.shape)
        assert empty.untyped_storage().nbytes() == like.nbytes
    mixed = LARGE.view(2, 4, 8, -1).to(memory_format=torch.channels_last)
    assert memory.empty_like(mixed).stride() == mixed.stride()


def test_little_is_kept_and_nothing_is_pickled():
    memory = BufferPool()
    batches = [memory.empty_like(LARGE) for _ in range(9)]
    batches.clear()
    assert memory.n_free <= 2
    assert pickle.loads(pickle.dumps(memory)).n_free == 0
