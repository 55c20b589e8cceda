"""Write and parse addresses: of a value in a recording, and of items of a store."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import parse_qsl, quote_plus

from hookline.display.text import plural
from hookline.errors import InputError, check_one_of
from hookline.views.page.value_entries import ValueKey
from hookline.views.page.what_to_draw import FORMS, ORDERS, Choice

# Names may have lone surrogates, which strict UTF-8 refuses.
_ERRORS = "surrogatepass"
MOST_ITEMS = 64  # on one page


def format_query(key: ValueKey, leaf: str = "") -> str:
    """Write the key of a value as the query of an address, with the leaf of one of its tensors.

    >>> format_query(ValueKey("layer1:grad_output", 0, 2))
    'at=layer1%3Agrad_output&pass=0&call=2'
    """
    at = quote_plus(key.at, errors=_ERRORS)
    text = f"at={at}&pass={key.pass_number}&call={key.call}"
    if key.backward is not None:
        text += f"&backward={key.backward}"
    return text + f"&leaf={quote_plus(leaf, errors=_ERRORS)}" * bool(leaf)


def parse_query(query: bytes) -> dict[str, str]:
    """Parse the parameters of an address; if one is given twice, the last counts.

    Raises:
        InputError: the address has too many parameters.
    """
    try:
        pairs = parse_qsl(query.decode("ascii", "replace"), True, errors=_ERRORS, max_num_fields=20)
    except ValueError as error:
        raise InputError("this address cannot be read.\nGo to the start page.") from error
    return dict(pairs)


def parse_choice(parameters: dict[str, str]) -> Choice:
    """Parse the choice of what to draw.

    Raises:
        InputError: a number, the order or the form is malformed.
    """
    order = parameters.get("order", ORDERS[0])
    check_one_of("order", order[:20], ORDERS, f"Write order={ORDERS[0]}.")
    form = parameters.get("form", FORMS[0])
    check_one_of("form", form[:20], FORMS, f"Write form={FORMS[0]}.")
    sample, first, part = (parse_int(parameters, name) or 0 for name in ("sample", "first", "part"))
    return Choice(sample, order, first, parameters.get("leaf") or part, form)


def parse_int(parameters: dict[str, str], name: str) -> int | None:
    """Parse a parameter as an integer >= 0; return None if it is absent.

    Raises:
        InputError: the parameter is not such an integer.
    """
    text = parameters.get(name, "")
    if not text:
        return None
    if not (text.isdecimal() and text.isascii() and len(text) < 10):
        raise InputError(
            f"{name} must be a whole number from 0 up, got {text[:20]!r}."
            f"\nWrite {name}=0, or leave it out."
        )
    return int(text)


# -- items of a store ---------------------------------------------------------------------------


def parse_items(text: str, name: str = "items") -> tuple[int, ...]:
    """Parse the numbers of items.

        >>> parse_items("5,17"), parse_items("1000:1003")
        ((5, 17), (1000, 1001, 1002))

    Raises:
        InputError: the text is neither, or names more than 64 items.
    """
    first, colon, last = text.replace(" ", "").partition(":")
    parts = [first, last] if colon else first.split(",")
    items: Sequence[int] = ()
    if all(part.isdecimal() and part.isascii() and len(part) < 16 for part in parts):
        numbers = [int(part) for part in parts]
        items = range(numbers[0], numbers[1]) if colon else numbers
    if not 0 < len(items) <= MOST_ITEMS:
        raise InputError(
            f"{name} must name 1 to {MOST_ITEMS} items, got {text[:40]!r}."
            "\nGive numbers such as 5,17 or a range such as 1000:1008."
        )
    return tuple(items)


def format_items(items: Sequence[int]) -> str:
    """Write the numbers of items, as `parse_items` parses them.

    >>> format_items([5, 17]), format_items([1000, 1001, 1002])
    ('5,17', '1000:1003')
    """
    if len(items) > 1 and _are_consecutive(items):
        return f"{items[0]}:{items[-1] + 1}"
    return ",".join(map(str, items))


def items_in_words(items: Sequence[int], noun: str = "item") -> str:
    """Name items, or ranks, in a sentence.

    >>> items_in_words([7]), items_in_words([5, 17]), items_in_words([1000, 1001, 1002])
    ('item 7', 'items 5 and 17', 'items 1,000 to 1,002')
    """
    if len(items) > 2 and _are_consecutive(items):
        return f"{noun}s {items[0]:,} to {items[-1]:,}"
    if len(items) > 6:
        return plural(len(items), noun)
    *others, last = (f"{number:,}" for number in items)
    return f"{noun}s {', '.join(others)} and {last}" if others else f"{noun} {last}"


def _are_consecutive(items: Sequence[int]) -> bool:
    return list(items) == list(range(items[0], items[-1] + 1))
