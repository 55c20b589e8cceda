"""The command `doctor`: diagnose a named model with a given or guessed input."""

from __future__ import annotations

import hookline as hl
from hookline.cli.inspecting import inputs_of, read_input
from hookline.cli.terminal import Busy
from hookline.engine.selection.site import PORTS
from hookline.errors import InputError
from hookline.models import LoadedModel, guess_input
from hookline.verbs.doctor.diagnosis import Diagnosis


def diagnose(
    loaded: LoadedModel, at: list[str] | None, source: str | None, ports: str
) -> tuple[Diagnosis, str]:
    """Diagnose a model in eval mode, with gradients enabled.

    Returns:
        The diagnosis and a description of the input.

    Raises:
        HooklineError: the selector matches nothing, or the input cannot be read.
    """
    batch = guess_input(loaded) if source is None else read_input(source, loaded)
    names = tuple(name.strip() for name in ports.split(","))
    unknown = [name for name in names if name not in PORTS]
    if unknown:
        raise InputError(
            f"--ports must be among {', '.join(PORTS)}, got {unknown[0]!r}."
            "\nGive --ports output,grad_output, for instance."
        )
    with Busy("running the model"):
        inputs = None if batch is None else inputs_of(loaded.model, batch)
        found = hl.doctor(loaded.model, inputs, at or None, ports=names)
    if batch is None:
        return found, "none given, and none could be guessed: give one, such as random:1x3x224x224"
    guessed = " (a guess: give yours after the model)" if source is None else ""
    return found, batch.description + guessed
