"""Connections run out, requests run out of time, readers fall behind: who waits gives way."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest

from k3serve.api import connections
from k3serve.api.connections import Connections, Stage
from k3serve.types import TokenEvent
from tests.api.client import Served, joined, read_all, read_reply
from tests.fakes import events_of, hangs_after

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
MODELS = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"


def post(body: bytes) -> bytes:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def until(served: Served, stage: Stage, count: int) -> None:
    """A client cannot see when the thread of its connection has moved on."""
    deadline = time.monotonic() + 20
    while sum(c.stage is stage for c in served.server.connections.all()) < count:
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


ASK = post(b'{"prompt": "x", "max_tokens": 5}')


def test_the_oldest_idle_connection_gives_way(start_server: Any) -> None:
    served = start_server(max_connections=2)
    with served.raw(HEALTH) as one, served.raw() as two:
        assert read_reply(one).status == 200
        until(served, Stage.IDLE, 2)
        two.sendall(HEALTH)
        assert read_reply(two).status == 200
        with served.raw(MODELS) as three:
            assert read_reply(three).status == 200
            assert one.recv(1) == b""  # closed without a word, as after any idle time
            two.sendall(HEALTH)
            assert read_reply(two).status == 200


def test_600_idle_connections_shut_nobody_out(start_server: Any) -> None:
    served = start_server(max_connections=32)
    idle = []
    try:
        for _ in range(600):
            idle.append(socket.create_connection(("127.0.0.1", served.server.port)))
        served.alive()
    finally:
        for sock in idle:
            sock.close()


def test_health_answers_where_all_connections_are_busy(start_server: Any) -> None:
    served = start_server(max_connections=2)
    gate = threading.Event()
    served.executor.script = hangs_after(list(b"a"), gate)
    with served.raw(ASK) as one, served.raw(ASK) as two:
        served.executor.wait_for(lambda e: len(e.submitted) == 2)
        assert served.get("/health").status == 200
        refused = served.get("/v1/models")
        assert refused.status == 503 and refused.headers["Retry-After"] == "1"
        assert refused.error["code"] == "too_many_connections"
        assert refused.headers["Connection"] == "close"
        gate.set()
        assert read_reply(one).status == 200 and read_reply(two).status == 200


def test_slow_heads_give_way(start_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "SLOW_S", -1.0)  # every request that is arriving is slow
    served = start_server(max_connections=2)
    with served.raw(b"GET /hea") as one, served.raw(b"GET /hea"):
        until(served, Stage.RECEIVING, 2)
        served.alive()  # on two connections, and the first may be there still when the second comes
        answer = read_all(one)
    assert answer == b"" or (answer.startswith(b"HTTP/1.1 503") and b"Retry-After" in answer)


def test_who_is_answered_never_gives_way() -> None:
    places = Connections(limit=1, reserve=1)
    pairs = [socket.socketpair() for _ in range(3)]
    try:
        first = places.admit(pairs[0][0])
        assert first is not None and places.move(first, Stage.ANSWERING)
        second = places.admit(pairs[1][0])
        assert second is not None and second.reserve
        assert places.move(second, Stage.ANSWERING)
        assert places.admit(pairs[2][0]) is None and not places.make_room()
        places.leave(pairs[0][0])
        third = places.admit(pairs[2][0])
        assert third is not None and not third.reserve
    finally:
        for pair in pairs:
            pair[0].close()
            pair[1].close()


def test_head_larger_than_any(served: Served) -> None:
    lines = b"".join(b"X-%d: %b\r\n" % (i, b"y" * 60_000) for i in range(20))
    with served.raw(b"GET /health HTTP/1.1\r\n" + lines) as sock:
        assert sock.recv(12) == b"HTTP/1.1 431"
    served.alive()


@pytest.mark.parametrize("stream", [b"true", b"false"])
def test_time_out_before_the_first_token(served: Served, stream: bytes) -> None:
    served.executor.script = hangs_after([], threading.Event())
    body = b'{"prompt": "x", "max_tokens": 5, "timeout": 0.05, "stream": %b}' % stream
    got = served.ask("POST", "/v1/completions", body)
    assert got.status == 504 and got.headers["x-should-retry"] == "false"
    assert got.error["code"] == "timeout" and got.error["type"] == "timeout_error"
    assert served.executor.cancelled == [served.executor.submitted[0].id]
    served.alive()


def test_time_out_in_mid_stream_is_a_frame_and_no_clean_end(start_server: Any) -> None:
    served = start_server(request_timeout_s=0.2)
    served.executor.script = hangs_after(list(b"ab"), threading.Event())
    body = b'{"prompt": "x", "max_tokens": 5, "stream": true, "timeout": 60}'
    answer = served.exchange(post(body))
    assert b'"code":"timeout"' in answer and b"[DONE]" not in answer
    assert not answer.endswith(b"0\r\n\r\n")
    assert served.executor.cancelled == [served.executor.submitted[0].id]


@pytest.mark.parametrize("value", [b"0", b"-1", b"1e9", b'"5"', b"true"])
def test_time_out_must_be_seconds(served: Served, value: bytes) -> None:
    got = served.ask("POST", "/v1/completions", b'{"prompt": "x", "timeout": %b}' % value)
    assert got.status == 400 and got.error["param"] == "timeout"


def test_a_reader_too_far_behind_is_cancelled_long_before_the_time_out(start_server: Any) -> None:
    served = start_server(write_timeout_s=3600.0, max_outbox=5)
    piece = served.tokenizer.piece("x" * 100_000)

    def endless(request: Any) -> Any:
        while True:
            yield TokenEvent(request.id, (piece,))

    submit = served.executor.submit

    def behind(request: Any) -> Any:
        outbox = submit(request)
        outbox.backlog = 6
        return outbox

    served.executor.script, served.executor.submit = endless, behind
    with served.raw(post(b'{"prompt": "x", "max_tokens": 4000, "stream": true}')):
        served.executor.wait_for(lambda e: len(e.cancelled) == 1)


def test_a_full_queue_refuses_before_the_body_is_read(start_server: Any) -> None:
    served = start_server()
    served.executor.limits |= {"max_slots": 0, "max_queue": 0}
    with served.raw(post(b"")[:-4].replace(b": 0", b": 99") + b"\r\n\r\n") as sock:
        sock.shutdown(socket.SHUT_WR)
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 429") and b"Retry-After: 1" in answer
    assert not served.executor.submitted


def test_a_body_byte_by_byte_runs_out_of_time(start_server: Any) -> None:
    """Each byte buys the time that it takes at a slow link's rate, which is next to nothing."""
    served = start_server(body_timeout_s=0.3)
    left = threading.Event()
    with served.raw(post(b"")[:-5] + b"9999\r\n\r\n") as sock:

        def trickle() -> None:
            try:
                while not left.wait(0.02):
                    sock.sendall(b" ")
            except OSError:
                left.set()

        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            assert sock.recv(12) == b"HTTP/1.1 408"
            assert not left.is_set()  # it was still sending
        finally:
            left.set()
            thread.join()
    assert not served.executor.submitted


def test_64_slow_heads_leave_health_its_place(
    start_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "SLOW_S", 3600.0)  # none of them is asked to go
    served = start_server(max_connections=64, head_timeout_s=1.0)
    slow = [socket.create_connection(("127.0.0.1", served.server.port)) for _ in range(64)]
    try:
        for sock in slow:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nX-Slow: ")
        until(served, Stage.RECEIVING, 64)
        assert served.get("/health").status == 200
        assert all(b" 408 " in read_all(sock) for sock in slow)
    finally:
        for sock in slow:
            sock.close()


def test_the_kernel_watches_for_peers_that_vanish(served: Served) -> None:
    """A peer that is gone without a word: no test can pull a cable, so this asks the kernel."""
    with served.raw(HEALTH) as sock:
        assert read_reply(sock).status == 200
        name = sock.getsockname()
        all_sockets = [c.sock for c in served.server.connections.all()]
        ours = [s for s in all_sockets if s.getpeername() == name]
        assert len(ours) == 1
        assert ours[0].getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        for option, value in connections.WATCH:
            if hasattr(socket, option):
                assert ours[0].getsockopt(socket.IPPROTO_TCP, getattr(socket, option)) == value


@pytest.mark.parametrize("stream", [b"true", b"false"])
def test_a_half_closed_client_counts_as_gone(served: Served, stream: bytes) -> None:
    served.executor.script = hangs_after([], threading.Event())
    with served.raw(post(b'{"prompt": "x", "max_tokens": 5, "stream": %b}' % stream)) as sock:
        served.executor.wait_for(lambda e: len(e.submitted) == 1)
        sock.shutdown(socket.SHUT_WR)
        served.executor.wait_for(lambda e: len(e.cancelled) == 1)
    served.alive()


def test_256_streams_at_once_get_each_its_own_text(start_server: Any) -> None:
    served = start_server()
    gate = threading.Event()

    def echoes(request: Any) -> Any:
        first, *others = events_of(request, request.prompt)
        yield first
        yield gate  # nobody ends before everybody has begun
        yield from others

    served.executor.script = echoes
    served.executor.limits["max_slots"] = 256
    texts = [f"stream {number} of all" for number in range(256)]
    streams = []
    try:
        for text in texts:
            sock = socket.create_connection(("127.0.0.1", served.server.port), timeout=30)
            sock.sendall(
                post(b'{"prompt": "%b", "max_tokens": 64, "stream": true}' % text.encode())
            )
            streams.append(sock)
        served.executor.wait_for(lambda e: len(e.submitted) == 256, timeout_s=30)
        assert served.get("/health").status == 200
        gate.set()
        got = [joined(read_reply(sock).frames)["text"] for sock in streams]
    finally:
        gate.set()
        for sock in streams:
            sock.close()
    assert got == texts
