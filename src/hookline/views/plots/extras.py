"""matplotlib, which only the plots need: imported when the first figure is made."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from hookline.errors import HooklineError
from hookline.util.install import how_to_install


def load(name: str) -> Any:
    """Import a module of matplotlib, now that it is needed. pyplot is never among them.

    Raises:
        HooklineError: it is not installed; the message says how to install it.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise HooklineError(f"plots need matplotlib.\n{how_to_install('plots')}") from error
