"""A small HTTP client for the tests: JSON, server-sent events, raw bytes."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from k3serve.api.server import ApiServer
from tests.fakes import ByteTokenizer, FakeExecutor


def strict_json(data: bytes | str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(data, parse_constant=refuse)


@dataclass
class Got:
    """An answer, read to its end."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return strict_json(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object, which must have the OpenAI shape."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        assert isinstance(error["message"], str) and error["message"]
        assert "Traceback" not in error["message"]
        return error

    @property
    def frames(self) -> list[Any]:
        """The events of a stream, [DONE] as a string."""
        parts = self.body.decode().split("\n\n")
        assert parts.pop() == "", "the stream ends inside an event"
        assert all(p.startswith("data: ") for p in parts), parts
        return [p[6:] if p == "data: [DONE]" else strict_json(p[6:]) for p in parts]


@dataclass
class Served:
    """A running server with its doubles."""

    server: ApiServer
    executor: FakeExecutor
    tokenizer: ByteTokenizer

    def ids(self, *pieces: bytes | str) -> list[int]:
        """One token per piece; a special's name is its id."""
        names = self.tokenizer.named_special_ids
        return [
            names[p] if isinstance(p, str) and p in names else self.tokenizer.piece(p)
            for p in pieces
        ]

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
    ) -> Got:
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=20)
        try:
            given = {"Content-Type": "application/json"} if data is not None else {}
            connection.request(method, path, data, given | (headers or {}))
            response = connection.getresponse()
            return Got(response.status, response.headers, response.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Got:
        return self.ask("GET", path, None, headers)

    def complete(self, **body: Any) -> Got:
        return self.ask("POST", "/v1/completions", body)

    def chat(self, **body: Any) -> Got:
        body.setdefault("messages", [{"role": "user", "content": "hi"}])
        return self.ask("POST", "/v1/chat/completions", body)

    def alive(self) -> None:
        """After a hostile case: healthy, and a normal request is answered as ever."""
        assert self.get("/health").status == 200
        previous, self.executor.script = self.executor.script, answers_hello
        got = self.complete(prompt="x", max_tokens=5, temperature=0)
        self.executor.script = previous
        assert got.status == 200, got.body
        assert got.json["choices"][0]["text"] == "hello"

    @contextmanager
    def raw(self, data: bytes = b"") -> Iterator[socket.socket]:
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=20) as sock:
            sock.sendall(data)
            yield sock

    def exchange(self, data: bytes) -> bytes:
        """Sends, closes the sending side never, and reads until the server closes."""
        with self.raw(data) as sock:
            return read_all(sock)


def answers_hello(request: Any) -> Any:
    from tests.fakes import events_of

    return events_of(request, list(b"hello"))


def read_all(sock: socket.socket) -> bytes:
    parts = []
    try:
        while data := sock.recv(65536):
            parts.append(data)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def read_reply(sock: socket.socket) -> Got:
    """One answer of a kept connection."""
    response = http.client.HTTPResponse(sock)
    response.begin()
    return Got(response.status, response.headers, response.read())


def joined(frames: list[Any], index: int = 0) -> dict[str, Any]:
    """What the chunks of one choice add up to, for comparison with the answer not streamed."""
    assert frames[-1] == "[DONE]"
    text, content, reasoning, finish, calls = "", "", "", [], {}
    for frame in frames[:-1]:
        for choice in frame["choices"]:
            if choice["index"] != index:
                continue
            text += choice.get("text", "")
            delta = choice.get("delta", {})
            content += delta.get("content") or ""
            reasoning += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", []):
                known = calls.setdefault(call["index"], {"arguments": ""})
                known["arguments"] += call["function"]["arguments"]
                if "id" in call:
                    assert "id" not in known, "id sent twice"
                    known |= {"id": call["id"], "name": call["function"]["name"]}
            if choice["finish_reason"] is not None:
                finish.append(choice["finish_reason"])
    assert len(finish) == 1, finish
    return {
        "text": text,
        "content": content,
        "reasoning": reasoning,
        "finish": finish[0],
        "calls": [calls[i] for i in sorted(calls)],
    }
