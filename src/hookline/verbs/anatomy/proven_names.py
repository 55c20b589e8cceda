"""The proven names of one stack, as plain data that keeps no model alive."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

from hookline.errors import SelectionError

NAMES = (
    "embed", "pos_embed", "resid_pre", "attn_in", "q", "k", "v", "q_norm", "k_norm", "scores",
    "pattern", "z", "attn_gate", "attn_heads", "attn_out_raw", "attn_out", "cross_attn_in",
    "cross_attn_out_raw", "cross_attn_out", "mixer_in", "mixer_out_raw", "mixer_out", "resid_mid",
    "mlp_in", "mlp_pre", "mlp_gate", "mlp_up", "mlp_act", "router_logits", "expert_indices",
    "expert_weights", "expert_out", "mlp_out_raw", "mlp_out", "resid_post", "ln_final",
    "unembed", "logits_raw", "logits",
)  # fmt: skip
_WHOLE = -1  # the layer of names that belong to no layer


@final
@dataclass(frozen=True, slots=True)
class ProvenNames:
    """The proven names of one stack of blocks."""

    model: str  # the name of the model's class
    stack: str  # the path of the stack
    blocks: tuple[str, ...]  # the paths of the blocks
    # The sites by name and layer; the layer -1 stands for the whole model.
    sites: Mapping[tuple[str, int], str]
    refused: Mapping[tuple[str, int], str]  # the reason for each name and layer without a site
    # The largest error of the identities of each name and layer.
    errors: Mapping[tuple[str, int], float]
    shapes: Mapping[str, tuple[int, ...]]  # the shapes of the values by site, for the first input
    width: int  # the width of the stream
    n_tokens: int  # the number of tokens of all rows, for the first input
    # The number of heads of keys and values, by layer; 0 where it is unknown.
    n_value_heads: tuple[int, ...]

    def __iter__(self) -> Iterator[str]:
        having = {name for name, _ in self.sites}
        return (name for name in NAMES if name in having)

    def __contains__(self, name: object) -> bool:
        return any(name == having for having, _ in self.sites)

    def layers_of(self, name: str) -> list[int]:
        """Return the layers that have a part; none if it belongs to the whole model."""
        return sorted(layer for having, layer in self.sites if having == name and layer != _WHOLE)

    def sites_of(self, name: str, layer: int | None = None) -> list[str]:
        """Return the sites of a part.

        Args:
            name: the name.
            layer: the layer, from 0, or from the end if negative; None is all that have the part.

        Raises:
            SelectionError: the name is unknown or not proven, or the layer does not exist.
        """
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, n=3)
            close = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise SelectionError(
                f"a part must have one of the names of hl.anatomy, got {name!r}.{close}"
                f"\nProven here: {', '.join(self)}."
            )
        layers = self.layers_of(name)
        if (name, _WHOLE) in self.sites:
            if layer is None:
                return [self.sites[name, _WHOLE]]
            raise SelectionError(
                f"{name!r} belongs to no layer, got layer {layer}.\nWrite parts[{name!r}]."
            )
        n_layers = len(self.blocks)
        if layer is not None and not -n_layers <= layer < n_layers:
            raise SelectionError(
                f"the layer must be from 0 to {n_layers - 1}, got {layer}."
                f"\nWrite parts[{name!r}, {n_layers - 1}] for the last layer."
            )
        wanted = [k for k in layers if layer is None or k == layer % n_layers]
        if not wanted:
            raise SelectionError(self.not_proven_message(name, layer))
        return [self.sites[name, k] for k in wanted]

    def not_proven_message(self, name: str, layer: int | None = None) -> str:
        """Return the message for a name that is not proven."""
        wanted = None if layer is None else layer % len(self.blocks)
        reasons = [
            why for (each, k), why in self.refused.items() if each == name and wanted in (None, k)
        ]
        where = "" if layer is None else f" of layer {layer}"
        why = reasons[0] if reasons else "the model has none"
        return (
            f"{name!r}{where} is not a proven part of {self.model}: {why}."
            "\nprint(parts) shows the names that are proven."
        )

    def n_heads(self) -> int | None:
        """Return the number of heads, if all patterns have as many.

        A pattern of one head may have no axis of heads, and heads may be rows.
        """
        shapes = [self.shapes.get(self.sites["pattern", k]) for k in self.layers_of("pattern")]
        return _sole_or_none({math.prod(shape[:-1]) // self.n_tokens for shape in shapes if shape})

    def n_key_value_heads(self) -> int | None:
        """Return the number of heads of keys and values, if all layers have as many."""
        return _sole_or_none({self.n_value_heads[k] for k in self.layers_of("v")} - {0})

    def why_not_proven(self) -> dict[str, str]:
        """Return why each name is not proven, in some layer or at all."""
        reasons: dict[str, str] = {}
        for (name, layer), why in self.refused.items():
            where = f"layer {layer}: " * (name in self and layer != _WHOLE)
            reasons.setdefault(name, f"{where}{why}")
        return {name: reasons[name] for name in NAMES if name in reasons}

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each name, as plain values."""
        rows = []
        for name in self:
            layers = self.layers_of(name)
            keys = [(name, layer) for layer in layers or [_WHOLE]]
            site = self.sites[keys[0]]
            shape = self.shapes.get(site)
            errors = [self.errors[key] for key in keys if key in self.errors]
            row = {
                "name": name, "site": site, "layers": layers,
                "shape": None if shape is None else list(shape), "error": max(errors, default=None),
            }  # fmt: skip
            rows.append(row)
        return rows


def _sole_or_none(numbers: set[int]) -> int | None:
    return next(iter(numbers)) if len(numbers) == 1 else None
