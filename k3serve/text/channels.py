"""Token ids of a reply -> reasoning, content and tool calls, while they arrive.

Rule: only special ids make a tag; a marker that the model spells in ordinary tokens is text. The
concatenated result does not depend on how the ids are cut into calls of `feed`. Nothing the model
emits is an error.

A reply in the K3 format goes through channels:

    [think opened by the prompt] REASONING <|close|>think<|sep|>
    <|open|>response<|sep|> CONTENT <|close|>response<|sep|>
    <|open|>tools<|sep|> <|open|>call tool="NAME" index="1"<|sep|>
        <|open|>argument key="K" type="T"<|sep|> VALUE <|close|>argument<|sep|>
    <|close|>call<|sep|> <|close|>tools<|sep|>
    <|close|>message<|sep|><|end_of_msg|>

What models do wrong, and what becomes of it:
  - an opening or closing tag of a channel ends the channel before it, also an unclosed one, and
    with it an open call;
  - text outside all channels is content (white space between tags is dropped);
  - an unknown channel is content, its tags dropped; a tag with a malformed header is text as it
    stands;
  - a call without a tool name is dropped; an argument without a key is text;
  - an unfinished tag at the very end is dropped if it may have become a known one, else it is text.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from k3serve.text.arguments import ArgumentsJson
from k3serve.text.tokenizer import TokenizerLike
from k3serve.text.utf8 import Utf8Decoder
from k3serve.text.xtml import CLOSE, OPEN, SEP, parse_header

MAX_HEADER_BYTES = 4096  # a longer "tag" is text: nothing is held back for ever


class Kind(enum.Enum):
    """What a delta carries."""

    REASONING = "reasoning"  # text
    CONTENT = "content"  # text
    CALL_START = "call_start"  # index, id, name
    CALL_ARGUMENTS = "call_arguments"  # index, text: a piece of the JSON object
    CALL_END = "call_end"  # index; a call without one was cut off


@dataclass(frozen=True, slots=True)
class Delta:
    """One step of a reply; only the fields that its kind names are set."""

    kind: Kind
    text: str = ""
    index: int = 0  # of the tool call, from 0
    id: str = ""
    name: str = ""


class _At(enum.Enum):
    """Where in the reply the parser is."""

    NOWHERE = enum.auto()  # between channels
    THINK = enum.auto()
    RESPONSE = enum.auto()
    UNKNOWN = enum.auto()
    TOOLS = enum.auto()
    CALL = enum.auto()
    VALUE = enum.auto()  # in an argument or json block
    NAMELESS = enum.auto()  # in a call that is dropped


_CHANNELS = {
    "think": _At.THINK,
    "response": _At.RESPONSE,
    "tools": _At.TOOLS,
    "message": _At.NOWHERE,  # a container, no channel: what it holds decides
}
_KNOWN_TAGS = (*_CHANNELS, "call", "argument", "json")
_IN_CALL = (_At.CALL, _At.VALUE, _At.NAMELESS)


class ChannelParser:
    """The parser of one choice.

    `thinking_open`, `response_open`: the prompt ends inside that channel (see xtml.open_channel).
    `raw` gives the plain text of a completion as content, without flagged specials unless
    skip_special is False.
    """

    def __init__(
        self,
        tokenizer: TokenizerLike,
        *,
        thinking_open: bool,
        response_open: bool,
        raw: bool = False,
        skip_special: bool = True,
    ) -> None:
        assert not (thinking_open and response_open), "a prompt ends in one channel"
        self.reasoning_tokens = 0  # tokens of reasoning text, tags not counted
        self.calls = 0  # tool calls started
        self._tokenizer = tokenizer
        self._raw = raw
        self._skip_special = skip_special
        named = tokenizer.named_special_ids
        self._markers = {named[m]: m for m in (OPEN, CLOSE, SEP) if m in named}
        self._ends = frozenset(tokenizer.eos_ids)
        self._at = _At.NOWHERE
        if raw or response_open:
            self._at = _At.RESPONSE
        elif thinking_open:
            self._at = _At.THINK
        self._unknown = ""  # name of the unknown channel
        self._utf8 = Utf8Decoder()
        self._marker = ""  # OPEN or CLOSE while a header is read
        self._header: list[bytes] = []
        self._header_bytes = 0
        self._space: list[str] = []  # white space outside channels, content only if text follows
        self._stray = False  # text was found here, outside channels
        self._arguments = ArgumentsJson()
        self._cut = False  # the message ended inside a call
        self._out: list[Delta] = []
        self._pending: tuple[Kind, list[str]] | None = None  # text of the delta in the making

    @property
    def open_call(self) -> bool:
        """Whether a tool call has begun and not closed; it stays True when the message ended so."""
        return self._cut or self._at in (_At.CALL, _At.VALUE)

    def feed(self, ids: Iterable[int]) -> list[Delta]:
        """What these ids add to the reply; neighbouring text of one kind comes as one delta."""
        take = self._take_raw if self._raw else self._take
        for token_id in ids:
            take(token_id)
        return self._taken()

    def finish(self) -> list[Delta]:
        """What was held back. A call that is open stays open: no CALL_END comes."""
        self._end_message()
        return self._taken()

    # ------------------------------------------------------------------------------------ tokens

    def _take_raw(self, token_id: int) -> None:
        if not (self._skip_special and self._tokenizer.is_special(token_id)):
            self._bytes(self._tokenizer.token_bytes(token_id), tokens=1)

    def _take(self, token_id: int) -> None:
        marker = self._markers.get(token_id)
        if token_id in self._ends:
            self._end_message()
        elif marker == SEP and self._marker:
            self._tag()
        elif marker in (OPEN, CLOSE):
            self._header_as_text()
            self._flush_utf8()
            self._marker = marker
        elif marker or not self._tokenizer.is_special(token_id):
            data = self._tokenizer.token_bytes(token_id)
            if not self._marker:
                self._bytes(data, tokens=1)
                return
            self._header.append(data)
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self._header_as_text()

    def _end_message(self) -> None:
        """An end token, or the end of the ids. Whatever follows an end token is content."""
        name, space, _ = b"".join(self._header).decode("utf-8", "replace").partition(" ")
        if any(name == known if space else known.startswith(name) for known in _KNOWN_TAGS):
            self._drop_header()
        self._header_as_text()
        self._flush_utf8()
        if self._at in (_At.CALL, _At.VALUE):
            self._cut = True
            self._emit(Kind.CALL_ARGUMENTS, self._arguments.cut())
        self._go(_At.RESPONSE if self._raw else _At.NOWHERE)

    # -------------------------------------------------------------------------------------- tags

    def _tag(self) -> None:
        header = b"".join(self._header).decode("utf-8", "replace")
        parsed = parse_header(header)
        if parsed is not None:
            name, attributes = parsed
            if self._marker == OPEN:
                known = self._opened(name, attributes)
            else:
                known = not attributes and self._closed(name)
            if known:
                self._drop_header()
                return
        self._header_as_text(SEP.encode())

    def _opened(self, name: str, attributes: dict[str, str]) -> bool:
        """Handles an opening tag; False when it is none here and stays text."""
        at = self._at
        if name in _CHANNELS:
            self._leave_call()
            self._go(_CHANNELS[name])
        elif name == "call" and (at in _IN_CALL or at in (_At.TOOLS, _At.NOWHERE)):
            self._leave_call()
            self._start_call(attributes.get("tool", ""))
        elif at is _At.NAMELESS:
            pass
        elif name == "argument" and at in (_At.CALL, _At.VALUE) and "key" in attributes:
            self._leave_value()
            piece = self._arguments.open(attributes["key"], attributes.get("type"))
            self._emit(Kind.CALL_ARGUMENTS, piece)
            self._go(_At.VALUE)
        elif name == "json" and at in (_At.CALL, _At.VALUE):
            self._leave_value()
            self._emit(Kind.CALL_ARGUMENTS, self._arguments.open_block())
            self._go(_At.VALUE)
        elif name in _KNOWN_TAGS or at in (_At.TOOLS, _At.CALL, _At.VALUE):
            return False
        else:
            self._unknown = name
            self._go(_At.UNKNOWN)
        return True

    def _closed(self, name: str) -> bool:
        """Handles a closing tag; False when it is none here and stays text."""
        at = self._at
        if name in ("tools", "message") or (name in _CHANNELS and at not in _IN_CALL):
            self._leave_call()
            self._go(_At.NOWHERE)
        elif name == "call" and (at in _IN_CALL or at is _At.TOOLS):
            self._leave_call()
            self._go(_At.TOOLS)
        elif name in ("argument", "json") and at in _IN_CALL:
            self._leave_value()
        elif at is _At.UNKNOWN and name == self._unknown:
            self._go(_At.NOWHERE)
        else:
            return False
        return True

    def _start_call(self, name: str) -> None:
        if not name:
            self._go(_At.NAMELESS)
            return
        self._flush_delta()
        index = self.calls
        self.calls += 1
        self._out.append(
            Delta(Kind.CALL_START, index=index, id=f"functions.{name}:{index}", name=name)
        )
        self._arguments = ArgumentsJson()
        self._go(_At.CALL)

    def _leave_value(self) -> None:
        if self._at is _At.VALUE:
            self._emit(Kind.CALL_ARGUMENTS, self._arguments.close())
            self._go(_At.CALL)

    def _leave_call(self) -> None:
        self._leave_value()
        if self._at is _At.CALL:
            self._emit(Kind.CALL_ARGUMENTS, self._arguments.end())
            self._flush_delta()
            self._out.append(Delta(Kind.CALL_END, index=self.calls - 1))
        if self._at in _IN_CALL:
            self._go(_At.TOOLS)

    def _go(self, at: _At) -> None:
        self._at = at
        self._space = []
        self._stray = False

    # -------------------------------------------------------------------------------------- text

    def _drop_header(self) -> None:
        self._marker = ""
        self._header = []
        self._header_bytes = 0

    def _header_as_text(self, end: bytes = b"") -> None:
        """The tag in the making was none: its marker and header are text of the present channel."""
        if not self._marker:
            return
        data = self._marker.encode() + b"".join(self._header) + end
        tokens = 1 + len(self._header) + bool(end)
        self._drop_header()
        self._bytes(data, tokens)

    def _bytes(self, data: bytes, tokens: int) -> None:
        if self._at is _At.THINK:
            self.reasoning_tokens += tokens
        text = self._utf8.feed(data)
        if text:
            self._text(text)

    def _flush_utf8(self) -> None:
        tail = self._utf8.flush()
        if tail:
            self._text(tail)

    def _text(self, text: str) -> None:
        if self._at is _At.THINK:
            self._emit(Kind.REASONING, text)
        elif self._at in (_At.RESPONSE, _At.UNKNOWN):
            self._emit(Kind.CONTENT, text)
        elif self._at is _At.VALUE:
            self._emit(Kind.CALL_ARGUMENTS, self._arguments.feed(text))
        elif self._at is _At.NAMELESS:
            pass
        elif text.isspace() and not self._stray:
            self._space.append(text)
        else:
            self._stray = True
            self._emit(Kind.CONTENT, "".join(self._space) + text)
            self._space = []

    def _emit(self, kind: Kind, text: str) -> None:
        if not text:
            return
        if self._pending is None or self._pending[0] is not kind:
            self._flush_delta()
            self._pending = (kind, [])
        assert self._pending is not None
        self._pending[1].append(text)

    def _flush_delta(self) -> None:
        if self._pending is not None:
            kind, pieces = self._pending
            self._pending = None
            index = self.calls - 1 if kind is Kind.CALL_ARGUMENTS else 0
            self._out.append(Delta(kind, text="".join(pieces), index=index))

    def _taken(self) -> list[Delta]:
        self._flush_delta()
        taken, self._out = self._out, []
        return taken
