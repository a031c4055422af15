"""Clients that always have a request open, and say how each one ended; for scripts/check_faults.py.

Rule: an answer counts as done only when it is whole; everything else is told apart as a client
would: an error status, an error event without [DONE], or a connection that broke.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

Kind = Literal["done", "refused", "error", "broken", "wrong"]
TOLD = ("refused", "error")  # the server itself said that the request failed
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Outcome:
    kind: Kind
    sent_at: float  # monotonic
    ended_at: float
    detail: str = ""


def request(url: str, path: str, body: dict[str, Any], timeout_s: float = TIMEOUT_S) -> Outcome:
    """Sends it and reads to the end. refused: a 503; error: an error event; wrong: anything that a
    client could take for success, or another status."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    sent_at = time.monotonic()
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        kind, detail = _read(connection.getresponse(), body)
    except (OSError, http.client.HTTPException) as error:
        kind, detail = "broken", repr(error)
    finally:
        connection.close()
    return Outcome(kind, sent_at, time.monotonic(), detail)


def _read(response: http.client.HTTPResponse, body: dict[str, Any]) -> tuple[Kind, str]:
    try:
        data, whole = response.read(), True
    except http.client.IncompleteRead as error:
        data, whole = error.partial, False
    if response.status == 503 and whole:
        return "refused", json.loads(data)["error"]["message"]
    if response.status != 200:
        return "wrong", f"status {response.status}: {data[:200]!r}"
    if body.get("stream"):
        return _read_stream(data, whole, body)
    return _judge(json.loads(data), body) if whole else ("broken", "within the answer")


def _read_stream(data: bytes, whole: bool, body: dict[str, Any]) -> tuple[Kind, str]:
    frames = data.split(b"\n\n")[:-1]  # what follows the last blank line is no frame
    lines = [frame.removeprefix(b"data: ") for frame in frames]
    complete = b"[DONE]" in lines
    chunks = [json.loads(line) for line in lines if line != b"[DONE]"]
    failed = [chunk["error"]["message"] for chunk in chunks if "error" in chunk]
    if failed:
        return ("wrong", "an error and [DONE]") if complete else ("error", failed[0])
    if not complete:
        said = "a clean end of the stream, but neither [DONE] nor an error"
        return ("wrong", said) if whole else ("broken", "within the stream")
    return _judge(chunks[-1], body)


def _judge(answer: dict[str, Any], body: dict[str, Any]) -> tuple[Kind, str]:
    count, wanted = answer["usage"]["completion_tokens"], body["max_tokens"]
    return ("done", "") if count == wanted else ("wrong", f"{count} tokens, not {wanted}")


class Client(threading.Thread):
    """Sends one request after the other, until one fails or `finish` is called."""

    def __init__(self, url: str, what: str, seed: int) -> None:
        super().__init__(daemon=True)
        self.what = what
        self.outcomes: list[Outcome] = []
        self._url, self._rng = url, random.Random(seed)
        self._finish = threading.Event()

    def run(self) -> None:
        while not self._finish.is_set():
            path, body = BODIES[self.what](self._rng)
            self.outcomes.append(request(self._url, path, body))
            if self.outcomes[-1].kind != "done":
                return

    def finish(self) -> None:
        """After the request that is open."""
        self._finish.set()


def _prompt(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(50, 200) for _ in range(tokens)]


def _completion(tokens: int, answer: int, **more: Any) -> Any:
    def make(rng: random.Random) -> tuple[str, dict[str, Any]]:
        body = {"prompt": _prompt(rng, tokens), "max_tokens": answer, "ignore_eos": True,
                "temperature": 0, **more}  # fmt: skip
        return "/v1/completions", body

    return make


def _chat(rng: random.Random) -> tuple[str, dict[str, Any]]:
    text = " ".join(str(number) for number in _prompt(rng, 8))
    return "/v1/chat/completions", {
        "messages": [{"role": "user", "content": text}], "max_tokens": 300, "ignore_eos": True,
    }  # fmt: skip


STREAMED: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
BODIES = {
    "stream": _completion(8, 400, **STREAMED),
    "plain": _completion(8, 400),
    "chat": _chat,
    "long stream": _completion(450, 2, **STREAMED),
    "long": _completion(450, 2),
    "scored": _completion(450, 1, echo=True, logprobs=2),
}
DECODING = ("stream", "plain", "stream", "chat", "stream", "plain")
PREFILLING = ("scored", "long stream", "long", "scored", "long stream", "scored")


class HealthWatch(threading.Thread):
    """Asks /health until the server is gone, and notes the first time that it said unhealthy."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.unhealthy_at: float | None = None
        self.text = ""
        self._url = urlsplit(url)
        self._finish = threading.Event()

    def run(self) -> None:
        while not self._finish.wait(0.05) and self.unhealthy_at is None:
            try:
                self._ask()
            except (OSError, http.client.HTTPException):
                continue

    def _ask(self) -> None:
        connection = http.client.HTTPConnection(
            self._url.hostname or "", self._url.port, timeout=1.0
        )
        try:
            connection.request("GET", "/health")
            response = connection.getresponse()
            body = response.read()
            if response.status == 503:
                self.text = json.loads(body)["error"]["message"]
                self.unhealthy_at = time.monotonic()
        finally:
            connection.close()

    def finish(self) -> None:
        self._finish.set()
