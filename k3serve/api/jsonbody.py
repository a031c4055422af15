"""Bytes of a request body -> a JSON object that is safe to work with.

Rule: what passes here is UTF-8, at most MAX_DEPTH deep, holds only finite numbers and no lone
surrogate. Of duplicate keys the last one counts, for the check and the use alike. All else is 400.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from k3serve.errors import RequestError

MAX_DEPTH = 100
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def _bad(message: str, param: str | None = None) -> RequestError:
    return RequestError(message, param=param, code="invalid_json")


def _constant(name: str) -> float:
    raise _bad(f"{name} is not JSON; numbers must be finite")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _bad(f"the number {text[:40]} is too large; numbers must be finite")
    return value


def parse_object(body: bytes) -> dict[str, Any]:
    """The object in the body, or RequestError 400."""
    text = _text(body)
    try:
        value = json.loads(text, parse_constant=_constant, parse_float=_finite)
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError as error:
        raise _bad(
            f"the body is not valid JSON: {error.msg} at line {error.lineno} column {error.colno}"
        ) from None
    except ValueError:  # more digits than int() takes
        raise _bad("the body holds an integer with too many digits") from None
    if not isinstance(value, dict):
        raise _bad(f"the body must be a JSON object, not {_kind(value)}")
    if text.count("[") + text.count("{") > MAX_DEPTH:  # else it cannot be that deep
        _check_depth(value)
    if _SURROGATE_ESCAPE.search(text):
        _check_surrogates(value)
    return value


def _text(body: bytes) -> str:
    if not body.strip():
        raise _bad("the body is empty; send a JSON object")
    if body.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        raise _bad("the body starts with a byte-order mark; send plain UTF-8")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _bad(f"the body is not UTF-8 (byte {error.start})") from None
    if "\x00" in text:
        raise _bad("the body holds NUL bytes; is it UTF-16? Send UTF-8")
    return text


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string"}
    return names.get(type(value), "an array")


def _too_deep() -> RequestError:
    return _bad(f"the JSON is nested more than {MAX_DEPTH} levels deep")


def _check_depth(root: Any) -> None:
    level = [root]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in _containers(node)]
        if not level:
            return
    raise _too_deep()


def _containers(node: Any) -> list[Any]:
    children = node.values() if isinstance(node, dict) else node
    return [c for c in children if type(c) in (dict, list)]


def _check_surrogates(root: Any) -> None:
    stack: list[tuple[str, Any]] = [("", root)]
    while stack:
        path, node = stack.pop()
        if isinstance(node, str):
            if found := _SURROGATE.search(node):
                where = path or "the body"
                raise _bad(
                    f"{where} holds a lone surrogate (\\u{ord(found[0]):04x}), which no text can; "
                    "send the pair or U+FFFD",
                    param=path or None,
                )
        elif isinstance(node, dict):
            for key, value in node.items():
                if found := _SURROGATE.search(key):
                    raise _bad(
                        f"a key in {path or 'the body'} holds a lone surrogate "
                        f"(\\u{ord(found[0]):04x})",
                        param=path or None,
                    )
                stack.append((f"{path}.{key}" if path else key, value))
        elif isinstance(node, list):
            stack.extend((f"{path}[{i}]", value) for i, value in enumerate(node))
