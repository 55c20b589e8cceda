"""Parse and write the numbers of the items of a store that a page shows."""

from __future__ import annotations

from collections.abc import Sequence

from hookline.display.text import plural
from hookline.errors import InputError

MOST_ITEMS = 64  # on one page


def items_of(text: str, name: str = "items") -> tuple[int, ...]:
    """Parse the numbers of items.

        >>> items_of("5,17"), items_of("1000:1003")
        ((5, 17), (1000, 1001, 1002))

    Args:
        text: numbers with commas between, or a range.
        name: what messages call the text.

    Raises:
        InputError: the text is neither, or names more than 64 items.
    """
    first, colon, last = text.replace(" ", "").partition(":")
    parts = [first, last] if colon else first.split(",")
    found: Sequence[int] = ()
    if all(part.isdecimal() and part.isascii() and len(part) < 16 for part in parts):
        numbers = [int(part) for part in parts]
        found = range(numbers[0], numbers[1]) if colon else numbers
    if not 0 < len(found) <= MOST_ITEMS:
        raise InputError(
            f"{name} must name 1 to {MOST_ITEMS} items, got {text[:40]!r}."
            "\nGive numbers such as 5,17 or a range such as 1000:1008."
        )
    return tuple(found)


def text_of(items: Sequence[int]) -> str:
    """Write the numbers of items, as `items_of` parses them.

    >>> text_of([5, 17]), text_of([1000, 1001, 1002])
    ('5,17', '1000:1003')
    """
    if len(items) > 1 and _is_range(items):
        return f"{items[0]}:{items[-1] + 1}"
    return ",".join(map(str, items))


def in_words(items: Sequence[int]) -> str:
    """Name items in a sentence.

    >>> in_words([7]), in_words([5, 17]), in_words([1000, 1001, 1002])
    ('item 7', 'items 5 and 17', 'items 1,000 to 1,002')
    """
    if len(items) > 2 and _is_range(items):
        return f"items {items[0]:,} to {items[-1]:,}"
    if len(items) > 6:
        return plural(len(items), "item")
    *others, last = (f"{number:,}" for number in items)
    return f"items {', '.join(others)} and {last}" if others else f"item {last}"


def _is_range(items: Sequence[int]) -> bool:
    return list(items) == list(range(items[0], items[-1] + 1))
