"""Answers as values: status, headers and body, with the OpenAI error envelope.

Rule: the one place that knows how an error looks on the wire. No stack trace ever gets here.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from k3serve.errors import RequestError

JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer, written in one send."""

    status: int = 200
    body: bytes = b""
    content_type: str | None = JSON
    headers: tuple[tuple[str, str], ...] = ()
    note: str = ""  # for the access log: token counts and finish reasons, never text


def dumps(value: Any) -> bytes:
    """Compact UTF-8 JSON; NaN and infinities are a bug in the caller, not an answer."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", "replace")


def json_reply(
    value: Any, *, headers: tuple[tuple[str, str], ...] = (), note: str = "", status: int = 200
) -> Reply:
    return Reply(status, dumps(value), headers=headers, note=note)


def error_type(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 504:
        return "timeout_error"
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def envelope(error: RequestError) -> dict[str, Any]:
    return {
        "error": {
            "message": error.message,
            "type": error_type(error.status),
            "param": error.param,
            "code": error.code,
        }
    }


def error_reply(error: RequestError, headers: tuple[tuple[str, str], ...] = ()) -> Reply:
    if error.retry_after_s is not None:
        headers = (*headers, ("Retry-After", str(max(1, math.ceil(error.retry_after_s)))))
    elif error.status >= 500:  # both SDKs repeat any 5xx; this one would fail again
        headers = (*headers, ("x-should-retry", "false"))
    return Reply(
        error.status, dumps(envelope(error)), headers=headers, note=error.code or error.param or ""
    )


def internal_error() -> RequestError:
    """What a client learns of a bug; the log has the rest."""
    return RequestError(
        "the server failed on this request; its log has the reason under this x-request-id",
        status=500,
        code="internal_error",
    )


def status_line(status: int) -> str:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = "Unknown"
    return f"HTTP/1.1 {status} {phrase}\r\n"


def too_many_connections(limit: int) -> RequestError:
    return RequestError(
        f"all of this server's {limit} connections are busy; retry later",
        status=503,
        code="too_many_connections",
        retry_after_s=1.0,
    )


def made_room() -> RequestError:
    """For a request that was still arriving when its place was given to another client."""
    return RequestError(
        "the request arrived too slowly while other clients waited for a connection; retry later",
        status=503,
        code="too_many_connections",
        retry_after_s=1.0,
    )


def busy_answer(limit: int) -> bytes:
    """The whole answer for a connection that finds no place at all."""
    body = dumps(envelope(too_many_connections(limit)))
    head = (
        f"{status_line(503)}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        "Retry-After: 1\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
