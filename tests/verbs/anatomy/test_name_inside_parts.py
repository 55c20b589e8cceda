"""Equations inside attention, by their errors: hookline.verbs.anatomy.name_inside_parts."""

from __future__ import annotations

import pytest
import torch

from hookline.verbs.anatomy import name_inside_parts
from hookline.verbs.anatomy.identities import CLOSE

Q, K = torch.randn(2, 3, 4, 6, 8, generator=torch.Generator().manual_seed(0))
BIAS = 5 * torch.randn(4, 6, 6, generator=torch.Generator().manual_seed(1))


def product(q=Q, k=K):
    return 0.35 * (q @ k.transpose(-1, -2))


@pytest.mark.parametrize(
    "scores",
    [
        product(), product() + BIAS, product() - BIAS[0, :, :1], 3 * torch.tanh(product() / 3),
        product().masked_fill(torch.ones(6, 6).triu(1) > 0, -torch.inf),
    ],
)  # fmt: skip
def test_scores_are_a_product_scaled_capped_masked_or_biased(scores):
    assert name_inside_parts._scores_error(scores, Q, K) < CLOSE
    assert name_inside_parts._scores_error(scores, K, Q) > 0.1


def test_a_bias_of_one_text_alone_is_no_bias_of_positions():
    scores = product()
    scores[0] += BIAS
    assert name_inside_parts._scores_error(scores, Q, K) > 0.1
