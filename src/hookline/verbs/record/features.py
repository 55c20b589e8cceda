"""Run a model only as far as the selected sites, and return their values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any, Unpack

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hookline.engine import Selector, Site
from hookline.engine.pytree import describe, tree
from hookline.errors import InputError, NotRecordedError, check_option_names, warn
from hookline.recordings import Recording
from hookline.verbs.record.keep import KeepOptions
from hookline.verbs.record.model_state_tracker import ModelStateTracker, may_keep_state
from hookline.verbs.record.partial_forward import PartialForward
from hookline.verbs.shared.model_state import in_eval_mode
from hookline.verbs.shared.run_model import Inputs, unwrap_lone_tensor


def features(
    model: nn.Module,
    inputs: Inputs | DataLoader[Any] | Iterator[Any],
    selector: Selector,
    *,
    eval: bool = True,
    **options: Unpack[KeepOptions],
) -> Recording:
    """Run a model until every selected site has its value, and return the values.

        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> feats = hl.features(model, torch.zeros(4, 2), ["1", "0"])
        >>> feats["1"].shape
        torch.Size([4, 3])

    The model runs in eval mode, and each module gets its own mode back afterwards. In training
    mode, dropout would make features random. Batch norm would mix the rows of a batch and update
    its statistics. The gradient mode stays the caller's.

    A `DataLoader`, or an iterator of batches, is run batch by batch, each batch in its own pass. A
    model with state of its own runs to its end until a batch has changed no buffer or attribute,
    because the next batch may depend on these:

        >>> batches = torch.zeros(9, 2).split(4)
        >>> hl.features(model, iter(batches), "1").cat("1").shape
        torch.Size([9, 3])

    Values are kept without their graph, as by `hl.record`. For a loss on them, such as a perceptual
    or a style loss, give `detach=False`; without it, a warning says so if an input requires
    gradients.

    The order of the listed sites does not matter. The run stops when each site has a value: of a
    module that runs several times that of its first call, or of the call that is named
    (`"block#2"`). Calls before the stop are kept, so `feats["block"]` may be ambiguous. The forward
    is stopped by an exception, as by Ctrl-C. So context managers and `finally` blocks of the model
    run, and `always_call` hooks of other code do not.

    Args:
        model: the model.
        inputs: a tensor or a list, which is one argument; a tuple of arguments; a dict of keyword
            arguments; a function without arguments that runs the model somewhere inside; or a
            `DataLoader` or an iterator that gives tensors, tuples or dicts, or `tqdm` of it. Give a
            dict that is one argument as `({...},)`. A list of one tensor, as a loader gives it for
            `TensorDataset(x)`, is this tensor, unless the model takes the list.
        selector: which sites, as in `hl.select`.
        eval: False leaves each module in its own mode.
        **options: `keep`, `device`, `dtype`, `detach` and `copy`, as in `hl.record`.

    Returns:
        A recording with a value for every selected site. Of batches it has one pass each; join
        them with `feats.cat(site)`.

    Raises:
        SelectionError: the selector matches nothing, or a gradient.
        NotRecordedError: the model ran to its end without reaching one of the sites.
        InputError: a loader gives no batch, or gives longer lists, which may hold labels. Or the
            inputs are a data set, which has no batches.
        AttachError: the model cannot be hooked, or an option is invalid.
        TypeError: there is no such option.
    """
    check_option_names(features, options, KeepOptions.__annotations__)
    if "detach" not in options and _inputs_require_grad(inputs):
        warn(
            "hl.features keeps values without their graph, and an input requires gradients: a loss"
            " on these values gives it none.\nGive detach=False to keep the graph, or detach=True"
            " if no loss needs it."
        )
    missing: list[Site] = []
    # The block begins at once: an error in between would leave hooks on the model.
    with (
        PartialForward(model, selector, "features", options) as runner,
        in_eval_mode(runner.modules) if eval else nullcontext(),
    ):
        # A module behind the last site may change what the next batch depends on.
        if _gives_batches(inputs) and may_keep_state(model):
            runner.state = ModelStateTracker(model)
        for number, batch in enumerate(_batches(model, inputs)):
            missing = runner.run(batch)
            if runner.state is not None:
                runner.recording.cut_last_pass_at_completion()  # of a run to the end
            if missing and number:
                raise NotRecordedError(
                    f"{missing[0]} must have a value for each batch, got none for batch {number}."
                    "\nhl.doctor(model, batch, selector) tells why."
                )
            if missing:
                break
    for site in missing:
        runner.recording[site]  # raises an error that says why
    return runner.recording


def _gives_batches(inputs: Any) -> bool:
    """Tell whether inputs are batches: a loader, an iterator, or `tqdm` of anything iterable."""
    wrapped = getattr(inputs, "iterable", None)  # of a progress bar, which is no iterator
    return isinstance(inputs, DataLoader | Iterator) or isinstance(wrapped, Iterable)


def _inputs_require_grad(inputs: Any) -> bool:
    """Tell whether autograd would follow a tensor of the inputs; those of a loader are not read."""
    if not torch.is_grad_enabled() or _gives_batches(inputs):
        return False
    return any(tensor.requires_grad for _, tensor in tree.tensors(inputs))


def _batches(model: nn.Module, inputs: Any) -> Iterator[Any]:
    """Yield the batches one after the other."""
    if isinstance(inputs, Dataset):
        raise InputError(
            f"inputs must be batches, got a data set ({type(inputs).__name__}).\nGive"
            " torch.utils.data.DataLoader(dataset, batch_size=32)."
        )
    if not _gives_batches(inputs):
        yield unwrap_lone_tensor(model, inputs)
        return
    is_empty = True
    for batch in (unwrap_lone_tensor(model, batch) for batch in inputs):
        if isinstance(batch, list):
            raise InputError(
                "a batch must hold only the model's inputs, got"
                f" {describe.in_words(batch)}.\n"
                "Give the inputs alone, such as the first part of each batch:"
                " hl.features(model, (batch[0] for batch in loader), ...)."
            )
        is_empty = False
        yield batch
    if is_empty:
        raise InputError(
            f"inputs must give at least one batch, got none from this {type(inputs).__name__}."
            "\nGive a loader whose data set has rows, or an iterator that is still unused."
        )
