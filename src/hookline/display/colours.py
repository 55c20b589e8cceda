"""Colour maps as numbers, for drawings made without matplotlib.

Both maps suit colour-blind readers. Viridis also suits black-and-white print, because its lightness
rises evenly.
"""

from __future__ import annotations

from collections.abc import Sequence

Rgb = tuple[int, int, int]

# viridis at 0, 0.1, ..., 1; colours between these are interpolated.
VIRIDIS: tuple[Rgb, ...] = (
    (68, 1, 84), (72, 36, 117), (65, 68, 135), (53, 95, 141), (42, 120, 142), (33, 145, 140),
    (34, 168, 132), (68, 191, 112), (122, 209, 81), (189, 223, 38), (253, 231, 37),
)  # fmt: skip

# Blue, white, orange, for signed values: zero is white. The page's script has the same map; its
# lightness changes in equal steps (OKLab), and red-green blindness does not hide the sign.
BLUE_ORANGE: tuple[Rgb, ...] = (
    (18, 91, 171), (52, 119, 200), (98, 148, 212), (143, 179, 224), (191, 210, 235),
    (247, 247, 247),
    (233, 200, 188), (218, 160, 138), (202, 122, 91), (185, 84, 41), (152, 59, 14),
)  # fmt: skip


def interpolate_colour(share: float, anchors: Sequence[Rgb]) -> Rgb:
    """Interpolate a colour of a map at a position from 0 to 1.

    >>> interpolate_colour(0.05, VIRIDIS)
    (70, 18, 100)
    """
    place = min(max(share, 0.0), 1.0) * (len(anchors) - 1)
    left = min(int(place), len(anchors) - 2)
    red, green, blue = (
        round(a + (b - a) * (place - left))
        for a, b in zip(anchors[left], anchors[left + 1], strict=True)
    )
    return red, green, blue
