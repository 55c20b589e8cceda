"""Change one thing of a run: each check returns the changed run, and its reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hookline.display.text import first_line, plural
from hookline.engine import is_compiled
from hookline.verbs.invariance.batch import DECODED, IDS, MASK, POSITIONS, CheckNotApplicable, Side
from hookline.verbs.invariance.trials import Run, Trials
from hookline.verbs.shared.run_model import call_model, copy_inputs
from hookline.verbs.shared.run_settings import RandomStates, generators_of
from hookline.verbs.shared.token_inputs import CACHES

Pair = tuple[Run, Run]
_MOST_ALONE = 4  # rows that run alone
BATCH_NORM = nn.modules.batchnorm._BatchNorm


def run_twice(trials: Trials) -> Pair:
    """Run the batch once more after a first run."""
    return trials.run(trials.batch, before=partial(_run_without_recording, trials)), trials.base_run


def _run_without_recording(trials: Trials) -> None:
    call_model(trials.model, copy_inputs(trials.batch.inputs))


def run_restoring_rng(trials: Trials) -> None:
    """Run the batch, and put the random numbers back."""
    states = RandomStates(generators_of(trials.model.modules()))
    _run_without_recording(trials)
    states.restore()


def run_rows_alone(trials: Trials) -> Pair:
    """Run each row alone, up to four, and the last."""
    n_rows = trials.batch.require_several_rows()
    rows = sorted({*range(min(n_rows, _MOST_ALONE - 1)), n_rows - 1})
    return trials.run(*(trials.batch.select_rows([row]) for row in rows)), trials.base_run


def run_rows_reversed(trials: Trials) -> Pair:
    """Run the rows in reverse order."""
    rows = range(trials.batch.require_several_rows())
    return trials.run(trials.batch.select_rows(rows[::-1])), trials.base_run


def run_padded(side: Side, trials: Trials, *, has_positions: bool = False) -> Pair:
    """Run the batch with three more tokens of padding."""
    if side == "left" and POSITIONS in trials.batch.named and not has_positions:
        raise CheckNotApplicable(f"{POSITIONS} are given")
    return trials.run(trials.batch.padded(side, has_positions=has_positions)), trials.base_run


def run_without_padding(trials: Trials) -> Pair:
    """Run each padded row alone, without its padding."""
    rows = list(trials.batch.unpadded_rows())[:_MOST_ALONE]
    return trials.run(*rows), trials.run(trials.batch, tokens=trials.batch.with_mask())


def run_in_chunks(trials: Trials) -> Pair:
    """Run the first half of the tokens, then the second with the cache of the first."""
    batch = trials.batch.with_decoder_ids
    half = batch.n_tokens // 2
    # That which the inputs have, if any: the model takes one of them alone.
    keys = [*filter(batch.named.__contains__, CACHES), *filter(batch.accepted.__contains__, CACHES)]
    name = next(iter(keys), "")
    if not name or "use_cache" not in batch.accepted:
        raise CheckNotApplicable(f"the forward takes no {CACHES[-1]}")
    if not half:
        raise CheckNotApplicable("the rows have one token")
    parts = [
        part.with_arguments(use_cache=True)
        for part in (batch.cut_tokens(0, half), batch.cut_tokens(half, batch.n_tokens))
    ]
    tokens = [part.token_inputs() for part in parts] if batch.ids != DECODED else None
    mask = "decoder_attention_mask" if batch.ids == DECODED else MASK
    if isinstance(batch.named.get(mask), Tensor):  # of the tokens in the cache, too
        parts[1] = parts[1].with_arguments(**{mask: batch.named[mask]})

    def passes(root: nn.Module) -> None:
        first = call_model(root, copy_inputs(parts[0].inputs))
        if getattr(first, name, None) is None:
            raise CheckNotApplicable("the model returns no cache")
        more = {name: first[name]}
        if batch.ids == DECODED:
            more |= {"encoder_outputs": (first.encoder_last_hidden_state,)}
        call_model(
            root,
            parts[1]
            .with_arguments(**more)
            .without_argument(IDS if batch.ids == DECODED else "")
            .inputs,
        )

    recording = trials.record(passes)
    return Run(recording, tokens, given="(root):output.encoder_"), trials.base_run


def run_after_training_pass(trials: Trials) -> Pair:
    """Run the batch after a pass in training mode, with batch norm's statistics put back."""
    return trials.run(trials.batch, before=partial(_run_training_pass, trials)), trials.base_run


def _run_training_pass(trials: Trials) -> None:
    modules = list(trials.model.modules())
    modes = [module.training for module in modules]
    norms = [module for module in modules if isinstance(module, BATCH_NORM)]
    buffers = [buffer for norm in norms for buffer in norm.buffers()]
    numbers = [buffer.clone() for buffer in buffers]
    for module in modules:
        module.training = True
    run_restoring_rng(trials)
    for module, is_training in zip(modules, modes, strict=True):
        module.training = is_training
    for buffer, before in zip(buffers, numbers, strict=True):
        buffer.copy_(before)


def run_in_training_mode(trials: Trials) -> Pair:
    """Run the batch in training mode."""
    if trials.model.training:
        raise CheckNotApplicable("the model is in training mode")
    return replace(trials, is_training=True).run(trials.batch), trials.base_run


def run_compiled(trials: Trials) -> Pair:
    """Run the compiled model."""
    if any(map(is_compiled, trials.model.modules())):
        raise CheckNotApplicable("the model is compiled")
    model: Any = torch.compile(trials.model, backend=trials.backend)
    return trials.run(trials.batch, model=model), trials.base_run


def run_checkpointed(trials: Trials) -> Pair:
    """Run forward and backward in training mode, with and without activation checkpointing."""
    try:
        base = replace(trials, is_training=True, eval_modules=(), ports=(*trials.ports, "grad"))
        reference = base.base_run
    except CheckNotApplicable:
        raise
    except Exception as error:
        raise CheckNotApplicable(f"no backward in training mode: {first_line(error)}") from error
    return base.run(base.batch, before=partial(_checkpoint_blocks, trials.model)), reference


def _checkpoint_blocks(model: Any) -> None:
    """Checkpoint the blocks of a model; `restore_after_run` takes it back.

    Raises:
        CheckNotApplicable: no blocks are known.
    """
    if getattr(model, "supports_gradient_checkpointing", False):
        # A newer transformers has another name for it, and warns of the old one.
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)()
        return
    blocks = repeated_blocks(model)
    if not blocks:
        raise CheckNotApplicable("no blocks: modules of one class in a Sequential or ModuleList")
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model: children of one class, with children, of one container."""
    blocks: dict[nn.Module, None] = {}
    for container in model.modules():
        children = list(container.children())
        is_container = isinstance(container, nn.Sequential | nn.ModuleList) and len(children) > 1
        if is_container and len({type(child) for child in children}) == 1:
            inner = [child for child in children if any(True for _ in child.children())]
            is_within = any(container is part for block in blocks for part in block.modules())
            blocks.update(dict.fromkeys([] if is_within else inner))
    return list(blocks)


def run_in_dtype(dtype: torch.dtype, trials: Trials) -> Pair:
    """Run a copy in another dtype."""
    dtypes = {tensor.dtype for tensor in trials.model.parameters() if tensor.is_floating_point()}
    if dtypes == {dtype}:
        raise CheckNotApplicable("the model is in this dtype")
    return _on_copy(trials, dtype)


def run_on_other_device(trials: Trials) -> Pair:
    """Run a copy on another device: on an accelerator, or else on the processor."""
    kinds = {tensor.device.type for tensor in trials.model.parameters()}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        raise CheckNotApplicable("torch finds no accelerator")
    if len(kinds) > 1:
        raise CheckNotApplicable(f"the model lies on {plural(len(kinds), 'device')}")
    return _on_copy(trials, accelerator if kinds == {"cpu"} else torch.device("cpu"))


def _on_copy(trials: Trials, target: torch.dtype | torch.device) -> Pair:
    model, batch = trials.copy_model(target), trials.batch.to(target)
    try:
        return trials.run(batch, model=model), trials.base_run
    except Exception as error:
        raise CheckNotApplicable(f"the copy raises {first_line(error)}") from error


Check = Callable[[Trials], Pair]

CHECKS: dict[str, Check] = {
    "twice": run_twice,
    "alone": run_rows_alone,
    "reordered": run_rows_reversed,
    "padded right": partial(run_padded, "right"),
    "padded left": partial(run_padded, "left"),
    "padded with positions": partial(run_padded, "left", has_positions=True),
    "without padding": run_without_padding,
    "chunks": run_in_chunks,
    "after training": run_after_training_pass,
    "training mode": run_in_training_mode,
    "compiled": run_compiled,
    "checkpointed": run_checkpointed,
    "float64": partial(run_in_dtype, torch.float64),
    "bfloat16": partial(run_in_dtype, torch.bfloat16),
    "other device": run_on_other_device,
}
