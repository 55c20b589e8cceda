"""A store is judged by the statistics of its sites, without reading a value."""

from __future__ import annotations

import pytest
import torch

import hookline as hl
from small_stores import write_store


def judged(tmp_path, columns, **options):
    write_store(tmp_path / "s", columns, **options)
    return hl.open(tmp_path / "s").findings()


def test_numbers_that_are_not_finite_are_errors(tmp_path):
    broken = torch.ones(4, 2)
    broken[1, 0], broken[2, 1] = float("nan"), float("inf")
    findings = judged(tmp_path, {"fine": torch.rand(4, 2), "a": broken, "b": broken})
    (finding,) = findings
    assert finding.text == "a has 2 NaN or infinite of 8 elements."
    assert (finding.level, finding.site, finding.follows) == ("error", "a", ("b",))
    assert finding.number == "25 % NaN, inf"
    assert not findings.ok


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e5m2, torch.bfloat16])
def test_a_nan_of_any_dtype_is_an_error(tmp_path, dtype):
    broken = torch.full((4, 2), 2.0)
    broken[1, 0] = float("nan")
    (finding,) = judged(tmp_path, {"a": broken.to(dtype)})
    assert finding.text == "a has 1 NaN or infinite of 8 elements."
    assert (".float()" in finding.advice) is (dtype.itemsize == 1)


def test_one_magnitude_of_many_phases_is_not_constant(tmp_path):
    unit = torch.polar(torch.ones(4, 2), torch.zeros(4, 2))
    unit[1] *= -1
    assert not list(judged(tmp_path, {"a": unit}))


def test_sites_of_one_number_are_told(tmp_path):
    columns = {"zero": torch.zeros(4, 2), "same": torch.full((4, 2), 3.5), "x": torch.rand(4, 2)}
    findings = judged(tmp_path, columns)
    assert [(f.kind, f.site, f.number) for f in findings] == [
        ("dead", "zero", "100 % zero"),
        ("constant", "same", "3.5"),
    ]


def test_items_without_a_row_are_counted_with_the_first_reason(tmp_path):
    skipped = [(1, "no such file"), (2, "truncated")]
    (finding,) = judged(tmp_path, {"x": torch.rand(4, 2)}, skipped=skipped)
    assert finding.text == "2 items of the data set have no row."
    assert finding.number == "2 of 6"
    assert "item 1: no such file" in finding.why


def test_a_healthy_store_and_an_empty_one_have_no_findings(tmp_path):
    findings = judged(tmp_path, {"x": torch.rand(4, 2)})
    assert (list(findings), findings.facts) == ([], "1 site, 4 items")
    write_store(tmp_path / "empty", {"x": torch.rand(0, 2)})
    assert hl.open(tmp_path / "empty").findings().ok
