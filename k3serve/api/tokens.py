"""Token ids -> text and bytes, one id at a time, also without tokenizer files.

Rule: a character that is split over ids appears once, when it is complete, as in one-shot decoding.
"""

from __future__ import annotations

from collections.abc import Iterable

from k3serve.api.context import Context
from k3serve.text.utf8 import Utf8Decoder


class Pieces:
    """What single ids look like. Ids that the tokenizer does not know (padding rows) are empty."""

    def __init__(self, context: Context) -> None:
        self._tokenizer = context.tokenizer
        self._limit = 0 if context.tokenizer is None else context.tokenizer.vocab_size

    def raw(self, token_id: int) -> bytes:
        if token_id >= self._limit:
            return b""
        return bytes(self._tokenizer.token_bytes(token_id))

    def text(self, token_id: int) -> str:
        """For humans and for keys; unknown ids as token_id:N."""
        if token_id >= self._limit:
            return f"token_id:{token_id}"
        return str(self._tokenizer.token_text(token_id))

    def is_special(self, token_id: int) -> bool:
        return token_id < self._limit and bool(self._tokenizer.is_special(token_id))


class Detokenizer:
    """Streaming decoder of one sequence."""

    def __init__(self, pieces: Pieces, skip_special: bool) -> None:
        self._pieces = pieces
        self._skip = skip_special
        self._utf8 = Utf8Decoder()

    def feed(self, ids: Iterable[int], skip_special: bool | None = None) -> str:
        skip = self._skip if skip_special is None else skip_special
        pieces = self._pieces
        data = b"".join(pieces.raw(i) for i in ids if not (skip and pieces.is_special(i)))
        return self._utf8.feed(data)

    def flush(self) -> str:
        """An incomplete character at the end, as U+FFFD."""
        return self._utf8.flush()
