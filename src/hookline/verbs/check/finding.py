"""Describe the origin of a value that is not finite, and observations that `also=` asks for."""

from __future__ import annotations

import linecache
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, final

import torch

from hookline.display.text import escape_invisible, plural
from hookline.display.units import measure
from hookline.engine import path_text
from hookline.errors import NonFiniteError
from hookline.findings import Finding
from hookline.statistics import Moments

_MOST_PASSED = 6
# The fields that files of older versions lack.
_LATER = frozenset(("also", "observation", "units"))
# What is known of a parameter that is not finite: else the check, or a step, was refused.
SINCE_START = (
    "it was finite when the check began, and no step used a gradient that was not finite; look at"
    " the learning rate, the optimizer's eps, and what else writes weights"
)
# The tensor that the message of a finding names, by its kind.
_WHAT = {
    "loss": "the gradient of the output {site}",
    "backward": "gradients in the backward of {site}",
    "forward": "the output of {site}",
    "gradient": "the gradient of {site}",
    "constant": "a tensor besides parameters, buffers and inputs",
}

# Folders whose frames are of no user: torch, hookline.
_OURS = str(Path(__file__).parents[2])
_TORCHS = str(Path(torch.nn.__file__).parents[1])


@final
@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of source code."""

    filename: str  # the file
    lineno: int  # the number of the line
    function: str = ""  # the function that the line is in
    text: str = ""  # the line itself; empty if the source is not there

    def __str__(self) -> str:
        return f"{self.filename}:{self.lineno}"


def is_internal(filename: str) -> bool:
    """Tell whether a file is of torch or hookline."""
    return filename.startswith((_OURS, _TORCHS, "<"))


def user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the nearest frame up the stack that is outside torch and hookline."""
    while frame is not None and is_internal(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def source_line(frame: FrameType | None, lineno: int | None = None) -> SourceLine | None:
    """Return a line of a frame's code; by default the line that runs."""
    if frame is None:
        return None
    code, lineno = frame.f_code, lineno or frame.f_lineno
    text = linecache.getline(code.co_filename, lineno).strip()
    return SourceLine(code.co_filename, lineno, code.co_name, text)


@final
@dataclass(frozen=True, slots=True)
class MeasuredTensor:
    """The numbers of one tensor."""

    name: str  # the input, parameter or buffer
    shape: tuple[int, ...]  # its shape
    dtype: str  # its dtype, such as "float32"
    # Its statistics; None if its numbers cannot be read, as on the meta device.
    moments: Moments | None = None

    def __str__(self) -> str:
        head = f"{self.name} {self.dtype}{list(self.shape)}"
        moments, text = self.moments, "no finite number"
        if moments is None:
            return head
        if moments.finite:
            least, greatest, mean = map(measure, (moments.min, moments.max, moments.mean))
            text = f"from {least} to {greatest}, mean {mean}"
        n_bad = moments.non_finite
        return f"{head}  {text}" + (f", {n_bad} not finite" if n_bad else "")


@final
@dataclass(frozen=True, slots=True)
class CheckFinding:
    """Describe the origin of a NaN or an infinity, or an output that `also=` asks for.

        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> try:
        ...     with hl.check(model):
        ...         _ = model(torch.full((1, 2), float("nan")))
        ... except hl.NonFiniteError as error:
        ...     print(error.finding.kind, error.finding.path, error.finding.n_nan)
        input (root):input 2

    A `NonFiniteError` has its finding in `error.finding`. The line of `hl.check` lists the first
    100 findings in `line.findings`, and the first 100 that `also=` asks for. `print(finding)` shows
    all that is known. `finding.site` is the site as text, and `finding.message` the message of the
    error or of the warning.

    Args:
        kind: where the value was made: "forward" or "backward" of a module, or "loss", all code
            between the model's output and `backward()`. Or the tensor that held it: "parameter",
            "buffer", "input", "gradient" (of a parameter) or "constant" (any other tensor).
        path: the path of the module that made it, or of the parameter, buffer or input that held
            it. For a loss, "loss" if the loss is NaN and the gradients are finite.
        module_type: the class of that module.
        call: the number of the module's call within the pass, from 0; None where there is none.
        step: the number of the pass, from 0 for each line, or of the optimizer's step where only
            parts of the model are called; None before the first, and for units that are dead in
            all passes.
        n_nan: the number of NaNs.
        n_inf: the number of infinities.
        n_total: the number of elements of the tensor that was made or held.
        operation: the operation that made it, such as "aten.log.default", or that read it first; of
            a loss without the overload, such as "aten.log". None if not known.
        function: the function that was called, such as "log"; in a backward the node of the graph,
            such as "LogBackward0"; None if not known.
        line: the nearest line of code outside torch; None if not known.
        inputs: the inputs of the operation, or of the module where the operation is not known. An
            input has `name`, `shape`, `dtype` and `moments`, its statistics.
        parameters: the parameters and buffers of the module, in the same form.
        suspect: the parameter, buffer or input that is the likely cause; None without one.
        passed_on: the sites that passed the value on, in the order in which they ran.
        vanished: whether the value was gone before the pass ended, so that nothing was raised.
        rank: the rank that made it, in a distributed job; None if not known.
        notes: further remarks, as text.
        file: the file that keeps the inputs, for `hookline replay`; None if no file was written.
        also: the name in `also=` that asked for this finding, such as "dead"; None for a NaN or an
            infinity. `kind` is then "forward", or "gradient" for "missing_grad".
        observation: the observation that `also=` asked for, as text; otherwise empty.
        units: the indices of the units that are dead, for "dead".
    """

    kind: str
    path: str
    module_type: str = ""
    call: int | None = None
    step: int | None = 0
    n_nan: int = 0
    n_inf: int = 0
    n_total: int = 0
    operation: str | None = None
    function: str | None = None
    line: SourceLine | None = None
    inputs: tuple[MeasuredTensor, ...] = ()
    parameters: tuple[MeasuredTensor, ...] = ()
    suspect: str | None = None
    passed_on: tuple[str, ...] = ()
    vanished: bool = False
    rank: int | None = None
    notes: tuple[str, ...] = ()
    file: str | None = None
    also: str | None = None
    observation: str = ""
    units: tuple[int, ...] = ()

    @property
    def is_error(self) -> bool:
        """Tell whether it is raised: a NaN or an infinity that has not vanished."""
        return self.also is None and not self.vanished

    @property
    def site(self) -> str:
        """The site that made the value, or held it."""
        call = f"#{self.call}" if self.call else ""
        return escape_invisible(path_text(self.path) + call)

    @property
    def is_loss(self) -> bool:
        """Tell whether the loss itself is not finite, and its gradients are."""
        return self.kind == "loss" and self.path == "loss"

    @property
    def message(self) -> str:
        """Return the message of the error, in two lines; or of the warning, in one."""
        subject, type_name = self._subject(), f" ({self.module_type})" if self.module_type else ""
        if self.also is not None:
            return f"{subject}{type_name} {self.observation}."
        where = f" at {self.line}" if self.line else ""
        by = self.function or self.operation
        verb = "made" if self.kind in ("forward", "backward", "loss") else "read"
        maker = f", {verb} by {by}{where}" if by else where and f", {verb}{where}"
        if self.kind == "loss" and not self.is_loss:
            maker = ": the loss made it" + (f", by {by}{where}" if by else "")
        rank = "" if self.rank is None else f" on rank {self.rank}"
        step = "before the first step" if self.step is None else f"in step {self.step}"
        return (
            f"{subject}{type_name} must be finite, got {self._counts_text()} {step}"
            f"{rank}{maker}.\n{self._remedy()}"
        )

    def _subject(self) -> str:
        """Name the value, as the subject of the message."""
        if self.is_loss:
            return "the loss"
        if self.also is not None and self.kind == "gradient":
            return f"parameter {self.site}"
        return _WHAT.get(self.kind, "the {kind} {site}").format(kind=self.kind, site=self.site)

    def _counts_text(self) -> str:
        parts = [f"{self.n_nan} NaN" * bool(self.n_nan), f"{self.n_inf} inf" * bool(self.n_inf)]
        counts = " and ".join(filter(None, parts)) or "a NaN or an infinity"
        return f"{counts} of {plural(self.n_total, 'value')}" if self.n_total else counts

    def _remedy(self) -> str:
        more = "print(error.finding) says more"
        if self.kind == "loss":
            return f"Look at the loss; {more}."
        return f"Look at {self.suspect or 'its inputs'}; {more}."

    def to_finding(self) -> Finding:
        """Return what is wrong as a finding like those of runs, without the details."""
        counts = self._counts_text() if self.also is None else ""
        first, _, _ = self.message.partition("\n")
        return Finding(
            kind=self.also or "non-finite",
            text=first,
            site=self.site,
            level="error" if self.is_error else "warning",
            number=counts,
            advice=self._remedy().partition(";")[0] + ".",
            follows=self.passed_on,
            step=self.step,
        )

    def error(self) -> NonFiniteError:
        """Return the error that says this."""
        return NonFiniteError(self.message, self)

    def __str__(self) -> str:
        first, _, _ = self.message.partition("\n")
        lines = [first]
        if self.operation:
            lines.append(f"  operation: {self.function or '?'} ({self.operation})")
        if self.line:
            within = f", in {self.line.function}" if self.line.function else ""
            lines.append(f"  line: {self.line}{within}: {self.line.text}".rstrip(": "))
        lines += [f"  input: {tensor}" for tensor in self.inputs]
        lines += [f"  {self.module_type or 'module'} holds: {tensor}" for tensor in self.parameters]
        if self.suspect:
            lines.append(f"  suspect: {self.suspect}")
        if self.passed_on:
            names = ", ".join(self.passed_on[:_MOST_PASSED])
            lines.append(f"  passed on by: {names}{', …' * (len(self.passed_on) > _MOST_PASSED)}")
        if self.vanished:
            lines.append("  it was gone before the pass ended, so nothing was raised")
        lines += [f"  {note}" for note in self.notes]
        if self.file:
            lines.append(f"  kept: hookline replay {self.file}")
        return escape_invisible("\n".join(lines))

    def as_json(self) -> dict[str, Any]:
        """Return the fields as a dict that JSON can hold."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        values["line"] = self.line and astuple(self.line)
        for name in ("inputs", "parameters"):
            values[name] = [
                [part.name, list(part.shape), part.dtype, part.moments and part.moments.as_json()]
                for part in values[name]
            ]
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> CheckFinding:
        """Read the dict that `as_json` made.

        Raises:
            ValueError, TypeError, KeyError: it is not such a dict.
        """
        names = [n for n in CheckFinding.__dataclass_fields__ if n in data or n not in _LATER]
        values = {name: data[name] for name in names}
        values["line"] = SourceLine(*data["line"]) if data["line"] else None
        for name in ("inputs", "parameters"):
            values[name] = tuple(
                MeasuredTensor(
                    label, tuple(shape), dtype, Moments.from_json(fields) if fields else None
                )
                for label, shape, dtype, fields in data[name]
            )
        values["passed_on"], values["notes"] = tuple(data["passed_on"]), tuple(data["notes"])
        values["units"] = tuple(data.get("units", ()))
        return CheckFinding(**values)

    def with_(self, **changes: Any) -> CheckFinding:
        """Return the finding with some fields changed."""
        return replace(self, **changes)
