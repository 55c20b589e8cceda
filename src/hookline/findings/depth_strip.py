"""Draw the depth strip of a pass as an SVG without a script: spread, zeros, gradients."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, final

from hookline.display.text import escape_html, plural
from hookline.display.units import measure, share
from hookline.findings.finding import Finding
from hookline.findings.survey import Survey, repeated_block_indices
from hookline.findings.tensor_reading import Numbers, Reading

# Legible on a light and on a dark ground. The page has the same lanes in the same order.
INKS = {"fwd": "#3b7dd8", "bwd": "#c2479a", "error": "#d9482b", "warning": "#b7791f"}
_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM, _GAP = 860, 132, 8, 16, 18, 8
_MOST_TITLES = 400  # outputs; beyond it they have no words of their own
_SIGN_WIDTH = 6.2
_PINS = {
    "error": '<circle cx="{x:.1f}" cy="7" r="4.5" fill="{ink}"/>',
    "warning": '<path d="M{x:.1f} 2l5 9h-10Z" fill="{ink}"/>',
}


@final
class _Lane(NamedTuple):
    """One of the strip's curves: a number for each output, None where there is none."""

    name: str
    about: str
    ink: str
    height: int
    numbers: Sequence[float | None]
    is_bad: Sequence[bool]
    is_log: bool = True


def depth_strip_svg(survey: Survey, findings: Iterable[Finding]) -> str:
    """Draw the outputs of a pass from left to right in firing order; empty without two of them.

    Args:
        survey: the readings of the pass.
        findings: what is marked.
    """
    first: dict[tuple[str, int], Reading] = {}
    for reading in survey.outputs:
        first.setdefault((reading.path, reading.call), reading)
    outputs = list(first.values())
    if len(outputs) < 2:
        return ""
    gradients = {(r.path, r.call): r for r in survey.gradients if r.port == "grad_output"}
    twins = [gradients.get((r.path, r.call)) for r in outputs]
    lanes = _lanes(outputs, twins)
    drawing = _StripDrawing(outputs, _block_indices(survey, outputs))
    height = _TOP + sum(lane.height + _GAP for lane in lanes) + _BOTTOM
    parts: list[str] = []
    top = _TOP
    for lane in lanes:
        parts += drawing.draw_lane(lane, top)
        top += lane.height + _GAP
    parts += drawing.draw_block_names(height)
    parts += drawing.draw_pins(findings, height)
    if len(outputs) <= _MOST_TITLES:
        parts += drawing.draw_tooltips(lanes, height)
    words = f"{plural(len(outputs), 'output')} in firing order: {', '.join(x.name for x in lanes)}"
    return (
        f'<svg role="img" aria-label="{escape_html(words)}" viewBox="0 0 {_WIDTH} {height}"'
        f' width="100%" style="max-width:{_WIDTH}px;height:auto" font-size="11"'
        f' font-family="system-ui, sans-serif" fill="currentColor">{"".join(parts)}</svg>'
    )


def _lanes(outputs: Sequence[Reading], gradients: Sequence[Reading | None]) -> list[_Lane]:
    lanes = [
        _Lane(
            "Spread", "std, forward", "fwd", 48,
            [_none_if_not_finite(r.numbers.std) for r in outputs],
            [r.numbers.n_bad > 0 for r in outputs],
        ),
        _Lane(
            "Zeros", "", "", 26,
            [_zero_share(r.numbers) for r in outputs], [False] * len(outputs), is_log=False,
        ),
    ]  # fmt: skip
    if any(gradient is not None for gradient in gradients):
        norms = [
            None if t is None else _none_if_not_finite(t.numbers.rms * t.numbers.numel**0.5)
            for t in gradients
        ]
        broken = [t is not None and t.numbers.n_bad > 0 for t in gradients]
        lanes.append(_Lane("Gradient", "norm, backward", "bwd", 48, norms, broken))
    return lanes


def _zero_share(numbers: Numbers) -> float | None:
    """Return the share of zeros; None of integers, which are not read, and without elements."""
    is_read = numbers.dtype.is_floating_point or numbers.dtype.is_complex
    return numbers.zeros / numbers.numel if is_read and numbers.numel else None


def _block_indices(survey: Survey, outputs: Sequence[Reading]) -> list[int]:
    """Return the places of the repeated blocks; without any, of the modules at the top.

    In a part of a model, blocks need not hold others.
    """
    blocks = {(reading.path, reading.call) for reading in survey.block_outputs}
    places = [k for k, r in enumerate(outputs) if (r.path, r.call) in blocks]
    top = [k for k, r in enumerate(outputs) if r.path and "." not in r.path]
    if places or not all(r.path for r in outputs):
        return places or top
    return max(top, repeated_block_indices([r.path for r in outputs]), key=len)


def _none_if_not_finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


@final
class _StripDrawing:
    """The places of the outputs from left to right, and what is drawn there."""

    def __init__(self, outputs: Sequence[Reading], trunk: Sequence[int]) -> None:
        self._outputs = outputs
        self._trunk = trunk
        self._step = (_WIDTH - _LEFT - _RIGHT) / len(outputs)

    def _center_x(self, place: int) -> float:
        return _LEFT + self._step * (place + 0.5)

    def draw_lane(self, lane: _Lane, top: int) -> Iterator[str]:
        """Yield a lane: its name, the numbers at its ends, its marks, and what is not finite."""
        bottom = top + lane.height
        yield f'<text x="0" y="{top + 10}" font-weight="600">{lane.name}</text>'
        yield f'<text x="0" y="{top + 24}" opacity=".65">{lane.about}</text>'
        yield (
            f'<path d="M{_LEFT} {bottom + 0.5}H{_WIDTH - _RIGHT}" stroke="currentColor"'
            ' opacity=".25"/>'
        )
        heights, ends = _heights_and_end_texts(lane, top)
        for text, y in zip(ends, (bottom, top + 9), strict=False):
            yield f'<text x="{_LEFT - 6}" y="{y}" text-anchor="end" opacity=".65">{text}</text>'
        yield from (self._curve(lane, heights) if lane.is_log else self._bars(heights, bottom))
        yield from self._draw_non_finite(lane, top)

    def _curve(self, lane: _Lane, heights: Sequence[float | None]) -> Iterator[str]:
        ink = INKS[lane.ink]
        dots = "".join(
            f"M{self._center_x(k):.1f} {y:.1f}h0" for k, y in enumerate(heights) if y is not None
        )
        yield (
            f'<path d="{dots}" stroke="{ink}" stroke-width="3" stroke-linecap="round"'
            ' opacity=".45"/>'
        )
        line, pen = "", "M"
        for place in self._trunk:
            y = heights[place]
            if y is not None:
                line += f"{pen}{self._center_x(place):.1f} {y:.1f}"
            pen = "M" if y is None else "L"
        yield f'<path d="{line}" fill="none" stroke="{ink}" stroke-width="1.6"/>' * bool(line)

    def _bars(self, heights: Sequence[float | None], bottom: float) -> Iterator[str]:
        width = max(1.0, self._step * 0.72)
        for full, opacity in ((False, ".4"), (True, "1")):
            ink = INKS["warning"] if full else "currentColor"
            path = "".join(
                f"M{self._center_x(k) - width / 2:.1f} {bottom}V{y:.1f}h{width:.1f}V{bottom}Z"
                for k, y in enumerate(heights)
                if y is not None and y < bottom and (y <= bottom - 26) == full
            )
            yield f'<path d="{path}" fill="{ink}" opacity="{opacity}"/>' * bool(path)

    def _draw_non_finite(self, lane: _Lane, top: int) -> Iterator[str]:
        for place, is_bad in enumerate(lane.is_bad):
            if is_bad:
                x, width = self._center_x(place) - self._step / 2, max(2.0, self._step)
                yield (
                    f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{lane.height}"'
                    f' fill="{INKS["error"]}" opacity=".3"/>'
                )

    def draw_block_names(self, height: int) -> Iterator[str]:
        """Yield the names of the trunk below the axis, where there is room."""
        end = 0.0
        for place in self._trunk:
            name = self._outputs[place].path.rpartition(".")[2]
            half = len(name) * _SIGN_WIDTH / 2
            x = self._center_x(place)
            if x - half > end and x + half < _WIDTH:
                yield (
                    f'<text x="{x:.1f}" y="{height - 5}" text-anchor="middle" opacity=".65">'
                    f"{escape_html(name)}</text>"
                )
                end = x + half + 6

    def draw_pins(self, findings: Iterable[Finding], height: int) -> Iterator[str]:
        """Yield a pin for each error and warning, at the site where it begins."""
        for finding in reversed([*findings]):
            place = self._output_index(finding.site)
            if finding.level not in _PINS or place is None:
                continue
            ink, x = INKS[finding.level], self._center_x(place)
            yield _PINS[finding.level].format(x=x, ink=ink)
            yield f'<path d="M{x:.1f} {_TOP}V{height - _BOTTOM}" stroke="{ink}" opacity=".5"/>'

    def _output_index(self, site: str) -> int | None:
        path = site.partition(":")[0].partition("#")[0]
        path = "" if path == "(root)" else path
        number = re.search(r"#(\d+)", site)
        call = int(number[1]) if number else 0
        alike = [k for k, r in enumerate(self._outputs) if (r.path, r.call) == (path, call)]
        inside = [k for k, r in enumerate(self._outputs) if path and r.path.startswith(f"{path}.")]
        return next(iter([*alike, *inside]), None)

    def draw_tooltips(self, lanes: Sequence[_Lane], height: int) -> Iterator[str]:
        """Yield an invisible column for each output, whose title tells its numbers."""
        formats: Mapping[bool, Callable[[float | None], str]] = {True: measure, False: share}
        for place, reading in enumerate(self._outputs):
            facts = [
                f"{lane.name.lower()} {formats[lane.is_log](lane.numbers[place])}"
                for lane in lanes
                if lane.numbers[place] is not None
            ]
            facts += ["NaN or infinity"] * any(lane.is_bad[place] for lane in lanes)
            words = f"{reading.site} ({reading.module_type}): {', '.join(facts)}"
            x, width = self._center_x(place) - self._step / 2, self._step
            yield (
                f'<rect x="{x:.1f}" y="{_TOP}" width="{width:.1f}"'
                f' height="{height - _TOP - _BOTTOM}" fill="transparent">'
                f"<title>{escape_html(words)}</title></rect>"
            )


def _heights_and_end_texts(lane: _Lane, top: int) -> tuple[list[float | None], list[str]]:
    """Return the height of each number in a lane, and the numbers at its bottom and its top."""
    bottom = top + lane.height
    if not lane.is_log:
        heights = [None if n is None else bottom - n * lane.height for n in lane.numbers]
        return heights, ["0", "100 %"]
    logs = [math.log10(n) if n else None for n in lane.numbers]
    known = [log for log in logs if log is not None]
    if not known:
        return [None if n is None else float(bottom) for n in lane.numbers], []
    low, high = min(known), max(known)
    if high - low < 1:
        low, high = (low + high - 1) / 2, (low + high + 1) / 2
    heights = [
        None if n is None
        else bottom if log is None
        else bottom - 2 - (lane.height - 4) * (log - low) / (high - low)
        for n, log in zip(lane.numbers, logs, strict=True)
    ]  # fmt: skip
    return heights, [f"{10**low:.2g}", f"{10**high:.2g}"]
