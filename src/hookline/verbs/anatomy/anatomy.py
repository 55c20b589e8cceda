"""The names of the parts of a transformer, each proven."""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Integral
from typing import Any, final

import torch
from torch import Tensor, nn

from hookline.display.results import Printout, Result
from hookline.display.text import plural, type_and_line
from hookline.display.text_table import Heading
from hookline.engine import (
    Selection,
    gather_last_dim,
    is_compiled,
    is_exported,
    is_scripted,
    is_tensor_parallel,
    meet_sharding_ranks,
    register_parts,
    require_model,
    select,
    unwrap,
    whole_weights,
)
from hookline.engine.pytree import describe
from hookline.errors import AttachError, HooklineError, InputError, SelectionError, StructureError
from hookline.recordings import PassRecord, Recording
from hookline.verbs.anatomy.check_unsharded_output import (
    check_same_output,
    refuse_plain_shards,
    run_output,
)
from hookline.verbs.anatomy.identities import relative_error, tolerance
from hookline.verbs.anatomy.logit_lens import Lens, apply_head
from hookline.verbs.anatomy.prove_parts import find_and_prove_parts, without_warnings_and_fastpath
from hookline.verbs.anatomy.stacks import Stack
from hookline.verbs.anatomy.trace import Trace, trace_model
from hookline.verbs.anatomy.trial_inputs import trial_inputs
from hookline.verbs.shared.model_state import eval_without_side_effects
from hookline.verbs.shared.refused_weights import refuse_meta_tensors
from hookline.verbs.shared.run_model import Inputs


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

    def __init__(self, model: nn.Module, stacks: list[Stack], wrapped: nn.Module) -> None:
        self._model, self._wrapped = model, wrapped
        self._names = stacks[-1].proven_names(model)
        self._head = stacks[-1].head
        self._projections = [layer.projection for layer in stacks[-1].layers]
        self.stacks: dict[str, Anatomy] = {}
        for stack in stacks:
            parts = Anatomy(model, [stack], wrapped) if len(stacks) > 1 else self
            self.stacks[stack.path] = parts
        self.n_layers: int = len(self._names.blocks)
        self.width: int = self._names.width
        self.n_heads: int | None = self._names.n_heads()
        self.n_key_value_heads: int | None = self._names.n_key_value_heads()

    def __getitem__(self, name: str | tuple[str, int]) -> Selection:
        """Return the selection of a part, in all layers or in one."""
        text, layer = (name, None) if isinstance(name, str) else _name_and_layer(name)
        return select(self._model, self._names.sites_of(text, layer))

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names that are proven in some layer, or for the whole model."""
        return iter(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    @property
    def refused(self) -> dict[str, str]:
        """The names that are not proven, at all or in some layer, each with the reason."""
        return self._names.why_not_proven()

    # -- reads ------------------------------------------------------------------------------------

    def lens(self, run: Recording | PassRecord, n: int = 5) -> Lens:
        """Read the streams of a run as the model's head reads the last one: the logit lens.

        The model's own final norm, unembedding, scale and cap are applied to each stream. For the
        last stream this is proven to give the model's logits.

            >>> import hookline as hl
            >>> block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
            >>> blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
            >>> model = nn.Sequential(nn.Embedding(50, 8), blocks, nn.Linear(8, 50)).eval()
            >>> parts = hl.anatomy(model)
            >>> with hl.record(model, parts["resid_post"]) as run:
            ...     logits = model(torch.randint(50, (2, 6)))
            >>> torch.allclose(parts.lens(run).logits[1], logits, atol=1e-6)
            True

        Args:
            run: a recording, or a pass of one, that has the streams `resid_post` of some layers.
            n: the number of tokens of the highest logits.

        Returns:
            The logits by layer, and the tokens of the highest ones. Print it.

        Raises:
            SelectionError: the model's logits are not proven to be a function of its last stream.
            NotRecordedError: the run has no such stream.
            InputError: `run` is not a recording of one pass, or `n` is not 1 or more.
        """
        _check_is_recording(run)
        if self._head is None or "logits" not in self:
            raise SelectionError(self._names.not_proven_message("logits"))
        streams = {layer: self._site("resid_post", layer) for layer in range(self.n_layers)}
        meet_sharding_ranks(self._wrapped, "parts.lens(run)")
        with whole_weights(self._wrapped):
            return apply_head(self._head, streams, run, n)

    def _site(self, name: str, layer: int) -> str:
        if not _is_integer(layer):
            raise InputError(
                f"layer must be the number of a layer, got {layer!r}.\nThe first layer is 0."
            )
        return self._names.sites_of(name, layer)[0]

    def heads(self, value: Tensor) -> Tensor:
        """Return a value of all heads side by side by head: (..., heads, tokens, width).

        Args:
            value: a value whose last dimension is that of all heads, such as `attn_heads`; under
                tensor parallelism, of this rank's heads.

        Raises:
            SelectionError: the number of heads is not proven.
            StructureError: the value does not divide into heads, or is no tensor of tokens.
        """
        if not isinstance(value, Tensor) or value.dim() < 2:
            raise StructureError(
                "value must be a tensor of (tokens, features), with or without rows, got"
                f" {describe.in_words(value)}.\nGive run[parts['attn_heads', 0]]."
            )
        if self.n_heads is None:
            raise SelectionError(self._names.not_proven_message("pattern"))
        n_heads = self._n_heads_side_by_side(value.shape[-1])
        if value.shape[-1] % n_heads:
            raise StructureError(
                f"value must have a last dimension of {n_heads} heads side by side, got"
                f" {describe.shape(value)}.\nGive run[parts['attn_heads', 0]]."
            )
        return value.reshape(*value.shape[:-1], n_heads, -1).transpose(-3, -2)

    def _n_heads_side_by_side(self, width: int) -> int:
        """Return the number of heads in a value: tensor parallelism gives each rank some."""
        assert self.n_heads is not None
        if "attn_heads" not in self or not is_tensor_parallel(self._wrapped):
            return self.n_heads
        full_width = self._names.shapes[self._names.sites_of("attn_heads")[0]][-1]
        return max(self.n_heads * min(width, full_width) // full_width, 1)

    def contributions(self, run: Recording | PassRecord, layer: int) -> Tensor:
        """Return what each head of a layer adds to the stream: (heads, rows, tokens, width).

        The sum over the heads, and the bias of the output projection, is `attn_out_raw`. Under
        tensor parallelism, the heads of all ranks are gathered.

        Args:
            run: a recording, or a pass of one, that has `attn_heads` of the layer.
            layer: the layer.

        Raises:
            SelectionError: `attn_heads` or `attn_out_raw` is not proven in this layer, or the
                module that gets the heads does more than project them.
            NotRecordedError: the run does not have it.
            InputError: `run` is no recording of one pass, or `layer` no number.
        """
        _check_is_recording(run)
        site = self._site("attn_heads", layer)
        self._site("attn_out_raw", layer)  # which raises if it is not proven
        projection = self._model.get_submodule(self._projections[layer])
        full_width = self._names.shapes[site][-1]
        width = self._names.shapes[self._site("z", layer)][-1]
        meet_sharding_ranks(self._wrapped, f"parts.contributions(run, {layer})")
        with torch.no_grad(), whole_weights(self._wrapped) as split:
            weight = split.get(id(getattr(projection, "weight", None)))
            value = gather_last_dim(run.tensor(site), weight, full_width)
            bias = projection(torch.zeros_like(value[..., :1, :]))
            parts = []
            for begin in range(0, value.shape[-1], width):
                head = torch.zeros_like(value)
                head[..., begin : begin + width] = value[..., begin : begin + width]
                parts.append(projection(head) - bias)
            added = torch.stack(parts)
            off = relative_error(added.sum(0) + bias, projection(value))
        if off > tolerance(value.dtype):
            raise SelectionError(
                f"{self._projections[layer]} must be a projection, whose parts add up: they are off"
                f" by {off:.1e}.\nRecord attn_out_raw before and after a head is set to zero."
            )
        return added

    def expert_load(self, run: Recording | PassRecord) -> dict[int, Tensor]:
        """Return how many tokens of a run each expert got, by layer.

        Args:
            run: a recording, or a pass of one, that has `expert_indices`.

        Raises:
            SelectionError: no layer has proven experts.
            NotRecordedError: the run does not have the indices.
            InputError: `run` is no recording of one pass.
        """
        _check_is_recording(run)
        self._names.sites_of("expert_indices")  # which raises if there are none
        loads = {}
        for layer in self._names.layers_of("expert_indices"):
            n_experts = self._names.shapes[self._site("router_logits", layer)][-1]
            chosen = run.tensor(self._site("expert_indices", layer)).flatten()
            loads[layer] = torch.bincount(chosen, minlength=n_experts)
        return loads

    # -- text -------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return the names with their sites, the refusals, and the sizes, as plain values."""
        return {
            "stack": self._names.stack, "layers": self.n_layers, "heads": self.n_heads,
            "key_value_heads": self.n_key_value_heads, "width": self.width,
            "parts": self._table_rows(), "refused": self.refused,
        }  # fmt: skip

    def _table_rows(self) -> list[dict[str, Any]]:
        return self._names.rows()

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
                    self._site_with_star(row["site"], row["layers"]),
                    "" if row["shape"] is None else str(row["shape"]),
                    _layers_text(row["layers"], self.n_layers),
                    _error_text(row["error"]),
                )
                for row in self._table_rows()
            ],
            notes=self._notes(),
            more="names",
        )  # fmt: skip

    def _site_with_star(self, site: str, layers: list[int]) -> str:
        """Return a site with a star in place of its layer."""
        if not layers:
            return site
        path = self._names.blocks[layers[0]]
        return site.replace(path, f"{path.rpartition('.')[0]}.*", 1)

    def _notes(self) -> list[str]:
        reasons = self.refused
        told = {
            name: why
            for name, why in reasons.items()
            if name in self or name == "resid_mid" or "is off by" in why
        }
        notes = [f"{name} is not proven: {why}" for name, why in told.items()]
        others = [name for name in reasons if name not in told]
        if others:
            notes.append(f"None of {', '.join(others)}: parts.refused has the reasons.")
        scripted = [path for path, module in self._model.named_modules() if is_scripted(module)]
        if scripted:
            notes.append(f"{scripted[0]} is a ScriptModule: what it calls has no names.")
        stacks = [path for path, parts in self.stacks.items() if parts is not self]
        if len(stacks) > 1:
            stack = self._names.stack
            notes.append(f"These are of the stack {stack}; parts.stacks has {', '.join(stacks)}.")
        return notes


def _check_is_recording(run: Any) -> None:
    if not isinstance(run, Recording | PassRecord):
        raise InputError(
            f"run must be a recording, got {type(run).__name__}."
            '\nRecord it: with hl.record(model, parts["resid_post"]) as run: ...'
        )
    if isinstance(run, Recording) and len(run.passes) > 1:
        raise InputError(
            f"run must be of one pass, got a recording of {len(run.passes)}."
            "\nGive one of them, such as run.passes[0]."
        )


def _is_integer(layer: Any) -> bool:
    return isinstance(layer, Integral) and not isinstance(layer, bool)


def _name_and_layer(key: Any) -> tuple[str, int]:
    if isinstance(key, tuple) and len(key) == 2:
        name, layer = key
        if isinstance(name, str) and _is_integer(layer):
            return name, int(layer)
    raise SelectionError(
        f"a part must be a name, or a name and the number of a layer, got {key!r}."
        "\nWrite parts['pattern'] or parts['pattern', 3]."
    )


def _error_text(error: float | None) -> str:
    """Return the text of an error; the last bits differ between machines."""
    if error is None:
        return ""
    return "< 1e-6" if error < 1e-6 else f"{error:.0e}"


def _layers_text(layers: list[int], n_layers: int) -> str:
    if len(layers) in (0, n_layers):
        return "all" if layers else ""
    return ", ".join(map(str, layers))


def _trace_or_refuse(model: nn.Module, inputs: Any, *, is_given: bool) -> Trace:
    """Trace a run of a model; say so if it takes no input that is made for it."""
    try:
        return trace_model(model, inputs)
    except Exception as reason:
        if is_given or isinstance(reason, HooklineError):
            raise
        raise InputError(
            f"hl.anatomy must be given an input that {type(model).__name__} takes, because on the"
            f" one that was made for it, it raises {type_and_line(reason)}."
            "\nWrite hl.anatomy(model, x)."
        ) from reason


def anatomy(model: nn.Module, inputs: Inputs | None = None) -> Anatomy:
    """Name the parts of a transformer, and prove each name on two inputs in every block.

    The parts are found by following the values of one run, not by the names of modules. A name is
    given only if its identity holds: `resid_pre + attn_out = resid_mid`, `pattern @ v = z`,
    `norm(last resid_post) = ln_final`, and so on, with a relative error below 1e-5. Sums do not
    tell attention from MLP, so the model also runs with changed tokens: only attention carries a
    change to other tokens, by its pattern alone.

        >>> block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
        >>> model = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        >>> parts = hl.anatomy(model, torch.randn(2, 6, 8))
        >>> [str(site) for site in parts["mlp_out"]]
        ['layers.0.linear2', 'layers.1.linear2']

    The model runs six times (eight under tensor parallelism), in eval mode and without gradients.
    Afterwards its mode, its buffers and torch's random state are as before.

    Under FSDP and tensor parallelism, every rank calls this, and holds the whole weights meanwhile.
    The same is true of `parts.lens` and `parts.contributions`.

    Args:
        model: a transformer, or another model with a residual stream.
        inputs: an input as in `hl.summary`, of at least three tokens. The second input is made
            from it: tokens moved by one place, floating numbers with noise. None makes two random
            texts of 9 and 7 tokens, or pictures.

    Returns:
        The parts by name. Print them. `parts["pattern", 3]` is a selection.

    Raises:
        AttachError: `model` is not a model, or compiled; or it computes something else with whole
            weights than with those that tensor parallelism has split; or transformers before 5.16
            has split it.
        InputError: None was given for `inputs`, and no input can be made that the model takes; or
            the input has fewer than three tokens; or the model has lazy or meta parameters.
        RanksError: a rank over which the weights are sharded does not call it.
        SelectionError: the model has no residual stream that can be proven: its blocks are not a
            sum of the stream and of parts (ResNet), or have several streams (hyper-connections).
    """
    require_model(model, "hl.anatomy(model)")
    if is_exported(model):
        raise AttachError(
            "hl.anatomy must be given a model as it was before torch.export, because it follows the"
            f" calls of modules, got {type(model).__name__}.\nName the parts of the model:"
            " hl.anatomy(model)."
        )
    if any(map(is_compiled, model.modules())):
        raise AttachError(
            "hl.anatomy must be given a model that is not compiled, because it follows the calls of"
            " torch's functions.\nCall parts = hl.anatomy(model) before torch.compile."
        )
    refuse_plain_shards(model)
    wrapped, model = model, unwrap(model)
    refuse_meta_tensors("hl.anatomy", model, inputs, refuse_offloaded=True)
    meet_sharding_ranks(wrapped, "hl.anatomy of a sharded model")
    # A tensor made in inference mode has no version, which tells that it was written to.
    with (
        torch.inference_mode(False),
        eval_without_side_effects(model),
        without_warnings_and_fastpath(),
    ):
        both = trial_inputs(model, inputs)
        split_output = run_output(wrapped, both[0]) if is_tensor_parallel(wrapped) else None
        with whole_weights(wrapped):
            if split_output is not None:
                check_same_output(model, both[0], split_output)
            trace = _trace_or_refuse(model, both[0], is_given=inputs is not None)
            parts = Anatomy(model, find_and_prove_parts(model, trace, both), wrapped)
    register_parts(model, parts._names.sites_of)
    return parts
