"""A handle removes the hooks that one call on a line registered, before the line ends.

The line holds the hooks. A handle refers to them weakly, so that it keeps neither the line nor the
model alive.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import Self, final

from hookline.display.text import plural
from hookline.engine.line.attachment import Attachment, retry_interrupted
from hookline.engine.line.registration import Entry, Registrations
from hookline.engine.selection.site import Site
from hookline.engine.taps.base import Tap


@final
@dataclass(slots=True, weakref_slot=True, eq=False)
class CallHooks:
    """The hooks that one call on a line registered; the line holds this object."""

    registrations: Registrations  # the line's registrations
    attached: list[Attachment]  # all attachments of the line
    lock: threading.RLock  # held while hooks of the line are registered, in any thread
    taps: list[Tap] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)
    is_on: bool = False

    def store_hooks(self, taps: list[Tap], entries: list[Entry]) -> None:
        """Store the taps of the call and the entries of their hooks."""
        self.taps, self.entries = taps, entries
        self.sites += [tap.site for tap in taps]
        self.is_on = True

    def remove(self) -> None:
        """Remove these hooks, also if interrupted meanwhile. Idempotent."""
        with self.lock:
            retry_interrupted(self._remove)

    def _remove(self) -> None:
        if not self.is_on:
            return
        # First, so that any hook of a tap that is still in place does nothing from here on.
        for tap in self.taps:
            tap.retire()
        self.registrations.remove_entries(self._removable_entries())
        for attachment in self.attached:
            attachment.drop_taps(self.taps)
        self.is_on = False
        self.taps, self.entries = [], []

    def _removable_entries(self) -> list[Entry]:
        """Return the entries that can be removed at once.

        In a running call, a hook that undoes another hook's work stays until that call ends.
        """
        off = self.entries
        for tap in self.taps:
            hook = tap.closing_hook()
            if hook is not None:
                closers = self.registrations.entries_of([tap], hook=hook)
                tap.call_when_closed(partial(self.registrations.remove_entries, closers))
                off = [entry for entry in off if all(entry is not closer for closer in closers)]
        return off


@final
class HookHandle:
    """A handle to the hooks of one call on a line, like torch's `RemovableHandle`.

        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> with hl.attach(model) as line:
        ...     handle = line.forward("*", lambda module, args, output: print("ran"))
        ...     _ = model(torch.ones(1, 2))
        ...     handle.remove()
        ...     _ = model(torch.ones(1, 2))
        ran
        ran
        >>> handle
        HookHandle(forward, 2 sites, off)

    A handle is also a context manager: `with line.forward(...):` removes the hooks at the end of
    the block. The line removes all its hooks when it ends. A handle does not keep the line alive.
    """

    __slots__ = ("__weakref__", "_kind", "_registration", "_sites")

    def __init__(self, kind: str, registration: CallHooks) -> None:
        self._kind = kind
        self._sites = registration.sites  # plain data, which outlives the line
        self._registration = weakref.ref(registration)

    def remove(self) -> None:
        """Remove the hooks of this call. Idempotent; a no-op once the line has ended."""
        registration = self._registration()
        if registration is not None:
            registration.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        retry_interrupted(self.remove)

    def __repr__(self) -> str:
        registration = self._registration()
        state = "on" if registration is not None and registration.is_on else "off"
        return f"HookHandle({self._kind}, {plural(len(self._sites), 'site')}, {state})"
