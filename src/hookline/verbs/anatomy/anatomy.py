"""The names of the parts of a transformer, each proven."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor, nn

from hookline.display.results import Heading, Printout, Result
from hookline.display.text import plural
from hookline.engine import Selection, register_parts, require_model, select
from hookline.errors import SelectionError, one_of
from hookline.recordings import Recording
from hookline.verbs.anatomy.lens import Lens, lens_of
from hookline.verbs.anatomy.structure import Stack, structure_of
from hookline.verbs.anatomy.trial_inputs import trial_inputs
from hookline.verbs.shared.rerun import eval_without_side_effects
from hookline.verbs.shared.run_model import Inputs

_ORDER = (
    "embed", "pos_embed", "resid_pre", "attn_in", "q", "k", "v", "q_norm", "k_norm", "scores",
    "pattern", "z", "attn_gate", "attn_heads", "attn_out_raw", "attn_out", "cross_attn_in",
    "cross_attn_out_raw", "cross_attn_out", "mixer_in", "mixer_out_raw", "mixer_out", "resid_mid",
    "mlp_in", "mlp_pre", "mlp_gate", "mlp_up", "mlp_act", "router_logits", "expert_indices",
    "expert_weights", "expert_out", "mlp_out_raw", "mlp_out", "resid_post", "ln_final",
    "unembed", "logits_raw", "logits",
)  # fmt: skip


@final
class Anatomy(Result):
    """The parts of a transformer by their usual names; `hl.anatomy` makes it.

    `parts["resid_post"]` selects a part in all layers that have it, and `parts["pattern", 3]` in
    one layer. Both are selections, for every verb. In the model that was given, the text
    `".resid_post"` or `".pattern.3"` selects the same. Of a model with several stacks, such as an
    encoder and a decoder, the names are those of the last stack; `parts.stacks` has all.

    Attributes:
        stacks: the parts of each stack, by the path of the stack.
        n_layers: the number of layers.
        n_heads: the number of heads; None if it is not the same in all layers, or unproven.
        n_key_value_heads: the number of heads of keys and values; None as above.
        width: the width of the residual stream.

    Raises:
        SelectionError: by a look-up: the name is unknown or not proven, and the message has the
            reason; or the layer does not exist, or lacks the part.
    """

    def __init__(self, model: nn.Module, stacks: list[Stack]) -> None:
        self._model = model
        self._stack = stacks[-1]
        self.stacks: dict[str, Anatomy] = {}
        for stack in stacks:
            parts = Anatomy(model, [stack]) if len(stacks) > 1 else self
            self.stacks[stack.path] = parts
        self.n_layers = len(self._stack.layers)
        self.width: int = self._stack.layers[0].block.pre.tensor.shape[-1]
        self.n_heads = self._count("pattern")
        self.n_key_value_heads = self._count("k")

    def _count(self, name: str) -> int | None:
        sites = [layer.sites.get(name) for layer in self._stack.layers]
        shapes = [self._stack.shapes.get(site) for site in sites if site is not None]
        counts = {shape[-3] for shape in shapes if shape is not None}
        return counts.pop() if len(counts) == 1 else None

    def __getitem__(self, name: str | tuple[str, int]) -> Selection:
        """Return the selection of a part, in all layers or in one."""
        text, layer = (name, None) if isinstance(name, str) else name
        return select(self._model, list(self.sites(text, layer)))

    def sites(self, name: str, layer: int | None = None) -> dict[str, int | None]:
        """Return the texts of a part's sites, each with its layer.

        Args:
            name: the name.
            layer: the layer, from 0, or from the end if negative; None is all layers.

        Raises:
            SelectionError: as in a look-up.
        """
        stack = self._stack
        if name in stack.names.sites and layer is None:
            return {stack.names.sites[name]: None}
        having = {k: each.sites[name] for k, each in enumerate(stack.layers) if name in each.sites}
        if layer is None and having:
            return {site: k for k, site in having.items()}
        if layer is None or name not in {*_ORDER} or name in stack.names.sites:
            raise SelectionError(self._why_not(name, layer))
        if not -self.n_layers <= layer < self.n_layers:
            raise SelectionError(
                f"the layer must be from 0 to {self.n_layers - 1}, got {layer}."
                f"\nWrite parts[{name!r}, {self.n_layers - 1}] for the last layer."
            )
        layer %= self.n_layers
        if layer not in having:
            raise SelectionError(self._why_not(name, layer))
        return {having[layer]: layer}

    def _why_not(self, name: str, layer: int | None) -> str:
        known = "\nprint(parts) shows the names that are proven."
        if name not in _ORDER:
            one_of("the name of a part", name, _ORDER, "print(parts) shows the proven ones.",
                   SelectionError)  # fmt: skip
        if name in self._stack.names.sites:
            return f"{name!r} belongs to no layer, got layer {layer}.\nWrite parts[{name!r}]."
        owners: list[Any] = [self._stack.names, *self._stack.layers]
        if layer is not None:
            owners = [self._stack.layers[layer]]
        why = next((o.refused[name] for o in owners if name in o.refused), "the model has none")
        where = "" if layer is None else f" of layer {layer}"
        return f"{name!r}{where} is not a proven part of {type(self._model).__name__}: {why}.{known}"

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names that are proven in a layer, or for the whole model."""
        names = set(self._stack.names.sites).union(*(each.sites for each in self._stack.layers))
        return (name for name in _ORDER if name in names)

    def __contains__(self, name: object) -> bool:
        return name in list(self)

    @property
    def refused(self) -> dict[str, str]:
        """The names that are not proven in some layer, each with the reason."""
        reasons: dict[str, str] = dict(self._stack.names.refused)
        for number, layer in enumerate(self._stack.layers):
            for name, why in layer.refused.items():
                reasons.setdefault(name, why if name not in self else f"layer {number}: {why}")
        return {name: reasons[name] for name in _ORDER if name in reasons}

    # -- reads ------------------------------------------------------------------------------------

    def lens(self, run: Recording, n: int = 5) -> Lens:
        """Read the streams of a run as the model's head reads the last one: the logit lens.

        The model's own final norm, unembedding, scale and cap are applied to each stream. For the
        last stream this is proven to give the model's logits.

            >>> parts = hl.anatomy(model)
            >>> with hl.record(model, parts["resid_post"]) as run:
            ...     output = model(x)
            >>> parts.lens(run).logits[3].shape
            torch.Size([2, 9, 100])

        Args:
            run: a recording that has the streams `resid_post` of some layers.
            n: the number of tokens of the highest logits.

        Returns:
            The logits by layer, and the tokens of the highest ones. Print it.

        Raises:
            SelectionError: the model's logits are not proven to be a function of its last stream.
            NotRecordedError: the run has no such stream.
        """
        if self._stack.head is None or "logits" not in self:
            raise SelectionError(self._why_not("logits", None))
        return lens_of(self._stack.head, self.sites("resid_post"), run, n)

    def heads(self, value: Tensor) -> Tensor:
        """Return a value of all heads side by side by head: (..., heads, tokens, width).

        Args:
            value: a value whose last dimension is that of all heads, such as `attn_heads`.

        Raises:
            SelectionError: the number of heads is not proven.
        """
        if self.n_heads is None:
            raise SelectionError(self._why_not("pattern", None))
        return value.unflatten(-1, (self.n_heads, -1)).transpose(-3, -2)

    def contributions(self, run: Recording, layer: int) -> Tensor:
        """Return what each head of a layer adds to the stream: (heads, rows, tokens, width).

        The sum over the heads, and the bias of the output projection, is `attn_out_raw`.

        Args:
            run: a recording that has `attn_heads` of the layer.
            layer: the layer.

        Raises:
            SelectionError: `attn_heads` is not proven in this layer.
            NotRecordedError: the run does not have it.
        """
        ((site, number),) = self.sites("attn_heads", layer).items()
        assert number is not None
        value = run.tensor(site)
        projection = self._model.get_submodule(self._stack.layers[number].projection)
        width = value.shape[-1] // self._heads_of(number)
        with torch.no_grad():
            bias = projection(torch.zeros_like(value[..., :1, :]))
            parts = []
            for begin in range(0, value.shape[-1], width):
                head = torch.zeros_like(value)
                head[..., begin : begin + width] = value[..., begin : begin + width]
                parts.append(projection(head) - bias)
        return torch.stack(parts)

    def _heads_of(self, layer: int) -> int:
        return self._stack.shapes[self._stack.layers[layer].sites["z"]][-3]

    def expert_load(self, run: Recording) -> dict[int, Tensor]:
        """Return how many tokens of a run each expert got, by layer.

        Args:
            run: a recording that has `expert_indices`.

        Raises:
            SelectionError: no layer has proven experts.
            NotRecordedError: the run does not have the indices.
        """
        loads = {}
        for site, layer in self.sites("expert_indices").items():
            assert layer is not None
            logits = self._stack.layers[layer].sites.get("router_logits")
            shape = self._stack.shapes.get(logits or "", (0,))
            loads[layer] = torch.bincount(run.tensor(site).flatten(), minlength=shape[-1])
        return loads

    # -- text -------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return the names with their sites, the refusals, and the sizes, as plain values."""
        return {
            "stack": self._stack.path, "layers": self.n_layers, "heads": self.n_heads,
            "key_value_heads": self.n_key_value_heads, "width": self.width,
            "parts": self._table_rows(), "refused": self.refused,
        }  # fmt: skip

    def _table_rows(self) -> list[dict[str, Any]]:
        rows = []
        for name in self:
            sites = self.sites(name)
            layers = [layer for layer in sites.values() if layer is not None]
            first = next(iter(sites))
            key = [(name, layer) for layer in layers] or [(name, -1)]
            errors = [self._stack.errors[each] for each in key if each in self._stack.errors]
            shape = self._stack.shapes.get(first)
            row = {
                "name": name, "site": first, "layers": layers,
                "shape": None if shape is None else list(shape), "error": max(errors, default=None),
            }  # fmt: skip
            rows.append(row)
        return rows

    def _printout(self) -> Printout:
        n_heads = "" if self.n_heads is None else f", {plural(self.n_heads, 'head')}"
        if self.n_key_value_heads not in (None, self.n_heads):
            n_heads += f" ({self.n_key_value_heads} of keys and values)"
        head = f" of {type(self._model).__name__}: {plural(self.n_layers, 'layer')}{n_heads}"
        return Printout(
            title="Anatomy",
            head=f"{head}, width {self.width}, proven on two inputs",
            headings=(
                Heading("name"), Heading("site", "path"), Heading("shape", "structure"),
                Heading("layers", gives_way=2), Heading("error", "number", gives_way=1),
            ),
            rows=[
                (
                    row["name"],
                    self._pattern(row["site"], row["layers"]),
                    "" if row["shape"] is None else str(row["shape"]),
                    _layers(row["layers"], self.n_layers),
                    "" if row["error"] is None else f"{row['error']:.0e}",
                )
                for row in self._table_rows()
            ],
            notes=self._notes(),
            more="names",
        )  # fmt: skip

    def _pattern(self, site: str, layers: list[int]) -> str:
        """Return a site with a star in place of its layer."""
        if not layers:
            return site
        path = self._stack.layers[layers[0]].block.path
        return site.replace(path, f"{path.rpartition('.')[0]}.*", 1)

    def _notes(self) -> list[str]:
        reasons: dict[str, list[str]] = {}
        for name, why in self.refused.items():
            reasons.setdefault(why, []).append(name)
        notes = [f"not {', '.join(names)}: {why}" for why, names in reasons.items()]
        others = [path for path, parts in self.stacks.items() if parts is not self]
        if len(others) > 1:
            notes.append(f"of the stack {self._stack.path}; parts.stacks has {', '.join(others)}")
        return notes


def _layers(layers: list[int], n_layers: int) -> str:
    if len(layers) in (0, n_layers):
        return "all" if layers else ""
    return ", ".join(map(str, layers))


def anatomy(model: nn.Module, inputs: Inputs | None = None) -> Anatomy:
    """Name the parts of a transformer, and prove each name on two inputs in every block.

    The parts are found by following the values of one run, not by the names of modules. A name is
    given only if its identity holds: `resid_pre + attn_out = resid_mid`, `pattern @ v = z`,
    `norm(last resid_post) = ln_final`, and so on, with a relative error below 1e-5. Sums do not
    tell attention from MLP, so the model also runs with changed tokens: only attention carries a
    change to other tokens, by its pattern alone.

        >>> parts = hl.anatomy(model)
        >>> parts["resid_mid", 0]
        Selection of 1 site
          site                 type
          model.layers.0@add#0 LlamaDecoderLayer@add

    The model runs about eight times, in eval mode and without gradients. Afterwards its mode, its
    buffers and torch's random state are as before.

    Args:
        model: a transformer, or another model with a residual stream.
        inputs: an input as in `hl.summary`, of at least three tokens. The second input is made
            from it: tokens moved by one place, floating numbers with noise. None makes two random
            texts of 9 and 7 tokens, or pictures.

    Returns:
        The parts by name. Print them. `parts["pattern", 3]` is a selection.

    Raises:
        AttachError: `model` is not a model.
        InputError: None was given for `inputs`, and no input can be made.
        SelectionError: the model has no residual stream that can be proven: its blocks are not a
            sum of the stream and of parts (ResNet), or have several streams (hyper-connections).
    """
    require_model(model, "hl.anatomy(model)")
    both = trial_inputs(model, inputs)
    with eval_without_side_effects(model):
        parts = Anatomy(model, structure_of(model, both))
    register_parts(model, parts.sites)
    return parts
