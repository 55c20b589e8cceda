"""Limit the connections that wait for their client, in time and in number.

A client that sends half a request, or does not read its answer, costs the server a file descriptor.
So a connection that waits too long is closed. If too many wait, the oldest one is closed, so that a
complete request always finds room.
"""

from __future__ import annotations

import asyncio
from typing import Any, final

from hookline.views.page.optional_imports import load

SECONDS = 10.0
_MOST = 100  # far below the usual limit of 1,024 file descriptors for a process


@final
class Waiting:
    """The connections that wait for their client, the oldest first.

    Args:
        seconds: the longest wait; data that arrives meanwhile does not extend it.
        most: the most connections that may wait; beyond it, the oldest is closed.
    """

    def __init__(self, seconds: float = SECONDS, most: int = _MOST) -> None:
        self._seconds = seconds
        self._most = most
        self._timers: dict[asyncio.Transport, asyncio.TimerHandle] = {}

    def begin(self, transport: asyncio.Transport) -> None:
        """Start waiting for a client; a no-op if the wait has already begun."""
        if transport in self._timers:
            return
        loop = asyncio.get_running_loop()
        self._timers[transport] = loop.call_later(self._seconds, self._give_up, transport)
        if len(self._timers) > self._most:
            self._give_up(next(iter(self._timers)))

    def end(self, transport: asyncio.Transport) -> None:
        """Stop waiting for a client that has sent its request, read its answer, or left."""
        timer = self._timers.pop(transport, None)
        if timer is not None:
            timer.cancel()

    def _give_up(self, transport: asyncio.Transport) -> None:
        self.end(transport)
        transport.abort()  # close() would wait until the client has read the buffer


def protocol(waiting: Waiting) -> type[Any]:
    """Create uvicorn's protocol class with limits on waiting connections.

    Args:
        waiting: the connections of the server.

    Raises:
        HooklineError: uvicorn is not installed.
    """
    base: type[Any] = load("uvicorn.protocols.http.h11_impl").H11Protocol

    class Patient(base):  # type: ignore[misc]
        """A connection on which the server either answers a request or waits for the client."""

        is_full = False  # whether the write buffer is full until the client reads

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            waiting.begin(transport)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._look()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._look()

        def pause_writing(self) -> None:
            super().pause_writing()
            self.is_full = True
            waiting.begin(self.transport)

        def resume_writing(self) -> None:
            super().resume_writing()
            self.is_full = False
            self._look()

        def connection_lost(self, exc: Exception | None) -> None:
            waiting.end(self.transport)
            super().connection_lost(exc)

        def _look(self) -> None:
            """Wait for the client unless a request is being answered, which has no limit."""
            is_answering = self.cycle is not None and not self.cycle.response_complete
            if is_answering and not self.is_full:
                waiting.end(self.transport)
            elif not self.transport.is_closing():
                waiting.begin(self.transport)

    return Patient
