"""Requests that nobody should send: random bodies, damaged JSON, lying heads; the answers to them.

Rule: a strategy gives bytes, and knows nothing of the server but its paths and field names.
Try it: `FUZZ_EXAMPLES=5000 python -m pytest tests/api/test_fuzz.py`.
"""

from __future__ import annotations

import http.client
import io
import json
import os
import socket
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from k3serve.api.policy import HARMLESS, REFUSED
from k3serve.api.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from tests.api.client import Got

WANTED = os.environ.get("FUZZ_EXAMPLES")  # of each test: new ones on every run
EXAMPLES = int(WANTED or 80)
CHAT = [{"role": "user", "content": "hi"}]
BASES: dict[str, tuple[Any, dict[str, Any]]] = {  # the fields of a path, and a body that it takes
    "/v1/completions": (CompletionBody, {"prompt": "x", "max_tokens": 5}),
    "/v1/chat/completions": (ChatBody, {"messages": CHAT, "max_tokens": 5}),
    "/tokenize": (TokenizeBody, {"prompt": "x"}),
    "/detokenize": (DetokenizeBody, {"tokens": [65]}),
}
PATHS = tuple(BASES)


def fuzz(share: float = 1.0) -> Any:
    """The same examples on every run, unless FUZZ_EXAMPLES asks for new ones."""
    return settings(
        max_examples=max(1, int(EXAMPLES * share)),
        derandomize=WANTED is None,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


# ------------------------------------------------------------------------------------ bodies

texts = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["", "\ud83d", "\udc00\ud800", "a\0b", "<|im_end|>", "\u2028", "x" * 5000]),
)
numbers = st.one_of(
    st.integers(-3, 40),
    st.sampled_from([2**31, 2**32, 2**63, 2**64, -(2**63), 10**400, 0.5, 1e308, 5e-324, -0.0]),
    st.floats(),
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=10,
)
near_misses = st.sampled_from(  # the right shape, with one thing wrong in it
    [
        [{"role": "user"}],
        [{"role": "tool", "content": "x", "tool_call_id": 5}],
        [{"role": "user", "content": [{"type": "text", "text": None}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
        [*CHAT, *CHAT, {"role": "system", "content": ""}],
        [{"type": "function", "function": {"name": "f", "parameters": {"type": ["x"]}}}],
        {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},
        {"type": "function", "function": {"name": "g"}},
        {"include_usage": "yes"},
        {"65": 1e9, "x": 1},
        {"65": 0.5},
        [[65, 66], ["x"]],
        [65, 2**31],
        [[]],
        ["a", "b", ""],
    ]
)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
# Values that a field may have, so that a wrong one is met behind the first checks, too.
PLAUSIBLE: dict[str, list[Any]] = {
    "model": ["k3-nano", ""],
    "prompt": ["x", ["x", "y"], [65, 66], [[65], [66, 67]]],
    "messages": [CHAT, [{"role": "system", "content": "s"}, *CHAT]],
    "max_tokens": [0, 1, 3, 5],
    "max_completion_tokens": [1, 5],
    "temperature": [0, 0.7, 2],
    "top_p": [0.1, 1],
    "top_k": [-1, 0, 1, 50],
    "min_p": [0, 0.5],
    "seed": [-1, 0, 2**63 - 1],
    "n": [1, 2, 3],
    "best_of": [1, 2],
    "stop": ["l", ["ll", "o"], []],
    "stop_token_ids": [[], [108], [0, 111]],
    "min_tokens": [0, 2],
    "presence_penalty": [-2, 0.5],
    "frequency_penalty": [0, 2],
    "repetition_penalty": [0.5, 1.1],
    "logit_bias": [{}, {"65": -100}],
    "logprobs": [True, 0, 1, 20],
    "top_logprobs": [0, 3],
    "timeout": [1, 60.5],
    "stream_options": [{"include_usage": True}, {"continuous_usage_stats": True}],
    "tools": [[TOOL], []],
    "tool_choice": ["auto", "none", "required", {"type": "function", "function": {"name": "f"}}],
    "response_format": [{"type": "text"}, {"type": "json_object"}],
    "reasoning_effort": ["none", "high"],
    "chat_template_kwargs": [{"thinking": False}, {}],
    "tokens": [[65], [0, 299]],
}
FLAGS = [True, False, None]


@st.composite
def bodies(draw: st.DrawFn, path: str, last: str = "") -> bytes:
    """An object of a path's own fields, some with a wrong value; `last` (a JSON field) wins."""
    kind, base = BASES[path]
    names = st.sampled_from([*kind.model_fields, *HARMLESS, *REFUSED, "zebra", "promt", ""])
    names = st.one_of(st.sampled_from(list(kind.model_fields)), names, texts)
    usual = draw(st.lists(st.sampled_from(list(kind.model_fields)), max_size=5))
    usual = [(name, draw(st.sampled_from(PLAUSIBLE.get(name, FLAGS)))) for name in usual]
    strange = draw(st.lists(st.tuples(names, values | near_misses), max_size=2))
    fields = [*base.items(), *usual, *strange]  # a name may come twice
    if draw(st.booleans()):
        fields.reverse()
    ascii_only = draw(st.booleans())
    parts = [f"{_dumps(k, ascii_only)}:{_dumps(v, ascii_only)}" for k, v in fields]
    return ("{" + ",".join([*parts, *([last] if last else [])]) + "}").encode(
        "utf-8", "surrogatepass"
    )


def _dumps(value: Any, ascii_only: bool) -> str:
    try:
        return json.dumps(value, ensure_ascii=ascii_only)
    except ValueError:  # more digits than str() takes
        return "9" * 5000


@st.composite
def damaged(draw: st.DrawFn, body: bytes) -> bytes:
    """The body with a piece cut out, put in, or said again very often."""
    at = draw(st.integers(0, len(body)))
    to = min(len(body), at + draw(st.integers(0, 6)))
    pieces = [
        b"",
        b"\0",
        b"\xff",
        b"\xed\xa0\x80",
        b"NaN",
        b"-Infinity",
        b"1e999",
        b"[",
        b"{",
        b'"',
    ]
    piece = draw(st.sampled_from(pieces) | st.binary(max_size=3))
    times = draw(st.sampled_from([1, 1, 2, 200, 20_000]))
    return body[:at] + piece * times + body[to:]


# ------------------------------------------------------------------------------------- heads

methods = st.sampled_from(
    ["GET", "POST", "PUT", "DELETE", "OPTIONS", "get", "PRI", "\x80", "A" * 99]
)
targets = st.sampled_from(
    [*PATHS, "/health", "/metrics", "/v1/models", "/v1/models/%00", "/v1/models/%ff%2e", "*",
     "http://[", "http://x/health", "//health", "/?\xff", "/" + "a" * 3000, "x y"]
)  # fmt: skip
versions = st.sampled_from(
    ["HTTP/1.1"] * 6 + ["HTTP/1.0", "HTTP/0.9", "HTTP/2.0", "HTTP/1.9", "http/1.1", "HTTP/", ""]
)
header_lines = st.one_of(
    st.sampled_from(
        [
            "Expect: 100-continue",
            "Expect: 200-ok",
            "Connection: close",
            "Connection: keep-alive",
            "Content-Type: application/json; charset=utf-16",
            "Content-Type: text/html",
            "Origin: x",
            "Content-Type: application/json; charset=\xff",
            "Content-Encoding: gzip",
            "Upgrade: h2c",
            "Authorization: Bearer \xe9",
            "x-request-id: " + "i" * 200,
            "X-Long: " + "y" * 70_000,
            "Content-Length: 3",
            "Content-Length: -1",
            "Content-Length: 0x3",
            "Content-Length: 1e3",
            "Content-Length: " + "9" * 30,
            "Transfer-Encoding: gzip",
            "Transfer-Encoding: chunked",
            " folded: x",
            "no colon",
            "Bad Name: x",
            ": x",
            "Host: a",
            "Host: b",
        ]
    ),
    st.builds(
        lambda name, value: f"{name}: {value}",
        st.text(st.characters(codec="latin-1"), max_size=8),
        st.text(st.characters(codec="latin-1"), max_size=12),
    ),
)


@st.composite
def framings(draw: st.DrawFn, body: bytes) -> tuple[list[str], bytes]:
    """(header lines, the bytes behind the head): right more often than wrong."""
    how = draw(st.sampled_from(["length", "length", "chunks", "chunks", "lie", "bad", "none"]))
    if how == "length":
        return [f"Content-Length: {len(body)}"], body
    if how == "lie":
        off = draw(st.sampled_from([-2, -1, 1, 2, 100, 10**9]))
        return [f"Content-Length: {max(0, len(body) + off)}"], body
    if how == "none":
        return [], body
    cut = draw(st.integers(0, len(body)))
    parts = [part for part in (body[:cut], body[cut:]) if part]
    data = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    if how == "bad":
        data = draw(damaged(data))
    return ["Transfer-Encoding: chunked"], data


def post(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """One request, good or bad in any part of it."""
    good = draw(st.booleans())
    path = draw(st.sampled_from(PATHS))
    method, target, version = "POST", path, "HTTP/1.1"
    if not good:
        method, target, version = draw(methods), draw(targets), draw(versions)
    body = draw(bodies(path) | st.just(json.dumps(BASES[path][1]).encode()))
    lines, data = draw(framings(body))
    lines = ["Host: x", *lines, *draw(st.lists(header_lines, max_size=0 if good else 3))]
    head = "\r\n".join([f"{method} {target} {version}", *lines, "\r\n"])
    return head.encode("latin-1", "replace") + data


@st.composite
def conversations(draw: st.DrawFn) -> bytes:
    """Some requests in one piece, as pipelining clients send them, perhaps cut off."""
    data = b"".join(draw(st.lists(requests(), min_size=1, max_size=4)))
    return data[: draw(st.integers(1, len(data)))] if draw(st.booleans()) else data


# ----------------------------------------------------------------------------------- answers


class _Shared(io.BytesIO):
    """One stream for all answers of a connection; each reader of it closes what it got."""

    def makefile(self, _mode: str) -> _Shared:
        return self

    def close(self) -> None:
        pass


def exchange(port: int, data: bytes, may_be_cut: bool = False) -> list[Got]:
    """All answers on one connection to data and the end of it; each must be well-formed. The last
    may be cut where the server takes that end for a client that left, and looks soon."""
    parts = []
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while part := sock.recv(65536):
                parts.append(part)
        except (ConnectionResetError, BrokenPipeError):
            pass  # the server may close while we still send
    stream = _Shared(b"".join(parts))
    size = len(stream.getvalue())
    answers = []
    while stream.tell() < size:
        response = http.client.HTTPResponse(stream)  # type: ignore[arg-type]
        response.begin()  # steps over 100 Continue
        try:
            body = response.read()
        except http.client.IncompleteRead:
            assert may_be_cut and stream.tell() == size
            break
        answers.append(Got(response.status, response.headers, body))
    return answers


def check(answers: list[Got]) -> None:
    """What holds of every answer, whatever was asked."""
    for got in answers:
        timed_out = got.status == 504 and got.error["code"] == "timeout"  # of a tiny `timeout`
        assert got.status < 500 or got.status == 503 or timed_out, (got.status, got.body)
        assert got.headers["x-request-id"]
        if got.status >= 400:
            assert got.error["message"]
        elif got.headers.get_content_type() == "text/event-stream":
            assert got.frames[-1] == "[DONE]"
        elif got.headers.get_content_type() == "application/json" and got.body:
            assert isinstance(got.json, dict)
