"""Tools in a chat: checking declarations, writing past calls, bringing results into call order.

Rule: a tool result takes name and index from the call that it answers, never from its place in the
list.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from k3serve.errors import RequestError
from k3serve.text.show import shown
from k3serve.text.xtml import Writer


@dataclass(frozen=True, slots=True)
class PastCall:
    """One tool call of an earlier assistant turn."""

    id: str | None
    name: str
    arguments: Mapping[str, Any] | str  # a string is what could not be read as a JSON object
    param: str


def _bad(param: str, problem: str) -> RequestError:
    return RequestError(f"{param} {problem}", param=param)


def check_tools(tools: object, param: str) -> list[Mapping[str, Any]]:
    """The tools, or a 400 naming what is wrong with which."""
    if not isinstance(tools, list | tuple):
        raise _bad(param, "must be a list of tools")
    for i, tool in enumerate(tools):
        here = f"{param}[{i}]"
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise _bad(here, 'must be an object of "type": "function", the only type supported')
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise _bad(f"{here}.function", "must be an object with at least a name")
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise _bad(f"{here}.function.name", "must be a string that is not empty")
        if not isinstance(function.get("parameters", {}), Mapping | None):
            raise _bad(f"{here}.function.parameters", "must be a JSON schema object")
    return list(tools)


def read_calls(message: Mapping[str, Any], param: str) -> list[PastCall]:
    """The calls of an assistant message."""
    if message.get("function_call") is not None:
        raise _bad(f"{param}.function_call", "is not supported: use tool_calls")
    calls = message.get("tool_calls")
    if calls is None:
        return []
    if not isinstance(calls, list | tuple):
        raise _bad(f"{param}.tool_calls", "must be a list of tool calls")
    return [_read_call(call, f"{param}.tool_calls[{i}]") for i, call in enumerate(calls)]


def _read_call(call: object, param: str) -> PastCall:
    if not isinstance(call, Mapping) or call.get("type", "function") != "function":
        raise _bad(param, 'must be an object of "type": "function", the only type supported')
    function = call.get("function")
    if not isinstance(function, Mapping):
        raise _bad(f"{param}.function", "must be an object with name and arguments")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise _bad(f"{param}.function.name", "must be a string that is not empty")
    call_id = call.get("id")
    if call_id is not None and not isinstance(call_id, str):
        raise _bad(f"{param}.id", "must be a string")
    arguments = function.get("arguments")
    if arguments is None:
        arguments = {}
    if isinstance(arguments, str):
        arguments = _parse_arguments(arguments)
    if not isinstance(arguments, Mapping | str):
        raise _bad(f"{param}.function.arguments", "must be a JSON object, as text or as it is")
    return PastCall(call_id, name, arguments, f"{param}.function")


def _parse_arguments(text: str) -> Mapping[str, Any] | str:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def write_calls(out: Writer, calls: Sequence[PastCall]) -> None:
    """The tools channel of a past turn."""
    out.open("tools")
    for number, call in enumerate(calls, start=1):
        out.open("call", ("tool", call.name), ("index", str(number)), param=f"{call.param}.name")
        param = f"{call.param}.arguments"
        if isinstance(call.arguments, str):
            out.open("json", ("type", "object"))
            out.text(call.arguments, param)
            out.close("json")
        else:
            for key, value in call.arguments.items():
                out.open("argument", ("key", key), ("type", _json_type(value)), param=param)
                out.text(_written(value, param), param)
                out.close("argument")
        out.close("call")
    out.close("tools")


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list | tuple) else "object"


def _written(value: object, param: str) -> str:
    """Strings raw, everything else as JSON with Python's usual separators."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise _bad(param, f"cannot be written as JSON: {error}") from None


class ResultOrder:
    """In which order the messages are rendered, and which call each tool result answers.

    A run of tool messages follows the order of the calls of the last assistant turn before it. A
    result names its call by id, or as NAME:POSITION (from 0) where the call had no id. When one of
    a run matches no call, the run stays as given and that result needs a name of its own.
    """

    def __init__(self, messages: Sequence[Mapping[str, Any]]) -> None:
        self.order: list[int] = []  # message indices
        self._callers: dict[
            int, tuple[str, int]
        ] = {}  # message index -> tool name, call number from 1
        calls: list[PastCall] = []
        run: list[int] = []
        for i, message in enumerate(messages):
            if message["role"] == "tool":
                run.append(i)
                continue
            self._take_run(messages, run, calls)
            run = []
            self.order.append(i)
            if message["role"] == "assistant":
                calls = read_calls(message, f"messages[{i}]")
        self._take_run(messages, run, calls)

    def caller(self, index: int) -> tuple[str, int]:
        """Tool name and call number (from 1) of the result at messages[index]."""
        return self._callers[index]

    def _take_run(
        self, messages: Sequence[Mapping[str, Any]], run: list[int], calls: list[PastCall]
    ) -> None:
        places: dict[str, int] = {}
        for place, call in enumerate(calls):
            if call.id is not None:
                places.setdefault(call.id, place)
        for place, call in enumerate(calls):
            places.setdefault(f"{call.name}:{place}", place)
            places.setdefault(f"functions.{call.name}:{place}", place)
        found: dict[int, int] = {}  # message index -> place of its call
        for position, i in enumerate(run):
            call_id = messages[i].get("tool_call_id")
            if call_id is not None and not isinstance(call_id, str):
                raise _bad(f"messages[{i}].tool_call_id", "must be a string")
            if call_id is not None and call_id in places:
                found[i] = places[call_id]
                self._callers[i] = (calls[found[i]].name, found[i] + 1)
                continue
            name = messages[i].get("name")
            if not name:
                raise _bad(
                    f"messages[{i}].tool_call_id",
                    f"is {shown(call_id)}, which no call of the assistant turn before it has: "
                    f"use the call's id, or give the tool's name",
                )
            self._callers[i] = (name, position + 1)
        self.order += sorted(run, key=found.__getitem__) if len(found) == len(run) else run
