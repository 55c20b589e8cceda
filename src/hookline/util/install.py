"""The command that installs what hookline can do without."""

from __future__ import annotations


def how_to_install(*extras: str, options: str = "") -> str:
    """Say how to install extras of hookline, which comes as a checkout and is on no package index.

        >>> print(how_to_install("cli", "page"))
        Run in the folder of hookline: pip install ".[cli,page]"

    Args:
        *extras: their names in pyproject.toml.
        options: what stands behind `pip install`, such as "--force-reinstall".

    Returns:
        A line that begins with a verb and ends with the command.
    """
    command = " ".join(["pip install", *filter(None, [options]), f'".[{",".join(extras)}]"'])
    return f"Run in the folder of hookline: {command}"
