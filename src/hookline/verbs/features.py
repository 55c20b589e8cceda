"""features: run a model only as far as the wanted sites, and give their values.

Imports record, calling and engine.
"""

from __future__ import annotations

import itertools
from typing import Unpack, final

from torch import nn

from hookline.engine import Selector, Site, reshard, stop_all
from hookline.recordings import Recording
from hookline.verbs.calling import Inputs, call
from hookline.verbs.keeping import Keep
from hookline.verbs.record import start_recording

_tokens = itertools.count()


@final
class _Enough(BaseException):
    """Unwinds the forward. Not an Exception, so that no `except Exception` on the way stops it."""

    def __init__(self, token: int) -> None:
        self.token = token


def features(
    model: nn.Module, inputs: Inputs, selector: Selector, **options: Unpack[Keep]
) -> Recording:
    """Run a model until the last of the wanted sites has its value, and no further.

        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> feats = features(model, torch.zeros(4, 2), ["1", "0"])
        >>> feats["1"].shape
        torch.Size([4, 3])

    The order in which the sites are listed does not matter. A module that runs several times is
    waited for once, unless a later call is named (`"block#2"`). The model's mode and the gradient
    mode are the caller's. Stopping unwinds the forward as Ctrl-C would: context managers and
    `finally` are honoured, `always_call` hooks of others are not.

    Args:
        model: the model.
        inputs: a tensor; a tuple of arguments; a dict of keyword arguments; or a function without
            arguments, for code that runs the model somewhere inside.
        selector: which sites; as in `hl.select`.
        **options: keep, device, dtype, detach, copy; as in `hl.record`.

    Returns:
        A recording with a value for every wanted site.

    Raises:
        SelectionError: the selector matches nothing.
        NotRecordedError: the model ran to its end without reaching one of the sites.
    """
    token = next(_tokens)
    missing: set[Site] = set()

    def after(site: Site) -> None:
        missing.discard(site)
        if not missing:
            raise _Enough(token)

    recorder, line = start_recording(model, selector, "features", ("output",), options, after)
    line.quiet = True
    wanted = recorder.recording.sites
    missing.update(wanted)
    with recorder as recording:
        try:
            call(model, inputs)
        except _Enough as enough:
            if enough.token != token:
                raise
            line.passes.stop()
            stop_all()  # lines around this one saw the same forward end
            reshard(model)
            # Its traceback holds every frame of the forward, and with them the activations.
            enough.__traceback__ = None
    for site in wanted:
        if site in missing:
            recording[site]  # raises, and says why
    return recording
