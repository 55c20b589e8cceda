"""The values of a recording for figures: checks of arguments, walks, and look-ups of tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, final

from torch import Tensor

from hookline.display.text import name_without_torch, plural
from hookline.engine import Selection, Site, normalize_root
from hookline.engine.pytree import describe, tree
from hookline.errors import AmbiguousError, InputError, NotRecordedError, OverwrittenError
from hookline.recordings.key_index import Key, only_site
from hookline.recordings.pass_record import PassRecord
from hookline.recordings.recorded_values import (
    RecordedValue,
    add_leaf_to_key,
    is_convertible,
    iterate_recorded_values,
)
from hookline.recordings.recording import Recording
from hookline.statistics.value_statistics import main_tensor, measured_tensors

Source = Recording | PassRecord


def check_plot_source(source: Any) -> None:
    """Refuse a source that is not a recording: a model, a tensor, a folder's name."""
    if not isinstance(source, Recording | PassRecord):
        raise InputError(
            f"hl.plots must be given a recording or a pass, got {type(source).__name__}."
            "\nRecord first, with hl.record(model) as run: model(x), and give run or one of"
            " run.passes. Open a folder with hl.open(path)."
        )
    if isinstance(source, Recording) and source.ranks:
        raise InputError(
            f"a figure must be of one rank's recording, got {len(source.ranks)} ranks."
            "\nGive one of them: run.ranks[0]."
        )


def check_count(name: str, count: Any, most: int | None = None) -> None:
    """Check a count: of sites, channels or bins."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InputError(
            f"{name} must be a whole number from 1 up, got {count!r}."
            f"\nGive {name}=16, for instance."
        )
    if most is not None and count > most:
        raise InputError(
            f"{name} must be at most {most} for a figure, got {count}.\nGive {name}={most}."
        )


def check_sample_index(sample: Any) -> None:
    """Check the index of a sample."""
    if isinstance(sample, bool) or not isinstance(sample, int):
        raise InputError(
            f"sample must be the number of a row of the batch, got {sample!r}."
            "\nGive sample=0 for the first."
        )


def iterate_source_values(source: Source) -> Iterator[RecordedValue]:
    """Yield the values of a recording or a pass in firing order, without reading them.

    If several backward passes went over a pass, their gradients follow it, one pass at a time.
    """
    for record in [source] if isinstance(source, PassRecord) else source.passes:
        yield from iterate_recorded_values(record)


@final
@dataclass(frozen=True)
class LabelledTensor:
    """A tensor of a recording with its labels."""

    label: str  # the site as in a look-up, with the leaf of the tensor
    module_type: str  # the class of the site's module; empty if unknown
    tensor: Tensor
    where: str = ""  # the pass, if the recording has several: `pass 1`

    @property
    def title(self) -> str:
        """The site and its type: `layer1.0.conv1 (Conv2d)`."""
        return f"{self.label} ({self.module_type})" if self.module_type else self.label

    @property
    def form(self) -> str:
        """The shape, dtype and pass: `[1, 64, 56, 56] float32, pass 1`."""
        dtype = name_without_torch(self.tensor.dtype)
        return f"{describe.shape(self.tensor)} {dtype}" + f", {self.where}" * bool(self.where)


@final
@dataclass(frozen=True)
class SkippedValue:
    """A value that cannot be drawn, and the reason."""

    label: str
    why: str


def look_up_main_tensor(source: Source, key: Key, name: str = "") -> LabelledTensor:
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
    value, unread = _look_up_value(source, key, name)
    return _label_tensor(unread, value, main_tensor(value))


def look_up_tensors(source: Source, key: Key) -> list[LabelledTensor]:
    """Look up every tensor that is measured of the only value of a site; errors as above."""
    value, unread = _look_up_value(source, key, "")
    return _label_tensors(unread, value)


def _look_up_value(source: Source, key: Key, name: str) -> tuple[Any, _ValueLabels]:
    """Return the only value of a site, and what names it."""
    check_plot_source(source)
    if isinstance(key, Selection):
        key = only_site(key)
    try:
        value = source[key]
    except AmbiguousError as error:
        raise AmbiguousError(_ambiguous_text(source, key, name, error)) from None
    where = ""
    if isinstance(source, PassRecord):
        where = f"pass {source.number}"
    elif len(source.passes) > 1:
        where = f"pass {next(record.number for record in source.passes if key in record)}"
    module_type = (key.module_type if isinstance(key, Site) else "") or _module_type_at(
        source, str(key)
    )
    return value, _ValueLabels(normalize_root(str(key)), module_type, where)


def _ambiguous_text(source: Source, key: Key, name: str, error: AmbiguousError) -> str:
    """Return the message that says what to pass in place of a site with several values."""
    code, single_key = source.suggest_one_value(key)
    arguments = [f"{name or 'run'}{code} as {name or 'the recording'}"] * bool(code)
    arguments += [f"{single_key!r} as the site"] * (single_key != str(key))
    several = f"{name}: " * bool(name) + str(error).splitlines()[0]
    return f"{several}\nGive {' and '.join(arguments)}."


def only_pass(source: Source, name: str = "") -> PassRecord:
    """Return the source if it is a pass, or the only pass of a recording.

    Args:
        source: a recording, or one of its passes.
        name: the name of the source's argument, for figures that take several sources.

    Raises:
        NotRecordedError: the model has not run.
        InputError: the recording has several passes.
    """
    check_plot_source(source)
    if isinstance(source, PassRecord):
        return source
    filled = [record for record in source.passes if len(record)]
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


def iterate_tensors(record: PassRecord) -> Iterator[tuple[str, LabelledTensor | SkippedValue]]:
    """Yield every tensor of a pass that is measured with its key, in firing order.

    The key of a value with one such tensor is its site, and else has the leaf, too.
    """
    for recorded in iterate_source_values(record):
        suffix = "" if recorded.backward is None else f", backward {recorded.backward}"
        key = recorded.key + suffix
        try:
            values = _label_tensors(
                _ValueLabels(recorded.key, recorded.site.module_type), recorded.read()
            )
        except OverwrittenError:
            yield key, SkippedValue(key, "overwritten in place after recording without copy=True")
        except InputError:
            yield key, SkippedValue(key, "without numbers that can be read")
        else:
            for value in values:
                label = recorded.key if suffix and len(values) == 1 else value.label
                label += suffix
                yield key if len(values) == 1 else label, replace(value, label=label)


def values_to_draw(source: Source, sites: Any) -> tuple[list[LabelledTensor], list[SkippedValue]]:
    """Return the values to draw and those that cannot be drawn: of all sites, or of named ones.

    Raises:
        NotRecordedError, AmbiguousError, OverwrittenError: as in a look-up of a named site.
        InputError: no value can be drawn.
    """
    entries: list[LabelledTensor | SkippedValue]
    if sites is None:
        entries = [value for _, value in iterate_tensors(only_pass(source))]
    else:
        keys = [sites] if isinstance(sites, str | Site) else sites
        entries = [value for key in keys for value in look_up_tensors(source, key)]
    values = [value for value in entries if isinstance(value, LabelledTensor)]
    skipped = [value for value in entries if isinstance(value, SkippedValue)]
    if not values:
        why = f" ({skipped[0].label}: {skipped[0].why})" if skipped else ""
        raise InputError(
            f"the recording must hold a value that can be drawn, got none{why}."
            "\nRecord sites with tensors."
        )
    return values, skipped


def skipped_text(skipped: list[SkippedValue]) -> str:
    """Say which values a figure leaves out, and why; return an empty text if there are none."""
    if not skipped:
        return ""
    reasons: dict[str, list[str]] = {}
    for entry in skipped:
        reasons.setdefault(entry.why, []).append(entry.label)
    texts = [
        f"{plural(len(labels), 'value')} {why} ({labels[0]}{', …' if len(labels) > 1 else ''})"
        for why, labels in reasons.items()
    ]
    return "not drawn: " + "; ".join(texts)


@dataclass(frozen=True, slots=True)
class _ValueLabels:
    """Name a value that is not read: `LabelledTensor` without its tensor."""

    label: str
    module_type: str
    where: str = ""


def _label_tensors(unread: _ValueLabels, value: Any) -> list[LabelledTensor]:
    tensors: list[Tensor | None] = [tensor for _, tensor in measured_tensors(value)]
    return [_label_tensor(unread, value, tensor) for tensor in tensors or [None]]


def _label_tensor(unread: _ValueLabels, value: Any, tensor: Tensor | None) -> LabelledTensor:
    """Name a tensor of a value; refuse one without numbers."""
    label = unread.label
    if tensor is None:
        if any(part.is_meta for _, part in tree.tensors(value)):
            raise InputError(f"{label} is on the meta device: it has a shape and no numbers.")
        raise InputError(
            f"{label} must hold a tensor that can be drawn, got {describe.in_words(value)}."
            "\nName a site with such a tensor, or a leaf of it."
        )
    if not is_convertible(tensor):
        raise InputError(
            f"{label} is {describe.in_full(tensor)}, whose numbers torch cannot read."
            "\nRecord it in another dtype, with keep=, or leave the site out."
        )
    if not isinstance(value, Tensor):
        leaf = next(leaf for leaf, part in tree.tensors(value) if part is tensor)
        label = add_leaf_to_key(label, leaf)
    return LabelledTensor(label, unread.module_type, tensor, unread.where)


def _module_type_at(source: Source, key: str) -> str:
    sites = source.sites if isinstance(source, Recording) else [site for site, _ in source.fired()]
    path = re.split(r"[:#\[]", key)[0]
    return next((site.module_type for site in sites if path in (site.path, *site.aliases)), "")
