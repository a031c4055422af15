"""Request bodies as typed, checked values.

Rule: strict JSON types ("5" is no 5, true is no 1), finite numbers, null means absent. Each field's
description completes the sentence "FIELD must be ...", so every refusal names what is allowed.
Fields of free shape (prompt, stop, messages, ...) are checked in inputs.py and messages.py.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from k3serve.api.policy import sort_out
from k3serve.errors import RequestError
from k3serve.types import MAX_STOP_IDS, MAX_TOP_LOGPROBS

MAX_N = 128
SEED_LIMIT = 2**63


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


def _number(low: float, high: float, text: str) -> Any:
    return Field(ge=low, le=high, allow_inf_nan=False, description=text)


Count = Annotated[int, Field(ge=0, lt=2**64, description="an integer, 0 or more and below 2**64")]
Flag = Annotated[bool, Field(description="true or false")]
Text = Annotated[str, Field(description="a string")]
Effort = Annotated[
    Literal["none", "low", "high", "max"], Field(description="one of none, low, high, max")
]
TopCount = Annotated[
    int, Field(ge=0, le=MAX_TOP_LOGPROBS, description=f"an integer from 0 to {MAX_TOP_LOGPROBS}")
]


class StreamOptions(_Body):
    include_usage: Flag | None = None
    continuous_usage_stats: Flag | None = None
    include_obfuscation: Flag | None = None  # padding against traffic analysis; none is made


class SamplingBody(_Body):
    """What completions and chat have in common."""

    model: Text | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, _number(0, 2, "a number from 0 to 2")] | None = None
    top_p: (
        Annotated[
            float,
            Field(
                gt=0,
                le=1,
                allow_inf_nan=False,
                description="a number above 0 and at most 1 (temperature 0 is greedy)",
            ),
        ]
        | None
    ) = None
    top_k: (
        Annotated[
            int,
            Field(ge=-1, lt=2**31, description="an integer from -1 to 2147483647; 0 or -1 is off"),
        ]
        | None
    ) = None
    min_p: Annotated[float, _number(0, 1, "a number from 0 to 1")] | None = None
    seed: (
        Annotated[
            int,
            Field(
                ge=-1,
                lt=SEED_LIMIT,
                description="an integer from 0 to 9223372036854775807, or -1 for none",
            ),
        ]
        | None
    ) = None
    n: Annotated[int, Field(ge=1, le=MAX_N, description=f"an integer from 1 to {MAX_N}")] | None = (
        None
    )
    best_of: Annotated[int, Field(description="equal to n; more is not supported")] | None = None
    stop: Any = None
    stop_token_ids: (
        Annotated[
            list[int],
            Field(
                max_length=MAX_STOP_IDS,
                description=f"an array of at most {MAX_STOP_IDS} token ids",
            ),
        ]
        | None
    ) = None
    ignore_eos: Flag | None = None
    min_tokens: Count | None = None
    presence_penalty: Annotated[float, _number(-2, 2, "a number from -2 to 2")] | None = None
    frequency_penalty: Annotated[float, _number(-2, 2, "a number from -2 to 2")] | None = None
    repetition_penalty: (
        Annotated[
            float,
            Field(ge=0.01, le=10, allow_inf_nan=False, description="a number from 0.01 to 10"),
        ]
        | None
    ) = None
    logit_bias: Any = None
    include_stop_str_in_output: Flag | None = None
    skip_special_tokens: Flag | None = None
    add_special_tokens: Flag | None = None  # K3 prompts have none to add: both values are honoured
    return_token_ids: Flag | None = None
    speculate: Flag | None = None
    timeout: (
        Annotated[
            float,
            Field(
                gt=0,
                le=86_400,
                allow_inf_nan=False,
                description="a number of seconds above 0 and at most 86400",
            ),
        ]
        | None
    ) = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = Field(
        None, description="an object with include_usage and continuous_usage_stats"
    )

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def usage_in_every_chunk(self) -> bool:
        return self.include_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )


class CompletionBody(SamplingBody):
    prompt: Any = None
    echo: Flag | None = None
    logprobs: TopCount | None = None

    @property
    def top_count(self) -> int | None:
        return self.logprobs


class ChatBody(SamplingBody):
    messages: Any = None
    max_completion_tokens: Count | None = None
    logprobs: Flag | None = None
    top_logprobs: TopCount | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Flag | None = None
    response_format: Any = None
    reasoning_effort: Effort | None = None
    include_reasoning: Flag | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(description="an object")] | None = None
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag | None = None
    echo: Annotated[Literal[False], Field(description="false; use /v1/completions")] | None = None

    @property
    def top_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeBody(_Body):
    model: Text | None = None
    prompt: Annotated[str, Field(description="a string (send messages for a chat)")] | None = None
    add_special_tokens: Flag | None = None
    return_token_strs: Flag | None = None
    messages: Any = None
    tools: Any = None
    tool_choice: Any = None
    response_format: Any = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(description="an object")] | None = None
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag | None = None


class DetokenizeBody(_Body):
    model: Text | None = None
    tokens: Annotated[list[int], Field(description="an array of token ids")]


B = TypeVar("B", bound=_Body)


def parse(kind: type[B], data: dict[str, Any]) -> tuple[B, list[str]]:
    """(the checked body, the names of fields that have no effect), or RequestError 400."""
    kept, ignored = sort_out(data, frozenset(kind.model_fields))
    if isinstance(options := kept.get("stream_options"), dict):
        known = frozenset(StreamOptions.model_fields)
        kept["stream_options"] = {k: v for k, v in options.items() if k in known}
        ignored += [f"stream_options.{k}" for k in options if k not in known]
    try:
        body = kind.model_validate(kept)
    except ValidationError as error:
        raise _explain(kind, error) from None
    if isinstance(body, SamplingBody):
        _check_combinations(body)
    return body, ignored


def _check_combinations(body: SamplingBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream: true", param="stream_options")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise RequestError(
            f"best_of must be equal to n ({body.n or 1}); got {body.best_of}", param="best_of"
        )
    if isinstance(body, ChatBody) and body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")


def shown(value: Any) -> str:
    """A value for an error message: short, one line, ASCII."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= 60 else text[:57] + "..."


def _explain(kind: type[_Body], error: ValidationError) -> RequestError:
    first = error.errors(include_url=False)[0]
    model: type[BaseModel] = kind
    param, wanted = "", first["msg"]
    for part in first["loc"]:
        if isinstance(part, int):
            param += f"[{part}]"
            continue
        field = model.model_fields.get(part)
        if field is None:  # the name of a union's branch, not of a field
            continue
        param += f".{part}" if param else part
        wanted = _description(field) or wanted
        if part == "stream_options":
            model = StreamOptions
    if first["type"] == "missing":
        return RequestError(f"{param} is missing; it must be {wanted}", param=param)
    whole = wanted if "[" not in param else f"part of {wanted}"
    return RequestError(f"{param} must be {whole}; got {shown(first['input'])}", param=param)


def _description(field: Any) -> str | None:
    if field.description:
        return str(field.description)
    for arg in getattr(field.annotation, "__args__", ()):
        for extra in getattr(arg, "__metadata__", ()):
            if getattr(extra, "description", None):
                return str(extra.description)
    return None
