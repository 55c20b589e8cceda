"""Bind the server to a free port and run it."""

from __future__ import annotations

import errno
import secrets
import socket
import threading
from typing import Any, final

from hookline.errors import InputError
from hookline.views.page.connection_limits import Waiting, protocol
from hookline.views.page.guard import Rules, is_loopback
from hookline.views.page.optional_imports import load
from hookline.views.page.server import make_app
from hookline.views.page.sources import OpenRecordings

_PORTS = 20  # the number of consecutive ports to try


@final
class Serving:
    """A server that is bound to its port and answers once it runs.

        >>> from hookline.views.page.sources import FolderSource, OpenRecordings
        >>> serving = Serving(OpenRecordings(FolderSource(tmp_path)), port=0)
        >>> serving.address.startswith("http://127.0.0.1:")
        True
        >>> serving.close()

    Args:
        shelf: the recordings to show.
        host: the address to bind to. Addresses other than loopback require a token.
        port: the port, or the next free one if it is taken; 0 picks any free port.
        waiting: the limits on idle connections; None means 10 seconds and 100 connections.

    Raises:
        InputError: no port is free, or this machine does not have the address.
        HooklineError: starlette, uvicorn, jinja2 or pillow is not installed.
    """

    def __init__(
        self,
        shelf: OpenRecordings,
        host: str = "127.0.0.1",
        port: int = 8765,
        waiting: Waiting | None = None,
    ) -> None:
        uvicorn = load("uvicorn")
        token = "" if is_loopback(host) else secrets.token_urlsafe(24)
        app = make_app(shelf, Rules(host, token))
        self._socket = _bound(host, port)
        self.port: int = self._socket.getsockname()[1]
        self.wanted_port = port
        shown = socket.gethostname() if host in ("0.0.0.0", "::", "") else host
        shown = f"[{shown}]" if ":" in shown else shown
        self.address = f"http://{shown}:{self.port}/" + (f"?token={token}" if token else "")
        config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off",
                                server_header=False, timeout_graceful_shutdown=1, ws="none",
                                http=protocol(waiting or Waiting()))  # fmt: skip
        self._server: Any = uvicorn.Server(config)
        self._thread: threading.Thread | None = None

    @property
    def moved(self) -> bool:
        """True if the wanted port was taken and another port is used."""
        return self.wanted_port not in (0, self.port)

    def run(self) -> None:
        """Serve until the process is interrupted (Ctrl-C)."""
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()

    def start(self) -> None:
        """Serve in a background thread until `close()`."""
        self._thread = threading.Thread(target=self.run, name="hookline-view", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the server after it has answered the requests in progress."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(5)
        self._socket.close()


def _bound(host: str, port: int) -> socket.socket:
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
        found = socket.socket(family, socket.SOCK_STREAM)
        # Without this, a port would stay taken for a minute after its server has ended.
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((host.strip("[]"), number))
            found.listen(128)
        except OSError as error:
            found.close()
            if error.errno == errno.EADDRINUSE and port:
                continue
            why = error.strerror or str(error)
            raise InputError(
                f"cannot listen on {host}, port {number}: {why}.\nGive --host with an address of"
                " this machine, and --port from 1024 up."
            ) from error
        return found
    raise InputError(
        f"ports {port} to {port + _PORTS - 1} are all taken.\nGive another port: --port"
        f" {port + 100}."
    )
