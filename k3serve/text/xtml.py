"""XTML, the markup of Kimi K3's chats: tags between special tokens, text between tags.

Rule: a chat is a list of fragments, each tokenised alone; only a special fragment may become a
special id. So what a user writes, markers included, stays ordinary text.

    open tag   <|open|>NAME KEY="VALUE" ...<|sep|>
    close tag  <|close|>NAME<|sep|>
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from k3serve.errors import RequestError
from k3serve.text.tokenizer import TokenizerLike, check_text

OPEN = "<|open|>"
CLOSE = "<|close|>"
SEP = "<|sep|>"
END_OF_MSG = "<|end_of_msg|>"
MEDIA_BEGIN = "<|media_begin|>"
MEDIA_CONTENT = "<|media_content|>"
MEDIA_PAD = "<|media_pad|>"
MEDIA_END = "<|media_end|>"

_NAME = r"[A-Za-z][\w.-]*"
_HEADER = re.compile(rf'({_NAME})((?: {_NAME}="[^"]*")*)')
_ATTRIBUTE = re.compile(rf' ({_NAME})="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Fragment:
    """A piece of a rendered chat that is tokenised alone."""

    text: str
    special: bool = False


class Writer:
    """Collects fragments; drops empty ones, which have no tokens."""

    def __init__(self) -> None:
        self.fragments: list[Fragment] = []

    def special(self, *names: str) -> None:
        self.fragments += [Fragment(name, special=True) for name in names]

    def text(self, text: str, param: str | None = None) -> None:
        """Text from a request goes in with the `param` that a 400 should name."""
        if param is not None:
            check_text(text, param)
        if text:
            self.fragments.append(Fragment(text))

    def open(self, name: str, *attributes: tuple[str, str], param: str | None = None) -> None:
        self.special(OPEN)
        self.text(name)
        for key, value in attributes:
            self.text(f" {key}")
            self.text('="')
            self.text(escape(value), param)
            self.text('"')
        self.special(SEP)

    def close(self, name: str) -> None:
        self.special(CLOSE)
        self.text(name)
        self.special(SEP)

    def end_message(self) -> None:
        self.close("message")
        self.special(END_OF_MSG)


def escape(value: str) -> str:
    """An attribute value as it stands between quotes; nothing else is escaped in XTML."""
    return value.replace("&", "&amp;").replace('"', "&quot;")


def unescape(value: str) -> str:
    return value.replace("&quot;", '"').replace("&amp;", "&")


def parse_header(text: str) -> tuple[str, dict[str, str]] | None:
    """Name and attributes of what stands between a marker and <|sep|>; None when it is no tag."""
    match = _HEADER.fullmatch(text)
    if match is None:
        return None
    return match[1], {key: unescape(value) for key, value in _ATTRIBUTE.findall(match[2])}


def text_of(fragments: Iterable[Fragment]) -> str:
    return "".join(fragment.text for fragment in fragments)


def encode_chat(tokenizer: TokenizerLike, fragments: Iterable[Fragment]) -> list[int]:
    """Token ids of a rendered chat; RequestError when the tokenizer lacks the chat markers."""
    ids: list[int] = []
    for fragment in fragments:
        if not fragment.special:
            ids += tokenizer.encode(fragment.text)
        elif fragment.text in tokenizer.named_special_ids:
            ids.append(tokenizer.special_id(fragment.text))
        else:
            raise RequestError(
                f"messages: this model's tokenizer has no {fragment.text}, so it cannot chat in "
                f"the Kimi K3 format: use /v1/completions",
                param="messages",
                code="chat_unsupported",
            )
    return ids


def open_channel(fragments: Iterable[Fragment]) -> str | None:
    """The channel, "think" or "response", in which a rendered prompt leaves the model writing."""
    channel, marker = None, ""
    for fragment in fragments:
        if fragment.special:
            marker = fragment.text
        elif marker in (OPEN, CLOSE):  # the first text behind a marker is the tag's name
            channel = fragment.text if marker == OPEN else None
            marker = ""
    return channel if channel in ("think", "response") else None
