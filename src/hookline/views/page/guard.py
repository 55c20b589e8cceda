"""Who may ask the server for pages: Host headers, a token, and what a browser may do.

A page of another site can make a browser send requests to a loopback address, and can give that
address a name of its own; so only requests for a name that is ours are answered. Whoever else is
on the network needs the token.
"""

from __future__ import annotations

import hmac
import ipaddress
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Any, final
from urllib.parse import parse_qsl, quote, urlencode

COOKIE = "hookline-token"
_LOCAL = {"localhost", "127.0.0.1", "[::1]"}

_POLICY = (
    "default-src 'none'; img-src 'self' data:; style-src 'unsafe-inline'; connect-src 'self';"
    " form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


def is_loopback(host: str) -> bool:
    """Whether an address that a server binds to can be reached from this machine alone.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@final
@dataclass(frozen=True)
class Rules:
    """Whom the server answers.

    Args:
        host: the address that it is bound to.
        token: what must be shown; empty asks for none.
    """

    host: str
    token: str = ""

    def allows_host(self, header: str) -> bool:
        """Whether a Host header names this server: a loopback name, or the address bound to.

        A server that is bound to every address of a machine cannot know its names; there the token
        keeps others out, since a browser sends its cookie to the name alone that it came from.
        """
        name = header.rpartition(":")[0] if header.rpartition(":")[2].isdecimal() else header
        if is_loopback(self.host):
            return name.lower() in _LOCAL | {self.host, f"[{self.host}]"}
        every = self.host in ("0.0.0.0", "::", "")
        return every or name.lower() in _LOCAL | {self.host.lower(), f"[{self.host}]"}

    def knows(self, token: str) -> bool:
        """Whether this is the token, compared in the same time whatever it is."""
        return hmac.compare_digest(token.encode("utf-8", "replace"), self.token.encode())


@final
class Guard:
    """Stands before an app: answers only what the rules allow, and adds the headers.

    Args:
        app: the app, as ASGI has it.
        rules: whom to answer.
        scripts: which scripts a browser may run, as a policy names them.
    """

    def __init__(self, app: Any, rules: Rules, scripts: str) -> None:
        self._app = app
        self._rules = rules
        policy = f"{_POLICY}; script-src {scripts}"
        self._headers = {**_HEADERS, "content-security-policy": policy}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            return  # no websocket, nothing to start up
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if not self._rules.allows_host(headers.get(b"host", "")):
            text = (
                "hookline: this address is not the server's own. Open the one that it printed,"
                " or start it with the name in front of it: hookline view DIR --host NAME."
            )
            await _answer(send, 421, text)
            return
        if scope["method"] not in ("GET", "HEAD"):
            await _answer(send, 405, "hookline: pages are only read here.")
            return
        if self._rules.token:
            pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
            given = dict(pairs).get("token", "")
            if given and self._rules.knows(given):
                rest = urlencode([pair for pair in pairs if pair[0] != "token"])
                await _welcome(send, scope["path"], rest, given)
                return
            if not self._rules.knows(_cookie(headers.get(b"cookie", ""))):
                text = "hookline: open the whole address that was printed, with its token."
                await _answer(send, 403, text)
                return

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *_encoded(self._headers)]}
            await send(message)

        await self._app(scope, receive, with_headers)


def _cookie(header: str) -> str:
    try:
        found = SimpleCookie(header).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found is not None else ""


async def _welcome(send: Any, path: str, query: str, token: str) -> None:
    """Keep the token in a cookie, and take it out of the address, which people pass on."""
    # To a browser `//name` and `/\\name` are other servers, and a line break ends a header.
    where = "/" + quote(path.lstrip("/"), errors="replace") + (f"?{query}" if query else "")
    cookie = f"{COOKIE}={token}; HttpOnly; SameSite=Strict; Path=/"
    await _answer(send, 303, "", {"location": where, "set-cookie": cookie})


async def _answer(send: Any, status: int, text: str, more: dict[str, str] | None = None) -> None:
    headers = {"content-type": "text/plain; charset=utf-8", **_HEADERS, **(more or {})}
    await send({"type": "http.response.start", "status": status, "headers": _encoded(headers)})
    await send({"type": "http.response.body", "body": text.encode()})


def _encoded(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
