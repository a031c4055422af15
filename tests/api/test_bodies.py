"""All request bodies share one budget of memory: a crowd of large ones is refused, no small one."""

from __future__ import annotations

import json
import threading
import tracemalloc
from typing import Any

import pytest

from k3serve.api.bodies import FREE_BYTES, BodyMemory
from k3serve.api.jsonbody import parse_object
from k3serve.errors import RequestError
from tests.api.client import Served, read_all, read_reply
from tests.fakes import hangs_after

LARGE = 4 * 1024 * 1024


def ask(fill: int) -> bytes:
    """A request that generates, with a field of no use."""
    return json.dumps({"prompt": "x", "max_tokens": 5, "user": "u" * fill}).encode()


def post(body: bytes, *headers: str) -> bytes:
    lines = headers or (f"Content-Length: {len(body)}",)
    head = "\r\n".join(["POST /v1/completions HTTP/1.1", "Host: x", *lines])
    return head.encode() + b"\r\n\r\n" + body


def chunked(body: bytes) -> bytes:
    frames = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    return post(b"", "Transfer-Encoding: chunked") + frames


@pytest.fixture
def crowded(start_server: Any) -> Any:
    """A server on which one large request runs, and its budget is spent."""
    served = start_server(body_memory_bytes=5 * LARGE)
    gate = threading.Event()
    served.executor.script = hangs_after(list(b"a"), gate)
    with served.raw(post(ask(LARGE))) as sock:
        served.executor.wait_for(lambda e: len(e.submitted) == 1)
        yield served
        gate.set()
        assert read_reply(sock).status == 200


@pytest.mark.parametrize("send", [post, chunked], ids=["length", "chunked"])
def test_a_large_body_too_many_is_refused_and_small_ones_pass(crowded: Served, send: Any) -> None:
    answer = crowded.exchange(send(ask(LARGE)))
    assert answer.startswith(b"HTTP/1.1 503") and b"Retry-After: 1" in answer
    assert b"bodies_too_large_now" in answer
    assert len(crowded.executor.submitted) == 1
    crowded.alive()


def test_what_finds_no_room_is_refused_before_it_is_sent(crowded: Served) -> None:
    announced = f"Content-Length: {LARGE}"
    answer = crowded.exchange(post(b"", announced, "Expect: 100-continue"))
    assert answer.startswith(b"HTTP/1.1 503") and b"100 Continue" not in answer


def test_a_lie_about_the_length_takes_nothing(start_server: Any) -> None:
    served = start_server(body_memory_bytes=LARGE)
    with (
        served.raw(post(b"", f"Content-Length: {LARGE}")) as one,
        served.raw(post(ask(LARGE))) as two,
    ):
        assert read_reply(two).status == 200
        one.shutdown(1)
        assert read_all(one).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    "body", [ask(LARGE), b'{"prompt": ' + b"[" * LARGE, b"{" * LARGE], ids=["good", "cut", "deep"]
)
def test_who_is_alone_is_not_refused_and_leaves_nothing_behind(
    start_server: Any, body: bytes
) -> None:
    served = start_server(body_memory_bytes=1)
    status = 200 if body == ask(LARGE) else 400
    for _ in range(2):
        with served.raw(post(body)) as sock:
            assert read_reply(sock).status == status
            sock.shutdown(1)
            assert read_all(sock) == b""  # closed, so all is given back
        assert served.server.bodies.used == 0


def test_shares_add_up() -> None:
    memory = BodyMemory(1000)
    with memory.share() as one, memory.share() as two, memory.share() as small:
        one.take(FREE_BYTES + 600)
        two.take(FREE_BYTES + 400)
        assert memory.used == 1000
        small.take(FREE_BYTES)
        with pytest.raises(RequestError) as refused:
            two.take(1)
        assert refused.value.status == 503 and refused.value.retry_after_s == 1
        with pytest.raises(RequestError):
            small.check(FREE_BYTES + 1)
        assert memory.used == 1000
    assert memory.used == 0


@pytest.mark.parametrize(
    "items",
    [b"[]", b"{}", b"300", b"1234567", b"1.5", b'"a"', b'{"k":1}', b"[[1]]", b'"\xc3\xa9"'],
    ids=repr,
)
def test_the_estimate_is_no_less_than_what_parsing_takes(items: bytes) -> None:
    body = b'{"prompt":[' + b",".join([items] * 100_000) + b"]}"
    share = BodyMemory(1 << 40).share()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        value = parse_object(body)
        took = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert value
    share.take_for_parsing(body)
    assert took <= share.size
