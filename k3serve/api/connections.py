"""Who is connected, and who must go when connections run out.

Rule: a connection that waits for its client may be closed to make room, oldest first; one whose
request is being answered never. A few places beyond the limit answer `/health` and the like.
Try it: `python -m pytest tests/api/test_connections.py`.
"""

from __future__ import annotations

import enum
import logging
import socket
import threading
import time
from dataclasses import dataclass, field

log = logging.getLogger("k3serve.api")

RESERVE = 16  # places for public paths when all others are busy
SLOW_S = 1.0  # a request that takes longer to arrive may be given up for another client
WATCH = (  # a peer that vanished without a word is noticed within about 30 s
    ("TCP_KEEPIDLE", 15),
    ("TCP_KEEPINTVL", 5),
    ("TCP_KEEPCNT", 3),
    ("TCP_USER_TIMEOUT", 30_000),
)


class Stage(enum.Enum):
    """What a connection does."""

    IDLE = "idle"  # between requests, or before the first
    RECEIVING = "receiving"  # a request is on its way in
    ANSWERING = "answering"


@dataclass(slots=True, eq=False)
class Connection:
    """One accepted socket. `closed` is set when its place was given to another client."""

    sock: socket.socket
    reserve: bool
    stage: Stage = Stage.IDLE
    since: float = field(default_factory=time.monotonic)
    closed: bool = False


class Connections:
    """All connections of a server. Thread-safe."""

    def __init__(self, limit: int, reserve: int = RESERVE) -> None:
        self._limit = limit
        self._reserve = reserve
        self._lock = threading.Lock()
        self._by_socket: dict[socket.socket, Connection] = {}

    def admit(self, sock: socket.socket) -> Connection | None:
        """A place for a new socket, if need be that of one who waits; None: all are busy."""
        with self._lock:
            made = None
            if self._count(reserve=False) < self._limit or self._evict(reserve=False):
                made = Connection(sock, reserve=False)
            elif self._count(reserve=True) < self._reserve or self._evict(reserve=True):
                made = Connection(sock, reserve=True)
            if made is not None:
                self._by_socket[sock] = made
            return made

    def all(self) -> list[Connection]:
        with self._lock:
            return list(self._by_socket.values())

    def make_room(self) -> bool:
        """Closes one who waits, as when file descriptors run out; False: nobody waits."""
        with self._lock:
            return self._evict(reserve=False) or self._evict(reserve=True)

    def of(self, sock: socket.socket) -> Connection:
        with self._lock:
            return self._by_socket.get(sock) or Connection(sock, reserve=False, closed=True)

    def move(self, connection: Connection, stage: Stage) -> bool:
        """The connection's new stage. False: its place is gone, and it must close."""
        with self._lock:
            connection.stage, connection.since = stage, time.monotonic()
            return not connection.closed

    def leave(self, sock: socket.socket) -> None:
        with self._lock:
            self._by_socket.pop(sock, None)

    def _count(self, reserve: bool) -> int:
        return sum(c.reserve is reserve for c in self._by_socket.values())

    def _evict(self, reserve: bool) -> bool:
        waits = [c for c in self._by_socket.values() if c.reserve is reserve and _may_go(c)]
        if not waits:
            return False
        oldest = min(waits, key=lambda c: (c.stage is not Stage.IDLE, c.since))
        oldest.closed = True
        del self._by_socket[oldest.sock]
        log.debug("a connection (%s) made room for another", oldest.stage.value)
        try:
            oldest.sock.shutdown(socket.SHUT_RD)  # its thread reads an end, and may still answer
        except OSError:
            pass
        return True


def _may_go(connection: Connection) -> bool:
    if connection.stage is Stage.RECEIVING:
        return time.monotonic() - connection.since > SLOW_S
    return connection.stage is Stage.IDLE


def watch_peer(sock: socket.socket, send_buffer: int) -> None:
    """Lets the kernel notice a peer that vanished, and keep little for one that does not read."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in WATCH:
        if hasattr(socket, name):  # not every system has all of them
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
