"""The commands that run a named model on an input: `inspect`, `doctor` and `profile`."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import hookline as hl
from hookline.cli.python_to_commands import python_to_commands
from hookline.cli.terminal import ProgressBar
from hookline.data import guess_input, load_input
from hookline.display.text import plural
from hookline.engine import PORTS, Report
from hookline.errors import HooklineError, HooklineWarning, InputError, SelectionError
from hookline.findings import Findings
from hookline.models import Batch, LoadedModel
from hookline.recordings import Recording, check_target
from hookline.verbs.doctor.diagnosis import Diagnosis, Note, SiteVerdict
from hookline.verbs.profile.profile import Profile
from hookline.verbs.shared.model_state import eval_without_side_effects
from hookline.verbs.shared.run_model import Inputs, call_model, sum_of_mean_squares
from hookline.verbs.summary import Summary
from hookline.views.page import ImagesAndClasses, write_recording_page

PAGE = "report.html"
_OUTPUTS_AND_INPUT = ["(root)", "**", "(root):input"]
_N_SILENT = 3

_Advice = TypeVar("_Advice", Note, SiteVerdict)


@dataclass(frozen=True)
class Inspection:
    """The results of an inspection and their folder. `page` is None if nothing was recorded."""

    summary: Summary
    recording: Recording
    folder: Path
    page: Path | None
    classes: list[tuple[str, float]]
    findings: Findings


def inspect(loaded: LoadedModel, batch: Batch, at: list[str] | None, folder: Path) -> Inspection:
    """Run a model once, record it, and write the recording and its page into a folder.

    If the forward raises, `summary.failure` names the module, and the values before the failure are
    written. If nothing was recorded, nothing is written, and the recording's report says why.

    Raises:
        HooklineError: a selector matches nothing, or the folder cannot be written.
    """
    check_target(folder)
    model = loaded.model
    for site in hl.select(model, at or None):
        if site.is_gradient:
            raise SelectionError(
                f"--at must name sites of the forward, got {site}: inspect runs no backward."
                "\nUse Python: with hl.record(model, ...) as run: loss(model(x)).backward()."
            )
    # The page lays maps over the images that the model got.
    sites = _OUTPUTS_AND_INPUT if batch.images and not at else at or None
    n_modules = sum(1 for _ in model.modules())
    output: list[Any] = []
    with ProgressBar("running the model", n_modules) as busy, warnings.catch_warnings():
        # `silent_sites_text` and the page already report sites that never fired.
        warnings.simplefilter("ignore", HooklineWarning)
        with hl.record(model, sites, copy=True) as run, hl.attach(model) as line:
            line.forward(None, lambda *_: busy.step())
            line.forward("", lambda module, args, value: output.append(value))
            summary = hl.summary(model, batch_to_inputs(model, batch))
    if not len(run):
        return Inspection(summary, run, folder, None, [], run.findings())
    with ProgressBar("writing the recording"):
        run.save(folder)
    classes = _top_classes(loaded, output[0]) if output else []
    with ProgressBar("writing the page"):
        page = write_recording_page(
            run,
            folder / PAGE,
            title=loaded.name,
            subtitle=batch.description,
            summary=summary,
            evidence=ImagesAndClasses(batch.images, classes),
        )
    return Inspection(summary, run, folder, page, classes, run.findings())


def inspection_data(inspection: Inspection, batch: Batch) -> dict[str, Any]:
    """Return an inspection as plain values: its summary, its files, and the recorded sites."""
    return {
        "input": batch.description,
        "classes": [{"label": label, "probability": share} for label, share in inspection.classes],
        "folder": None if inspection.page is None else str(inspection.folder),
        "page": None if inspection.page is None else str(inspection.page),
        "n_values": len(inspection.recording),
        "findings": inspection.findings.to_dict(),
        "sites": inspection.recording.report().to_dict()["sites"],
        "summary": inspection.summary.to_dict(),
    }


def silent_sites_text(report: Report, *, are_chosen: bool) -> str:
    """Say which sites never fired, and why; return an empty text if there is nothing to report.

    Args:
        report: the recording's report.
        are_chosen: whether the user selected sites. Without a selection, some sites may well never
            run, and only the page lists them.
    """
    silent = report.silent
    some = len(silent) < len(report.sites)
    if not silent or (some and not are_chosen):
        return ""
    reasons = "; ".join(f"{site}: {report.why.get(site, '')}" for site in silent[:_N_SILENT])
    more = f"; and {len(silent) - _N_SILENT} more" if len(silent) > _N_SILENT else ""
    text = "nothing was recorded, so nothing was written"
    if some:
        text = f"{len(silent)} of {plural(len(report.sites), 'site')} never fired"
    return f"{text}.\n{reasons}{more}."


def read_input(source: str, loaded: LoadedModel) -> Batch:
    """Read an input as `load_input` does, and refuse one without elements.

    Raises:
        InputError: it cannot be read, or its tensors have no elements.
    """
    batch = load_input(source, loaded)
    values = (*batch.args, *batch.kwargs.values())
    tensors = [value for value in values if isinstance(value, Tensor)]
    if tensors and not any(tensor.numel() for tensor in tensors):
        raise InputError(
            f"the input must have at least one element, got {batch.description}."
            "\nGive a batch of one row or more, such as random:1x3x224x224."
        )
    return batch


def batch_to_inputs(model: nn.Module, batch: Batch) -> Inputs:
    """Convert a batch to the inputs that `hl.summary` takes."""
    if not batch.kwargs:
        return batch.args
    return batch.kwargs if not batch.args else lambda: model(*batch.args, **batch.kwargs)


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
    with ProgressBar("running the model"):
        inputs = None if batch is None else batch_to_inputs(loaded.model, batch)
        diagnosis = _translate_remedies(hl.doctor(loaded.model, inputs, at or None, ports=names))
    if batch is None:
        text = "none given, and none could be guessed: give one, such as random:1x3x224x224"
        return diagnosis, text
    remark = " (a guess: give yours after the model)" if source is None else ""
    return diagnosis, batch.description + remark


def _translate_remedies(diagnosis: Diagnosis) -> Diagnosis:
    """Write the remedies of a diagnosis with commands in place of calls of Python."""

    def translated(advice: _Advice) -> _Advice:
        return replace(advice, remedy=python_to_commands(advice.remedy))

    failure = diagnosis.failure
    if failure is not None:  # what it says may advise, too
        failure = replace(translated(failure), what=python_to_commands(failure.what))
    return replace(
        diagnosis,
        sites=tuple(map(translated, diagnosis.sites)),
        notes=tuple(map(translated, diagnosis.notes)),
        failure=failure,
    )


def profile_steps(
    model: nn.Module, batch: Batch, steps: int, *, backward: bool, progress: ProgressBar
) -> Profile:
    """Run a model several times, in eval mode, under `hl.profile`.

    If the model raises, the profile holds what ran, and its `failure` names the module.

    Raises:
        HooklineError: no output has a gradient.
    """
    inputs = batch_to_inputs(model, batch)
    profiling = hl.profile(model)

    def step() -> None:
        output = call_model(model, inputs)
        if backward:
            _run_backward(output)
            model.zero_grad()
        progress.step()

    try:
        with eval_without_side_effects(model), profiling, torch.set_grad_enabled(backward):
            for _ in range(steps):
                step()
    except Exception as error:
        if isinstance(error, HooklineError) or profiling.failure is None:
            raise
    return profiling


def _run_backward(output: object) -> None:
    loss = sum_of_mean_squares(output)
    if loss is None:
        raise InputError(
            "with --backward, an output must be one that requires a gradient, got none."
            "\nProfile without --backward, or unfreeze the model's parameters."
        )
    torch.autograd.backward(loss)


def _top_classes(loaded: LoadedModel, output: Any) -> list[tuple[str, float]]:
    """List the five likeliest classes of the first row, if the output has a score per label."""
    scores = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if loaded.labels is None or not isinstance(scores, Tensor) or scores.ndim != 2:
        return []
    if not len(scores) or scores.shape[1] != len(loaded.labels):
        return []
    best = torch.softmax(scores[0].float(), 0).topk(min(5, len(loaded.labels)))
    return [
        (loaded.labels[int(k)], float(p)) for p, k in zip(best.values, best.indices, strict=True)
    ]
