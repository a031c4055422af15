"""From a checked body to Requests: prompts, stop strings, budgets, sampling settings.

Rule: after this module every number fits the plan's int32 and float32 fields and the context.
"""

from __future__ import annotations

import re
import secrets
from typing import Any

from k3serve.api.context import Context
from k3serve.api.schema import SEED_LIMIT, CompletionBody, SamplingBody, shown
from k3serve.errors import RequestError
from k3serve.types import GREEDY_BELOW, MAX_LOGIT_BIAS, MAX_STOP_IDS, Request, Sampling

MAX_STOPS = 16
MAX_STOP_CHARS = 4096
_BIAS_KEY = re.compile(r"0|[1-9][0-9]{0,9}")


# ---------------------------------------------------------------------------- prompts


def prompts_of(context: Context, value: Any) -> list[tuple[int, ...]]:
    """Token ids of each prompt: a string, strings, ids, or id lists; never mixed, never empty."""
    if isinstance(value, str):
        return [_encode(context, value, "prompt")]
    if not isinstance(value, list) or not value:
        raise RequestError(
            "prompt must be a string, an array of strings, an array of token ids, or an array of "
            f"arrays of token ids, and not empty; got {shown(value)}",
            param="prompt",
        )
    kinds = {type(item) for item in value}
    if kinds == {str}:
        return [_encode(context, text, f"prompt[{i}]") for i, text in enumerate(value)]
    if kinds == {list}:
        return [check_ids(context, ids, f"prompt[{i}]") for i, ids in enumerate(value)]
    if str in kinds or list in kinds:
        raise RequestError("prompt must not mix strings, token ids and arrays", param="prompt")
    return [check_ids(context, value, "prompt")]


def _encode(context: Context, text: str, param: str) -> tuple[int, ...]:
    """Special strings become their single id, as in /tokenize: a raw prompt may carry them."""
    if not text:
        raise RequestError(f"{param} is empty; send at least one token", param=param)
    context.check_fits(len(text), param)
    return tuple(context.need_tokenizer(param).encode(text, allow_special=True))


def check_ids(context: Context, ids: list[Any], param: str) -> tuple[int, ...]:
    if not ids:
        raise RequestError(f"{param} is empty; send at least one token", param=param)
    limit = context.settings.vocab_size
    for i, item in enumerate(ids):
        if type(item) is not int or not 0 <= item < limit:
            raise RequestError(
                f"{param}[{i}] must be a token id from 0 to {limit - 1}; got {shown(item)}",
                param=f"{param}[{i}]",
            )
    return tuple(ids)


# ---------------------------------------------------------------------------- stops and biases


def stops_of(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or len(items) > MAX_STOPS:
        raise RequestError(
            f"stop must be a string or an array of at most {MAX_STOPS} strings; got {shown(value)}",
            param="stop",
        )
    for i, item in enumerate(items):
        if not isinstance(item, str) or not 0 < len(item) <= MAX_STOP_CHARS:
            param = "stop" if isinstance(value, str) else f"stop[{i}]"
            raise RequestError(
                f"{param} must be a string of 1 to {MAX_STOP_CHARS} characters; got {shown(item)}",
                param=param,
            )
    return tuple(dict.fromkeys(items))


def bias_of(context: Context, value: Any) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIAS:
        raise RequestError(
            f"logit_bias must be an object of at most {MAX_LOGIT_BIAS} entries "
            f"{{token id: number}}; got {_size(value)}",
            param="logit_bias",
        )
    limit = context.settings.vocab_size
    pairs = []
    for key, bias in value.items():
        if not _BIAS_KEY.fullmatch(key) or int(key) >= limit:
            raise RequestError(
                f"logit_bias keys must be token ids from 0 to {limit - 1}, written without signs, "
                f"blanks or leading zeros; got {shown(key)}",
                param="logit_bias",
            )
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise RequestError(
                f"logit_bias.{key} must be a number from -100 to 100; got {shown(bias)}",
                param=f"logit_bias.{key}",
            )
        pairs.append((int(key), float(bias)))
    return tuple(pairs)


def _size(value: Any) -> str:
    return f"{len(value)} entries" if isinstance(value, dict) else shown(value)


def stop_ids_of(context: Context, body: SamplingBody) -> tuple[int, ...]:
    given = body.stop_token_ids or []
    if given:
        check_ids(context, list(given), "stop_token_ids")
    ends = () if body.ignore_eos else context.eos_ids
    ids = tuple(dict.fromkeys((*ends, *given)))
    if len(ids) > MAX_STOP_IDS:
        raise RequestError(
            f"stop_token_ids may name {MAX_STOP_IDS - len(ends)} ids beside the model's "
            f"{len(ends)} end tokens; got {len(given)}",
            param="stop_token_ids",
        )
    return ids


# ---------------------------------------------------------------------------- budgets


def budget(
    context: Context, prompt_len: int, asked: int | None, *, default: int | None, param: str
) -> int:
    """max_tokens of one sequence: prompt + max_tokens must fit the context, echo or not.

    Unset means `default`, but no more than what is left; None means all that is left.
    """
    limit = context.executor.capacity().max_context
    left = limit - prompt_len
    if asked is None and left >= 1:
        return left if default is None else min(default, left)
    wanted = 1 if asked is None else asked
    if wanted > left:
        how = f"{wanted} in {param}" if asked is not None else "at least 1 to generate"
        raise RequestError(
            f"this model's maximum context length is {limit} tokens; this request needs "
            f"{prompt_len + wanted} ({prompt_len} in the prompt, {how}). "
            f"Shorten the prompt or lower {param}",
            param=param if asked is not None and left >= 0 else "prompt",
            code="context_length_exceeded",
        )
    return wanted


# ---------------------------------------------------------------------------- requests


def requests_of(
    context: Context,
    body: SamplingBody,
    prompts: list[tuple[int, ...]],
    budgets: list[int],
    top_count: int | None,
) -> list[Request]:
    """One Request per prompt and choice, in order of the answer's index."""
    n = body.n or 1
    _check_count(context, len(prompts) * n)
    stop_ids = stop_ids_of(context, body)
    bias = bias_of(context, body.logit_bias)
    echo = isinstance(body, CompletionBody) and bool(body.echo)
    made = []
    for prompt, max_tokens in zip(prompts, budgets, strict=True):
        if (body.min_tokens or 0) > max_tokens:
            raise RequestError(
                f"min_tokens must be at most max_tokens ({max_tokens}); got {body.min_tokens}",
                param="min_tokens",
            )
        drawn = secrets.randbelow(SEED_LIMIT)  # per prompt: equal prompts must differ
        for choice in range(n):
            sampling = Sampling(
                max_tokens=max_tokens,
                seed=drawn if body.seed is None or body.seed < 0 else body.seed,
                choice=choice,
                temperature=_temperature(body.temperature),
                top_p=1.0 if body.top_p is None else body.top_p,
                top_k=max(0, body.top_k or 0),
                min_p=body.min_p or 0.0,
                presence_penalty=body.presence_penalty or 0.0,
                frequency_penalty=body.frequency_penalty or 0.0,
                repetition_penalty=(
                    1.0 if body.repetition_penalty is None else body.repetition_penalty
                ),
                logit_bias=bias,
                min_tokens=body.min_tokens or 0,
                stop_token_ids=stop_ids,
                top_logprobs=top_count,
                prompt_logprobs=top_count if echo else None,
                speculate=body.speculate is not False,
            )
            made.append(Request(next(context.ids), prompt, sampling))
    return made


def _temperature(value: float | None) -> float:
    if value is None:
        return 1.0
    return 0.0 if value < GREEDY_BELOW else value


def _check_count(context: Context, count: int) -> None:
    capacity = context.executor.capacity()
    limit = capacity.max_slots + capacity.max_queue
    if count > limit:
        raise RequestError(
            f"prompts times n is {count}, more than this server ever holds ({limit}); "
            "send several requests",
            param="prompt",
            code="too_many_sequences",
        )
