"""Import the packages that only the page needs."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from hookline.errors import HooklineError
from hookline.util.install import how_to_install


def load(name: str) -> Any:
    """Import a module of jinja2, pillow, starlette or uvicorn.

    Args:
        name: the module's name, such as `PIL.Image`.

    Returns:
        The module.

    Raises:
        HooklineError: the package is not installed; the message says how to install it.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if name.partition(".")[0] in ("starlette", "uvicorn"):
            message = f"hookline view needs starlette and uvicorn.\n{how_to_install('cli', 'page')}"
        else:
            message = f"the page needs jinja2 and pillow.\n{how_to_install('cli')}"
        raise HooklineError(message) from error
