"""OpenAI-style messages -> fragments of the Kimi K3 chat format.

Rule: the result is, fragment for fragment, what the checkpoint's own encoder makes of the same
chat; what cannot be rendered is a 400 that names the field.

Order: declared tools, thinking effort, the messages, tool choice, response format, generation
prompt.

Try it: text_of(render([{"role": "user", "content": "What is 2 + 2?"}]))
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from k3serve.errors import RequestError
from k3serve.text import toolcalls
from k3serve.text.show import shown
from k3serve.text.tokenizer import check_text
from k3serve.text.xtml import (
    MEDIA_BEGIN,
    MEDIA_CONTENT,
    MEDIA_END,
    MEDIA_PAD,
    Fragment,
    Writer,
    encode_chat,
    open_channel,
    text_of,
)

__all__ = ["EFFORTS", "Fragment", "encode_chat", "open_channel", "render", "text_of"]

EFFORTS = ("low", "high", "max")

_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
_NEW_TOOLS = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n"
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the "
    "response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
_TOOL_CHOICE = {
    "required": "The system is invoked with `tool_choice=required`.\n"
    "You MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\n"
    "You MUST NOT call any tools in the next message.",
}
_RESPONSE_FORMAT = (
    "The system is invoked with `response_format={}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional "
    "formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n```json\n{}\n```"


def render(
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = True,
    effort: str | None = None,
    tool_choice: str | Mapping[str, Any] | None = None,
    response_format: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final: bool = False,
    allow_images: bool = False,
) -> list[Fragment]:
    """The fragments of a chat; `open_channel` of them says where the model goes on.

    effort is one of EFFORTS, None (say nothing) or "none" (thinking off). A named tool_choice
    declares only that tool and requires a call. continue_final leaves the last, assistant message
    open instead of starting a new one; instructions for the next turn then stand before it. Raises
    RequestError (400) with a param such as `messages[2].content`.
    """
    _check_messages(messages)
    thinking, effort = _check_effort(thinking, effort)
    declared, choice = _check_tools(messages, tools, tool_choice)
    out = Writer()
    if declared:
        _system(out, "tool-declare", _TOOLS + _fenced_tools(declared, "tools"), "tools")
    if effort:
        _system(out, "thinking-effort", _EFFORT.format(effort))
    results = toolcalls.ResultOrder(messages)
    last = len(messages) - 1
    for place, index in enumerate(results.order):
        if place == last and continue_final:
            break
        _message(out, messages[index], index, thinking, results, allow_images)
    if choice in _TOOL_CHOICE:
        _system(out, "tool-choice", _TOOL_CHOICE[choice])
    _response_format(out, response_format)
    if continue_final:
        _unfinished(out, messages[last], f"messages[{last}]", thinking)
    elif add_generation_prompt:
        out.open("message", ("role", "assistant"))
        out.open("think" if thinking else "response")
    return out.fragments


# ------------------------------------------------------------ checks


def _bad(param: str, problem: str) -> RequestError:
    return RequestError(f"{param} {problem}", param=param)


def _check_messages(messages: object) -> None:
    if not isinstance(messages, list | tuple) or not messages:
        found = "empty" if isinstance(messages, list | tuple) else shown(messages)
        raise _bad("messages", f"is {found}, a list of at least one message is needed")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise _bad(f"messages[{i}]", f"is {shown(message)}, an object is needed")
        role = message.get("role")
        if role not in ("system", "developer", "user", "assistant", "tool"):
            raise _bad(
                f"messages[{i}].role",
                f"is {shown(role)}, allowed are system, developer, user, assistant, tool",
            )
        name = message.get("name")
        if name is not None and not isinstance(name, str):
            raise _bad(f"messages[{i}].name", f"is {shown(name)}, a string is needed")
        if message.get("tools") is not None and role not in ("system", "developer"):
            raise _bad(f"messages[{i}].tools", "may only stand in a system message")


def _check_effort(thinking: bool, effort: object) -> tuple[bool, str | None]:
    if effort == "none":
        return False, None
    if effort is not None and effort not in EFFORTS:
        raise _bad(
            "reasoning_effort", f"is {shown(effort)}, allowed are {', '.join(EFFORTS)}, none"
        )
    return thinking, str(effort) if thinking and effort else None


def _check_tools(
    messages: Sequence[Mapping[str, Any]], tools: object, tool_choice: object
) -> tuple[list[Mapping[str, Any]], str | None]:
    """The tools to declare, and required, none or None."""
    declared = toolcalls.check_tools(tools, "tools") if tools is not None else []
    late = [
        tool
        for i, m in enumerate(messages)
        if m.get("tools") is not None
        for tool in toolcalls.check_tools(m["tools"], f"messages[{i}].tools")
    ]
    if tool_choice in (None, "auto", "none"):
        return declared, "none" if tool_choice == "none" else None
    if tool_choice == "required":
        if not declared and not late:
            raise _bad("tool_choice", "is 'required', but tools is empty: add the tools to call")
        return declared, "required"
    function = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise _bad(
            "tool_choice",
            f"is {shown(tool_choice)}, allowed are 'auto', 'none', 'required' and "
            f'{{"type": "function", "function": {{"name": ...}}}}',
        )
    if name not in {tool["function"]["name"] for tool in [*declared, *late]}:
        raise _bad("tool_choice", f"names the tool {shown(name)}, which is not in tools")
    return [tool for tool in declared if tool["function"]["name"] == name], "required"


# ------------------------------------------------------------ parts of the prompt


def _system(out: Writer, kind: str, body: str, param: str | None = None) -> None:
    out.open("message", ("role", "system"), ("type", kind))
    out.text(body, param)
    out.end_message()


def _fenced_tools(tools: object, param: str) -> str:
    return f"```json\n{_compact(tools, param)}\n```"


def _compact(value: object, param: str) -> str:
    """Key-sorted JSON without spaces, non-ASCII kept."""
    try:
        return json.dumps(
            value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )
    except (ValueError, TypeError, RecursionError) as error:
        raise _bad(param, f"cannot be written as JSON: {error}") from None


def _response_format(out: Writer, response_format: object) -> None:
    if response_format is None:
        return
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind not in ("text", "json_object", "json_schema"):
        raise _bad(
            "response_format.type",
            f"is {shown(kind)}, allowed are 'text', 'json_object', 'json_schema'",
        )
    if kind == "text":
        return
    assert isinstance(response_format, Mapping)
    body = _RESPONSE_FORMAT.format(kind)
    param = "response_format"
    if kind == "json_schema":
        outer = response_format.get("json_schema")
        inner = outer if isinstance(outer, Mapping) else {}
        found = (
            response_format.get("response_schema"),
            inner.get("schema"),
            inner.get("json_schema"),
        )
        schema = next((s for s in found if s is not None), None)
        param = "response_format.json_schema.schema"
        if not isinstance(schema, Mapping | bool):
            raise _bad(param, f"is {shown(schema)}, a JSON schema is needed")
        body += _SCHEMA.format(_compact(schema, param))
    _system(out, "response-format", body, param)


def _message(
    out: Writer,
    message: Mapping[str, Any],
    index: int,
    thinking: bool,
    results: toolcalls.ResultOrder,
    allow_images: bool,
) -> None:
    param = f"messages[{index}]"
    role = message["role"]
    if role == "assistant":
        _assistant(out, message, param, thinking)
        return
    if role == "tool":
        name, number = results.caller(index)
        out.open(
            "message",
            ("role", "tool"),
            ("tool", name),
            ("index", str(number)),
            param=f"{param}.name",
        )
    elif role != "user" and message.get("tools"):
        _late_tools(out, message, param)
        return
    else:
        _open_message(out, "user" if role == "user" else "system", message, param)
    _content(out, message, param, images=allow_images and role == "user")
    out.end_message()


def _open_message(out: Writer, role: str, message: Mapping[str, Any], param: str) -> None:
    name = message.get("name")
    named = [] if name is None else [("name", name)]
    out.open("message", ("role", role), *named, param=f"{param}.name")


def _late_tools(out: Writer, message: Mapping[str, Any], param: str) -> None:
    if message.get("content"):
        raise _bad(
            f"{param}.content",
            "stands in a system message that declares tools: send the text as a message of its own",
        )
    body = _NEW_TOOLS + _fenced_tools(message["tools"], f"{param}.tools")
    _system(out, "tool-declare", body, f"{param}.tools")


def _assistant(out: Writer, message: Mapping[str, Any], param: str, thinking: bool) -> None:
    calls = toolcalls.read_calls(message, param)
    reasoning = _reasoning(message, param)
    _open_message(out, "assistant", message, param)
    if thinking:
        out.open("think")
        out.text(reasoning)
        out.close("think")
    out.open("response")
    _content(out, message, param, optional=True)
    out.close("response")
    if calls:
        toolcalls.write_calls(out, calls)
    out.end_message()


def _unfinished(out: Writer, message: Mapping[str, Any], param: str, thinking: bool) -> None:
    """The last message, open where the model goes on: in its response, else in its reasoning."""
    if message["role"] != "assistant":
        raise _bad(f"{param}.role", "must be assistant to be continued (continue_final_message)")
    if message.get("tool_calls"):
        raise _bad(f"{param}.tool_calls", "cannot be continued: leave out continue_final_message")
    _open_message(out, "assistant", message, param)
    if thinking:
        out.open("think")
        out.text(_reasoning(message, param))
        if not message.get("content"):
            return
        out.close("think")
    out.open("response")
    _content(out, message, param, optional=True)


def _reasoning(message: Mapping[str, Any], param: str) -> str:
    """A past turn's reasoning, under either of the names that clients use."""
    for field in ("reasoning_content", "reasoning"):
        value = message.get(field)
        if value is not None:
            if not isinstance(value, str):
                raise _bad(f"{param}.{field}", f"is {shown(value)}, a string is needed")
            return check_text(value, f"{param}.{field}")
    return ""


def _content(
    out: Writer,
    message: Mapping[str, Any],
    param: str,
    *,
    optional: bool = False,
    images: bool = False,
) -> None:
    content = message.get("content")
    param = f"{param}.content"
    if isinstance(content, str):
        out.text(content, param)
    elif isinstance(content, list):
        for i, part in enumerate(content):
            _part(out, part, f"{param}[{i}]", images)
    elif content is not None or not optional:
        raise _bad(param, f"is {shown(content)}, a string or a list of parts is needed")


def _part(out: Writer, part: object, param: str, images: bool) -> None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(part, Mapping) and kind == "text":
        if not isinstance(part.get("text"), str):
            raise _bad(f"{param}.text", f"is {shown(part.get('text'))}, a string is needed")
        out.text(part["text"], f"{param}.text")
    elif isinstance(part, Mapping) and kind == "image_url" and images:
        size = part.get("size")
        if not isinstance(size, list | tuple) or [type(n) for n in size] != [int, int]:
            raise _bad(f"{param}.size", f"is {shown(size)}, [width, height] in pixels is needed")
        out.special(MEDIA_BEGIN)
        out.text(f"image {size[0]}x{size[1]}")
        out.special(MEDIA_CONTENT, MEDIA_PAD, MEDIA_END)
    else:
        what = f"is {shown(part)}" if kind is None else f"has the type {shown(kind)}"
        raise _bad(param, f'{what}, only {{"type": "text", "text": ...}} is supported here')
