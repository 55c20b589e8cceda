"""Covariances: of the last dimension, of finite rows, and without loss where means are large."""

from __future__ import annotations

import math

import pytest
import torch

import hookline as hl


def result_of(*values):
    statistic = hl.stats.covariance()
    slots = statistic.start(values[0])
    for value in values:
        slots = statistic.update(slots, value)
    return statistic.result(slots)


@pytest.mark.parametrize("offset", [0.0, 1e7])
def test_it_is_the_covariance_that_torch_computes(offset):
    x = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x += offset
    found, rows = result_of(*x), x.reshape(-1, 7)
    assert (found.count, found.non_finite) == (15, 0)
    torch.testing.assert_close(found.mean, rows.mean(0))
    torch.testing.assert_close(found.matrix, torch.cov(rows.T, correction=0))
    torch.testing.assert_close(found.second_moment, rows.T @ rows / 15)
    torch.testing.assert_close(found.correlation, torch.corrcoef(rows.T))


def test_a_row_with_a_nan_is_counted_and_left_out():
    x = torch.tensor([[1.0, 2.0], [math.nan, 5.0], [3.0, 6.0], [1.0, -math.inf]])
    found, rest = result_of(x), result_of(x[::2])
    assert (found.count, found.non_finite) == (4, 2)
    assert torch.equal(found.matrix, rest.matrix)
    assert str(found) == "covariance of 2 features over 4 rows, 2 of them non-finite"


def test_without_finite_rows_there_is_no_mean():
    found = result_of(torch.full((2, 3), math.nan))
    assert found.mean.isnan().all()
    assert found.matrix.isnan().all()


@pytest.mark.parametrize("n", [2, 3, 7, 1000])
def test_a_constant_feature_has_no_correlation(n):
    x = torch.tensor([0.1, -1e9 / 3, 0.0, 0.0], dtype=torch.float64).repeat(n, 1)
    x[:, 3] = torch.arange(n, dtype=torch.float64) * 1e-9 + 0.7
    correlation = result_of(*x.split(2)).correlation
    assert correlation[:3].isnan().all()
    assert correlation[:, :3].isnan().all()
    assert correlation[3, 3] == pytest.approx(1.0)


def test_a_value_without_features_has_an_empty_matrix():
    assert result_of(torch.ones(3, 0)).matrix.shape == (0, 0)


def test_values_of_other_shapes_or_kinds_are_refused():
    with pytest.raises(hl.StructureError, match=r"a dimension of features, got .*\n.*reshape"):
        result_of(torch.tensor(1.0))
    with pytest.raises(hl.StructureError, match=r"must be real"):
        result_of(torch.ones(2, 2, dtype=torch.complex64))
    with pytest.raises(hl.StructureError, match=r"as many features .* got \[2, 4\].\nGive each"):
        result_of(torch.ones(2, 3), torch.ones(2, 4))
