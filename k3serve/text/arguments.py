"""The arguments of one tool call: XTML argument tags in, JSON text for OpenAI clients out.

Rule: all pieces returned, joined, are one valid JSON object; a string argument flows while the
model writes it. Other types are held until their tag closes, since only then is it known whether
they are valid JSON.

Try it: a = ArgumentsJson(); a.open("k", "string"), a.feed('say "hi"'), a.close(), a.end()
"""

from __future__ import annotations

import json

_BLOCK_KEY = "json"


class ArgumentsJson:
    """Written left to right: open, feed..., close for each argument, then end."""

    def __init__(self) -> None:
        self._begun = False  # the brace is out
        self._kind = ""  # string, value or block while one is open
        self._held: list[str] = []  # text of the open value or block
        self._block: str | None = None  # a closed json block that may be the whole object

    def open(self, key: str, type_name: str | None) -> str:
        """An argument tag. Without a type the value is taken as JSON where it is JSON."""
        self._kind = "string" if type_name == "string" else "value"
        return self._settle_block() + self._key(key) + ('"' if self._kind == "string" else "")

    def open_block(self) -> str:
        """A json tag, which holds all arguments as one text."""
        self._kind = "block"
        return self._settle_block()

    def feed(self, text: str) -> str:
        if self._kind == "string":
            return _escaped(text)
        self._held.append(text)
        return ""

    def close(self) -> str:
        """The end of the open argument or block."""
        kind, self._kind = self._kind, ""
        if kind == "string":
            return '"'
        text, self._held = "".join(self._held), []
        if kind == "value":
            return _as_json(text)
        self._block = text
        return ""

    def end(self) -> str:
        """The end of the call."""
        if self._block is not None and not self._begun and _is_object(self._block):
            return self._block
        piece = self._settle_block()
        return piece + ("}" if self._begun else "{}")

    def cut(self) -> str:
        """What is held when the output breaks off: the object stays incomplete, as the call is."""
        if self._begun and self._kind != "value":
            return ""  # a block behind an argument: how it would go on was not decided yet
        return (self._block or "") + "".join(self._held)

    def _key(self, key: str) -> str:
        lead = ", " if self._begun else "{"
        self._begun = True
        return f"{lead}{json.dumps(key, ensure_ascii=False)}: "

    def _settle_block(self) -> str:
        """A block that is not the whole object after all becomes an argument of its own."""
        if self._block is None:
            return ""
        text, self._block = self._block, None
        return self._key(_BLOCK_KEY) + _as_json(text)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _as_json(text: str) -> str:
    return text if _parsed(text) is not None else json.dumps(text, ensure_ascii=False)


def _is_object(text: str) -> bool:
    found = _parsed(text)
    return found is not None and isinstance(found[0], dict)


def _parsed(text: str) -> tuple[object] | None:
    """The value in a tuple, None when the text is no strict JSON (NaN is none)."""
    try:
        return (json.loads(text, parse_constant=_refuse),)
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is no JSON")
