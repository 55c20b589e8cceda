"""Run a model only as far as the last of the selected sites."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import nn

from hookline.engine import Line, Selector, Site, end_thread_passes, reshard
from hookline.recordings import Recording
from hookline.verbs.record.keep import KeepOptions, check_keep_options
from hookline.verbs.record.model_state_tracker import ModelStateTracker
from hookline.verbs.record.record import start_recording
from hookline.verbs.shared.run_model import call_model

_tokens = itertools.count()


@final
class _StopForward(BaseException):
    """Unwind the forward. A BaseException, so that no `except Exception` in the model stops it."""

    def __init__(self, token: int) -> None:
        self.token = token


@final
class _ReachedSites:
    """Track the sites that a run has reached. Hooks hold it, so it must not hold the line.

    Args:
        token: the token of the line.

    Attributes:
        missing: the sites that the run has not reached.
        stops: whether the run ends when it has reached all.
    """

    __slots__ = ("missing", "stops", "token")

    def __init__(self, token: int) -> None:
        self.token = token
        self.missing: set[Site] = set()
        self.stops = True

    def mark_reached(self, site: Site) -> None:
        """Note a site that the run has reached."""
        self.missing.discard(site)
        if self.stops and not self.missing:
            raise _StopForward(self.token)


@final
class PartialForward:
    """A line that records sites, and ends each forward when all of them have fired.

    Args:
        model: the model.
        selector: the sites.
        verb: the name of the verb, for messages.
        options: the options of `record`.

    Attributes:
        sites: the selected sites.
        modules: the modules of the model, the root first.
        state: the state that the model keeps from batch to batch; None to ignore it.
        changing: the names of the state that each batch so far has changed. If there are any, the
            model runs to its end in each batch, because modules behind the last site may change
            the state.
    """

    def __init__(
        self, model: nn.Module, selector: Selector, verb: str, options: KeepOptions
    ) -> None:
        self._model = model
        self.state: ModelStateTracker | None = None
        self._may_stop = False
        self.changing: list[str] = []
        self._progress = progress = _ReachedSites(next(_tokens))
        options = check_keep_options(options)
        line = Line(model, name=verb, lenient=selector is None)
        self._recorder = start_recording(
            line, selector, ("output",), options, progress.mark_reached
        )
        line.options.quiet = True
        self.sites: tuple[Site, ...] = self._recorder.recording.sites
        # The line has listed the modules: `model.modules()` takes 0.6 microseconds a module.
        self.modules: list[nn.Module] = [model, *[node.module for node in line.nodes]]

    @property
    def recording(self) -> Recording:
        """The recording that the line fills."""
        return self._recorder.recording

    def __enter__(self) -> PartialForward:
        self._recorder.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._recorder.__exit__(*error)

    def devices(self) -> set[torch.device]:
        """Return the devices of the model's parameters."""
        return {
            parameter.device
            for module in self.modules
            for parameter in module.parameters(recurse=False)
        }

    @contextmanager
    def whole_forward(self) -> Iterator[None]:
        """Run the model to its end in the block, so that each call of a module is seen.

        What fails behind the last site is not asked for, and no error.
        """
        self._progress.stops = False
        try:
            yield
        finally:
            self._progress.stops = True

    def run(self, inputs: Any) -> list[Site]:
        """Run the model on a batch; to its end until a batch has changed no state.

        Args:
            inputs: the batch, as `hl.features` takes it.

        Returns:
            The sites that the model did not reach.
        """
        if self.state is None or self._may_stop:
            return self._run_until_stopped(inputs)
        with self.whole_forward():
            missing = self._run_until_stopped(inputs)
        self.changing = self.state.changed_names()
        self._may_stop = not self.changing
        return missing

    def _run_until_stopped(self, inputs: Any) -> list[Site]:
        missing = self._progress.missing
        missing.update(self.sites)
        try:
            call_model(self._model, inputs)
        except _StopForward as enough:
            if enough.token != self._progress.token:
                raise
            self._clean_up_after_stop()
            # Its traceback holds every frame of the forward, and with them the activations.
            enough.__traceback__ = None
        except Exception as error:
            if not missing:
                self._clean_up_after_stop()
                return []
            if isinstance(inputs, list):
                error.add_note(
                    "hookline: to run a list of batches one after the other, give iter(batches)."
                )
            raise
        return [site for site in self.sites if site in missing]

    def _clean_up_after_stop(self) -> None:
        end_thread_passes()  # passes of this line, and of outer lines that see the same forward
        reshard(self._model)
