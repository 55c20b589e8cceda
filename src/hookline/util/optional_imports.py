"""Load optional packages, and say how to install them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def require(name: str, message: str, fix: str, error_type: Callable[[str], BaseException]) -> Any:
    """Import a module of an optional package.

        >>> from hookline.errors import InputError
        >>> require("no_such_package", "the plot needs it", "Run pip install it.", InputError)
        Traceback (most recent call last):
        hookline.errors.InputError: the plot needs it.
        Run pip install it.

    Args:
        name: the module, such as "PIL.Image".
        message: the first line of the message: the user and the package.
        fix: the second line of the message: the command that installs the package.
        error_type: the class of the error to raise.

    Returns:
        The module.

    Raises:
        Exception: of class `error_type`: the package is not installed, or its import fails.
    """
    try:
        return import_module(name)
    except ImportError as error:
        is_missing = error.name in (name, name.partition(".")[0])
        reason = "" if is_missing else f", got {type(error).__name__}: {error}"
        raise error_type(f"{message}{reason}.\n{fix}") from error


def module_if_imported(name: str) -> Any:
    """Return a module that has been imported; None without one.

    Also None while another thread is still importing it: the module then lacks some of its names.
    """
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    return None if getattr(spec, "_initializing", False) else module


def how_to_install(*extras: str, options: str = "") -> str:
    """Return the command that installs extras from a checkout of hookline.

        >>> print(how_to_install("cli", "page"))
        Run in the folder of hookline: pip install ".[cli,page]"

    Args:
        options: options of `pip install`, such as "--force-reinstall".
    """
    command = " ".join(["pip install", *filter(None, [options]), f'".[{",".join(extras)}]"'])
    return f"Run in the folder of hookline: {command}"
