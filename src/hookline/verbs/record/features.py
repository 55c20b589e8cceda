"""features: run a model only as far as the wanted sites, and give their values."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, Unpack, final

from torch import nn
from torch.utils.data import DataLoader, Dataset

from hookline.engine import Selector, Site, reshard, stop_all
from hookline.engine.pytree import describe
from hookline.errors import InputError, NotRecordedError
from hookline.recordings import Recording
from hookline.verbs.record.keep import Keep
from hookline.verbs.record.record import start_recording
from hookline.verbs.shared.failing_module import note_failing_module
from hookline.verbs.shared.run_model import Inputs, call, in_eval_mode

_tokens = itertools.count()


@final
class _Enough(BaseException):
    """Unwinds the forward. Not an Exception, so that no `except Exception` on the way stops it."""

    def __init__(self, token: int) -> None:
        self.token = token


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
    token = next(_tokens)
    missing: set[Site] = set()

    def after(site: Site) -> None:
        missing.discard(site)
        if not missing:
            raise _Enough(token)

    recorder, line = start_recording(model, selector, "features", ("output",), options, after)
    line.options.quiet = True
    wanted = recorder.recording.sites
    # The line has walked the model already: `model.modules()` takes 0.6 microseconds a module.
    modules = [model, *[node.module for node in line.nodes]]
    mode = in_eval_mode(modules) if eval else nullcontext()
    with recorder as recording, mode:
        for number, batch in enumerate(_batches(inputs)):
            missing.update(wanted)
            _run(model, batch, token)
            if missing and number:
                raise NotRecordedError(
                    f"{min(missing, key=wanted.index)} must have a value for each batch, got none"
                    f" for batch {number}.\nhl.doctor(model, batch, selector) tells why."
                )
            if missing:
                break
    for site in wanted:
        if site in missing:
            recording[site]  # raises, and says why
    return recording


def _run(model: nn.Module, inputs: Any, token: int) -> None:
    try:
        call(model, inputs)
    except _Enough as enough:
        if enough.token != token:
            raise
        stop_all()  # this line, and those around it that saw the same forward end
        reshard(model)
        # Its traceback holds every frame of the forward, and with them the activations.
        enough.__traceback__ = None
    except Exception as error:
        if isinstance(inputs, list):
            error.add_note(
                "hookline: a list is one argument of the model; to run a list of batches, one after"
                " the other, give iter(batches)."
            )
        note_failing_module(model, error)
        raise


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
