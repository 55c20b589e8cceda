"""Bind the server to a free port, and run it with limits on the connections that wait.

A client that sends half a request, or does not read its answer, costs the server a file descriptor.
So a connection that waits too long is closed. If too many wait, the oldest one is closed, so that a
complete request always finds room.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import socket
import threading
from typing import Any, final

from hookline.errors import InputError
from hookline.util.optional_imports import require
from hookline.views.page.asgi_app import SERVER_NEEDS, make_app
from hookline.views.page.request_guard import RequestRules, is_loopback
from hookline.views.page.served_folders import OpenRecordings

_PORTS = 20  # the number of consecutive ports to try
SECONDS = 10.0  # that a connection may wait for its client
_MOST = 100  # far below the usual limit of 1,024 file descriptors for a process


@final
class WaitLimits:
    """The connections that wait for their client, the oldest first.

    Args:
        seconds: the longest wait; data that arrives meanwhile does not extend it.
        most: the most connections that may wait; beyond it, the oldest is closed.
    """

    def __init__(self, seconds: float = SECONDS, most: int = _MOST) -> None:
        self._seconds = seconds
        self._most = most
        self._timers: dict[asyncio.Transport, asyncio.TimerHandle] = {}

    def start_timer(self, transport: asyncio.Transport) -> None:
        """Start waiting for a client; a no-op if the wait has already begun."""
        if transport in self._timers:
            return
        loop = asyncio.get_running_loop()
        self._timers[transport] = loop.call_later(self._seconds, self._abort, transport)
        if len(self._timers) > self._most:
            self._abort(next(iter(self._timers)))

    def stop_timer(self, transport: asyncio.Transport) -> None:
        """Stop waiting for a client that has sent its request, read its answer, or left."""
        timer = self._timers.pop(transport, None)
        if timer is not None:
            timer.cancel()

    def _abort(self, transport: asyncio.Transport) -> None:
        self.stop_timer(transport)
        transport.abort()  # close() would wait until the client has read the buffer


def limited_protocol(limits: WaitLimits) -> type[Any]:
    """Create uvicorn's protocol class with limits on waiting connections."""
    base: type[Any] = require("uvicorn.protocols.http.h11_impl", *SERVER_NEEDS).H11Protocol

    class LimitedProtocol(base):  # type: ignore[misc]
        """A connection on which the server either answers a request or waits for the client."""

        is_full = False  # whether the write buffer is full until the client reads

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            limits.start_timer(transport)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._update_timer()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._update_timer()

        def pause_writing(self) -> None:
            super().pause_writing()
            self.is_full = True
            limits.start_timer(self.transport)

        def resume_writing(self) -> None:
            super().resume_writing()
            self.is_full = False
            self._update_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            limits.stop_timer(self.transport)
            super().connection_lost(exc)

        def _update_timer(self) -> None:
            """Wait for the client unless a request is being answered, which has no limit."""
            is_answering = self.cycle is not None and not self.cycle.response_complete
            if is_answering and not self.is_full:
                limits.stop_timer(self.transport)
            elif not self.transport.is_closing():
                limits.start_timer(self.transport)

    return LimitedProtocol


@final
class LimitedServer:
    """A server that is bound to its port and answers once it runs.

        >>> from hookline.views.page.served_folders import FolderSource, OpenRecordings
        >>> serving = LimitedServer(OpenRecordings(FolderSource(tmp_path)), port=0)
        >>> serving.address.startswith("http://127.0.0.1:")
        True
        >>> serving.close()

    Args:
        recordings: the recordings to show.
        host: the address to bind to. Addresses other than loopback require a token.
        port: the port, or the next free one if it is taken; 0 picks any free port.
        limits: the limits on idle connections; None means 10 seconds and 100 connections.

    Raises:
        InputError: no port is free, or this machine does not have the address.
        HooklineError: starlette, uvicorn, jinja2 or pillow is not installed.
    """

    def __init__(
        self,
        recordings: OpenRecordings,
        host: str = "127.0.0.1",
        port: int = 8765,
        limits: WaitLimits | None = None,
    ) -> None:
        uvicorn = require("uvicorn", *SERVER_NEEDS)
        token = "" if is_loopback(host) else secrets.token_urlsafe(24)
        app = make_app(recordings, RequestRules(host, token))
        self._socket = _listen_on_free_port(host, port)
        self.port: int = self._socket.getsockname()[1]
        self.wanted_port = port
        name = socket.gethostname() if host in ("0.0.0.0", "::", "") else host
        name = f"[{name}]" if ":" in name else name
        self.address: str = f"http://{name}:{self.port}/" + (f"?token={token}" if token else "")
        config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off",
                                server_header=False, timeout_graceful_shutdown=1, ws="none",
                                http=limited_protocol(limits or WaitLimits()))  # fmt: skip
        self._server: Any = uvicorn.Server(config)
        self._thread: threading.Thread | None = None

    @property
    def is_on_other_port(self) -> bool:
        """True if the wanted port was taken and another port is used."""
        return self.wanted_port not in (0, self.port)

    def serve(self) -> None:
        """Serve until the process is interrupted (Ctrl-C)."""
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()

    def start_in_thread(self) -> None:
        """Serve in a background thread until `close()`."""
        self._thread = threading.Thread(target=self.serve, name="hookline-view", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the server after it has answered the requests in progress."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(5)
        self._socket.close()


def _listen_on_free_port(host: str, port: int) -> socket.socket:
    """Open a socket that listens on a port, or on the first free port after it.

    Raises:
        InputError: no port is free, this machine does not have the address, or the port is not
            allowed.
    """
    if not 0 <= port <= 65535:
        raise InputError(
            f"port must be from 0 to 65535, got {port}.\nGive --port 8765, or --port 0 for any."
        )
    for number in range(port, min(port + _PORTS, 65536) if port else 1):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        # Without this, a port would stay taken for a minute after its server has ended. On Windows
        # two servers could then listen on one port.
        if os.name != "nt":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host.strip("[]"), number))
            listener.listen(128)
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRINUSE and port:
                continue
            raise InputError(
                f"cannot listen on {host}, port {number}: {error.strerror or error}."
                "\nGive --host with an address of this machine, and --port from 1024 up."
            ) from error
        return listener
    raise InputError(
        f"ports {port} to {port + _PORTS - 1} are all taken.\nGive another port: --port"
        f" {port + 100}."
    )
