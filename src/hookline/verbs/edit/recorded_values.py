"""Recorded values, looked up by the site, the pass and the call of an edit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, final

from hookline.engine import Site
from hookline.engine.pytree import describe
from hookline.errors import AttachError, NotRecordedError
from hookline.recordings import Recording
from hookline.recordings.pass_record import PassRecord
from hookline.verbs.edit.steps_and_tokens import PassAndCall


@final
class RecordedValues:
    """The recorded values of one site, in the passes that did not fail.

    Args:
        run: the recording, or one of its passes.
        site: the site.

    Raises:
        NotRecordedError: the recording has no value of the site.
    """

    __slots__ = ("_records", "_site")

    def __init__(self, run: Recording | PassRecord, site: Site) -> None:
        self._site = site
        records = [run] if isinstance(run, PassRecord) else run.passes
        key = str(site)
        records = [record for record in records if record.failed is not True]
        holding = [record for record in records if key in record]
        # A gradient may come in another order than its run, so it is found by its run.
        is_by_run = site.is_gradient and len(holding) > 1
        self._records = records if is_by_run else holding
        if not holding:
            run[site]  # raises the reason, unless the run failed
            raise NotRecordedError(
                f"the recording must hold {site} of a run that did not fail, got a failed run."
                "\nRecord a run that returns."
            )

    def value_at(self, pass_and_call: PassAndCall) -> Any:
        """Return the value of a call in a pass; a recording of one pass serves every pass.

        Raises:
            AttachError: passes do not tell which tokens belong together: assisted decoding.
            NotRecordedError: the recording has no such pass or call.
            OverwrittenError: the value was changed in place after it was recorded.
        """
        number = pass_and_call.number if len(self._records) > 1 else 0
        if number and pass_and_call.is_assisted:
            raise AttachError(
                f"{self._site} must not be taken from run {number} of a recording in assisted"
                " decoding, where a run takes several drafted tokens, so that other runs have"
                " other positions.\nChoose tokens of the prompt, such as"
                " at=slice(prompt_length); or generate without an assistant."
            )
        try:
            return self._records[number][replace(self._site, call=pass_and_call.call)]
        except (IndexError, NotRecordedError):
            raise NotRecordedError(
                f"{self._site} must be recorded in run {pass_and_call.number} and call"
                f" {pass_and_call.call}, got {len(self._records)} recorded runs without it."
                "\nRecord as many runs and calls, or choose steps of generate:"
                " hl.edit(..., steps=0)."
            ) from None

    def only_value(self) -> Any:
        """Return the only value of the site, for compiled code; None if there are several."""
        if len(self._records) > 1:
            return None
        values = self._records[0].calls(self._site)
        return values[0] if len(values) == 1 else None


@final
class ChangeFromRecording:
    """A change that differs by site: by what a recording has there.

    Args:
        name: the name of the edit.
        run: the recording, or one of its passes.
        at: returns the change of a site in the recording.

    Raises:
        AttachError: `run` is not a recording.
    """

    __slots__ = ("_at", "_name", "_run")

    def __init__(self, name: str, run: Any, at: Callable[[Any, Site], Any]) -> None:
        if not isinstance(run, Recording | PassRecord):
            raise AttachError(
                f"hl.edits.{name} must be given a recording, got {describe.in_words(run)}."
                f"\nGive what hl.record returned: hl.edits.{name}(run)."
                f"{' For one value: hl.edits.replace(value).' if name == 'patch' else ''}"
            )
        self._name = name
        self._run = run
        self._at = at

    def __call__(self, value: Any) -> Any:
        """Refuse a call without a site."""
        raise missing_site_error(self._name)

    def at(self, site: Site) -> Any:
        """Return the change of a site."""
        return self._at(self._run, site)


def missing_site_error(name: str) -> AttachError:
    """Return the error for a change that is called without a site."""
    return AttachError(
        f"hl.edits.{name} needs the site that it changes.\nGive it to hl.edit: hl.edit(model,"
        f" selector, hl.edits.{name}(run))."
    )
