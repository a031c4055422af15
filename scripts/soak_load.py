"""What the clients of scripts/soak.py do: each kind one small function, good clients and bad ones.

Rule: a kind ends by itself within seconds, and raises Failed when the server did what it must not.
An answer is compared with the one that the same request got while nothing else ran.
"""

from __future__ import annotations

import http.client
import json
import random
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

PATH = "/v1/completions"
JSON = {"Content-Type": "application/json"}
ANSWER_TOKENS, LONG_TOKENS = 24, 1000
FIRST_ID, IDS = 50, 1900  # ordinary tokens of K3-nano
SHORT_S = 2.0  # how long a client that does nothing stays


class Failed(Exception):
    """The server broke a promise."""


class Busy(Exception):
    """429 or 503 with Retry-After: a promise kept."""


@dataclass(frozen=True, slots=True)
class Known:
    """A request, and its answer on a quiet server."""

    body: dict[str, Any]
    text: str
    scores: list[float | None]


@dataclass(frozen=True, slots=True)
class Target:
    """The server, and what its answers must be."""

    host: str
    port: int
    known: tuple[Known, ...] = ()

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=120)

    def raw(self, data: bytes = b"") -> socket.socket:
        sock = socket.create_connection((self.host, self.port), timeout=30)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(data)
        return sock


def learn(url: str, prompts: int = 8) -> Target:
    """Asks everything once, alone."""
    parts = urlsplit(url)
    target = Target(parts.hostname or "", parts.port or 80)
    rng = random.Random(1)
    known = []
    for number in range(prompts):
        ids = [rng.randrange(FIRST_ID, IDS) for _ in range(5 + 40 * number)]
        body = {"prompt": ids, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
        scored = post(target, body | {"echo": True, "logprobs": 1, "max_tokens": 0})
        text = post(target, body)["choices"][0]["text"]
        known.append(Known(body, text, scored["choices"][0]["logprobs"]["token_logprobs"]))
    return Target(target.host, target.port, tuple(known))


def post(target: Target, body: dict[str, Any]) -> dict[str, Any]:
    connection = target.connect()
    try:
        return json.loads(answered(connection, body).read())
    finally:
        connection.close()


def answered(
    connection: http.client.HTTPConnection, body: dict[str, Any]
) -> http.client.HTTPResponse:
    """The answer of a request that is right."""
    connection.request("POST", PATH, json.dumps(body), JSON)
    response = connection.getresponse()
    if response.status in (429, 503) and response.headers["Retry-After"]:
        response.read()
        raise Busy
    if response.status != 200:
        raise Failed(f"{response.status} {response.read()[:200]!a}")
    return response


# -------------------------------------------------------------------------------- good clients


def same(known: Known, text: str) -> None:
    if text != known.text:
        raise Failed(f"the known answer {known.text!a} came as {text!a}")


def whole(target: Target, rng: random.Random) -> None:
    """Some requests on one kept connection."""
    connection = target.connect()
    try:
        for known in rng.choices(target.known, k=rng.randint(1, 4)):
            answer = json.loads(answered(connection, known.body).read())
            same(known, answer["choices"][0]["text"])
    finally:
        connection.close()


def stream(target: Target, rng: random.Random) -> None:
    known = rng.choice(target.known)
    connection = target.connect()
    try:
        events = answered(connection, known.body | {"stream": True}).read().split(b"\n\n")
    finally:
        connection.close()
    if events[-2:] != [b"data: [DONE]", b""]:
        raise Failed(f"a stream ended with {events[-2:]!a}")
    choices = [json.loads(event[6:])["choices"][0] for event in events[:-2]]
    same(known, "".join(choice["text"] for choice in choices))


def score(target: Target, rng: random.Random) -> None:
    """Several prompts at once, as an evaluation sends them."""
    batch = rng.sample(target.known, 3)
    body = {"prompt": [k.body["prompt"] for k in batch], "max_tokens": 0, "echo": True}
    answer = post(target, body | {"logprobs": 1, "temperature": 0})
    for known, choice in zip(batch, answer["choices"], strict=True):
        if choice["logprobs"]["token_logprobs"] != known.scores:
            raise Failed("a known prompt got other scores")


def hurried(target: Target, rng: random.Random) -> None:
    """Asks for more than its time-out allows: an answer or a 504, never silence."""
    body = rng.choice(target.known).body | {"max_tokens": LONG_TOKENS, "timeout": 0.05}
    try:
        post(target, body)
    except Failed as failure:
        if not str(failure).startswith("504"):
            raise


# --------------------------------------------------------------------------------- bad clients


def wire(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: soak\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def long_stream(target: Target, rng: random.Random) -> socket.socket:
    body = rng.choice(target.known).body | {
        "max_tokens": LONG_TOKENS,
        "stream": True,
        "logprobs": 5,
    }
    return target.raw(wire(body))


def leave(sock: socket.socket, rng: random.Random) -> None:
    """By a proper close or by a reset."""
    if rng.random() < 0.5:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def cancel(target: Target, rng: random.Random) -> None:
    """Leaves before, or in the middle of, a long answer."""
    sock = long_stream(target, rng)
    for _ in range(rng.choice([0, 0, 1, 5])):
        sock.recv(4096)
    leave(sock, rng)


def slow_reader(target: Target, rng: random.Random) -> None:
    """Takes next to nothing of a long answer, or nothing at all."""
    sock = long_stream(target, rng)
    reads = rng.random() < 0.5
    until = time.monotonic() + SHORT_S
    while time.monotonic() < until:
        if reads:
            sock.recv(16)
        time.sleep(0.05)
    leave(sock, rng)


def idle(target: Target, rng: random.Random) -> None:
    """Connects and says nothing, or only half a request."""
    half = wire(rng.choice(target.known).body)
    sock = target.raw(half[: rng.choice([0, 5, 40, len(half) - 3])])
    time.sleep(rng.uniform(0, SHORT_S))
    leave(sock, rng)


BAD = (
    b"GET /nowhere HTTP/1.1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: 9\r\n\r\nnot json!",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n{}",
    b"GET /health HTTP/1.1\r\nX: " + b"y" * 70_000 + b"\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
    wire({"prompt": "x", "temperature": "hot"}),
    wire({"prompt": [10**9]}),
    wire({"prompt": "x" * 300_000}),
    wire({"prompt": "x", "metadata": [[]] * 100_000, "max_tokens": -1}),
)


def bad(target: Target, rng: random.Random) -> None:
    """Requests that must be refused, and on nobody else's account."""
    data = rng.choice(BAD)
    sock = target.raw(data)
    try:
        sock.shutdown(socket.SHUT_WR)
        answer = b""
        while more := sock.recv(4096):
            answer += more
    finally:
        sock.close()
    status = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")[9:12]
    if not (status.startswith(b"4") or status == b"503"):
        raise Failed(f"{data[:80]!a} was answered by {answer[:200]!a}")


Kind = Callable[[Target, random.Random], None]
MIX: tuple[tuple[Kind, int], ...] = (
    (stream, 6),
    (whole, 4),
    (score, 2),
    (hurried, 1),
    (cancel, 3),
    (slow_reader, 1),
    (idle, 1),
    (bad, 4),
)
