"""Streams: split characters, stop strings, usage, many choices, clients that leave (group B)."""

from __future__ import annotations

import socket
import struct
import threading
from typing import Any

import pytest

from k3serve.types import Finish, Request, State, TokenEvent
from tests.api.client import Got, Served, joined
from tests.fakes import events_of, hangs_after, says

OFF = {"chat_template_kwargs": {"thinking": False}}


def both(served: Served, chat: bool, **body: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the answer in one piece, what the stream's chunks add up to)."""
    if chat:
        whole = served.chat(**OFF, **body).json["choices"][0]
        streamed = joined(served.chat(**OFF, **body, stream=True).frames)
        text = whole["message"]["content"]
        return {"text": text, "finish": whole["finish_reason"]}, {
            "text": streamed["content"],
            "finish": streamed["finish"],
        }
    whole = served.complete(prompt="x", **body).json["choices"][0]
    streamed = joined(served.complete(prompt="x", **body, stream=True).frames)
    return {"text": whole["text"], "finish": whole["finish_reason"]}, {
        "text": streamed["text"],
        "finish": streamed["finish"],
    }


CHAT = pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
SPEED = pytest.mark.parametrize("per_event", [1, 2, 7])


@CHAT
@SPEED
@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ((b"\xe3\x81", b"\x96", "!", b"\xf0\x9f"), "ざ!�"),
        ((b"\xff", "ok", "!"), "�ok!"),
        ((b"\xf0\x9f", b"\x98\x8a"), "😊"),
    ],
)
def test_pc_16_character_split_over_tokens(
    served: Served, chat: bool, per_event: int, pieces: Any, text: str
) -> None:
    served.executor.script = says(served.ids(*pieces), per_event=per_event)
    whole, streamed = both(served, chat, max_tokens=len(pieces))
    assert whole == streamed == {"text": text, "finish": "length"}


@CHAT
@SPEED
@pytest.mark.parametrize(
    ("pieces", "stop", "text", "finish"),
    [
        (("The quick br", "own", " fox"), ["own fox"], "The quick br", "stop"),
        (("own", " cat"), ["own fox"], "own cat", "length"),
        (("a", "bc", "d"), ["bc", "bcd"], "a", "stop"),
        (("xENDy", "z"), "END", "x", "stop"),
        (("xEN", "Dy"), ["END", "y"], "x", "stop"),
        (("ab", "ac"), ["abacus", "ac"], "ab", "stop"),
        (("own", " f"), ["own fox"], "own f", "length"),
        (("é", b"\xe3\x81", b"\x96"), ["ざ"], "é", "stop"),
    ],
)
def test_pc_17_stop_string_straddles_chunks(
    served: Served,
    chat: bool,
    per_event: int,
    pieces: Any,
    stop: Any,
    text: str,
    finish: str,
) -> None:
    served.executor.script = says(served.ids(*pieces), per_event=per_event)
    whole, streamed = both(served, chat, stop=stop, max_tokens=len(pieces))
    assert whole == streamed == {"text": text, "finish": finish}


@CHAT
@SPEED
def test_pc_17_usage_does_not_depend_on_how_ticks_cut(
    served: Served, chat: bool, per_event: int
) -> None:
    served.executor.script = says(list(b"abSTOPcdefgh"), per_event=per_event)
    ask = served.chat if chat else served.complete
    body = OFF if chat else {"prompt": "x"}
    got = ask(**body, stop="STOP", max_tokens=12)
    assert got.json["usage"]["completion_tokens"] == 6
    assert got.json["choices"][0]["stop_reason"] == "STOP"


def test_stop_string_frees_the_slot_at_once(served: Served) -> None:
    gate = threading.Event()
    served.executor.script = hangs_after(served.ids("a", "STOP", "b"), gate)
    got = served.complete(prompt="x", stop="STOP", max_tokens=100)
    assert got.json["choices"][0]["text"] == "a"
    assert served.executor.cancelled == [served.executor.submitted[0].id]


@CHAT
def test_stop_string_can_be_included(served: Served, chat: bool) -> None:
    served.executor.script = says(served.ids("ab", "END", "c"))
    whole, streamed = both(served, chat, stop="END", include_stop_str_in_output=True, max_tokens=3)
    assert whole == streamed == {"text": "abEND", "finish": "stop"}


def test_stop_strings_wait_for_min_tokens(served: Served) -> None:
    served.executor.script = says(list(b"a.b.c."))
    got = served.complete(prompt="x", stop=".", min_tokens=3, max_tokens=6)
    assert got.json["choices"][0]["text"] == "a.b"


@CHAT
@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"include_usage": True}])
def test_pc_19_usage_chunk(served: Served, chat: bool, options: Any) -> None:
    body: dict[str, Any] = {"max_tokens": 3, "stream_options": options}
    ask = served.chat if chat else lambda **b: served.complete(prompt="x", **b)
    got = ask(**body, stream=True)
    frames = got.frames
    assert frames.pop() == "[DONE]"
    if not (options and options["include_usage"]):
        assert not any("usage" in f for f in frames)
        assert all(f["choices"] for f in frames)
        return
    last = frames.pop()
    assert last["choices"] == []
    assert last["usage"] == ask(max_tokens=3).json["usage"]
    assert all(f["usage"] is None and f["choices"] for f in frames)


def test_pc_19_stream_options_without_stream(served: Served) -> None:
    got = served.chat(stream_options={"include_usage": True})
    assert got.status == 400 and got.error["param"] == "stream_options"
    assert served.chat(stream_options={"include_usage": "yes"}, stream=True).status == 400


def test_continuous_usage_stats(served: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    got = served.complete(prompt="x", max_tokens=3, stream=True, stream_options=options)
    totals = [f["usage"]["completion_tokens"] for f in got.frames[:-1]]
    assert totals == [1, 2, 3, 3]


@pytest.mark.parametrize("stream", [False, True])
def test_pc_21_every_choice_has_its_own_finish(served: Served, stream: bool) -> None:
    def script(request: Request) -> Any:
        return events_of(request, [*list(b"abcdef")[: 2 + request.sampling.choice], 258])

    served.executor.script = script
    got = served.chat(**OFF, n=3, temperature=1, stream=stream)
    expected = ["ab", "abc", "abcd"]
    if stream:
        opened = [f["choices"][0]["index"] for f in got.frames[:3]]
        assert opened == [0, 1, 2]
        assert got.frames.count("[DONE]") == 1
        assert [joined(got.frames, i)["content"] for i in range(3)] == expected
    else:
        assert [c["message"]["content"] for c in got.json["choices"]] == expected
        assert got.json["usage"]["completion_tokens"] == 3 + 4 + 5


def stream_request(body: str) -> bytes:
    data = body.encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


STREAMED = '{"prompt": "x", "max_tokens": 1000, "stream": true}'
WHOLE = '{"prompt": "x", "max_tokens": 1000}'
BATCH = '{"prompt": ["x", "y", "z"], "max_tokens": 1000}'


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@pytest.mark.parametrize("leave", [socket.socket.close, reset], ids=["fin", "rst"])
@pytest.mark.parametrize("body", [STREAMED, WHOLE, BATCH], ids=["stream", "whole", "batch"])
@pytest.mark.parametrize("tokens", [b"", b"abc"], ids=["queued", "decoding"])
def test_pc_23_client_goes_away(served: Served, leave: Any, body: str, tokens: bytes) -> None:
    gate = threading.Event()
    served.executor.script = hangs_after(list(tokens), gate)
    count = 3 if body is BATCH else 1
    with served.raw(stream_request(body)) as sock:
        served.executor.wait_for(lambda e: len(e.submitted) == count)
        if tokens and body is STREAMED:
            assert sock.recv(10)
        leave(sock)
        served.executor.wait_for(lambda e: len(set(e.cancelled)) == count)
    assert set(served.executor.cancelled) == {r.id for r in served.executor.submitted}
    served.alive()


def test_pc_23_client_leaves_while_tokens_flow(served: Served) -> None:
    def endless(request: Request) -> Any:
        while True:
            yield TokenEvent(request.id, (97,))

    served.executor.script = endless
    with served.raw(stream_request(STREAMED)) as sock:
        assert sock.recv(1000)
        reset(sock)
        served.executor.wait_for(lambda e: len(e.cancelled) == 1)
    with served.raw(stream_request(WHOLE)) as sock:
        served.executor.wait_for(lambda e: len(e.submitted) == 2)
        sock.close()
        served.executor.wait_for(lambda e: len(e.cancelled) == 2)


def test_a_quiet_choice_does_not_hide_the_others(served: Served) -> None:
    """Choice 0 waits in the queue while choice 1 runs: its tokens must come out meanwhile."""
    gate = threading.Event()

    def script(request: Request) -> Any:
        if request.sampling.choice == 0:
            yield gate
        yield from events_of(request, list(b"ab"))

    served.executor.script = script
    body = '{"prompt": "x", "max_tokens": 2, "n": 2, "stream": true}'
    with served.raw(stream_request(body)) as sock:
        seen = b""
        while b'"finish_reason":"length"' not in seen:
            seen += sock.recv(65536)
        assert b'"index":1' in seen and b'"index":0' not in seen
        gate.set()
        while b"[DONE]" not in seen:
            seen += sock.recv(65536)
        assert b'"index":0' in seen


def failing(after: bytes) -> Any:
    def script(request: Request) -> Any:
        for token in after:
            yield TokenEvent(request.id, (token,))
        yield TokenEvent(request.id, finish=Finish.ERROR, error="host 2 died")

    return script


@CHAT
@pytest.mark.parametrize("stream", [False, True])
def test_failure_before_the_first_token_is_a_503(served: Served, chat: bool, stream: bool) -> None:
    served.executor.script = failing(b"")
    ask = served.chat if chat else lambda **b: served.complete(prompt="x", **b)
    got = ask(stream=stream)
    assert got.status == 503
    assert "host 2 died" in got.error["message"]
    assert got.headers["Retry-After"]


@CHAT
def test_failure_in_mid_stream_is_a_frame_and_no_clean_end(served: Served, chat: bool) -> None:
    served.executor.script = failing(b"ab")
    path = "/v1/chat/completions" if chat else "/v1/completions"
    text = '{"messages":[{"role":"user","content":"x"}],' if chat else '{"prompt":"x",'
    data = (text + '"stream":true}').encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    answer = served.exchange(head.encode() + data)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b'data: {"error":{"message":"the server failed while it generated: host 2' in answer
    assert b"[DONE]" not in answer
    assert not answer.endswith(b"0\r\n\r\n")
    if not chat:
        assert served.complete(prompt="x").status == 503  # not streamed: the status itself


def test_failed_server_whose_last_event_got_lost(served: Served) -> None:
    def script(request: Request) -> Any:
        served.executor.now = State.FAILED
        yield threading.Event()  # nothing ever comes

    served.executor.script = script
    got = served.complete(prompt="x")
    assert got.status == 503 and got.error["code"] == "server_failed"
    assert got.headers["x-should-retry"] is None


def test_cancelled_by_a_drain(served: Served) -> None:
    served.executor.script = lambda r: [TokenEvent(r.id, finish=Finish.CANCELLED)]
    got = served.complete(prompt="x")
    assert got.status == 503 and "shutting down" in got.error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_pc_79_full_queue(served: Served, stream: bool) -> None:
    served.executor.refuse_after = 0
    got = served.complete(prompt="x", stream=stream)
    assert got.status == 429
    assert got.headers["Retry-After"] == "1"
    assert got.error["code"] == "queue_full"


def test_pc_79_half_a_batch_is_rolled_back(served: Served) -> None:
    served.executor.refuse_after = 2
    got = served.complete(prompt=["a", "b", "c"])
    assert got.status == 429
    assert set(served.executor.cancelled) == {r.id for r in served.executor.submitted}
    assert len(served.executor.submitted) == 2


def test_batch_larger_than_the_server_ever_holds(served: Served) -> None:
    got = served.complete(prompt=["a"] * 100)
    assert got.status == 400
    assert "72" in got.error["message"]  # 8 slots and a queue of 64


def test_draining_server(served: Served) -> None:
    served.executor.now = State.DRAINING
    got = served.complete(prompt="x")
    assert got.status == 503
    assert got.headers["Connection"] == "close"
    assert got.headers["Retry-After"]


def test_first_frame_comes_before_the_end(served: Served) -> None:
    gate = threading.Event()
    served.executor.script = hangs_after([97], gate)
    with served.raw(stream_request(STREAMED)) as sock:
        seen = b""
        while b'"text":"a"' not in seen:
            seen += sock.recv(65536)
        assert b"[DONE]" not in seen
        gate.set()
        while b"[DONE]" not in seen:
            seen += sock.recv(65536)


def test_stream_headers(served: Served) -> None:
    got: Got = served.complete(prompt="x", stream=True)
    assert got.headers["Content-Type"].startswith("text/event-stream")
    assert got.headers["Transfer-Encoding"] == "chunked"
    assert got.headers["x-request-id"]
