"""Tell which hookline is installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    """Return the version of hookline that is installed."""
    try:
        return version("hookline")
    except PackageNotFoundError:  # hookline runs from its source tree
        return "unknown"
