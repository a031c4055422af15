"""Memory for request bodies, shared by all connections.

Rule: a body takes its part as its bytes arrive and before it is parsed, and gives all back when its
request ends. Small bodies always pass, and so does one that is alone: only a crowd is refused.
Try it: `python -m pytest tests/api/test_bodies.py`.
"""

from __future__ import annotations

import threading

from k3serve.errors import RequestError

FREE_BYTES = 256 * 1024  # of each request; a large crowd of small ones is bounded by connections
# What a parsed body takes, estimated from above: copies of its text, then by `,`, `[` and `{`.
PER_BYTE, PER_ITEM, PER_ARRAY, PER_OBJECT = 4, 40, 72, 200


class BodyMemory:
    """What all bodies together may take. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._used = 0  # beyond what is free for each

    @property
    def used(self) -> int:
        return self._used

    def share(self) -> Share:
        return Share(self)

    def has_room(self, size: int) -> bool:
        with self._lock:
            return self._fits(size - FREE_BYTES)

    def move(self, before: int, after: int) -> bool:
        """Changes one body's part from `before` to `after` bytes; False: no room for that."""
        with self._lock:
            self._used -= max(0, before - FREE_BYTES)
            fits = self._fits(after - FREE_BYTES)
            self._used += max(0, (after if fits else before) - FREE_BYTES)
            return fits

    def _fits(self, size: int) -> bool:
        return size <= 0 or self._used == 0 or self._used + size <= self._limit


class Share:
    """One request's part of it. `with memory.share() as share: ...` gives it back at the end."""

    def __init__(self, memory: BodyMemory) -> None:
        self._memory = memory
        self.size = 0

    def __enter__(self) -> Share:
        return self

    def __exit__(self, *_: object) -> None:
        self._memory.move(self.size, 0)
        self.size = 0

    def check(self, announced: int) -> None:
        """Refuses before a byte is read what would find no room now."""
        if not self._memory.has_room(announced):
            raise _full()

    def take(self, size: int) -> None:
        """Before `size` more bytes are kept. Raises RequestError 503 where they find no room."""
        if not self._memory.move(self.size, self.size + size):
            raise _full()
        self.size += size

    def take_for_parsing(self, body: bytes) -> None:
        items, arrays, objects = body.count(b","), body.count(b"["), body.count(b"{")
        values = PER_ITEM * items + PER_ARRAY * arrays + PER_OBJECT * objects
        self.take(PER_BYTE * len(body) + values)


def _full() -> RequestError:
    return RequestError(
        "too many large requests are under way; retry later, or send a smaller one",
        status=503,
        code="bodies_too_large_now",
        retry_after_s=1.0,
    )
