"""K3's chat format (XTML) as fragments that are tokenised one by one, and its parser.

Rule: markers are special tokens, everything else is ordinary text, and each tag part is a fragment
of its own, exactly as K3's own encoder does. `learn` marks what the model has to
produce itself; it is only used for training.
"""

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

from scripts.train_nano.samples import Call, Message, Sample

OPEN, CLOSE, SEP, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"

EFFORT_TEXT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the "
    "response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={effort}`."
)
TOOLS_TEXT = (
    "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{schema}\n```"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Fragment:
    text: str
    special: bool = False
    learn: bool = False


def render(sample: Sample, prompt_only: bool = False) -> list[Fragment]:
    """All fragments of a sample; `prompt_only` stops where the model starts to write the answer."""
    if sample.text:
        return [Fragment(sample.text, learn=True), Fragment("[EOS]", special=True, learn=True)]
    fragments = [fragment for part in _preamble(sample) for fragment in part]
    *history, last = sample.messages
    for message in history:
        fragments += _message(message, sample)
    answer = list(_assistant(last, sample))
    return fragments + ([f for f in answer if not f.learn] if prompt_only else answer)


def text_of(fragments: list[Fragment]) -> str:
    return "".join(fragment.text for fragment in fragments)


def _preamble(sample: Sample) -> Iterator[list[Fragment]]:
    if sample.tools:
        schema = json.dumps(
            list(sample.tools), sort_keys=True, separators=(",", ":"), ensure_ascii=False
        )
        text = TOOLS_TEXT.format(schema=schema)
        yield _plain({"role": "system", "type": "tool-declare"}, text)
    if sample.thinking in ("low", "high", "max"):
        text = EFFORT_TEXT.format(effort=sample.thinking)
        yield _plain({"role": "system", "type": "thinking-effort"}, text)


def _message(message: Message, sample: Sample) -> list[Fragment]:
    if message.role == "assistant":
        return list(_assistant(message, sample))
    attributes: dict[str, Any] = {"role": message.role}
    if message.role == "tool":
        attributes |= {"tool": message.tool, "index": message.index}
    return _plain(attributes, message.content)


def _plain(attributes: dict[str, Any], text: str) -> list[Fragment]:
    body = [Fragment(text)] if text else []
    return [*_open("message", **attributes), *body, *_close("message"), Fragment(END, True)]


def _assistant(message: Message, sample: Sample) -> Iterator[Fragment]:
    """An assistant message. The tags that the generation prompt contains are not learned."""
    yield from _open("message", role="assistant")
    if sample.thinking != "off":
        yield from _open("think")
        yield from _learned(_body("think", message.think))
        yield from _learned(_open("response"))
    else:
        yield from _open("response")
    yield from _learned(_body("response", message.content))
    if message.calls:
        yield from _learned(_calls(message.calls))
    yield from _learned([*_close("message"), Fragment(END, True)])


def _calls(calls: tuple[Call, ...]) -> Iterator[Fragment]:
    yield from _open("tools")
    for index, call in enumerate(calls, 1):
        yield from _open("call", tool=call.name, index=index)
        for key, value in call.arguments.items():
            yield from _open("argument", key=key, type=_json_type(value))
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            yield from _body("argument", text)
        yield from _close("call")
    yield from _close("tools")


def _body(tag: str, text: str) -> list[Fragment]:
    return ([Fragment(text)] if text else []) + _close(tag)


def _learned(fragments: Any) -> Iterator[Fragment]:
    for fragment in fragments:
        yield dataclasses.replace(fragment, learn=True)


def _open(tag: str, **attributes: Any) -> list[Fragment]:
    parts = [Fragment(OPEN, True), Fragment(tag)]
    for key, value in attributes.items():
        escaped = str(value).replace("&", "&amp;").replace('"', "&quot;")
        parts += [Fragment(f" {key}"), Fragment('="'), Fragment(escaped), Fragment('"')]
    return [*parts, Fragment(SEP, True)]


def _close(tag: str) -> list[Fragment]:
    return [Fragment(CLOSE, True), Fragment(tag), Fragment(SEP, True)]


def _json_type(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    names = {str: "string", int: "number", float: "number", dict: "object", list: "array"}
    return names[type(value)]


# ------------------------------------------------------------------------------------ parsing

_CALL = re.compile(r'<\|open\|>call tool="([^"]*)" index="\d+"<\|sep\|>(.*?)<\|close\|>call', re.S)
_ARGUMENT = re.compile(
    r'<\|open\|>argument key="([^"]*)" type="([^"]*)"<\|sep\|>(.*?)<\|close\|>argument', re.S
)


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    """What the model answered. `finished` says that the response channel was closed."""

    text: str
    think: str = ""
    calls: tuple[Call, ...] = ()
    finished: bool = True


def parse(generated: str, thinking: bool) -> Reply:
    """Splits what the model wrote after the generation prompt."""
    think = ""
    if thinking:
        think, closed, generated = generated.partition(f"{CLOSE}think{SEP}")
        if not closed:
            return Reply("", think, finished=False)
        generated = generated.removeprefix(f"{OPEN}response{SEP}")
    text, closed, _ = generated.partition(f"{CLOSE}response{SEP}")
    calls = tuple(
        Call(name, {key: _value(kind, raw) for key, kind, raw in _ARGUMENT.findall(body)})
        for name, body in _CALL.findall(generated)
    )
    return Reply(text, think, calls, finished=bool(closed))


def _value(kind: str, raw: str) -> Any:
    if kind == "string":
        return raw
    try:
        return json.loads(raw)
    except json.JSONDecodeError:
        return raw
