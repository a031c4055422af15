"""The engine's end of the link to a front: requests in, events and ticks out, and a beat.

Rule: the front decides who waits and who is refused; here every request is taken. A failure is told
once, as link.Failed: single requests get no event for it, as some may go on in another engine.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from pathlib import Path
from typing import Any

from k3serve.errors import ConfigError, HostFailure, RequestError
from k3serve.link import (
    BEAT_S,
    LINK_FD,
    Beat,
    Drain,
    Failed,
    Go,
    Joined,
    Link,
    Ready,
    Refuse,
    Ticked,
)
from k3serve.lockstep.leader import Leader, TickStats
from k3serve.types import Cancel, Finish, Request, TickShape, TokenEvent

log = logging.getLogger(__name__)


class FrontLink:
    """Used by one engine from its start to its end."""

    def __init__(self, sock: socket.socket) -> None:
        self._leader: Leader | None = None
        self._answered = threading.Event()
        self._refusal: str | None = None
        self._ended = threading.Event()
        self._link = Link(sock, self._receive, self._front_is_gone)
        self._link.start()
        threading.Thread(target=self._beat, name="k3serve-beat", daemon=True).start()

    def joined(self, leads: bool) -> None:
        """Waits until the front can serve. Raises ConfigError with its reason where it cannot."""
        self._link.send(Joined(leads))
        self._answered.wait()
        if self._refusal is not None:
            raise ConfigError(self._refusal)

    def serve(self, leader: Leader | None, shape: TickShape) -> None:
        """From now on requests go to this leader, which is ready; None on a follower."""
        self._leader = leader
        self._link.send(Ready(shape))

    def ticked(self, stats: TickStats, compilations: int) -> None:
        tokens = (stats.prompt_tokens, stats.tokens, stats.running)
        self._link.send(Ticked(*tokens, stats.times, compilations))

    def failed(self, failure: HostFailure) -> None:
        self._link.send(Failed(str(failure)))

    def put(self, event: TokenEvent) -> None:
        """The event sink of all requests."""
        if event.finish is not Finish.ERROR:
            self._link.send(event)

    def close(self) -> None:
        self._ended.set()
        self._link.close()

    def _receive(self, message: Any) -> None:
        leader = self._leader
        match message:
            case Request() if leader is not None:
                try:
                    leader.submit_to(message, self)
                except RequestError as error:  # it drains or failed, and the front knows soon
                    log.debug("request %d came too late: %s", message.id, error)
            case Cancel(request_id) if leader is not None:
                leader.cancel(request_id)
            case Drain(timeout_s) if leader is not None:
                leader.begin_drain(timeout_s)
            case Go():
                self._answered.set()
            case Refuse(reason):
                self._refusal = reason
                self._answered.set()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            self._link.send(Beat(_resident_bytes()))

    def _front_is_gone(self) -> None:
        if not self._ended.is_set():
            os._exit(1)


def _resident_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):  # not Linux
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def front_link() -> FrontLink | None:
    """The link that a front handed to this process; None where HTTP is to run here."""
    fd = os.environ.get(LINK_FD)
    return None if fd is None else FrontLink(socket.socket(fileno=int(fd)))
