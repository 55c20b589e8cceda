"""Import matplotlib, which only the plots need, for the first figure."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from hookline.errors import HooklineError
from hookline.util.install import how_to_install


def load(name: str) -> Any:
    """Import a module of matplotlib; pyplot is never imported.

    Raises:
        HooklineError: matplotlib is not installed; the message says how to install it.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise HooklineError(f"plots need matplotlib.\n{how_to_install('plots')}") from error
