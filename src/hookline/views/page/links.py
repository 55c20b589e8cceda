"""Write a place in a recording as an address, and parse addresses."""

from __future__ import annotations

from urllib.parse import parse_qsl, quote_plus

from hookline.errors import InputError
from hookline.views.page.pictures import ORDERS, Choice
from hookline.views.page.values import Place

# Names may have lone surrogates, which strict UTF-8 refuses.
_ERRORS = "surrogatepass"


def query_of(place: Place, choice: Choice | None = None) -> str:
    """Write a place and a choice of what to draw as the query of an address.

    >>> query_of(Place("layer1:grad_output", 0, 2), Choice(sample=3))
    'at=layer1%3Agrad_output&pass=0&call=2&sample=3'
    """
    at = quote_plus(place.at, errors=_ERRORS)
    text = f"at={at}&pass={place.pass_number}&call={place.call}"
    if place.backward is not None:
        text += f"&backward={place.backward}"
    if choice is not None:
        for name, usual in (("sample", 0), ("order", "index"), ("first", 0)):
            if getattr(choice, name) != usual:
                text += f"&{name}={getattr(choice, name)}"
    return text


def parameters_of(query: bytes) -> dict[str, str]:
    """Parse the parameters of an address; if one is given twice, the last counts.

    Raises:
        InputError: the address has too many parameters.
    """
    try:
        pairs = parse_qsl(query.decode("ascii", "replace"), True, errors=_ERRORS, max_num_fields=20)
    except ValueError as error:
        raise InputError("this address cannot be read.\nGo to the start page.") from error
    return dict(pairs)


def choice_of(parameters: dict[str, str]) -> Choice:
    """Parse the choice of what to draw.

    Raises:
        InputError: a number or the order is malformed.
    """
    order = parameters.get("order", "index")
    if order not in ORDERS:
        raise InputError(
            f"order must be one of {', '.join(ORDERS)}, got {order[:20]!r}."
            f"\nWrite order={ORDERS[0]}."
        )
    return Choice(number(parameters, "sample") or 0, order, number(parameters, "first") or 0)


def number(parameters: dict[str, str], name: str) -> int | None:
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
