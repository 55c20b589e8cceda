"""Put back, at the sites of a sweep, the values that came there in another run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

from hookline.display.text import plural
from hookline.engine import Site
from hookline.errors import NotRecordedError
from hookline.verbs.edit.patches import in_form_of
from hookline.verbs.edit.steps_and_tokens import Moment

Values = Mapping[str, Sequence[Any]]  # for each site the value of each call


@final
class PutBack:
    """A change at one site: the value of the same call in another run.

    Args:
        values: the values of that run, which may come later.
        site: the site.
    """

    wants_moment = True

    def __init__(self, values: Values, site: Site) -> None:
        self._values, self._site, self._where = values, site, str(site)

    def __repr__(self) -> str:
        # By it the folder of a sweep knows this change; the clean inputs stand for the values.
        return f"PutBack at {self._where}"

    def __call__(self, value: Any, moment: Moment) -> Any:
        """Return the value of the other run in the form of the present value.

        Raises:
            NotRecordedError: the other run has no such call.
            StructureError: the value of the other run has another form.
        """
        calls = self._values[self._where]
        number = 0 if self._site.call is not None else moment.call
        if number >= len(calls):
            raise NotRecordedError(
                f"{self._where} must be called as often in both runs, got"
                f" {plural(len(calls), 'call')} in the clean run, and more in the other."
                f"\nName one call, as in {self._where + '#0'!r}."
            )
        return in_form_of(value, calls[number], self._where)
