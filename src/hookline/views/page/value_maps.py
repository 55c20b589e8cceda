"""Read the maps of a value for its pane: its own, its gradient's, those of another recording."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hookline.display.text import first_line
from hookline.display.units import measure, share, size
from hookline.errors import HooklineError, InputError
from hookline.views.page.class_scores import top_class_scores_of_entry
from hookline.views.page.image_overlays import (
    Images,
    find_images,
    gradcam_maps,
    gradcam_maps_of_last_layer,
    is_model_input,
    norm_maps,
)
from hookline.views.page.page_state import PageState
from hookline.views.page.quantised_maps import ASKED_FOR, choose_same_channels, quantised_maps
from hookline.views.page.token_norms import find_token_ids, measure_token_norms, token_blocks
from hookline.views.page.value_entries import (
    ValueEntry,
    gradient_of,
    gradient_or_value_of,
    measure_part,
    read_tensor,
)
from hookline.views.page.what_to_draw import Choice
from hookline.views.plots.arrange_value import subtract


def value_maps(page: PageState, entry: ValueEntry, choice: Choice) -> dict[str, Any]:
    """Return the maps that the pane of a value draws, as plain data; values are read one at a time.

    Returns:
        `own` and `gradient`, each `{"maps": ...}`, `{"problem": text}` or None; `over`, what is
        laid over the input images; `scores`, the highest classes. Beside another recording also
        `other`, `difference` and the `numbers` of both.
    """
    gradient = gradient_of(page.entry_at, entry)
    with page.read_lock():
        images = find_images(page.values, entry.key.pass_number)
        own = _maps_or_error(entry, entry, choice, images)
        same = choose_same_channels(choice, own.get("maps"))
        answer: dict[str, Any] = {
            "own": own,
            "gradient": None if gradient is None else _maps_or_error(gradient, entry, same, images),
        }
        other = page.entry_of_other_recording(entry.key)
        if other is not None:
            answer["other"] = _maps_or_error(other, entry, same, images)
            answer["difference"] = _difference_or_error(entry, other, same, images)
            pair = [page.measure(entry), page.measure(other, of_other=True)]
            answer["numbers"] = [_facts_of_part(value, entry, choice) for value in pair]
        elif images is not None and own.get("maps", {}).get("kind") != "heads":
            answer["over"] = _image_overlay(page, entry, images, choice)
            answer["scores"] = top_class_scores_of_entry(entry, images, choice.sample)
    return answer


def token_norms(page: PageState, pass_number: int, sample: int) -> dict[str, Any]:
    """Return the norms of each token in each block of a pass, as plain data.

    Raises:
        InputError: no block of the pass has one row a token.
    """
    chosen = token_blocks(page.rows, page.values, pass_number)
    if chosen is None:
        raise InputError(f"pass {pass_number} has no tokens.\nGo to the start page.")
    outputs = [entry for _, entry in chosen.blocks]
    twins = {entry.order: gradient_of(page.entry_at, entry) for entry in outputs}
    others = {"gradient": {order: twin for order, twin in twins.items() if twin is not None}}
    if page.other is not None:
        pairs = {entry.order: page.entry_of_other_recording(entry.key) for entry in outputs}
        others["other"] = {order: other for order, other in pairs.items() if other is not None}
    ids = find_token_ids(page.values, pass_number, chosen.n_tokens)
    with page.read_lock():
        return measure_token_norms(chosen, page.rows, others, ids, sample)


def _facts_of_part(entry: ValueEntry, within: ValueEntry, choice: Choice) -> dict[str, str]:
    """Return the facts of a value, or of the tensor that is chosen of it by its leaf."""
    if isinstance(choice.part, int):
        return dict(statistics_facts(entry))
    try:
        return dict(statistics_facts(measure_part(entry, choice.part, within)))
    except (HooklineError, RuntimeError, TypeError) as error:
        return {"Problem": first_line(error)}


def statistics_facts(entry: ValueEntry) -> list[tuple[str, str]]:
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


def _maps_or_error(
    entry: ValueEntry, within: ValueEntry, choice: Choice, images: Images | None
) -> dict[str, Any]:
    """Return the maps of the tensor that is chosen of a value: of it, or of one beside it."""
    try:
        return {"maps": _maps_data(read_tensor(entry, choice.part, within), entry, choice, images)}
    except HooklineError as error:
        return {"problem": str(error).splitlines()[0]}
    except (RuntimeError, TypeError) as error:
        return {"problem": f"cannot be drawn: {first_line(error)}"}


def _difference_or_error(
    entry: ValueEntry, other: ValueEntry, choice: Choice, images: Images | None
) -> dict[str, Any]:
    try:
        a, b = (read_tensor(value, choice.part, entry) for value in (entry, other))
        if a.shape != b.shape:
            return {"problem": "The shapes differ."}
        return {"maps": _maps_data(subtract(a.detach(), b.detach()), entry, choice, images)}
    except (HooklineError, RuntimeError, TypeError) as error:
        return {"problem": f"cannot be drawn: {first_line(error)}"}


def _maps_data(
    tensor: Tensor, entry: ValueEntry, choice: Choice, images: Images | None
) -> dict[str, Any]:
    """Return the maps of a tensor; tokens of patches as channels of maps, if this is asked for."""
    grid = None if images is None else images.for_module(entry).grid_of(tensor)
    is_first = grid is None or grid.form == "channels first"
    placed = tensor if grid is None or choice.form == "table" else grid.to_maps(tensor)
    maps = quantised_maps(placed, entry.site.module_type, choice, ASKED_FOR)
    if grid is not None and not is_model_input(entry):
        maps["isPlaced"] = True
    return maps if is_first else maps | {"form": choice.form}


# -- over the images ------------------------------------------------------------------------------


def _image_overlay(
    page: PageState, entry: ValueEntry, images: Images, choice: Choice
) -> dict[str, Any] | None:
    """Return what is laid over the images, or what is missing for it; None if there is nothing."""
    is_root = entry.site.path == ""
    both = (entry, gradient_or_value_of(page.entry_at, entry))
    pair = [value for value in both if value is not None and value.numel is not None]
    if not pair:
        return None
    pair.sort(key=lambda value: value.site.port.startswith("grad"))
    try:
        sets = _last_layer_maps(page, entry, images, choice) if is_root else None
        if sets is None:
            sets = _gradcam_and_norm_maps(pair, images, choice)
    except HooklineError:
        return None
    except (RuntimeError, TypeError) as error:
        return {"why": f"Maps over the input cannot be drawn: {first_line(error)}"}
    if images.pixels is None and entry.is_image and len(pair) > 1 and not is_root:
        return {"why": _why_no_class_map(page, entry.key.pass_number)}
    return {**images.image_url_and_size(choice.sample), "sets": sets} if sets else None


def _why_no_class_map(page: PageState, pass_number: int) -> str:
    """Say what is missing for a class map: the input, or another shape of it."""
    of_pass = (value for value in page.values if value.key.pass_number == pass_number)
    given = next(filter(is_model_input, of_pass), None)
    if given is None:
        return "For Grad-CAM over the input image, record the input as well: (root):input."
    return f"Grad-CAM needs an input of shape [images, 1 or 3, height, width], got {given.shape}."


def _last_layer_maps(
    page: PageState, entry: ValueEntry, images: Images, choice: Choice
) -> list[dict[str, Any]] | None:
    """Return the class map of the last layer that has one, for the model's output."""
    if not entry.site.port.endswith("output"):
        return None
    number, sample = entry.key.pass_number, choice.sample
    maps = gradcam_maps_of_last_layer(page.values, page.entry_at, number, images, sample, ASKED_FOR)
    return None if maps is None else [maps]


def _gradcam_and_norm_maps(
    pair: Sequence[ValueEntry], images: Images, choice: Choice
) -> list[dict[str, Any]]:
    """Return the class map of a value and its gradient, and their norms at each place."""
    tensors = [read_tensor(value) for value in pair]
    names = ["norm of the gradient" if v.site.port.startswith("grad") else "norm" for v in pair]
    named = [*zip(names, tensors, strict=True)][is_model_input(pair[0]) :]
    images = images.for_module(pair[0])
    sets = [norm_maps(named, images, choice.sample, ASKED_FOR)]
    if len(tensors) > 1 and pair[0].site.port == "output":
        sets.insert(0, gradcam_maps(tensors[0], tensors[1], images, choice.sample, ASKED_FOR))
    return [maps for maps in sets if maps is not None]
