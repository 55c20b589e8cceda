"""RequestGuard the server: check the Host header and the token, and set security headers.

A page of another site can make a browser send requests to a loopback address, also under a name of
its own (DNS rebinding). So the server answers only requests whose Host header is its own name.
Other machines on the network need the token.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Any, final
from urllib.parse import parse_qsl, quote, urlencode

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
    """Return whether a server bound to an address can be reached from this machine only.

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
class RequestRules:
    """The rules for requests that the server answers."""

    host: str  # the address that the server is bound to
    token: str = ""  # the token that a client must send; empty requires none

    def allows_host(self, header: str) -> bool:
        """Return whether a Host header names this server: a loopback name or the bound address.

        A server that is bound to every address of a machine cannot know all its names, so it
        allows every Host header. The token still protects it, because a browser sends a cookie only
        to the name that set it.
        """
        name = header.rpartition(":")[0] if header.rpartition(":")[2].isdecimal() else header
        if is_loopback(self.host):
            return name.lower() in _LOCAL | {self.host, f"[{self.host}]"}
        every = self.host in ("0.0.0.0", "::", "")
        return every or name.lower() in _LOCAL | {self.host.lower(), f"[{self.host}]"}

    @property
    def cookie_name(self) -> str:
        """The name of the cookie that holds the token.

        Each token has a name of its own: browsers send a cookie to all ports of a host, so servers
        beside each other would overwrite a cookie of one name.
        """
        return f"hookline-{hashlib.sha256(self.token.encode()).hexdigest()[:16]}"

    def is_token(self, token: str) -> bool:
        """Return whether a text is the token, compared in constant time."""
        return hmac.compare_digest(token.encode("utf-8", "replace"), self.token.encode())


@final
class RequestGuard:
    """An ASGI middleware that refuses requests against the rules and adds security headers.

    Args:
        app: the ASGI app.
        rules: the rules.
        scripts: the value of `script-src` in the content security policy.
    """

    def __init__(self, app: Any, rules: RequestRules, scripts: str) -> None:
        self._app = app
        self._rules = rules
        policy = f"{_POLICY}; script-src {scripts}"
        self._headers = {**_HEADERS, "content-security-policy": policy}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer or refuse a request."""
        if scope["type"] != "http":
            return  # the server has neither websockets nor a lifespan
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if not self._rules.allows_host(headers.get(b"host", "")):
            text = (
                "hookline: this address is not the server's own. Open the one that it printed,"
                " or start the server with this name: hookline view DIR --host NAME."
            )
            await _respond(send, 421, text)
            return
        if scope["method"] not in ("GET", "HEAD"):
            await _respond(send, 405, "hookline: pages are only read here.")
            return
        if self._rules.token:
            pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
            token = dict(pairs).get("token", "")
            if token and self._rules.is_token(token):
                rest = urlencode([pair for pair in pairs if pair[0] != "token"])
                await _set_cookie_and_redirect(
                    send, scope["path"], rest, f"{self._rules.cookie_name}={token}"
                )
                return
            if not self._rules.is_token(
                _read_cookie(headers.get(b"cookie", ""), self._rules.cookie_name)
            ):
                text = "hookline: open the whole address that was printed, with its token."
                await _respond(send, 403, text)
                return

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {
                    **message,
                    "headers": [*message["headers"], *_encode_headers(self._headers)],
                }
            await send(message)

        await self._app(scope, receive, with_headers)


def _read_cookie(header: str, name: str) -> str:
    try:
        cookie = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return cookie.value if cookie is not None else ""


async def _set_cookie_and_redirect(send: Any, path: str, query: str, cookie: str) -> None:
    """Set the token as a cookie and redirect to the address without it, which is safe to share."""
    # A browser reads `//name` and `/\\name` as other servers, and a newline ends a header.
    where = "/" + quote(path.lstrip("/"), errors="replace") + (f"?{query}" if query else "")
    cookie = f"{cookie}; HttpOnly; SameSite=Strict; Path=/"
    await _respond(send, 303, "", {"location": where, "set-cookie": cookie})


async def _respond(send: Any, status: int, text: str, extra: dict[str, str] | None = None) -> None:
    headers = {"content-type": "text/plain; charset=utf-8", **_HEADERS, **(extra or {})}
    await send(
        {"type": "http.response.start", "status": status, "headers": _encode_headers(headers)}
    )
    await send({"type": "http.response.body", "body": text.encode()})


def _encode_headers(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
