"""Import optional packages on use; the error for a missing package tells how to install it."""

from __future__ import annotations

import importlib
import importlib.util
import urllib.error
import urllib.request
from http import HTTPStatus
from typing import Any

from hookline.errors import HooklineError, ModelError
from hookline.models.torchvision_import import import_torchvision
from hookline.util.optional_imports import how_to_install

# The fix that errors give, for the command line and for Python.
RANDOM = "--weights none for random weights (in Python: load_model(name, weights='none'))"


_EXTRAS = {
    "torchvision": "vision",
    "timm": "vision",
    "PIL": "vision",
    "transformers": "text",
    "huggingface_hub": "text",
}
# These packages import torchvision if it is installed.
_NEED_TORCHVISION = ("torchvision", "timm", "transformers")

_PROBE_SECONDS = 10.0


def import_package(
    package: str, needed_by: str, error_type: type[HooklineError] = ModelError
) -> Any:
    """Import an optional package.

        >>> import_package("timm", "timm:resnet18").create_model("resnet18").num_classes
        1000

    Args:
        package: such as "torchvision" or "PIL", or a module inside a package.
        needed_by: the user's own words, for the message.
        error_type: the class of the error to raise.

    Returns:
        The package.

    Raises:
        HooklineError: of class `error_type`: the package is not installed, or its import fails.
            The message has the command that installs it.
    """
    root = package.partition(".")[0]
    try:
        if root in _NEED_TORCHVISION and _is_installed("torchvision"):
            import_torchvision()
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name not in (root, package):
            raise error_type(_broken_import_text(root, needed_by, error)) from error
        raise error_type(
            f"{needed_by} needs the package {'pillow' if root == 'PIL' else root}, which is"
            f" not installed.\n{_install_hint(root)}"
        ) from error
    except (ImportError, RuntimeError, OSError) as error:
        raise error_type(_broken_import_text(root, needed_by, error)) from error


def error_in_short(error: BaseException) -> str:
    """Format an error as its type and first sentence, at most 160 characters, no full stop."""
    lines = str(error).strip().splitlines()
    text = lines[0].partition(". ")[0].strip().rstrip(".:") if lines else ""
    text = text if len(text) <= 160 else text[:160].rpartition(" ")[0] + " ..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def is_reachable(url: str) -> bool:
    """Return whether a server can be reached; one request, at most ten seconds.

    Without a network, libraries that download weights retry each file for half a minute. This
    request, made first, avoids that wait.

        >>> is_reachable("http://127.0.0.1:9")
        False

    Args:
        url: an address on that server.

    Returns:
        False if no connection can be made. A refusal (403, 404, ...) counts as reachable. So does
        a certificate that Python does not trust, because the library may trust it.
    """
    request = urllib.request.Request(url, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=_PROBE_SECONDS):
            return True
    except urllib.error.HTTPError as error:
        # A proxy that cannot reach the server answers with these two codes.
        return error.code not in (HTTPStatus.BAD_GATEWAY, HTTPStatus.GATEWAY_TIMEOUT)
    except urllib.error.URLError as error:
        return "certificate" in str(error.reason).lower()
    except OSError:  # the connection was made, then timed out or was dropped
        return False


def unavailable_weights_error(name: str, reason: str) -> ModelError:
    """Return the error for weights that cannot be downloaded."""
    return ModelError(
        f"{name}: its weights cannot be fetched ({reason}).\n"
        f"Use {RANDOM}, or --weights FILE for a checkpoint on this disk."
    )


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # sys.modules holds a module without a spec under this name
        return False


def _broken_import_text(package: str, needed_by: str, error: BaseException) -> str:
    return (
        f"{needed_by} needs the package {package}, which is installed but cannot be imported:\n"
        f"{error_in_short(error)}\n{_install_hint(package, '--force-reinstall')}"
    )


def _install_hint(package: str, options: str = "") -> str:
    if package in _EXTRAS:
        return how_to_install(_EXTRAS[package], options=options)
    return f"Install it: {' '.join(['pip install', *filter(None, [options]), package])}"
