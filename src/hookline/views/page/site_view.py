"""Gather the contents of a site's page: values side by side, and links to others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from torch import Tensor

from hookline.display.units import measure, share, size
from hookline.engine import Site
from hookline.errors import HooklineError
from hookline.verbs.compare.comparison import (
    ComparedSite,
    Comparison,
    number_text,
    ratio_text,
)
from hookline.views.page.entries import Place, ValueEntry
from hookline.views.page.links import query_of
from hookline.views.page.page_state import PageState
from hookline.views.page.pictures import (
    PER_PAGE,
    Choice,
    Picture,
    Tile,
    class_maps,
    difference_picture,
    is_picture,
    picture_of,
    problem_of,
)

_TWINS = {
    "output": "grad_output", "input": "grad_input",
    "grad_output": "output", "grad_input": "input",
}  # fmt: skip
# The statistics of a larger value are fetched after the page has loaded.
_LATER_BYTES = 4 * 1024**2


@final
@dataclass(frozen=True)
class Panel:
    """One value on a site's page."""

    title: str
    entry: ValueEntry
    later: str = ""  # the address of its statistics, if they are to be fetched later
    picture: Picture | None = None
    remark: str = ""  # the reason for a missing drawing


@final
@dataclass(frozen=True)
class Step:
    """Links to the previous and the next pass, call, backward pass, sample or channels."""

    name: str  # the quantity, such as "Pass"
    text: str  # the current position
    before: str  # the address of the previous one; empty at the first
    after: str  # the address of the next one; empty at the last
    parameter: str = ""  # the parameter that the form sets; empty if there is no form
    current: int = 0  # the parameter's current number
    last: int = 0  # the parameter's largest number
    others: tuple[tuple[str, str], ...] = ()  # the form's other parameters, as (name, value)


def site_view(
    page: PageState, entry: ValueEntry, choice: Choice, comparison: Comparison | None = None
) -> dict[str, Any]:
    """Gather the contents of a site's page; values are read one at a time.

    Args:
        comparison: the comparison with the other recording, as far as it is made.

    Raises:
        InputError: the sample does not exist.
    """
    twin = _twin(page, entry)
    with page.reading():
        panels = [_panel(page, entry, _title(entry), choice)]
        drawn = panels[0].picture
        if drawn is not None:
            choice = replace(choice, channels=drawn.channels)
        other = page.twin(entry.place)
        if other is not None:
            panels = [replace(panels[0], title=f"{_title(entry)} in {page.names[0]}")]
            panels.append(_panel(page, other, f"{_title(entry)} in {page.names[1]}", choice, True))
        if twin is not None:
            panels.append(_panel(page, twin, _title(twin), choice))
        gap_picture = _gap_picture(page, entry, other, choice)
        maps, remark = _class_maps(page, entry, twin, choice.sample)
    picture = panels[0].picture
    return {
        "label": page.label(entry),
        "entry": page.values[entry.order],
        "panels": panels,
        "steps": _steps(page, entry, choice, picture),
        "before": _neighbour(page, entry, -1),
        "after": _neighbour(page, entry, 1),
        "maps": maps,
        "maps_remark": remark,
        "gap": _gap_text(page, entry, other, comparison),
        "gap_picture": gap_picture,
        "order_links": _orders(entry, choice) if picture and picture.total > 1 else [],
    }


def facts_of(entry: ValueEntry) -> list[tuple[str, str, bool]]:
    """List a value's statistics as (name, text, whether to highlight it)."""
    statistics = entry.statistics
    facts = [("Shape", entry.shape, False), ("Dtype", entry.dtype, False)]
    if entry.n_bytes:
        facts.append(("Memory", size(entry.n_bytes), False))
    if statistics is not None:
        facts += [
            ("Mean", measure(statistics.mean), False), ("Std", measure(statistics.std), False),
            ("Min", measure(statistics.min), False), ("Max", measure(statistics.max), False),
            ("Zeros", share(statistics.zeros), False),
            ("NaN, inf", entry.non_finite_text, entry.non_finite > 0),
        ]  # fmt: skip
    return [fact for fact in facts if fact[1]]


def zero_of(entry: ValueEntry) -> float | None:
    """Return the position of zero on a histogram's axis, from 0 to 1; None if it is outside."""
    statistics = entry.statistics
    if statistics is None or statistics.min is None or statistics.max is None:
        return None
    low, high = statistics.min, statistics.max
    return -low / (high - low) if low < 0 < high else None


def _panel(
    page: PageState, entry: ValueEntry, title: str, choice: Choice, of_other: bool = False
) -> Panel:
    later = ""
    if entry.statistics is None and not entry.problem and entry.n_bytes > _LATER_BYTES:
        later = f"numbers?{query_of(entry.place)}" + "&of=other" * of_other
    else:
        entry = page.measure(entry, of_other=of_other)
    if entry.problem or entry.numel is None:
        return Panel(title, entry, later)
    try:
        tensor = page.tensor(entry)
        return Panel(title, entry, later, picture_of(tensor, entry.site.module_type, choice))
    except HooklineError as error:
        return Panel(title, entry, later, remark=problem_of(error))
    except (RuntimeError, TypeError) as error:
        return Panel(title, entry, later, remark=f"cannot be drawn: {str(error).splitlines()[0]}")


def _gap_text(
    page: PageState, entry: ValueEntry, other: ValueEntry | None, comparison: Comparison | None
) -> str:
    """Say what the comparison says of a value."""
    if page.other is None:
        return ""
    rows = [] if comparison is None else page.compared_rows(entry, comparison)
    if not rows:
        return f"Only in {page.names[0]}." if other is None else ""
    return " ".join(map(_row_text, rows))


def _row_text(row: ComparedSite) -> str:
    if row.relative is None or row.verdict == "identical":
        return f"{row.site}: {row.verdict}" + f" ({row.why})" * bool(row.why) + "."
    return (
        f"{row.site}: {row.verdict}. The relative difference is {number_text(row.relative)}"
        f" (L2 norm, over that of the second; noise floor {number_text(row.floor.relative)}); the"
        f" ratio of norms is {ratio_text(row.norm_ratio)}. The worst row is off by"
        f" {number_text(row.worst_row)}, the worst element by {number_text(row.worst_element)}."
    )


def _gap_picture(
    page: PageState, entry: ValueEntry, other: ValueEntry | None, choice: Choice
) -> Picture | None:
    """Draw the difference between the two recordings' values, if they have one shape."""
    if other is None:
        return None
    try:
        a, b = page.tensor(entry), page.tensor(other)
        if a.shape != b.shape:
            return None
        return difference_picture(a, b, entry.site.module_type, choice)
    except (HooklineError, RuntimeError, TypeError):
        return None


def _class_maps(
    page: PageState, entry: ValueEntry, twin: ValueEntry | None, sample: int
) -> tuple[list[Tile], str]:
    pair = {value.site.port: value for value in (entry, twin) if value is not None}
    if not {"output", "grad_output"} <= set(pair) or not entry.is_image:
        return [], ""
    image = _input_of(page, entry)
    if image is None:
        return [], "For Grad-CAM over the input image, record the input as well: '(root):input'."
    try:
        tensors = [page.tensor(pair[port]) for port in ("output", "grad_output")]
        return class_maps(tensors[0], tensors[1], image, sample), ""
    except HooklineError:
        return [], ""
    except (RuntimeError, TypeError) as error:
        return [], f"Grad-CAM cannot be drawn: {str(error).splitlines()[0]}"


def _input_of(page: PageState, entry: ValueEntry) -> Tensor | None:
    """Return the model's input images in the pass of a value, if they were recorded."""
    for value in page.values:
        is_input = value.site.path == "" and value.site.port == "input"
        if is_input and value.place.pass_number == entry.place.pass_number:
            try:
                tensor = page.tensor(value)
            except HooklineError:
                return None
            return tensor if is_picture(tensor) else None
    return None


def gradient_of(page: PageState, entry: ValueEntry) -> ValueEntry | None:
    """Return the gradient of a value; None if there is none, or for a gradient."""
    return None if entry.site.port.startswith("grad") else _twin(page, entry)


def _twin(page: PageState, entry: ValueEntry) -> ValueEntry | None:
    """Return the gradient of a value, or the value of a gradient."""
    port = _TWINS.get(entry.site.port)
    if port is None:
        return None
    at = str(Site(entry.site.path, port, entry.site.leaf, entry.site.call))
    for backward in (entry.place.backward, None, 0):
        twin = page.beside(Place(at, entry.place.pass_number, entry.place.call, backward))
        if twin is not None:
            return twin
    return None


def _title(entry: ValueEntry) -> str:
    titles = {"output": "Output", "input": "Input", "grad_output": "Gradient of the output",
              "grad_input": "Gradient of the input", "grad": "Gradient"}  # fmt: skip
    return titles.get(entry.site.port, entry.site.port)


# -- links to other values ---------------------------------------------------------------------


def _steps(
    page: PageState, entry: ValueEntry, choice: Choice, picture: Picture | None
) -> list[Step]:
    of_site = page.of_site(entry.place.at)
    of_pass = [value for value in of_site if value.place.pass_number == entry.place.pass_number]
    of_backward = [value for value in of_pass if value.place.backward == entry.place.backward]
    steps = [
        _stepped("Pass", entry, of_site, lambda value: value.place.pass_number, choice),
        _stepped("Backward", entry, of_pass, lambda value: value.place.backward or 0, choice),
        _stepped("Call", entry, of_backward, lambda value: value.place.call, choice),
    ]
    if picture is not None:
        steps.append(_sampled(entry, choice, picture))
        steps.append(_paged(entry, choice, picture))
    return [step for step in steps if step is not None]


def _stepped(
    name: str, entry: ValueEntry, values: Sequence[ValueEntry],
    number: Callable[[ValueEntry], int], choice: Choice,
) -> Step | None:  # fmt: skip
    """Link to the previous and next pass, backward or call; keep the call number if possible."""
    numbers = sorted({number(value) for value in values})
    if len(numbers) < 2:
        return None
    at = numbers.index(number(entry))

    def address(index: int) -> str:
        if not 0 <= index < len(numbers):
            return ""
        places = [value.place for value in values if number(value) == numbers[index]]
        best = next((place for place in places if place.call == entry.place.call), places[0])
        return f"site?{query_of(best, choice)}"

    text = f"{at + 1:,} of {len(numbers):,}"
    parameter = name.lower()
    others = _other_parameters(entry, choice, parameter)
    return Step(name, text, address(at - 1), address(at + 1), parameter, number(entry),
                numbers[-1], others)  # fmt: skip


def _sampled(entry: ValueEntry, choice: Choice, picture: Picture) -> Step | None:
    if picture.n_samples < 2:
        return None
    at, last = choice.sample, picture.n_samples - 1
    before, after = (
        f"site?{query_of(entry.place, replace(choice, sample=k))}" if 0 <= k <= last else ""
        for k in (at - 1, at + 1)
    )
    others = _other_parameters(entry, choice, "sample")
    return Step("Sample", f"of {picture.n_samples:,}", before, after, "sample", at, last, others)


def _paged(entry: ValueEntry, choice: Choice, picture: Picture) -> Step | None:
    if picture.kind != "channels" or picture.total <= PER_PAGE:
        return None
    before, after = (
        f"site?{query_of(entry.place, replace(choice, first=k))}" if 0 <= k < picture.total else ""
        for k in (picture.first - PER_PAGE, picture.first + PER_PAGE)
    )
    last = min(picture.first + PER_PAGE, picture.total)
    return Step("Channels", f"{picture.first + 1} to {last} of {picture.total:,}", before, after)


def _other_parameters(entry: ValueEntry, choice: Choice, but: str) -> tuple[tuple[str, str], ...]:
    """List the parameters that a form keeps. Another pass may not have the same calls."""
    at, pass_number, call, backward = entry.place
    parameters = {"at": at, "pass": str(pass_number), "call": str(call),
                  "sample": str(choice.sample), "order": choice.order}  # fmt: skip
    if backward is not None:
        parameters["backward"] = str(backward)
    if but == "pass":
        parameters.pop("call")
        parameters.pop("backward", None)
    parameters.pop(but, None)
    return tuple(parameters.items())


def _neighbour(page: PageState, entry: ValueEntry, step: int) -> tuple[str, str] | None:
    """Return the previous or next value in firing order, as (label, address)."""
    number = entry.order + step
    if not 0 <= number < len(page.values):
        return None
    neighbour = page.values[number]
    return page.label(neighbour), f"site?{query_of(neighbour.place)}"


def _orders(entry: ValueEntry, choice: Choice) -> list[tuple[str, str, bool]]:
    names = {"index": "by number", "mean": "by mean", "std": "by deviation", "max": "by maximum"}
    return [
        (text, f"site?{query_of(entry.place, Choice(choice.sample, order))}", order == choice.order)
        for order, text in names.items()
    ]
