from __future__ import annotations

import pytest

from hookline.display.units import count, measure, share, size


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"), (48, "48"), (999, "999"), (1000, "1.00 k"), (1024, "1.02 k"), (12_345, "12.3 k"),
        (123_456, "123 k"), (999_499, "999 k"), (999_600, "1.00 M"), (3.6e9, "3.60 G"),
        (7e20, "700 E"), (1e24, "1000000 E"),
    ],
)  # fmt: skip
def test_counts_keep_three_digits_and_never_a_fourth(number, text):
    assert count(number) == text


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (3_211_264, "3.06 MiB"),
        (2**40, "1.00 TiB"),
    ],
)
def test_memory_is_in_binary_units(n_bytes, text):
    assert size(n_bytes) == text


def test_a_share_says_none_and_all_only_of_none_and_all():
    assert [share(part) for part in (0, 1e-9, 0.123, 1 - 1e-9, 1, None)] == [
        "0 %", "<0.1 %", "12.3 %", ">99.9 %", "100 %", "",
    ]  # fmt: skip


def test_what_was_not_measured_is_empty():
    assert measure(None) == ""
