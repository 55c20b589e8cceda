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

# ColorBrewer's RdBu from blue to red, for signed values: zero is white.
BLUE_RED: tuple[Rgb, ...] = (
    (5, 48, 97), (33, 102, 172), (67, 147, 195), (146, 197, 222), (209, 229, 240), (247, 247, 247),
    (253, 219, 199), (244, 165, 130), (214, 96, 77), (178, 24, 43), (103, 0, 31),
)  # fmt: skip


def colour(share: float, anchors: Sequence[Rgb]) -> Rgb:
    """Interpolate a colour of a map at a position from 0 to 1.

    >>> colour(0.05, VIRIDIS)
    (70, 18, 100)
    """
    place = min(max(share, 0.0), 1.0) * (len(anchors) - 1)
    left = min(int(place), len(anchors) - 2)
    red, green, blue = (
        round(a + (b - a) * (place - left))
        for a, b in zip(anchors[left], anchors[left + 1], strict=True)
    )
    return red, green, blue
