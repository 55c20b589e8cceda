"""Change the value at one site, or a part of it, and note whether this has moved the value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from hookline.display.text import plural
from hookline.engine import Site, call_undoing_writes
from hookline.engine.pytree import describe, tree
from hookline.errors import NotRecordedError, StructureError
from hookline.verbs.edit.patches import recorded_like
from hookline.verbs.edit.steps_and_tokens import PassAndCall

Values = Mapping[str, Sequence[Any]]  # for each site the value of each call


@final
@dataclass(slots=True, eq=False)
class SiteChange:
    """A change of the value at one site, or of a part of it."""

    change: Callable[..., Any]  # the user's function
    site: Site  # the site
    where: tuple[slice, ...] = ()  # the part that is changed; () is all of it
    # Whether a value that it returned differs from the value that was there.
    has_moved: bool = False
    n_calls: int = 0  # how often it was called in the running forward
    _function: Any = None

    def begin_forward(self, functions: dict[int, Callable[..., Any]]) -> None:
        """Begin a forward, where a change that draws numbers begins again.

        Args:
            functions: those that have begun in this forward, by the id of the user's function.
        """
        self.n_calls = 0
        key, fresh = id(self.change), getattr(self.change, "fresh", None)
        if fresh is not None and key not in functions:
            functions[key] = fresh()
        self._function = functions.get(key, self.change)

    def __call__(self, value: Any) -> Any:
        """Return the changed value.

        Raises:
            StructureError: the change returned a value of another form.
        """
        new = self.changed_value(value)
        if self.where:
            part = new[self.where]
            self.count_call(has_moved=not _are_equal(value[self.where], part))
            value = value.clone()
            value[self.where] = part
            return value
        self.count_call(has_moved=not _are_equal(value, new))
        return new

    def changed_value(self, value: Any) -> Any:
        """Return what the change makes of a value, all of it.

        Raises:
            StructureError: the change returned a value of another form.
        """
        call = self.n_calls if self.site.call is None else self.site.call
        # As in an edit that lasts for one forward: each is the first of its line.
        pass_and_call = (
            (PassAndCall(0, call),) if getattr(self.change, "wants_pass_and_call", False) else ()
        )
        function = self._function
        new = call_undoing_writes(
            lambda value: function(value, *pass_and_call),
            value,
            self._write_error,
            self._write_error,
        )
        if new is None:
            return value
        difference = describe.difference(value, new)
        if difference:
            raise StructureError(
                f"the change at {self.site} must keep the value's form: {difference}."
                "\nReturn a value of the same shape and dtype. A patch needs inputs of one length."
            )
        return new

    def _write_error(self) -> StructureError:
        return StructureError(
            f"the change at {self.site} wrote in place to the value it was given, which other parts"
            " of the model may hold.\nReturn a new value: lambda t: t * 0, not lambda t: t.zero_()."
        )

    def count_call(self, *, has_moved: bool) -> None:
        """Count a call, and note whether it has moved the value."""
        self.n_calls += 1
        self.has_moved = self.has_moved or has_moved


def _are_equal(a: Any, b: Any) -> bool:
    if a is b or (isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)):
        return True
    pairs = zip(tree.tensors(a), tree.tensors(b), strict=True)
    return all(
        torch.equal(x, y) or bool(((x == y) | (x.isnan() & y.isnan())).all())
        for (_, x), (_, y) in pairs
    )


@final
class CleanValuePatch:
    """A change at one site: the value of the same call in another run.

    Args:
        values: the values of that run, which may come later.
        site: the site.
    """

    wants_pass_and_call = True

    def __init__(self, values: Values, site: Site) -> None:
        self._values, self._site, self._where = values, site, str(site)

    def __repr__(self) -> str:
        # By it the folder of a sweep knows this change; the clean inputs stand for the values.
        return f"PutBack at {self._where}"

    def __call__(self, value: Any, pass_and_call: PassAndCall) -> Any:
        """Return the value of the other run in the form of the present value.

        Raises:
            NotRecordedError: the other run has no such call.
            StructureError: the value of the other run has another form.
        """
        calls = self._values[self._where]
        number = 0 if self._site.call is not None else pass_and_call.call
        if number >= len(calls):
            raise NotRecordedError(
                f"{self._where} must be called as often in both runs, got"
                f" {plural(len(calls), 'call')} in the clean run, and more in the other."
                f"\nName one call, as in {self._where + '#0'!r}."
            )
        try:
            return recorded_like(value, calls[number], self._where)
        except StructureError:
            require_same_form(self._where, value, calls[number])  # says it of the clean run
            raise


def require_same_form(site: str, value: Any, goal: Any) -> None:
    """Refuse a clean value of another form.

    Raises:
        StructureError: structure, shape or dtype differ.
    """
    difference = describe.difference(value, goal)
    if difference:
        raise StructureError(
            f"the clean run must have values of the same form at {site}: {difference}."
            "\nGive `clean` and `inputs` of one shape."
        )
