"""Where a request's bytes begin and end: timed socket reads, Content-Length and chunked bodies.

Rule: never reads past the body, never keeps more than the limit in memory, and says with
`Framing.clean` whether the connection stands at the start of a next request.
"""

from __future__ import annotations

import io
import re
import select
import socket
import time
from collections.abc import Callable
from email.message import Message
from typing import BinaryIO

from k3serve.errors import RequestError

DRAIN_BYTES = 256 * 1024  # a refused body up to this size is read, to keep the connection
BLOCK_BYTES = 1024 * 1024  # of a body, between two looks at the memory for it
LINGER_BYTES = 64 * 1024 * 1024
LINGER_S = 2.0
HEAD_BYTES = 128 * 1024  # of one request, all header lines together
SLOWEST_SENDER = 64 * 1024.0  # bytes/s of a body; what it lacks must fit the body's time-out
_HEADER = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[^\x00\r\n]*\r?\n")


class TimedSocket(io.RawIOBase):
    """Reads a socket up to a deadline (monotonic seconds); a trickle of bytes does not move it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._deadline = time.monotonic()
        self._s_per_byte = 0.0

    def allow(self, limit_s: float, bytes_per_s: float = 0.0) -> None:
        """From now on limit_s, and with bytes_per_s what the bytes that come take at that rate."""
        self._deadline = time.monotonic() + limit_s
        self._s_per_byte = 1 / bytes_per_s if bytes_per_s else 0.0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:  # type: ignore[no-untyped-def]
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("request timed out")
        self._sock.settimeout(left)
        count = self._sock.recv_into(buffer)
        self._deadline += count * self._s_per_byte
        return count


class CheckedLines:
    """The header lines of one request, for http.client's parser. That one takes a line that is no
    header for the end of them all, and what follows for nothing: a Content-Length there would be
    overlooked, and the body read as the next request.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._left = HEAD_BYTES

    def readline(self, limit: int = -1) -> bytes:
        line = self._stream.readline(limit)
        self._left -= len(line)
        if self._left < 0:
            raise _refuse(f"the headers have more than {HEAD_BYTES} bytes", 431, "head_too_large")
        too_long = 0 <= limit <= len(line)  # the parser's own error says that better
        if not too_long and line not in (b"\r\n", b"\n") and not _HEADER.fullmatch(line):
            raise _refuse(
                f"bad header line {line[:60]!a}: it must be `Name: value` on one line, without "
                "blanks before the colon"
            )
        return line


def _refuse(message: str, status: int = 400, code: str = "bad_framing") -> RequestError:
    return RequestError(message, status=status, code=code)


class Framing:
    """The body of one request, read at most once."""

    def __init__(self, headers: Message, stream: BinaryIO, max_bytes: int) -> None:
        self._stream = stream
        self._max = max_bytes
        self._chunked = False
        self._length = 0
        self.clean = False  # the connection stands at the next request
        self._parse(headers)
        if not self._chunked and self._length == 0:
            self.clean = True

    def _parse(self, headers: Message) -> None:
        lengths = {v.strip() for v in headers.get_all("Content-Length", [])}
        encoding = headers.get_all("Transfer-Encoding", [])
        if encoding:
            if lengths:
                raise _refuse("Content-Length and Transfer-Encoding exclude each other")
            if len(encoding) != 1 or encoding[0].strip().lower() != "chunked":
                raise _refuse("Transfer-Encoding must be `chunked`")
            self._chunked = True
            return
        if not lengths:
            return
        text = lengths.pop()
        if lengths or not (text.isascii() and text.isdigit()) or len(text) > 18:
            raise _refuse("Content-Length must be one non-negative integer")
        self._length = int(text)

    def check_size(self) -> int:
        """413 before a byte is read, where the client announced the size; that, or 0."""
        if self._length > self._max:
            raise _refuse(
                f"the body has {self._length} bytes; this server takes at most {self._max}",
                413,
                "body_too_large",
            )
        return self._length

    def read(self, take: Callable[[int], None]) -> bytes:
        """The body. `take` is asked for room as bytes arrive, and may raise RequestError."""
        self.check_size()
        if self.clean:
            return b""
        body = self._read_chunked(take) if self._chunked else self._exactly(self._length, take)
        self.clean = True
        return body

    def drain(self) -> None:
        """Reads a small unread body away; a large or endless one leaves `clean` false."""
        if self.clean or self._chunked or self._length > DRAIN_BYTES:
            return
        self._exactly(self._length, lambda size: None)
        self.clean = True

    def _exactly(self, size: int, take: Callable[[int], None]) -> bytes:
        parts, seen = [], 0
        while seen < size:
            part = self._stream.read(min(size - seen, BLOCK_BYTES))
            take(len(part))
            parts.append(part)
            seen += len(part)
            if not part:
                raise _refuse(f"the body ended after {seen} of {size} announced bytes")
        return b"".join(parts)

    def _line(self) -> bytes:
        line = self._stream.readline(4097)
        if not line.endswith(b"\n") or len(line) > 4096:
            raise _refuse("bad chunked body: a line without end")
        return line.strip()

    def _read_chunked(self, take: Callable[[int], None]) -> bytes:
        parts, total = [], 0
        while True:
            size_text = self._line().split(b";")[0].strip()
            digits = set(b"0123456789abcdefABCDEF")
            if not size_text or len(size_text) > 15 or not set(size_text) <= digits:
                raise _refuse("bad chunked body: a chunk size must be a hexadecimal number")
            size = int(size_text, 16)
            if size == 0:
                break
            total += size
            if total > self._max:
                raise _refuse(
                    f"the body has more than {self._max} bytes; this server takes no more",
                    413,
                    "body_too_large",
                )
            parts.append(self._exactly(size, take))
            if self._line() != b"":
                raise _refuse("bad chunked body: a chunk is longer than its size")
        for _ in range(100):  # trailers, not used
            if self._line() == b"":
                return b"".join(parts)
        raise _refuse("bad chunked body: too many trailers")


_CLOSED = getattr(select, "POLLRDHUP", 0)  # POLLHUP and POLLERR are always looked for


def client_gone(sock: socket.socket) -> bool:
    """Whether the peer closed or reset.

    A half-closed connection counts as gone. Where the system cannot tell (POLLRDHUP is Linux's),
    bytes that a pipelining client sent ahead hide a close until they are read.
    """
    if _CLOSED:
        poll = select.poll()
        try:
            poll.register(sock, _CLOSED)
        except ValueError:  # closed on our side
            return True
        return bool(poll.poll(0))
    timeout = sock.gettimeout()
    try:
        sock.settimeout(0)  # with a timeout set, recv would wait before it looks
        return sock.recv(1, socket.MSG_PEEK) == b""
    except (BlockingIOError, InterruptedError):
        return False
    except OSError:
        return True
    finally:
        sock.settimeout(timeout)


def linger(sock: socket.socket) -> None:
    """Lets the peer read our answer before an unread body makes the kernel reset the connection."""
    deadline = time.monotonic() + LINGER_S
    seen = 0
    try:
        sock.shutdown(socket.SHUT_WR)
        while seen < LINGER_BYTES and (left := deadline - time.monotonic()) > 0:
            sock.settimeout(left)
            data = sock.recv(65536)
            if not data:
                return
            seen += len(data)
    except OSError:
        return
