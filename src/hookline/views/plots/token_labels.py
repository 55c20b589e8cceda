"""The labels of tokens in figures."""

from __future__ import annotations

from collections.abc import Sequence

from hookline.display.text import plural, shorten
from hookline.errors import InputError

_LONGEST = 24


def check_texts(name: str, texts: Sequence[str] | None, n_tokens: int, label: str) -> None:
    """Refuse texts that are not one for each token.

    Raises:
        InputError: there are more or fewer texts than tokens, or they are no texts.
    """
    if texts is None:
        return
    no_text = next((text for text in texts if not isinstance(text, str)), None)
    if isinstance(texts, str) or no_text is not None:
        got = "one text" if isinstance(texts, str) else type(no_text).__name__
        raise InputError(
            f"{name} must be a list of texts, one for each token of {label}, got {got}.\nGive those"
            " of the tokenizer: tokenizer.convert_ids_to_tokens(ids)."
        )
    if len(texts) != n_tokens:
        raise InputError(
            f"{name} must have one text for each of the {plural(n_tokens, 'token')} of"
            f" {label}, got {plural(len(texts), 'text')}.\nGive one for each, or {name}=None."
        )


def printable_tokens(texts: Sequence[str] | None) -> list[str] | None:
    """Format tokens: show outer spaces, escape newlines, shorten long texts."""
    return None if texts is None else [_printable_token(text) for text in texts]


def _printable_token(text: str) -> str:
    text = text.replace(" ", "␣") if text != text.strip() else text
    return shorten(text, _LONGEST) or "''"
