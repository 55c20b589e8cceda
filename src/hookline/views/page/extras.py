"""The packages that only the page needs."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from hookline.errors import HooklineError


def load(name: str) -> Any:
    """Import a module of jinja2, pillow, starlette or uvicorn, now that it is needed.

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
        served = name.partition(".")[0] in ("starlette", "uvicorn")
        message = (
            'hookline view needs starlette and uvicorn: pip install "hookline[cli,page]"'
            if served
            else 'the page needs jinja2 and pillow: pip install "hookline[cli]"'
        )
        raise HooklineError(message) from error
