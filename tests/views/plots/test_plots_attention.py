"""Maps of attention patterns: a row a query, a column a key."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import hookline as hl


def _map(axes):
    return axes.images[0].get_array()


def _ticks(axes, part):
    return [label.get_text() for label in getattr(axes, f"get_{part}ticklabels")()]


def test_a_map_for_each_head_on_one_scale(recorded, said):
    value = torch.rand(2, 3, 4, 4).softmax(-1)
    figure = hl.plots.attention(recorded(value), "site", sample=1)
    maps = figure.axes[:3]
    for axes, head in zip(maps, value[1], strict=True):
        np.testing.assert_array_equal(_map(axes), head.numpy())
        assert axes.images[0].get_clim() == (0, float(value[1].max()))
        assert axes.get_ylim() == (3.5, -0.5)  # the first query on top
    assert [axes.get_title(loc="left") for axes in maps] == ["head 0", "head 1", "head 2"]
    assert "3 heads, 4 queries, 4 keys" in said(figure)
    assert "sample 1 of 2" in said(figure)


def test_texts_label_queries_and_keys_of_the_outer_maps(recorded):
    texts = ["the", " cat", "\n", "sat"]
    figure = hl.plots.attention(recorded(torch.rand(1, 6, 4, 4)), "site", texts=texts)
    want = ["the", "␣cat", "\\n", "sat"]
    maps = figure.axes[:6]  # three columns
    assert [_ticks(axes, "y") == want for axes in maps] == [True, False, False] * 2
    assert [_ticks(axes, "x") == want for axes in maps] == [False] * 3 + [True] * 3


def test_heads_are_chosen_and_a_value_may_lack_the_batch(recorded, said):
    value = torch.rand(5, 4, 4)
    figure = hl.plots.attention(recorded(value), "site", heads=[3, -5])
    np.testing.assert_array_equal(_map(figure.axes[0]), value[3].numpy())
    np.testing.assert_array_equal(_map(figure.axes[1]), value[0].numpy())
    assert "2 of 5 heads" in said(figure)
    with pytest.raises(hl.InputError, match="must be a number from 0 to 4, got 5"):
        hl.plots.attention(recorded(value), "site", heads=[5])


def test_queries_with_a_cache_are_the_last_tokens(recorded):
    figure = hl.plots.attention(recorded(torch.rand(1, 1, 1, 4)), "site", texts=list("abcd"))
    assert _ticks(figure.axes[0], "y") == ["d"]
    assert _ticks(figure.axes[0], "x") == list("abcd")


def test_keys_may_be_other_tokens(recorded):
    run = recorded(torch.rand(1, 1, 2, 3))
    figure = hl.plots.attention(run, "site", texts=["q", "r"], keys=["a", "b", "c"])
    assert _ticks(figure.axes[0], "y") == ["q", "r"]
    assert _ticks(figure.axes[0], "x") == ["a", "b", "c"]
    with pytest.raises(hl.InputError, match="keys must have one text for each of the 3 tokens"):
        hl.plots.attention(run, "site", texts=["q", "r"], keys=["a"])
    with pytest.raises(hl.InputError, match="texts must have one text for each of the 3 tokens"):
        hl.plots.attention(run, "site", texts=["q", "r"])


def test_masked_scores_are_drawn_as_the_least(recorded, said):
    value = torch.tensor([[[[2.0, -math.inf], [-1.0, 3.0]]]])
    figure = hl.plots.attention(recorded(value), "site")
    np.testing.assert_array_equal(_map(figure.axes[0]), [[2, -1], [-1, 3]])
    assert "-1 to 3; 1 masked" in said(figure)


def test_long_texts_are_averaged_down(recorded, said):
    value = torch.rand(1, 1, 512, 512)
    figure = hl.plots.attention(recorded(value), "site")
    want = value[0, 0].reshape(256, 2, 256, 2).mean((1, 3))
    np.testing.assert_allclose(_map(figure.axes[0]), want, atol=1e-6)
    assert "drawn as 256 x 256" in said(figure)


def test_what_has_no_heads_is_refused(recorded):
    with pytest.raises(hl.InputError, match=r"shape \[batch, head, query, key\], got \[2, 3\]"):
        hl.plots.attention(recorded(torch.rand(2, 3)), "site")
    with pytest.raises(hl.InputError, match="sample must be from 0 to 0"):
        hl.plots.attention(recorded(torch.rand(1, 1, 2, 2)), "site", sample=1)


@pytest.mark.slow
@pytest.mark.parametrize(("n_heads", "n_tokens"), [(1, 4), (7, 4), (40, 12)])
def test_each_map_lies_inside_the_figure_and_apart(recorded, n_heads, n_tokens):
    texts = [f"token {k}" for k in range(n_tokens)]
    value = torch.rand(1, n_heads, n_tokens, n_tokens)
    figure = hl.plots.attention(recorded(value), "site", texts=texts)
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    maps = figure.axes[:n_heads]
    # With the labels around it, each as it is drawn.
    boxes = [axes.get_tightbbox(renderer) for axes in maps]
    width, height = figure.bbox.width, figure.bbox.height
    for box in boxes:
        assert -1 <= box.x0 < box.x1 <= width + 1
        assert -1 <= box.y0 < box.y1 <= height + 1
    for k, box in enumerate(boxes):
        assert not any(box.shrunk(0.99, 0.99).overlaps(other) for other in boxes[:k])


@pytest.mark.parametrize(
    ("texts", "got"), [(torch.arange(4), "Tensor"), ([1, 2, 3, 4], "int"), ("abcd", "one text")]
)
def test_ids_and_one_text_are_no_texts_of_tokens(recorded, texts, got):
    with pytest.raises(hl.InputError, match=rf"list of texts, .* got {got}\.\nGive those of the"):
        hl.plots.attention(recorded(torch.rand(1, 1, 4, 4)), "site", texts=texts)
