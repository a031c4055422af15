"""A tokenizer without files: 256 bytes and the 16 named specials of Kimi K3. A test double.

Rule: the protocol of the real one, so that everything above it can be tested without a checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

NAMES = (
    "[BOS]",
    "[EOS]",
    "<|end_of_msg|>",
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    "[start_header_id]",
    "[end_header_id]",
    "[EOT]",
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_end|>",
    "<|media_pad|>",
    "<osagent_mode>",
    "[UNK]",
    "[PAD]",
)
NOT_FLAGGED = ("<|open|>", "<|close|>", "<|sep|>")


class ByteTokenizer:
    """Ids 0 to 255 are bytes, 256 to 271 the names above."""

    vocab_size = 256 + len(NAMES)
    bos_token = "[BOS]"
    eos_token = "[EOS]"
    pad_token = "[PAD]"

    def __init__(self) -> None:
        self.named_special_ids: Mapping[str, int] = {n: 256 + i for i, n in enumerate(NAMES)}
        self.eos_ids = (self.special_id("<|end_of_msg|>"), self.special_id("[EOS]"))
        self._cut = re.compile("(" + "|".join(map(re.escape, NAMES)) + ")")

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        if not allow_special:
            return list(text.encode())
        ids: list[int] = []
        for piece in self._cut.split(text):
            known = self.named_special_ids.get(piece)
            ids += list(piece.encode()) if known is None else [known]
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        kept = (i for i in ids if not (skip_special and self.is_special(i)))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 0:
            raise IndexError(f"token id {token_id} is negative")
        return bytes([token_id]) if token_id < 256 else NAMES[token_id - 256].encode()

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        return token_id >= 256 and NAMES[token_id - 256] not in NOT_FLAGGED

    def special_id(self, name: str) -> int:
        return self.named_special_ids[name]

    def info(self) -> dict[str, Any]:
        return {
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "pad_token": self.pad_token,
            "chat_template": None,
            "tokenizer_class": "ByteTokenizer",
        }
