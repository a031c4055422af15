"""One request and the way to answer it, as an endpoint sees it.

Rule: endpoints know nothing of sockets; they read `body`, return a Reply, or open one stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from k3serve.api.jsonbody import parse_object


class ClientGone(Exception):
    """The client left before its answer was complete; there is nobody to tell."""


class StreamBody(Protocol):
    """The body of an answer whose length is not known yet."""

    def write(self, data: bytes, while_blocked: Callable[[], None] | None = None) -> None:
        """Sends at once; raises ClientGone when nobody reads. While the client does not read,
        `while_blocked` is called now and then, and may raise to give up."""
        ...

    def end(self) -> None:
        """The body is complete. Without it the connection closes as broken off."""
        ...


Headers = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class Exchange:
    """One HTTP request; `path_arg` is what a route with an open end matched."""

    body: bytes
    gone: Callable[[], bool]
    open_stream: Callable[[str, Headers], StreamBody]
    path_arg: str = ""
    note: str = field(default="")  # for the access log, also where no Reply is returned

    def json(self) -> dict[str, Any]:
        return parse_object(self.body)
