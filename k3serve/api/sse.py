"""Server-sent events as OpenAI clients read them.

Rule: `data: ` with the blank, no comments, no event names; [DONE] only after a complete answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from k3serve.api.exchange import Exchange, Headers, StreamBody
from k3serve.api.replies import dumps, envelope, internal_error
from k3serve.errors import RequestError

log = logging.getLogger("k3serve.api")


class EventStream:
    """Opens with its first event, so that an error before it can still be a plain status."""

    def __init__(self, exchange: Exchange, headers: Headers) -> None:
        self._exchange = exchange
        self._headers = headers
        self._body: StreamBody | None = None
        self.while_blocked: Callable[[], None] | None = None

    @property
    def started(self) -> bool:
        return self._body is not None

    def send(self, chunks: list[dict[str, Any]]) -> None:
        """All chunks in one write."""
        if chunks:
            self._write(b"".join(b"data: " + dumps(chunk) + b"\n\n" for chunk in chunks))

    def done(self) -> None:
        self._write(b"data: [DONE]\n\n")
        assert self._body is not None
        self._body.end()

    def fail(self, error: Exception) -> None:
        """An error frame, and no proper end: clients take a clean end as success."""
        if not isinstance(error, RequestError):
            log.exception("a stream failed")
            error = internal_error()
        self.while_blocked = None  # what failed would only fail again
        self._write(b"data: " + dumps(envelope(error)) + b"\n\n")

    def _write(self, data: bytes) -> None:
        if self._body is None:
            self._body = self._exchange.open_stream(
                "text/event-stream; charset=utf-8", self._headers
            )
        self._body.write(data, self.while_blocked)
