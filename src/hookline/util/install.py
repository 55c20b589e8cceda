"""The command that installs hookline's extras."""

from __future__ import annotations


def how_to_install(*extras: str, options: str = "") -> str:
    """Return the command that installs extras from a checkout of hookline.

        >>> print(how_to_install("cli", "page"))
        Run in the folder of hookline: pip install ".[cli,page]"

    Args:
        *extras: their names in pyproject.toml.
        options: options of `pip install`, such as "--force-reinstall".

    Returns:
        One line of text that ends with the command.
    """
    command = " ".join(["pip install", *filter(None, [options]), f'".[{",".join(extras)}]"'])
    return f"Run in the folder of hookline: {command}"
