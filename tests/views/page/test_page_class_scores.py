"""The highest classes in the output of a classifier."""

from __future__ import annotations

import pytest
import torch

from hookline.views.page.class_scores import top_class_scores


def test_class_scores_are_a_softmax_unless_they_sum_to_one():
    output = torch.tensor([[0.0, 3.0, 1.0], [float("nan"), 0.0, 0.0]])
    scores = top_class_scores({"logits": output}, 0)
    assert [index for index, _, _ in scores["top"]] == [1, 2, 0]
    assert [number for _, number, _ in scores["top"]] == [3, 1, 0]
    shares = output[0].softmax(0).sort(descending=True).values.tolist()
    assert [share for _, _, share in scores["top"]] == pytest.approx(shares, rel=1e-3)
    assert not scores["is_share"]
    assert top_class_scores(output.softmax(1), 0)["is_share"]
    assert top_class_scores(output, 1)["top"] == []
    assert top_class_scores(output, 2) is None
    assert top_class_scores(output[0], 0) is None


def test_a_class_that_is_masked_is_left_out():
    inf = float("inf")
    output = torch.tensor([[2.0, -inf, 1.0], [-inf, -inf, -inf], [0.0, inf, 1.0]])
    top = top_class_scores(output, 0)["top"]
    assert [index for index, _, _ in top] == [0, 2]
    assert sum(share for _, _, share in top) == pytest.approx(1, abs=1e-3)
    assert [top_class_scores(output, sample)["top"] for sample in (1, 2)] == [[], []]
