"""The server in a process: a port that is free, a token, an address to open."""

from __future__ import annotations

import errno
import secrets
import socket
import threading
from typing import Any, final

from hookline.errors import InputError
from hookline.views.page.extras import load
from hookline.views.page.guard import Rules, is_loopback
from hookline.views.page.server import make_app
from hookline.views.page.sources import OpenRecordings
from hookline.views.page.waiting import Waiting, protocol

_PORTS = 20  # how many are tried, one after the other


@final
class Serving:
    """A server that is bound to its port, and answers once it runs.

        >>> from hookline.views.page.sources import FolderSource, OpenRecordings
        >>> serving = Serving(OpenRecordings(FolderSource(tmp_path)), port=0)
        >>> serving.address.startswith("http://127.0.0.1:")
        True
        >>> serving.close()

    Args:
        shelf: what is shown.
        host: the address to bind to. Others than loopback ones ask for a token.
        port: the port; if it is taken, the next that is free. 0 is any.
        waiting: how long clients are waited for, and how many; None is 10 seconds, and 100.

    Raises:
        InputError: no port is free, or there is no such host.
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
        """Whether another port than the wanted one had to be taken."""
        return self.wanted_port not in (0, self.port)

    def run(self) -> None:
        """Answer until the process is told to end (Ctrl-C)."""
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()

    def start(self) -> None:
        """Answer in a thread of its own, until `close()`."""
        self._thread = threading.Thread(target=self.run, name="hookline-view", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it; what is being answered is answered first."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(5)
        self._socket.close()


def _bound(host: str, port: int) -> socket.socket:
    """A socket that listens on the port, or on the first one after it that is free.

    Raises:
        InputError: none is free, the address is not this machine's, or a port is not allowed.
    """
    if not 0 <= port <= 65535:
        raise InputError(
            f"port must be from 0 to 65535, got {port}.\nGive --port 8765, or --port 0 for any."
        )
    for number in range(port, min(port + _PORTS, 65536) if port else 1):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        found = socket.socket(family, socket.SOCK_STREAM)
        # Without this a port would stay taken for a minute after a server on it has ended.
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
        f"ports {port} to {port + _PORTS - 1} are all taken.\nGive another: --port {port + 100}."
    )
