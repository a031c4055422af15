"""Request heads that another server might read in another way: refused, never half understood."""

from __future__ import annotations

import json
import logging
import select
import socket
import threading
from typing import Any

import pytest

from tests.api.client import Served, read_reply
from tests.fakes import hangs_after
from tests.lockstep.fake_pod import in_background

HIDDEN = b"GET /version HTTP/1.1\r\nConnection: close\r\n\r\n"
BODY = json.dumps({"prompt": "x", "max_tokens": 5}).encode()


def answer_to(served: Served, data: bytes) -> bytes:
    with served.raw(data) as sock:
        sock.shutdown(socket.SHUT_WR)
        got = b""
        while piece := sock.recv(65536):
            got += piece
    return got


@pytest.mark.parametrize(
    "line",
    [
        b"Content-Length : %d",  # a blank before the colon
        b" Content-Length: %d",  # a continuation of nothing
        b"X: y\r\n Content-Length: %d",  # an obsolete continuation
        b"no header\r\nContent-Length: %d",
        b": nameless\r\nContent-Length: %d",
        b"X: y\rContent-Length: %d",  # a bare CR, which the parser takes for a line's end
        b"X: y\0\r\nContent-Length: %d",
        b"N\xc3\xa4me: y\r\nContent-Length: %d",
    ],
)
def test_a_body_is_never_read_as_the_next_request(served: Served, line: bytes) -> None:
    head = b"POST /ping HTTP/1.1\r\nHost: x\r\n" + line % len(HIDDEN) + b"\r\n\r\n"
    got = answer_to(served, head + HIDDEN)
    assert got.startswith(b"HTTP/1.1 400"), got[:200]
    assert b"bad header line" in got
    assert got.count(b"HTTP/1.1") == 1 and b"Connection: close" in got
    served.alive()


def test_a_head_that_is_cut_off_is_no_request(served: Served) -> None:
    got = answer_to(served, b"POST /ping HTTP/1.1\r\nHost: x\r\nContent-Le")
    assert got.startswith(b"HTTP/1.1 400")
    served.alive()


def test_ordinary_headers_pass(served: Served) -> None:
    odd = b"X-Empty:\r\nx!#$%&'*+-.^_`|~1: a:b \xe4\r\nHost:x\n"
    got = answer_to(served, b"GET /version HTTP/1.1\r\n" + odd + b"\r\n")
    assert got.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("data", [b"hello\r\n\r\n", b"\x16\x03\x01\x02\r\n", b"A B C D\r\n\r\n"])
def test_nonsense_leaves_no_trace_in_the_log(
    served: Served, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert answer_to(served, data).startswith(b"HTTP/1.1 400")
    assert [r.levelname for r in caplog.records if r.levelno > logging.INFO] == []
    assert any("400" in r.getMessage() for r in caplog.records if r.name == "k3serve.access")


def test_utf8_has_two_names(served: Served) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json; charset=utf8\r\n"
    got = answer_to(served, head + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
    assert got.startswith(b"HTTP/1.1 200")


@pytest.mark.skipif(not hasattr(select, "POLLRDHUP"), reason="only Linux can tell")
def test_a_client_that_leaves_behind_pipelined_bytes_is_seen(served: Served) -> None:
    """The bytes sent ahead must not hide that it closed: its slot would work to the end."""
    gate = threading.Event()
    served.executor.script = hangs_after(list(b"a"), gate)
    ask = b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
    with served.raw(ask) as sock:
        served.executor.wait_for(lambda e: len(e.submitted) == 1)
        sock.sendall(ask)
    try:
        served.executor.wait_for(lambda e: len(e.cancelled) == 1)
    finally:
        gate.set()


def test_shutdown_waits_for_answers_that_are_under_way(start_server: Any) -> None:
    """A drained server's last answers are complete in memory, but still to be written."""
    served = start_server()
    gate = threading.Event()
    served.executor.script = hangs_after(list(b"a"), gate)
    ask = b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
    with served.raw(ask) as sock, served.raw():  # and one connection without a request
        served.executor.wait_for(lambda e: len(e.submitted) == 1)
        ended = in_background(served.server.shutdown, 30.0)
        with pytest.raises(TimeoutError):
            ended.result(0.3)
        gate.set()
        ended.result(20)
        assert read_reply(sock).status == 200
