"""Which request fields exist, which are harmless to ignore, and which are refused.

Rule: no field is ignored in silence. A field is honoured (schema.py), listed in the answer's
`x-k3serve-ignored` header, or a 400; a name that looks like a misspelt one is a 400 too.
"""

from __future__ import annotations

import difflib
from typing import Any

from k3serve.errors import RequestError

# They change nothing in the answer: bookkeeping, hints about speed, and things that are always so.
HARMLESS = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_options "
    "prompt_cache_retention request_id session_id cache_salt verbosity moderation prediction "
    "spaces_between_special_tokens stream_interval mm_processor_kwargs truncation_side "
    "kv_transfer_params".split()
)

# name -> (values that ask for nothing, what to do instead)
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "structured_outputs": ((), "constrained decoding is not supported yet"),
    "guided_json": ((), "constrained decoding is not supported yet; try response_format"),
    "guided_regex": ((), "constrained decoding is not supported yet"),
    "guided_choice": ((), "constrained decoding is not supported yet"),
    "guided_grammar": ((), "constrained decoding is not supported yet"),
    "grammar": ((), "constrained decoding is not supported yet"),
    "suffix": (("",), "text after the gap cannot be taken into account"),
    "audio": ((), "this model has no audio"),
    "modalities": ((["text"], []), 'only ["text"] is possible'),
    "functions": (([],), "use tools"),
    "function_call": (("none", "auto"), "use tool_choice"),
    "web_search_options": ((), "this server searches nothing"),
    "use_beam_search": ((False,), "use n and sampling"),
    "length_penalty": ((1, 1.0), "it belongs to beam search, which is not supported"),
    "prompt_logprobs": ((), "use echo with logprobs on /v1/completions"),
    "allowed_token_ids": (([],), "use logit_bias"),
    "bad_words": (([],), "use logit_bias"),
    "truncate_prompt_tokens": ((), "cut the prompt before sending it"),
    "logprob_token_ids": (([],), "use top_logprobs"),
    "return_tokens_as_token_ids": ((False,), "use return_token_ids"),
    "thinking_token_budget": ((), "use reasoning_effort"),
    "chat_template": ((), "the chat format of this model is fixed"),
    "documents": (([],), "put them into a message"),
    "max_new_tokens": ((), "use max_tokens"),
    "logits_processors": ((), "use logit_bias"),
    "vllm_xargs": (({},), "there are no extra arguments"),
    "priority": ((0,), "requests are served in order of arrival"),
    "stop_sequences": (([],), "use stop"),
}

_MAX_LISTED = 20
_MAX_FIELDS = 1000


def sort_out(data: dict[str, Any], known: frozenset[str]) -> tuple[dict[str, Any], list[str]]:
    """(the known fields that are not null, names of ignored ones); RequestError for the rest."""
    if len(data) > _MAX_FIELDS:
        raise RequestError(
            f"the body has {len(data)} fields; at most {_MAX_FIELDS} are taken", code="bad_request"
        )
    kept, unknown, ignored = {}, [], []
    for name, value in data.items():
        if value is None:  # null means absent, for every field
            continue
        if name in known:
            kept[name] = value
        elif name in HARMLESS:
            ignored.append(name)
        elif name in REFUSED:
            _check_refused(name, value)
        else:
            unknown.append(name)
    for name in unknown[:50]:
        _check_typo(name, known)
    return kept, ignored + unknown


def _check_refused(name: str, value: Any) -> None:
    harmless, remedy = REFUSED[name]
    # type() too: False == 0 and 1 == True would pass for each other
    if not any(type(value) is type(h) and value == h for h in harmless):
        raise RequestError(
            f"{name} is not supported: {remedy}", param=name, code="unsupported_parameter"
        )


def _check_typo(name: str, known: frozenset[str]) -> None:
    if len(name) > 40:
        return
    names = [*known, *HARMLESS, *REFUSED]
    close = difflib.get_close_matches(name.lower().replace("-", "_"), names, 1, 0.85)
    if close:
        raise RequestError(
            f"unknown field {name!a}; did you mean {close[0]!r}?",
            param=name,
            code="unknown_parameter",
        )


def ignored_header(ignored: list[str]) -> tuple[tuple[str, str], ...]:
    """The header that lists what had no effect; none when everything had."""
    if not ignored:
        return ()
    names = [ascii(name[:60])[1:-1].replace(",", ";") for name in ignored[:_MAX_LISTED]]
    more = len(ignored) - _MAX_LISTED
    return (("x-k3serve-ignored", ", ".join(names) + (f", +{more} more" if more > 0 else "")),)
