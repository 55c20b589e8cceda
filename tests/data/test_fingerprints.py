"""Fingerprints: equal content, equal fingerprint; any other content, another one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hookline.data import fingerprints
from hookline.data.fingerprints import content_fingerprint, fingerprint, spread_indices
from warm import run_python


def test_equal_values_have_equal_fingerprints_however_they_lie():
    rows = torch.arange(12.0).reshape(3, 4)
    assert fingerprint(rows) == fingerprint(rows.t().contiguous().t())
    assert fingerprint(torch.arange(4)[2:3]) == fingerprint(torch.tensor([[0, 2]])[:, 1])
    assert fingerprint({"x": rows, "y": None}) == fingerprint({"x": rows.clone(), "y": None})


def test_every_difference_is_told():
    rows = torch.arange(12.0).reshape(3, 4)
    values = [
        rows, rows + 1, rows.half(), rows.bfloat16(), rows.reshape(4, 3), rows.to_sparse() * 2,
        [rows], (rows,), {"x": rows}, {"y": rows}, {"x": rows, "y": None}, [rows, rows],
        torch.tensor(1), torch.tensor([1]), torch.tensor([]), torch.zeros(0, 3),
        rows.numpy(), None, 1, 1.0, True, "1", b"1", ("ab", "c"), ("a", "bc"), (), [], {},
        object(), torch.complex(rows, rows), torch.complex(rows, rows).conj(),
        torch.nested.nested_tensor([rows[0], rows[1, :2]], layout=torch.jagged),
    ]  # fmt: skip
    assert len({fingerprint(value) for value in values}) == len(values)


@pytest.mark.processes
def test_a_fingerprint_is_the_same_in_another_process():
    code = (
        "import torch; from hookline.data.fingerprints import fingerprint;"
        "print(fingerprint({'x': torch.arange(5), 'y': ('a', 1.5)}))"
    )
    there = run_python("-c", code)
    assert there.stdout.strip() == fingerprint({"x": torch.arange(5), "y": ("a", 1.5)})


@given(n=st.integers(1, 5000), most=st.integers(2, 100))
def test_spread_indices_reach_from_the_first_to_the_last(n, most):
    found = spread_indices(n, most)
    assert (found[0], found[-1], len(found)) == (0, n - 1, min(n, most))
    gaps = np.diff(found)
    assert not len(gaps) or gaps.max() - gaps.min() <= 1


@pytest.mark.parametrize("n_files", [1, 3])
def test_large_files_are_known_by_blocks_that_are_spread(tmp_path, monkeypatch, n_files):
    monkeypatch.setattr(fingerprints, "WHOLE_BYTES", 64)
    monkeypatch.setattr(fingerprints, "N_SAMPLES", 8)
    monkeypatch.setattr(fingerprints, "_BLOCK_BYTES", 8)
    paths = [tmp_path / str(number) for number in range(n_files)]
    content = bytes(1000)
    for path in paths:
        path.write_bytes(content)
    before = content_fingerprint(paths)
    for path in paths:
        for changed in (b"x" + content[1:], content[:-1] + b"x", content[:-1]):
            path.write_bytes(changed)
            assert content_fingerprint(paths) != before
        path.write_bytes(content)
    assert content_fingerprint(paths) == before


def test_every_byte_of_small_files_counts(tmp_path):
    content = bytearray(200_000)
    (tmp_path / "a").write_bytes(content)
    before = content_fingerprint([tmp_path / "a"])
    for place in (0, 65_535, 65_536, 123_456, 199_999):
        changed = content.copy()
        changed[place] = 1
        (tmp_path / "a").write_bytes(changed)
        assert content_fingerprint([tmp_path / "a"]) != before
