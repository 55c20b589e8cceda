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
from hookline.verbs.invariance.feed import DECODED, IDS, MASK, POSITIONS, NotApplicable, Side
from hookline.verbs.invariance.trials import Run, Trials
from hookline.verbs.shared.caches import CACHES
from hookline.verbs.shared.rerun import RandomStates, copied, generators_of
from hookline.verbs.shared.run_model import call

Pair = tuple[Run, Run]
_MOST_ALONE = 4  # rows that run alone
BATCH_NORM = nn.modules.batchnorm._BatchNorm


def twice(trials: Trials) -> Pair:
    """Run the batch once more after a first run."""
    return trials.run(trials.feed, before=partial(_run, trials)), trials.base


def _run(trials: Trials) -> None:
    call(trials.model, copied(trials.feed.inputs))


def run_without_draws(trials: Trials) -> None:
    """Run the batch, and put the random numbers back."""
    states = RandomStates(generators_of(trials.model.modules()))
    _run(trials)
    states.restore()


def alone(trials: Trials) -> Pair:
    """Run each row alone, up to four, and the last."""
    n_rows = trials.feed.several_rows()
    rows = sorted({*range(min(n_rows, _MOST_ALONE - 1)), n_rows - 1})
    return trials.run(*(trials.feed.rows([row]) for row in rows)), trials.base


def reordered(trials: Trials) -> Pair:
    """Run the rows in reverse order."""
    rows = range(trials.feed.several_rows())
    return trials.run(trials.feed.rows(rows[::-1])), trials.base


def padded(side: Side, trials: Trials, *, has_positions: bool = False) -> Pair:
    """Run the batch with three more tokens of padding."""
    if side == "left" and POSITIONS in trials.feed.named and not has_positions:
        raise NotApplicable(f"{POSITIONS} are given")
    return trials.run(trials.feed.padded(side, has_positions=has_positions)), trials.base


def without_padding(trials: Trials) -> Pair:
    """Run each padded row alone, without its padding."""
    rows = list(trials.feed.without_padding())[:_MOST_ALONE]
    return trials.run(*rows), trials.run(trials.feed, tokens=trials.feed.with_mask())


def chunked(trials: Trials) -> Pair:
    """Run the first half of the tokens, then the second with the cache of the first."""
    feed = trials.feed.decoded
    half = feed.n_tokens // 2
    # That which the inputs have, if any: the model takes one of them alone.
    names = [*filter(feed.named.__contains__, CACHES), *filter(feed.accepted.__contains__, CACHES)]
    name = next(iter(names), "")
    if not name or "use_cache" not in feed.accepted:
        raise NotApplicable(f"the forward takes no {CACHES[-1]}")
    if not half:
        raise NotApplicable("the rows have one token")
    parts = [
        part.with_named(use_cache=True)
        for part in (feed.cut(0, half), feed.cut(half, feed.n_tokens))
    ]
    tokens = [part.tokens() for part in parts] if feed.ids != DECODED else None
    mask = "decoder_attention_mask" if feed.ids == DECODED else MASK
    if isinstance(feed.named.get(mask), Tensor):  # of the tokens in the cache, too
        parts[1] = parts[1].with_named(**{mask: feed.named[mask]})

    def passes(root: nn.Module) -> None:
        first = call(root, copied(parts[0].inputs))
        if getattr(first, name, None) is None:
            raise NotApplicable("the model returns no cache")
        more = {name: first[name]}
        if feed.ids == DECODED:
            more |= {"encoder_outputs": (first.encoder_last_hidden_state,)}
        call(root, parts[1].with_named(**more).without(IDS if feed.ids == DECODED else "").inputs)

    recording = trials.recorded(passes)
    return Run(recording, tokens, given="(root):output.encoder_"), trials.base


def after_training(trials: Trials) -> Pair:
    """Run the batch after a pass in training mode, with batch norm's statistics put back."""
    return trials.run(trials.feed, before=partial(_train, trials)), trials.base


def _train(trials: Trials) -> None:
    modules = list(trials.model.modules())
    modes = [module.training for module in modules]
    norms = [module for module in modules if isinstance(module, BATCH_NORM)]
    buffers = [buffer for norm in norms for buffer in norm.buffers()]
    numbers = [buffer.clone() for buffer in buffers]
    for module in modules:
        module.training = True
    run_without_draws(trials)
    for module, is_training in zip(modules, modes, strict=True):
        module.training = is_training
    for buffer, before in zip(buffers, numbers, strict=True):
        buffer.copy_(before)


def training(trials: Trials) -> Pair:
    """Run the batch in training mode."""
    if trials.model.training:
        raise NotApplicable("the model is in training mode")
    return replace(trials, is_training=True).run(trials.feed), trials.base


def compiled(trials: Trials) -> Pair:
    """Run the compiled model."""
    if any(map(is_compiled, trials.model.modules())):
        raise NotApplicable("the model is compiled")
    model: Any = torch.compile(trials.model, backend=trials.backend)
    return trials.run(trials.feed, model=model), trials.base


def checkpointed(trials: Trials) -> Pair:
    """Run forward and backward in training mode, with and without activation checkpointing."""
    try:
        base = replace(trials, is_training=True, resting=(), ports=(*trials.ports, "grad"))
        reference = base.base
    except NotApplicable:
        raise
    except Exception as error:
        raise NotApplicable(f"no backward in training mode: {first_line(error)}") from error
    return base.run(base.feed, before=partial(_checkpoint, trials.model)), reference


def _checkpoint(model: Any) -> None:
    """Checkpoint the blocks of a model; `untouched` takes it back.

    Raises:
        NotApplicable: no blocks are known.
    """
    if getattr(model, "supports_gradient_checkpointing", False):
        # A newer transformers has another name for it, and warns of the old one.
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)()
        return
    blocks = blocks_of(model)
    if not blocks:
        raise NotApplicable("no blocks: modules of one class in a Sequential or ModuleList")
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def blocks_of(model: nn.Module) -> list[nn.Module]:
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


def in_dtype(dtype: torch.dtype, trials: Trials) -> Pair:
    """Run a copy in another dtype."""
    dtypes = {tensor.dtype for tensor in trials.model.parameters() if tensor.is_floating_point()}
    if dtypes == {dtype}:
        raise NotApplicable("the model is in this dtype")
    return _elsewhere(trials, dtype)


def on_other_device(trials: Trials) -> Pair:
    """Run a copy on another device: on an accelerator, or else on the processor."""
    kinds = {tensor.device.type for tensor in trials.model.parameters()}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        raise NotApplicable("torch finds no accelerator")
    if len(kinds) > 1:
        raise NotApplicable(f"the model lies on {plural(len(kinds), 'device')}")
    return _elsewhere(trials, accelerator if kinds == {"cpu"} else torch.device("cpu"))


def _elsewhere(trials: Trials, target: torch.dtype | torch.device) -> Pair:
    model, feed = trials.copy(target), trials.feed.to(target)
    try:
        return trials.run(feed, model=model), trials.base
    except Exception as error:
        raise NotApplicable(f"the copy raises {first_line(error)}") from error


Check = Callable[[Trials], Pair]

CHECKS: dict[str, Check] = {
    "twice": twice,
    "alone": alone,
    "reordered": reordered,
    "padded right": partial(padded, "right"),
    "padded left": partial(padded, "left"),
    "padded with positions": partial(padded, "left", has_positions=True),
    "without padding": without_padding,
    "chunks": chunked,
    "after training": after_training,
    "training mode": training,
    "compiled": compiled,
    "checkpointed": checkpointed,
    "float64": partial(in_dtype, torch.float64),
    "bfloat16": partial(in_dtype, torch.bfloat16),
    "other device": on_other_device,
}
