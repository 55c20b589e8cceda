"""Connections on which the server waits for the client: for a while, and not for too many.

A client that sends half a request, or reads no answer, costs nothing to its sender, and a file
descriptor here. So a connection is closed when it has been waited for too long, and the one that
waits longest makes room for a new one: there is always room for a whole request.
"""

from __future__ import annotations

import asyncio
from typing import Any, final

from hookline.views.page.extras import load

SECONDS = 10.0
_MOST = 100  # connections that wait; the usual limit of a process is 1,024 descriptors


@final
class Waiting:
    """The connections that are waited for, the longest first.

    Args:
        seconds: how long each is waited for, from when the wait began, whatever it sends.
        most: how many, before the first is closed.
    """

    def __init__(self, seconds: float = SECONDS, most: int = _MOST) -> None:
        self._seconds = seconds
        self._most = most
        self._timers: dict[asyncio.Transport, asyncio.TimerHandle] = {}

    def begin(self, transport: asyncio.Transport) -> None:
        """Wait for a client, unless that has begun."""
        if transport in self._timers:
            return
        loop = asyncio.get_running_loop()
        self._timers[transport] = loop.call_later(self._seconds, self._give_up, transport)
        if len(self._timers) > self._most:
            self._give_up(next(iter(self._timers)))

    def end(self, transport: asyncio.Transport) -> None:
        """The client has done its part, or is gone."""
        timer = self._timers.pop(transport, None)
        if timer is not None:
            timer.cancel()

    def _give_up(self, transport: asyncio.Transport) -> None:
        self.end(transport)
        transport.abort()  # close() would wait until the client has read what is buffered


def protocol(waiting: Waiting) -> type[Any]:
    """Make uvicorn's protocol for a connection, with a limit on the waits.

    Args:
        waiting: the connections of the server.

    Raises:
        HooklineError: uvicorn is not installed.
    """
    base: type[Any] = load("uvicorn.protocols.http.h11_impl").H11Protocol

    class Patient(base):  # type: ignore[misc]
        """One connection; the server answers a request, or waits for the client."""

        is_full = False  # whether the client has to read before more can be written

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
            """A request that has arrived is answered, however long that takes."""
            is_answering = self.cycle is not None and not self.cycle.response_complete
            if is_answering and not self.is_full:
                waiting.end(self.transport)
            elif not self.transport.is_closing():
                waiting.begin(self.transport)

    return Patient
