"""What differs before any layer is blamed: the model, its versions, names on one side alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from hookline.display.text import listed, plural
from hookline.engine.model_fingerprint import RecordedModel
from hookline.verbs.compare.names import Pairing
from hookline.verbs.compare.sides import Side

_MOST_NAMED = 3

_RECORD_INPUT = (
    "the inputs of the model were not recorded, so they may differ: record them with"
    ' hl.record(model, ["**", "(root):input"])'
)


@final
@dataclass(frozen=True, slots=True)
class Remark:
    """Something that differs, or that could not be compared.

    Attributes:
        kind: "inputs", "model", "versions", "names", "order", "steps", "dtypes", "values" or "site".
        text: what it is, in a sentence.
        site: the site that it is about; empty if it is about the whole run.
    """

    kind: str
    text: str
    site: str = ""

    def __str__(self) -> str:
        return self.text


def before(a: Side, b: Side, pairing: Pairing) -> list[Remark]:
    """List what differs between two sides before a value is read."""
    remarks = [*_of_models(a.model, b.model)]
    recordings = a.noun == b.noun == "recording"
    if recordings and not any(entry.is_input for entry, _ in pairing.pairs):
        has_one = any(entry.is_input for entry in (*pairing.only_a, *pairing.only_b))
        text = _RECORD_INPUT + " in both" * has_one
        remarks.append(Remark("inputs", text, "(root):input"))
    for label, entries in (("a", pairing.only_a), ("b", pairing.only_b)):
        if entries and all(entry.kind == "gradient" for entry in entries):
            other = "ba"["ab".index(label)]
            text = f"{other} has no gradients at {plural(len(entries), 'site')} of {label}:"
            text += ' record both with ports=("output", "grad_output") and run backward'
            remarks.append(Remark("names", text, entries[0].key))
        elif entries:
            names = listed([entry.key for entry in entries], _MOST_NAMED)
            text = f"{plural(len(entries), 'value')} only in {label}: {names}"
            remarks.append(Remark("names", text, entries[0].key))
    return remarks


def _of_models(a: RecordedModel | None, b: RecordedModel | None) -> list[Remark]:
    if a is None or b is None:
        return []
    remarks = []
    if a.type != b.type:
        remarks.append(Remark("model", f"the model is a {a.type} in a, and a {b.type} in b"))
    else:
        parts = ("structure", "weights", "code")
        names = [name for name in parts if getattr(a, name) != getattr(b, name)]
        if names:
            are = "differ" if len(names) > 1 or names[0] == "weights" else "differs"
            hint = ": compare two state dicts to see which" * ("weights" in names)
            remarks.append(Remark("model", f"{' and '.join(names)} of the model {are}{hint}"))
    versions = [
        f"{name} {a.versions.get(name, 'none')} and {b.versions.get(name, 'none')}"
        for name in dict.fromkeys((*a.versions, *b.versions))
        if a.versions.get(name) != b.versions.get(name)
    ]
    if versions:
        remarks.append(Remark("versions", f"versions differ: {', '.join(versions)}"))
    return remarks


