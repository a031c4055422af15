"""Bytes to text while they arrive: a character split over tokens comes out whole.

Rule: whatever the split, the concatenated output equals one `bytes.decode("utf-8", "replace")` of
everything.

Try it: d = Utf8Decoder(); d.feed(b"\\xe4\\xbd"), d.feed(b"\\xa0")  ->  "", "你"
"""

from __future__ import annotations

import codecs


class Utf8Decoder:
    """Holds back at most the three bytes of an incomplete character."""

    __slots__ = ("_decoder",)

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> str:
        """The text that is complete now; invalid bytes become U+FFFD at once."""
        return self._decoder.decode(data)

    def flush(self) -> str:
        """U+FFFD for a held-back tail, else nothing; the decoder starts afresh."""
        tail = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return tail
