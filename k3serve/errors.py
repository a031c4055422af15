"""The errors that cross a layer: a bad request, a full server, a bad checkpoint, a dead host.

Rule: whoever raises says what was wrong, with which value, and what to do. Nothing else crosses a
layer on purpose.
"""

from __future__ import annotations


class RequestError(Exception):
    """A mistake in one request, answered to that request alone.

    `status` is the HTTP status, `param` the offending field, `code` a stable machine-readable word.
    `retry_after_s` is set where the same request may succeed later (429, 503).
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s


class Overloaded(RequestError):
    """The inbox is full (429), or the server is draining or failed (503)."""

    def __init__(self, message: str, *, status: int = 429, retry_after_s: float = 1.0) -> None:
        code = "queue_full" if status == 429 else "unavailable"
        super().__init__(message, status=status, code=code, retry_after_s=retry_after_s)


class ConfigError(Exception):
    """A setting or config that this server cannot honour; the message names key, value, remedy."""


class CheckpointError(Exception):
    """A file missing, cut short or not what the config says; the message names the tensor."""


class HostFailure(Exception):
    """A host died, stopped answering, or ran another plan. The run ends on every host."""
