"""Formatting of counts, byte sizes, measurements and shares."""

from __future__ import annotations

import math

_COUNT_UNITS = ("", "k", "M", "G", "T", "P", "E")
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def count(number: float) -> str:
    """Format a count with three digits and a decimal unit.

        >>> count(7_332_000_000), count(48), count(999_600)
        ('7.33 G', '48', '1.00 M')

    Args:
        number: the count, at least 0.

    Returns:
        The text; a number below 1000 is not scaled.
    """
    return _format_scaled(number, 1000, _COUNT_UNITS)


def size(n_bytes: float) -> str:
    """Format an amount of memory with three digits and a binary unit.

        >>> size(3_211_264), size(512)
        ('3.06 MiB', '512 B')

    Args:
        n_bytes: the amount in bytes, at least 0.
    """
    return _format_scaled(n_bytes, 1024, _BYTE_UNITS)


def duration(seconds: float) -> str:
    """Format a duration with three digits.

        >>> duration(0.0123), duration(45e-6), duration(2.5), duration(0)
        ('12.3 ms', '0.0450 ms', '2.50 s', '')

    Args:
        seconds: the duration, at least 0. Zero gives an empty text.
    """
    if not seconds:
        return ""
    number, unit = (seconds, "s") if seconds >= 0.9995 else (seconds * 1e3, "ms")
    digits = 0 if number >= 99.95 else 1 if number >= 9.995 else 2 if number >= 0.9995 else 4
    return f"{number:.{digits}f} {unit}"


def measure(number: float | None) -> str:
    """Format a measurement with four significant digits; None gives an empty text.

    >>> measure(0.0312549), measure(-12), measure(1.5e-9), measure(None)
    ('0.03125', '-12', '1.5e-09', '')
    """
    return "" if number is None else f"{number:.4g}"


def share(part: float | None) -> str:
    """Format a share as a percentage; 0 % and 100 % are exact, never rounded.

        >>> share(0.5), share(0.0), share(0.99999), share(1.0)
        ('50 %', '0 %', '>99.9 %', '100 %')

    Args:
        part: the share from 0 to 1; None gives an empty text.
    """
    if part is None:
        return ""
    percent = part * 100
    if part and percent < 0.1:
        return "<0.1 %"
    if part < 1 and percent > 99.9:
        return ">99.9 %"
    return f"{percent:.3g} %"


def _format_scaled(number: float, base: int, units: tuple[str, ...]) -> str:
    if number < base:
        return f"{number:g} {units[0]}".rstrip()
    power = min(int(math.log(number, base)), len(units) - 1)
    scaled = number / base**power
    # 999.6 would round to 1000, which has four digits, so the next unit is used.
    if scaled >= 999.5 and power < len(units) - 1:
        power, scaled = power + 1, number / base ** (power + 1)
    digits = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
    return f"{scaled:.{digits}f} {units[power]}"
