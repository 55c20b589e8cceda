"""Look up values of a recording for drawing, and arrange their dimensions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from hookline.display.text import plural
from hookline.engine import Site, as_written
from hookline.engine.pytree import describe, tree
from hookline.errors import AmbiguousError, InputError, NotRecordedError, OverwrittenError
from hookline.recordings import PassRecord, Recording
from hookline.statistics.to_numbers import DENSE_NUMEL
from hookline.views.plots.checks import Source, check_sample, check_source
from hookline.views.statistics import main_tensor, measured_tensors

_LETTERS = "NCTLDHW"
_USUAL = {1: "C", 2: "NC", 3: "NTC", 4: "NCHW", 5: "NCDHW"}


@final
@dataclass(frozen=True)
class Value:
    """A tensor of a recording with its labels.

    Args:
        label: the site as in a look-up, with the leaf of the tensor.
        module_type: the class of the site's module; empty if unknown.
        tensor: the tensor.
        where: the pass, if the recording has several: `pass 1`.
    """

    label: str
    module_type: str
    tensor: Tensor
    where: str = ""

    @property
    def title(self) -> str:
        """The site and its type: `layer1.0.conv1 (Conv2d)`."""
        return f"{self.label} ({self.module_type})" if self.module_type else self.label

    @property
    def form(self) -> str:
        """The shape, dtype and pass: `[1, 64, 56, 56] float32, pass 1`."""
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        return f"{describe.shape(self.tensor)} {dtype}" + f", {self.where}" * bool(self.where)


@final
@dataclass(frozen=True)
class Skipped:
    """A value that cannot be drawn, and the reason."""

    label: str
    why: str


@final
@dataclass(frozen=True)
class Arranged:
    """One sample of a value, its channels first.

    Args:
        data: the sample, shape `(channels, *space)`, of float32 or float64, on the CPU.
        space: the letters of the other dimensions.
        text: the layout and the sample: `read as NCHW, sample 0 of 8`.
    """

    data: Tensor
    space: str
    text: str


def look_up(source: Source, key: str | Site, name: str = "") -> Value:
    """Look up the main tensor of the only value of a site.

    Args:
        source: a recording, or one of its passes.
        key: the site.
        name: the name of the source's argument, for figures that take several sources.

    Raises:
        NotRecordedError, OverwrittenError: as in a look-up.
        AmbiguousError: the site has several values; the message says what to pass to the figure.
        InputError: the value holds no tensor.
    """
    value, label, module_type, where = _look_up(source, key, name)
    return _valued(label, module_type, value, where)


def look_up_all(source: Source, key: str | Site) -> list[Value]:
    """Look up every tensor that is measured of the only value of a site; errors as in `look_up`."""
    value, label, module_type, where = _look_up(source, key, "")
    return _all_valued(label, module_type, value, where)


def _look_up(source: Source, key: str | Site, name: str) -> tuple[Any, str, str, str]:
    """Return the only value of a site, its label, the type of its module, and the pass."""
    check_source(source)
    try:
        value = source[key]
    except AmbiguousError as error:
        raise AmbiguousError(_one_of_several(source, key, name, error)) from None
    where = ""
    if isinstance(source, PassRecord):
        where = f"pass {source.number}"
    elif len(source.passes) > 1:
        where = f"pass {next(one.number for one in source.passes if key in one)}"
    site = key if isinstance(key, Site) else None
    module_type = (site.module_type if site else "") or _type_of(source, str(key))
    return value, as_written(str(key)), module_type, where


def _one_of_several(source: Source, key: str | Site, name: str, error: AmbiguousError) -> str:
    """Return the message that says what to pass in place of a site with several values."""
    code, one = source.one_of_several(key)
    wanted = [f"{name or 'run'}{code} as {name or 'the recording'}"] * bool(code)
    wanted += [f"{one!r} as the site"] * (one != str(key))
    several = f"{name}: " * bool(name) + str(error).splitlines()[0]
    return f"{several}\nGive {' and '.join(wanted)}."


def one_pass(source: Source, name: str = "") -> PassRecord:
    """Return the source if it is a pass, or the only pass of a recording.

    Args:
        source: a recording, or one of its passes.
        name: the name of the source's argument, for figures that take several sources.

    Raises:
        NotRecordedError: the model has not run.
        InputError: the recording has several passes.
    """
    check_source(source)
    if isinstance(source, PassRecord):
        return source
    filled = [one for one in source.passes if len(one)]
    if not filled:
        raise NotRecordedError(
            "the recording must hold values, got none: the model has not run."
            "\nPrint run.report() to learn more."
        )
    if len(filled) > 1:
        raise InputError(
            f"{name or 'the recording'} must have one pass for this figure, got {len(filled)}."
            f"\nGive one of them: {name or 'run'}.passes[{filled[0].number}]."
        )
    return filled[0]


def walk(one: PassRecord) -> Iterator[tuple[str, Value | Skipped]]:
    """Yield every tensor of a pass that is measured with its key, in firing order.

    The key of a value with one such tensor is its site, and else has the leaf, too.
    """
    runs = one.backwards if len(one.backwards) > 1 else []
    for (site, call), key in zip(one.fired(), one.order, strict=True):
        if not (runs and site.is_gradient):
            yield from _read(one, key, site, call, "")
    for number, run in enumerate(runs):
        for (site, call), key in zip(run.fired(), run.order, strict=True):
            yield from _read(run, key, site, call, f", backward {number}")


def chosen_values(source: Source, sites: Any) -> tuple[list[Value], list[Skipped]]:
    """Return the values to draw and those that cannot be drawn: of all sites, or of named ones.

    Raises:
        NotRecordedError, AmbiguousError, OverwrittenError: as in a look-up of a named site.
        InputError: no value can be drawn.
    """
    if sites is not None:
        keys = [sites] if isinstance(sites, str | Site) else list(sites)
        entries: list[Value | Skipped] = []
        for key in keys:
            entries += look_up_all(source, key)
    else:
        entries = [value for _, value in walk(one_pass(source))]
    values = [value for value in entries if isinstance(value, Value)]
    skipped = [value for value in entries if isinstance(value, Skipped)]
    if not values:
        why = f" ({skipped[0].label}: {skipped[0].why})" if skipped else ""
        raise InputError(
            f"the recording must hold a value that can be drawn, got none{why}."
            "\nRecord sites with tensors."
        )
    return values, skipped


def not_drawn(skipped: list[Skipped]) -> str:
    """Say which values a figure leaves out, and why; return an empty text if there are none."""
    if not skipped:
        return ""
    reasons: dict[str, list[str]] = {}
    for one in skipped:
        reasons.setdefault(one.why, []).append(one.label)
    texts = [
        f"{plural(len(labels), 'value')} {why} ({labels[0]}{', …' if len(labels) > 1 else ''})"
        for why, labels in reasons.items()
    ]
    return "not drawn: " + "; ".join(texts)


def arrange(value: Value, layout: str | None, sample: int, usual: str = "") -> Arranged:
    """Take one sample of a value and move its channels first.

    Args:
        value: the value.
        layout: one letter a dimension: N sample, C channel, T or L position in a sequence, D, H, W.
        sample: the index of the sample.
        usual: the figure's own default layout for a value of this many dimensions.

    Raises:
        InputError: the layout does not fit, the sample does not exist, or the tensor is empty,
            sparse, nested or a single number.
    """
    check_sample(sample)
    tensor = drawable(value)
    letters = layout or _guess(value, usual)
    _check_layout(value, letters)
    text = f"read as {letters}"
    if "N" in letters:
        at = letters.index("N")
        n_samples = tensor.shape[at]
        if not -n_samples <= sample < n_samples:
            raise InputError(
                f"sample must be from 0 to {n_samples - 1} for {value.label}, got {sample}."
                "\nGive sample=0."
            )
        tensor = tensor.select(at, sample)
        text += f", sample {sample % n_samples} of {n_samples}" if n_samples > 1 else ""
    space = letters.replace("N", "")
    tensor = tensor.movedim(space.index("C"), 0)
    space = space.replace("C", "")
    while len(space) > 2:  # a volume is drawn as its middle slice
        middle = tensor.shape[1] // 2
        text += f", slice {space[0]} = {middle} of {tensor.shape[1]}"
        tensor, space = tensor.select(1, middle), space[1:]
    if letters == "NCHW" and layout is None and value.tensor.dim() == 4:
        _, first, second, last = value.tensor.shape
        if first == second != last:
            text += "; if its channels are last, layout='NHWC'"
    return Arranged(_plain(tensor), space, text)


def drawable(value: Value) -> Tensor:
    """Return the value's tensor, detached; refuse one that has no maps, curves or bars to draw.

    Raises:
        InputError: the tensor is empty, sparse, nested or a single number.
    """
    tensor = value.tensor.detach()
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        how = "to_padded_tensor(0.0)" if tensor.is_nested else "to_dense()"
        raise InputError(
            f"{value.label} is a {kind} tensor, which has no maps to draw."
            f"\nRecord it plain: hl.record(model, ..., keep=lambda t: t.{how})."
        )
    if not tensor.numel():
        raise InputError(f"{value.label} is empty: its shape is {describe.shape(tensor)}.")
    if not tensor.dim():
        raise InputError(
            f"{value.label} is a single number, {tensor.item()}.\nUse hl.plots.statistics to draw"
            " numbers over passes."
        )
    return tensor.dequantize() if tensor.is_quantized else tensor


def _all_valued(label: str, module_type: str, value: Any, where: str) -> list[Value]:
    tensors = measured_tensors(value)
    if len(tensors) < 2:
        return [_valued(label, module_type, value, where)]
    return [_valued(label, module_type, value, where, tensor) for _, tensor in tensors]


def _valued(
    label: str, module_type: str, value: Any, where: str, tensor: Tensor | None = None
) -> Value:
    tensor = main_tensor(value) if tensor is None else tensor
    if tensor is None:
        if any(one.is_meta for _, one in tree.tensors(value)):
            raise InputError(f"{label} is on the meta device: it has a shape and no numbers.")
        raise InputError(
            f"{label} must hold a tensor that can be drawn, got {describe.in_words(value)}."
            "\nName a site with such a tensor, or a leaf of it."
        )
    if not _is_readable(tensor):
        raise InputError(
            f"{label} is {describe.in_full(tensor)}, whose numbers torch cannot read."
            "\nRecord it in another dtype, with keep=, or leave the site out."
        )
    if not isinstance(value, Tensor):
        leaf = next(leaf for leaf, part in tree.tensors(value) if part is tensor)
        # The leaf is written after the port and before the call.
        head, sign, call = label.rpartition("#") if re.search(r"#\d+$", label) else (label, "", "")
        head += "" if ":" in head else ":output"
        label = f"{head}{describe.leaf_text(leaf)}{sign}{call}"
    return Value(label, module_type, tensor, where)


def _read(
    record: PassRecord, key: str, site: Site, call: int, suffix: str
) -> Iterator[tuple[str, Value | Skipped]]:
    try:
        value = record[site if site.call is not None else replace(site, call=call)]
        values = _all_valued(key, site.module_type, value, "")
    except OverwrittenError:
        why = "overwritten in place after recording without copy=True"
        yield key + suffix, Skipped(key + suffix, why)
    except InputError:
        yield key + suffix, Skipped(key + suffix, "without numbers that can be read")
    else:
        for value in values:
            label = (key if suffix and len(values) == 1 else value.label) + suffix
            name = key + suffix if len(values) == 1 else label
            yield name, replace(value, label=label)


def _is_readable(tensor: Tensor) -> bool:
    """Return whether torch can convert a tensor's numbers; packed 4-bit dtypes it cannot."""
    if tensor.is_quantized:
        return True
    if tensor.layout is not torch.strided and not tensor.is_nested:
        return tensor.numel() <= DENSE_NUMEL
    try:
        torch.empty(1, dtype=tensor.dtype).to(
            torch.complex128 if tensor.is_complex() else torch.float64
        )
    except RuntimeError:
        return False
    return True


def _type_of(source: Source, key: str) -> str:
    sites = source.sites if isinstance(source, Recording) else [site for site, _ in source.fired()]
    path = re.split(r"[:#\[]", key)[0]
    return next((site.module_type for site in sites if path in (site.path, *site.aliases)), "")


def _guess(value: Value, usual: str) -> str:
    n_dims = value.tensor.dim()
    if len(usual) == n_dims:
        return usual
    if n_dims == 3 and value.module_type.endswith("1d"):
        return "NCL"
    return _USUAL.get(n_dims, "?" * n_dims)


def _check_layout(value: Value, letters: str) -> None:
    is_sound = (
        len(letters) == value.tensor.dim()
        and len(set(letters)) == len(letters)
        and set(letters) <= set(_LETTERS)
        and "C" in letters
    )
    if not is_sound:
        n_dims = value.tensor.dim()
        asked = "needs a layout" if "?" in letters else f"cannot be read as {letters!r}"
        raise InputError(
            f"{value.label} {asked}: its shape is {describe.shape(value.tensor)}."
            f"\nGive layout= with one letter for each of its {n_dims} dimensions, C among them:"
            " N sample, C channel, T or L position in a sequence, D, H, W."
        )


def _plain(tensor: Tensor) -> Tensor:
    """Convert a tensor to float32 or float64 on the CPU; take the magnitude of complex numbers."""
    tensor = tensor.cpu()
    if tensor.is_complex():
        return tensor.abs()
    if tensor.dtype in (torch.float64, torch.int64, torch.int32):
        return tensor.resolve_neg().double()
    return tensor.resolve_neg().float()
