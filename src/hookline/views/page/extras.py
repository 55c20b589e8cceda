"""jinja2 and pillow, which only the page needs. Imports engine.errors."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from hookline.engine.errors import HooklineError


def load(name: str) -> Any:
    """Import a module of jinja2 or pillow, now that it is needed.

    Args:
        name: the module, as in `PIL.Image`.

    Returns:
        The module.

    Raises:
        HooklineError: it is not installed; the message says how to install it.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise HooklineError(
            'the page needs jinja2 and pillow: pip install "hookline[cli]"'
        ) from error
