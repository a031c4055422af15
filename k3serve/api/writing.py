"""Writing to a client that may read slowly, or not at all.

Rule: once the kernel's buffer is full, a client must take something every `stall_s`, and all in all
not be slower than SLOWEST_READER, with `stall_s` to spare. One who catches up starts anew.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable

from k3serve.api.exchange import ClientGone

SLOWEST_READER = 4096.0  # bytes/s, asked only of a client that is a whole buffer behind
_LOOK_S = 0.25  # how often a blocked write asks whether it is still wanted


class Writer:
    """The sending side of one connection, over all its answers."""

    def __init__(self, sock: socket.socket, stall_s: float) -> None:
        self._sock = sock
        self._stall_s = stall_s
        self._behind_since: float | None = None
        self._sent_behind = 0
        self._progress = 0.0  # when it last took something

    def send(self, data: bytes, while_blocked: Callable[[], None] | None = None) -> None:
        """Sends all of it. Raises ClientGone when the peer is gone or too slow, and whatever
        `while_blocked` raises, which is called now and then while the peer does not read.
        """
        left, waited = memoryview(data), False
        try:
            self._sock.settimeout(0)
            while left:
                try:
                    sent = self._sock.send(left)
                except (BlockingIOError, InterruptedError):
                    waited = True
                    self._wait(while_blocked)
                    continue
                left = left[sent:]
                self._progress = time.monotonic()
                self._sent_behind += sent
        except (OSError, ValueError) as error:  # ValueError: closed on our side
            raise ClientGone("connection lost") from error
        if not waited:  # it caught up
            self._behind_since, self._sent_behind = None, 0

    def _wait(self, while_blocked: Callable[[], None] | None) -> None:
        now = time.monotonic()
        if self._behind_since is None:
            self._behind_since, self._sent_behind = now, 0
            self._progress = now
        at_its_pace = self._behind_since + self._sent_behind / SLOWEST_READER
        left_s = min(self._progress, at_its_pace) + self._stall_s - now
        if left_s <= 0:
            raise ClientGone("client reads too slowly")
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT)
        poll.poll(1000 * min(left_s, _LOOK_S))
        if while_blocked is not None:
            while_blocked()


class Stream:
    """An open answer (exchange.StreamBody). The head travels with the first write: one packet less.

    `ended` is called when the body is complete, so that the connection may be kept.
    """

    def __init__(
        self, writer: Writer, head: bytes, chunked: bool, ended: Callable[[], None]
    ) -> None:
        self._writer = writer
        self._head = head
        self._chunked = chunked
        self._ended = ended

    def write(self, data: bytes, while_blocked: Callable[[], None] | None = None) -> None:
        head, self._head = self._head, b""
        framed = b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data
        self._writer.send(head + framed, while_blocked)

    def end(self) -> None:
        self._writer.send(b"0\r\n\r\n" if self._chunked else b"")
        self._ended()
