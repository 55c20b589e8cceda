"""features: run a model only as far as the wanted sites, and give their values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, Unpack

from torch import nn
from torch.utils.data import DataLoader, Dataset

from hookline.engine import Selector, Site
from hookline.engine.pytree import describe
from hookline.errors import InputError, NotRecordedError
from hookline.recordings import Recording
from hookline.verbs.record.keep import Keep
from hookline.verbs.record.prefix import Prefix
from hookline.verbs.shared.run_model import Inputs, in_eval_mode


def features(
    model: nn.Module,
    inputs: Inputs | DataLoader[Any] | Iterator[Any],
    selector: Selector,
    *,
    eval: bool = True,
    **options: Unpack[Keep],
) -> Recording:
    """Run a model until the last of the wanted sites has its value, and no further.

        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> feats = features(model, torch.zeros(4, 2), ["1", "0"])
        >>> feats["1"].shape
        torch.Size([4, 3])

    The model runs in eval mode, whatever mode it is in: dropout would make features random, and
    batch norm would mix the rows of a batch and update its statistics. The mode of each module is
    put back afterwards. The gradient mode is the caller's.

    A `DataLoader`, or an iterator of batches, is run batch by batch, each batch in a pass:

        >>> batches = torch.zeros(9, 2).split(4)
        >>> features(model, iter(batches), "1").cat("1").shape
        torch.Size([9, 3])

    The order in which the sites are listed does not matter. A module that runs several times is
    waited for once, unless a later call is named (`"block#2"`). Stopping unwinds the forward as
    Ctrl-C would: context managers and `finally` are honoured, `always_call` hooks of others are
    not.

    Args:
        model: the model.
        inputs: a tensor; a tuple of arguments; a dict of keyword arguments; a function without
            arguments, for code that runs the model somewhere inside; or a `DataLoader` or an
            iterator that gives tensors, tuples or dicts. A list is one argument of the model; a
            dict that is one argument is given as `({...},)`.
        selector: which sites; as in `hl.select`.
        eval: False keeps the mode that the model is in.
        **options: keep, device, dtype, detach, copy; as in `hl.record`.

    Returns:
        A recording with a value for every wanted site; of batches, one pass each: join them by
        `feats.cat(site)`.

    Raises:
        SelectionError: the selector matches nothing.
        NotRecordedError: the model ran to its end without reaching one of the sites.
        InputError: a loader gives no batch, or gives lists, which may hold labels too; or the
            inputs are a data set, which has no batches.
    """
    prefix = Prefix(model, selector, "features", options)
    mode = in_eval_mode(prefix.modules) if eval else nullcontext()
    missing: list[Site] = []
    with prefix, mode:
        for number, batch in enumerate(_batches(inputs)):
            missing = prefix.run(batch)
            if missing and number:
                raise NotRecordedError(
                    f"{missing[0]} must have a value for each batch, got none for batch {number}."
                    "\nhl.doctor(model, batch, selector) tells why."
                )
            if missing:
                break
    for site in missing:
        prefix.recording[site]  # raises, and says why
    return prefix.recording


def _batches(inputs: Any) -> Iterator[Any]:
    """Yield the batches, one after the other.

    Raises:
        InputError: there is no batch, or one is a list.
    """
    if isinstance(inputs, Dataset):
        raise InputError(
            f"inputs must be batches, got a data set ({type(inputs).__name__}).\nGive"
            " torch.utils.data.DataLoader(dataset, batch_size=32)."
        )
    if not isinstance(inputs, DataLoader | Iterator):
        yield inputs
        return
    is_empty = True
    for batch in inputs:
        if isinstance(batch, list):
            raise InputError(
                "a batch must hold what the model takes and nothing else, got"
                f" {describe.in_words(batch)}.\n"
                "Give the inputs alone, such as the first part of each:"
                " hl.features(model, (batch[0] for batch in loader), ...)."
            )
        is_empty = False
        yield batch
    if is_empty:
        raise InputError(
            f"inputs must give at least one batch, got none from this {type(inputs).__name__}."
            "\nGive a loader whose data set has rows, or an iterator that was not used before."
        )
