"""Gather the contents of a site's page: values side by side, and links to others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

from torch import Tensor

from hookline.display.units import measure, share, size
from hookline.engine import Site
from hookline.errors import HooklineError
from hookline.views.page.links import query_of
from hookline.views.page.pictures import (
    PER_PAGE,
    Choice,
    Picture,
    Tile,
    class_maps,
    difference_picture,
    histogram_path,
    is_picture,
    picture_of,
    problem_of,
)
from hookline.views.page.shown_recordings import PageState
from hookline.views.page.values import Place, ValueEntry

_TWINS = {
    "output": "grad_output", "input": "grad_input",
    "grad_output": "output", "grad_input": "input",
}  # fmt: skip
# The statistics of a larger value are fetched after the page has loaded.
_LATER_BYTES = 4 * 1024**2


@final
@dataclass(frozen=True)
class Panel:
    """One value on a site's page.

    Args:
        title: the heading.
        seen: the value.
        later: the address of its statistics, if they are to be fetched later.
        picture: the drawing.
        remark: the reason for a missing drawing.
    """

    title: str
    seen: ValueEntry
    later: str = ""
    picture: Picture | None = None
    remark: str = ""


@final
@dataclass(frozen=True)
class Step:
    """Links to the previous and the next pass, call, backward pass, sample or channels.

    Args:
        name: the quantity, such as "Pass".
        text: the current position.
        before: the address of the previous one; empty at the first.
        after: the address of the next one; empty at the last.
        parameter: the parameter that the form sets; empty if there is no form.
        current: the parameter's current number.
        last: the parameter's largest number.
        kept: the form's other parameters, as (name, value).
    """

    name: str
    text: str
    before: str
    after: str
    parameter: str = ""
    current: int = 0
    last: int = 0
    kept: tuple[tuple[str, str], ...] = ()


@final
@dataclass(frozen=True)
class SiteView:
    """The contents of a site's page."""

    label: str
    seen: ValueEntry
    panels: tuple[Panel, ...]
    steps: tuple[Step, ...]
    before: tuple[str, str] | None = None
    after: tuple[str, str] | None = None
    maps: tuple[Tile, ...] = ()
    maps_remark: str = ""
    gap: str = ""
    gap_picture: Picture | None = None
    order: str = "index"
    order_links: tuple[tuple[str, str, bool], ...] = ()


def site_view(shown: PageState, seen: ValueEntry, choice: Choice) -> SiteView:
    """Gather the contents of a site's page; values are read one at a time.

    Raises:
        InputError: the sample does not exist.
        HooklineError: pillow is not installed.
    """
    twin = _twin(shown, seen)
    with shown.reading():
        panels = [_panel(shown, seen, _title(seen), choice)]
        drawn = panels[0].picture
        if drawn is not None:
            choice = replace(choice, channels=drawn.channels)
        there = shown.there(seen.place)
        if there is not None:
            panels = [replace(panels[0], title=f"{_title(seen)} in {shown.names[0]}")]
            panels.append(_panel(shown, there, f"{_title(seen)} in {shown.names[1]}", choice, True))
        if twin is not None:
            panels.append(_panel(shown, twin, _title(twin), choice))
        gap, gap_picture = _gap(shown, seen, there, choice)
        maps, remark = _class_maps(shown, seen, twin, choice.sample)
    picture = panels[0].picture
    return SiteView(
        label=shown.row(seen).label,
        seen=shown.values[seen.order],
        panels=tuple(panels),
        steps=tuple(_steps(shown, seen, choice, picture)),
        before=_neighbour(shown, seen, -1),
        after=_neighbour(shown, seen, 1),
        maps=tuple(maps),
        maps_remark=remark,
        gap=gap,
        gap_picture=gap_picture,
        order=choice.order,
        order_links=tuple(_orders(seen, choice)) if picture and picture.total > 1 else (),
    )


def facts_of(seen: ValueEntry) -> list[tuple[str, str, bool]]:
    """List a value's statistics as (name, text, whether to highlight it)."""
    found = seen.statistics
    facts = [("Shape", seen.shape, False), ("Dtype", seen.dtype, False)]
    if seen.n_bytes:
        facts.append(("Memory", size(seen.n_bytes), False))
    if found is not None:
        facts += [
            ("Mean", measure(found.mean), False), ("Std", measure(found.std), False),
            ("Min", measure(found.min), False), ("Max", measure(found.max), False),
            ("Zeros", share(found.zeros), False),
            ("NaN, inf", seen.non_finite_text, seen.non_finite > 0),
        ]  # fmt: skip
    return [fact for fact in facts if fact[1]]


def path_of(seen: ValueEntry) -> str:
    """Draw a value's histogram as an SVG path."""
    return histogram_path(seen.counts)


def zero_of(seen: ValueEntry) -> float | None:
    """Return the position of zero on a histogram's axis, from 0 to 1; None if it is outside."""
    found = seen.statistics
    if found is None or found.min is None or found.max is None or found.min == found.max:
        return None
    return -found.min / (found.max - found.min) if found.min < 0 < found.max else None


def _panel(
    shown: PageState, seen: ValueEntry, title: str, choice: Choice, of_other: bool = False
) -> Panel:
    later = ""
    if seen.statistics is None and not seen.problem and seen.n_bytes > _LATER_BYTES:
        later = f"numbers?{query_of(seen.place)}" + "&of=other" * of_other
    else:
        seen = shown.measure(seen, of_other=of_other)
    if seen.problem or seen.numel is None:
        return Panel(title, seen, later)
    try:
        tensor = shown.tensor(seen, of_other=of_other)
        return Panel(title, seen, later, picture_of(tensor, seen.site.module_type, choice))
    except HooklineError as error:
        return Panel(title, seen, later, remark=problem_of(error))
    except (RuntimeError, TypeError) as error:
        return Panel(title, seen, later, remark=f"cannot be drawn: {str(error).splitlines()[0]}")


def _gap(
    shown: PageState, seen: ValueEntry, there: ValueEntry | None, choice: Choice
) -> tuple[str, Picture | None]:
    """Describe and draw the difference between the two recordings' values."""
    if shown.other is None:
        return "", None
    if there is None:
        return f"Only in {shown.names[0]}.", None
    known = shown.values[seen.order].difference
    if known is None and seen.n_bytes <= _LATER_BYTES:
        known = shown.measure(seen).difference
    if known is None:
        text = ""
    elif known.problem:
        text = f"They differ: {known.problem}."
    elif not known.differs:
        text = "They are equal to the last bit."
    else:
        text = (
            f"The relative difference is {measure(known.relative)} (L2 norm, over that of the"
            f" second); 1 - cosine is {measure(known.cosine)}."
        )
    try:
        a, b = shown.tensor(seen), shown.tensor(there, of_other=True)
        if a.shape != b.shape:
            return text, None
        return text, difference_picture(a, b, seen.site.module_type, choice)
    except (HooklineError, RuntimeError, TypeError):
        return text, None


def _class_maps(
    shown: PageState, seen: ValueEntry, twin: ValueEntry | None, sample: int
) -> tuple[list[Tile], str]:
    pair = {one.site.port: one for one in (seen, twin) if one is not None}
    if not {"output", "grad_output"} <= set(pair) or seen.form is None:
        return [], ""
    image = _input_of(shown, seen)
    if image is None:
        return [], "For Grad-CAM over the input image, record the input as well: '(root):input'."
    try:
        tensors = [shown.tensor(pair[port]) for port in ("output", "grad_output")]
        return class_maps(tensors[0], tensors[1], image, sample), ""
    except HooklineError:
        return [], ""
    except (RuntimeError, TypeError) as error:
        return [], f"Grad-CAM cannot be drawn: {str(error).splitlines()[0]}"


def _input_of(shown: PageState, seen: ValueEntry) -> Tensor | None:
    """Return the model's input images in the pass of a value, if they were recorded."""
    for one in shown.values:
        if one.site.path == "" and one.site.port == "input" and one.pass_number == seen.pass_number:
            try:
                tensor = shown.tensor(one)
            except HooklineError:
                return None
            return tensor if is_picture(tensor) else None
    return None


def _twin(shown: PageState, seen: ValueEntry) -> ValueEntry | None:
    """Return the gradient of a value, or the value of a gradient."""
    port = _TWINS.get(seen.site.port)
    if port is None:
        return None
    at = str(Site(seen.site.path, port, seen.site.leaf, seen.site.call))
    for backward in (seen.backward, None, 0):
        found = shown.beside(Place(at, seen.pass_number, seen.call, backward))
        if found is not None:
            return found
    return None


def _title(seen: ValueEntry) -> str:
    titles = {"output": "Output", "input": "Input", "grad_output": "Gradient of the output",
              "grad_input": "Gradient of the input", "grad": "Gradient"}  # fmt: skip
    return titles.get(seen.site.port, seen.site.port)


# -- links to other values ---------------------------------------------------------------------


def _steps(
    shown: PageState, seen: ValueEntry, choice: Choice, picture: Picture | None
) -> list[Step]:
    here = shown.of_site(seen.place.at)
    steps = [
        _stepped("Pass", "pass", seen, here, lambda one: one.pass_number, choice),
        _stepped("Backward", "backward", seen, _same(here, seen, "pass"), _backward, choice),
        _stepped(
            "Call", "call", seen, _same(here, seen, "pass", "backward"), lambda one: one.call,
            choice,
        ),
    ]  # fmt: skip
    if picture is not None:
        steps.append(_sampled(seen, choice, picture))
        steps.append(_paged(seen, choice, picture))
    return [step for step in steps if step is not None]


def _backward(seen: ValueEntry) -> int:
    return seen.backward or 0


def _same(values: Sequence[ValueEntry], seen: ValueEntry, *what: str) -> list[ValueEntry]:
    return [
        one
        for one in values
        if ("pass" not in what or one.pass_number == seen.pass_number)
        and ("backward" not in what or one.backward == seen.backward)
    ]


def _stepped(
    name: str, parameter: str, seen: ValueEntry, values: Sequence[ValueEntry],
    number: Callable[[ValueEntry], int], choice: Choice,
) -> Step | None:  # fmt: skip
    """Link to the previous and next pass, backward or call; keep the call number if possible."""
    numbers = sorted({number(one) for one in values})
    if len(numbers) < 2:
        return None
    at = numbers.index(number(seen))

    def address(place: int) -> str:
        if not 0 <= place < len(numbers):
            return ""
        among = [one for one in values if number(one) == numbers[place]]
        best = next((one for one in among if one.call == seen.call), among[0])
        return f"site?{query_of(best.place, choice)}"

    text = f"{at + 1:,} of {len(numbers):,}"
    kept = _kept(seen, choice, parameter)
    return Step(name, text, address(at - 1), address(at + 1), parameter, number(seen),
                numbers[-1], kept)  # fmt: skip


def _sampled(seen: ValueEntry, choice: Choice, picture: Picture) -> Step | None:
    if picture.n_samples < 2:
        return None
    at, last = choice.sample, picture.n_samples - 1
    before, after = (
        f"site?{query_of(seen.place, replace(choice, sample=k))}" if 0 <= k <= last else ""
        for k in (at - 1, at + 1)
    )
    kept = _kept(seen, choice, "sample")
    return Step("Sample", f"of {picture.n_samples:,}", before, after, "sample", at, last, kept)


def _paged(seen: ValueEntry, choice: Choice, picture: Picture) -> Step | None:
    if picture.kind != "channels" or picture.total <= PER_PAGE:
        return None
    before, after = (
        f"site?{query_of(seen.place, replace(choice, first=k))}" if 0 <= k < picture.total else ""
        for k in (picture.first - PER_PAGE, picture.first + PER_PAGE)
    )
    last = min(picture.first + PER_PAGE, picture.total)
    return Step("Channels", f"{picture.first + 1} to {last} of {picture.total:,}", before, after)


def _kept(seen: ValueEntry, choice: Choice, but: str) -> tuple[tuple[str, str], ...]:
    """List the parameters that a form keeps. Another pass may not have the same calls."""
    found = {"at": seen.place.at, "pass": str(seen.pass_number), "call": str(seen.call),
             "sample": str(choice.sample), "order": choice.order}  # fmt: skip
    if seen.backward is not None:
        found["backward"] = str(seen.backward)
    if but == "pass":
        found.pop("call")
        found.pop("backward", None)
    found.pop(but, None)
    return tuple(found.items())


def _neighbour(shown: PageState, seen: ValueEntry, step: int) -> tuple[str, str] | None:
    """Return the previous or next value in firing order, as (label, address)."""
    number = seen.order + step
    if not 0 <= number < len(shown.values):
        return None
    found = shown.values[number]
    return shown.row(found).label, f"site?{query_of(found.place)}"


def _orders(seen: ValueEntry, choice: Choice) -> list[tuple[str, str, bool]]:
    names = {"index": "by number", "mean": "by mean", "std": "by deviation", "max": "by maximum"}
    return [
        (text, f"site?{query_of(seen.place, Choice(choice.sample, order))}", order == choice.order)
        for order, text in names.items()
    ]
