"""Read the maps of a value for its pane: its own, its gradient's, those of another recording."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hookline.display.text import first_line
from hookline.display.units import measure, share, size
from hookline.engine import Site
from hookline.errors import HooklineError, InputError
from hookline.statistics.of_values import main_tensor, measured_tensors
from hookline.views.page.entries import Place, ValueEntry
from hookline.views.page.page_state import PageState
from hookline.views.page.pictures import Choice, class_maps, is_picture
from hookline.views.page.tiles import ASKED_FOR, tiles_of, with_channels
from hookline.views.page.token_norms import ids_of, token_data, token_rows

_TWINS = {
    "output": "grad_output", "input": "grad_input",
    "grad_output": "output", "grad_input": "input",
}  # fmt: skip


def value_maps(page: PageState, entry: ValueEntry, choice: Choice) -> dict[str, Any]:
    """Return the maps that the pane of a value draws, as plain data; values are read one at a time.

    Returns:
        `own` and `gradient`, each `{"maps": ...}`, `{"problem": text}` or None; `classes`, Grad-CAM
        over the input. Beside another recording also `other`, `difference` and the `numbers` of
        both.
    """
    twin = gradient_of(page, entry)
    with page.reading():
        own = _maps_of(page, entry, choice)
        same = with_channels(choice, own.get("maps"))
        answer: dict[str, Any] = {
            "own": own,
            "gradient": None if twin is None else _maps_of(page, twin, same),
            "classes": _class_maps(page, entry, _twin(page, entry), choice.sample),
        }
        other = page.twin(entry.place)
        if other is not None:
            answer["other"] = _maps_of(page, other, same)
            answer["difference"] = _difference_of(page, entry, other, same)
            pair = [page.measure(entry), page.measure(other, of_other=True)]
            answer["numbers"] = [dict(facts_of(value)) for value in pair]
    return answer


def tokens_of(page: PageState, number: int, sample: int) -> dict[str, Any]:
    """Return the norms of each token in each block of a pass, as plain data.

    Raises:
        InputError: no block of the pass has one row a token.
    """
    chosen = token_rows(page.rows, page.values, number)
    if chosen is None:
        raise InputError(f"pass {number} has no tokens.\nGo to the start page.")
    outputs = [entry for _, entry in chosen.blocks]
    twins = {entry.order: gradient_of(page, entry) for entry in outputs}
    others = {"gradient": {order: twin for order, twin in twins.items() if twin is not None}}
    if page.other is not None:
        pairs = {entry.order: page.twin(entry.place) for entry in outputs}
        others["other"] = {order: other for order, other in pairs.items() if other is not None}
    ids = ids_of(page.values, number, chosen.n_tokens)
    with page.reading():
        return token_data(chosen, page.rows, others, ids, sample)


def facts_of(entry: ValueEntry) -> list[tuple[str, str]]:
    """List a value's statistics as (name, text)."""
    statistics = entry.statistics
    facts = [("Shape", entry.shape), ("Dtype", entry.dtype)]
    if entry.n_bytes:
        facts.append(("Memory", size(entry.n_bytes)))
    if statistics is not None:
        facts += [
            ("Mean", measure(statistics.mean)), ("Std", measure(statistics.std)),
            ("Min", measure(statistics.min)), ("Max", measure(statistics.max)),
            ("Zeros", share(statistics.zeros)), ("NaN, inf", entry.non_finite_text),
        ]  # fmt: skip
    return [fact for fact in [*facts, ("Problem", entry.problem)] if fact[1]]


def _tensor_of(entry: ValueEntry, part: int) -> Tensor:
    """Read one of the tensors of a value; call it inside `reading`."""
    value = entry.recorded.read()
    tensors = [tensor for _, tensor in measured_tensors(value)] if part else [main_tensor(value)]
    tensor = tensors[part] if part < len(tensors) else None
    if tensor is None:
        raise InputError(f"the value holds no {'such ' * bool(part)}tensor.")
    return tensor


def _maps_of(page: PageState, entry: ValueEntry, choice: Choice) -> dict[str, Any]:
    try:
        tensor = _tensor_of(entry, choice.part)
        return {"maps": tiles_of(tensor, entry.site.module_type, choice, ASKED_FOR)}
    except HooklineError as error:
        return {"problem": str(error).splitlines()[0]}
    except (RuntimeError, TypeError) as error:
        return {"problem": f"cannot be drawn: {first_line(error)}"}


def _difference_of(
    page: PageState, entry: ValueEntry, other: ValueEntry, choice: Choice
) -> dict[str, Any]:
    try:
        a, b = (_tensor_of(value, choice.part) for value in (entry, other))
        if a.shape != b.shape:
            return {"problem": "The shapes differ."}
        gap = a.double() - b.double()
        return {"maps": tiles_of(gap, entry.site.module_type, choice, ASKED_FOR)}
    except (HooklineError, RuntimeError, TypeError) as error:
        return {"problem": f"cannot be drawn: {first_line(error)}"}


def _class_maps(
    page: PageState, entry: ValueEntry, twin: ValueEntry | None, sample: int
) -> dict[str, Any] | None:
    """Draw Grad-CAM over the input, or say what is missing for it; None if it has no sense."""
    pair = {value.site.port: value for value in (entry, twin) if value is not None}
    if not {"output", "grad_output"} <= set(pair) or not entry.is_image:
        return None
    image = _input_of(page, entry)
    if image is None:
        return {"why": "For Grad-CAM over the input image, record the input as well: (root):input."}
    try:
        tensors = [page.tensor(pair[port]) for port in ("output", "grad_output")]
        tiles = class_maps(tensors[0], tensors[1], image, sample)
    except HooklineError:
        return None
    except (RuntimeError, TypeError) as error:
        return {"why": f"Grad-CAM cannot be drawn: {first_line(error)}"}
    return {"tiles": [[tile.source, tile.caption] for tile in tiles]} if tiles else None


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
