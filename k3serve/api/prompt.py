"""From the chat fields of a body to the prompt's token ids.

Rule: what the rendering (text.chat) can express is asked of the model; what cannot be enforced yet
is listed as such in the answer's `x-k3serve-ignored`, never dropped in silence.

Thinking: chat_template_kwargs.thinking (or enable_thinking) decides; else reasoning_effort, where
`none` is off and low, high and max are on; else the server's default. Contradictions are a 400.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from k3serve.api.context import Context
from k3serve.api.schema import ChatBody, TokenizeBody, shown
from k3serve.errors import RequestError
from k3serve.text import chat as chat_text

_MESSAGE_FIELDS = frozenset(
    "role content name reasoning_content reasoning tool_calls tool_call_id tools".split()
)
_REFUSED_MESSAGE_FIELDS = {"function_call": "use tool_calls", "audio": "this model has no audio"}
_FORMATS = ("text", "json_object", "json_schema")
_UNENFORCED = "(asked of the model, not enforced)"


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered chat and the channel in which the model goes on: think, response or None."""

    ids: tuple[int, ...]
    channel: str | None
    named_tool: bool  # the client asked for one certain tool


def chat_prompt(context: Context, body: ChatBody | TokenizeBody, ignored: list[str]) -> ChatPrompt:
    """Renders and encodes; appends to `ignored` what has no effect or is not enforced."""
    if body.messages is None:
        raise RequestError(
            "messages is missing; send an array of at least one message", param="messages"
        )
    tokenizer = context.need_tokenizer("messages")
    thinking, effort = _thinking(context, body, ignored)
    tools = _tools(body.tools, ignored)
    add_prompt, go_on = _ends(body)
    fragments = chat_text.render(
        _messages(body.messages, ignored),
        tools=tools,
        thinking=thinking,
        effort=effort,
        tool_choice=_tool_choice(body.tool_choice, ignored),
        response_format=_response_format(body.response_format, ignored),
        add_generation_prompt=add_prompt,
        continue_final=go_on,
    )
    if isinstance(body, ChatBody):  # /tokenize counts texts of any length
        context.check_fits(sum(len(fragment.text) for fragment in fragments), "messages")
    return ChatPrompt(
        tuple(chat_text.encode_chat(tokenizer, fragments)),
        chat_text.open_channel(fragments),
        isinstance(body.tool_choice, dict),
    )


def _messages(value: Any, ignored: list[str]) -> Any:
    """The messages with null fields taken out; text.chat checks the rest."""
    if not isinstance(value, list):
        raise RequestError(f"messages must be an array; got {shown(value)}", param="messages")
    cleaned = []
    for i, message in enumerate(value):
        if not isinstance(message, dict):
            raise RequestError(
                f"messages[{i}] must be an object; got {shown(message)}", param=f"messages[{i}]"
            )
        kept = {k: v for k, v in message.items() if v is not None or k == "content"}
        for name in kept.keys() - _MESSAGE_FIELDS:
            if name in _REFUSED_MESSAGE_FIELDS:
                raise RequestError(
                    f"messages[{i}].{name} is not supported: {_REFUSED_MESSAGE_FIELDS[name]}",
                    param=f"messages[{i}].{name}",
                )
            _list_once(ignored, f"messages[].{name}")
            del kept[name]
        cleaned.append(kept)
    return cleaned


def _list_once(ignored: list[str], name: str) -> None:
    if name not in ignored:
        ignored.append(name)


def _thinking(
    context: Context, body: ChatBody | TokenizeBody, ignored: list[str]
) -> tuple[bool, str | None]:
    """(thinking on, effort to name in the prompt)."""
    explicit = _explicit_thinking(body.chat_template_kwargs or {}, ignored)
    effort = body.reasoning_effort
    if explicit is True and effort == "none":
        raise RequestError(
            "reasoning_effort none and chat_template_kwargs.thinking true contradict each other",
            param="reasoning_effort",
        )
    if explicit is False and effort not in (None, "none"):
        ignored.append("reasoning_effort (thinking is off)")
    if explicit is not None:
        thinking = explicit
    elif effort is not None:
        thinking = effort != "none"
    else:
        thinking = context.settings.default_thinking
    return thinking, (effort or context.settings.default_effort) if thinking else None


def _explicit_thinking(kwargs: dict[str, Any], ignored: list[str]) -> bool | None:
    found: bool | None = None
    for name, value in kwargs.items():
        if name not in ("thinking", "enable_thinking"):
            ignored.append(f"chat_template_kwargs.{name}")
            continue
        if value is None:
            continue
        if not isinstance(value, bool):
            raise RequestError(
                f"chat_template_kwargs.{name} must be true or false; got {shown(value)}",
                param=f"chat_template_kwargs.{name}",
            )
        if found is not None and found != value:
            raise RequestError(
                "chat_template_kwargs.thinking and .enable_thinking contradict each other",
                param="chat_template_kwargs",
            )
        found = value
    return found


def _ends(body: ChatBody | TokenizeBody) -> tuple[bool, bool]:
    """(open a new assistant message, go on with the last one)."""
    go_on = bool(body.continue_final_message)
    if go_on and body.add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    return not go_on and body.add_generation_prompt is not False, go_on


def _tools(value: Any, ignored: list[str]) -> Any:
    if value is None or value == []:
        return None
    if isinstance(value, list):
        functions = [t.get("function") for t in value if isinstance(t, dict)]
        if any(isinstance(f, dict) and f.get("strict") is True for f in functions):
            ignored.append("tools[].function.strict (not enforced)")
    return value


def _tool_choice(value: Any, ignored: list[str]) -> Any:
    if value == "required" or isinstance(value, dict):
        ignored.append(f"tool_choice {_UNENFORCED}")
    return value


def _response_format(value: Any, ignored: list[str]) -> Any:
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else value
    if not isinstance(value, dict) or kind not in _FORMATS:
        raise RequestError(
            f"response_format.type must be one of {', '.join(_FORMATS)}; got {shown(kind)}",
            param="response_format",
        )
    if kind == "text":
        return None
    ignored.append(f"response_format {_UNENFORCED}")
    return value
