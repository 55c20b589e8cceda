"""Connections that are waited for: with real sockets, closed by the server and not by a clock."""

from __future__ import annotations

import socket
from threading import Event

import pytest

from hookline.views.page import limited_server
from hookline.views.page.asgi_app import PageHandlers
from hookline.views.page.limited_server import SECONDS, WaitLimits

SOON = 0.2
NEVER = 10_000.0
REQUEST = b"GET /state HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@pytest.fixture
def connect():
    """Open a connection to a server; all are closed at the end."""
    opened = []

    def connect(server):
        found = socket.create_connection(("127.0.0.1", server.serving.port), timeout=30)
        opened.append(found)
        return found

    yield connect
    for one in opened:
        one.close()


def rest(connection):
    """What comes until the server closes the connection."""
    found = b""
    try:
        while part := connection.recv(65536):
            found += part
    except ConnectionResetError:
        pass
    return found


def answer(connection):
    """The head of one answer."""
    found = b""
    while b"\r\n\r\n" not in found:
        part = connection.recv(65536)
        assert part, "closed before the answer"
        found += part
    return found


@pytest.mark.slow
@pytest.mark.parametrize("sent", [b"", b"G", REQUEST[:-2], b"GET / HTTP/1.1\r\nX: " + b"y" * 9999])
def test_half_a_request_is_not_waited_for_longer_than_said(served, runs, connect, sent):
    connection = connect(served(runs / "a", waiting=WaitLimits(SOON)))
    connection.sendall(sent)
    assert rest(connection) == b""


@pytest.mark.slow
def test_a_request_that_trickles_in_gets_no_more_time(served, runs, connect):
    connection = connect(served(runs / "a", waiting=WaitLimits(SOON)))
    connection.settimeout(SOON / 10)
    for _ in range(1000):
        try:
            connection.sendall(b"G")
            assert connection.recv(1) == b""
            break
        except TimeoutError:
            continue
        except (ConnectionResetError, BrokenPipeError):
            break
    else:
        pytest.fail("the connection is open after a hundred times its time")


@pytest.mark.slow
def test_half_a_second_request_is_not_waited_for_either(served, runs, connect):
    connection = connect(served(runs / "a", waiting=WaitLimits(SOON)))
    connection.sendall(REQUEST)
    assert answer(connection).startswith(b"HTTP/1.1 200")
    connection.sendall(REQUEST[:9])
    assert b"HTTP/1.1" not in rest(connection)


@pytest.mark.slow
def test_the_body_of_a_refused_request_is_not_waited_for(served, runs, connect):
    connection = connect(served(runs / "a", waiting=WaitLimits(SOON)))
    connection.sendall(b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99\r\n\r\nx")
    assert rest(connection).startswith(b"HTTP/1.1 405")


@pytest.mark.slow
def test_an_answer_that_nobody_reads_is_not_kept(served, runs, connect):
    server = served(runs / "a", waiting=WaitLimits(SOON))
    connection = connect(server)
    # The buffers of the two sockets hold some of the answers; the server keeps the others.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    page = REQUEST.replace(b"/state", b"/")
    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        while True:  # what the buffers hold is sent before the server's time is over
            connection.sendall(page)


@pytest.mark.slow
def test_many_half_open_connections_leave_room_for_a_request(served, runs, connect):
    server = served(runs / "a", waiting=WaitLimits(NEVER, 20))
    idle = [connect(server) for _ in range(60)]
    for connection in idle:
        connection.sendall(REQUEST[:-2])
    assert server.get().status == 200
    for connection in idle[:40]:
        assert rest(connection) == b""  # they have waited longest
    idle[-1].sendall(REQUEST[-2:])
    assert answer(idle[-1]).startswith(b"HTTP/1.1 200")


@pytest.mark.slow
def test_a_request_is_answered_however_long_that_takes(served, runs, connect, monkeypatch):
    may_go_on, state = Event(), PageHandlers.recording_state

    def slow(pages, parameters):
        assert may_go_on.wait(30)
        return state(pages, parameters)

    monkeypatch.setattr(PageHandlers, "recording_state", slow)
    server = served(runs / "a", waiting=WaitLimits(SOON))
    asks, idle = connect(server), connect(server)
    asks.sendall(REQUEST)
    assert rest(idle) == b""
    may_go_on.set()  # by now it has taken longer than an idle connection is given
    assert answer(asks).startswith(b"HTTP/1.1 200")


@pytest.mark.slow
def test_the_time_is_ten_seconds_unless_said():
    assert SECONDS == 10
    assert WaitLimits()._seconds == SECONDS


@pytest.mark.parametrize(("system", "is_shared"), [("posix", True), ("nt", False)])
def test_only_where_it_is_safe_a_port_is_taken_again(monkeypatch, system, is_shared):
    with monkeypatch.context() as context:
        context.setattr(limited_server.os, "name", system)
        listener = limited_server._listen_on_free_port("127.0.0.1", 0)
    with listener:
        assert bool(listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)) is is_shared
