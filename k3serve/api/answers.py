"""What both generating endpoints share: the envelope of an answer, usage, and how it is delivered.

Rule: an endpoint supplies one Choice per sequence; whether pieces are streamed or gathered is
decided here only, so that both ways say the same.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from k3serve.api import drafts
from k3serve.api.context import Context
from k3serve.api.exchange import ClientGone, Exchange
from k3serve.api.generate import Group
from k3serve.api.policy import ignored_header
from k3serve.api.replies import Reply, json_reply
from k3serve.api.sse import EventStream
from k3serve.types import DraftStats, Request, TokenEvent


class Choice(Protocol):
    """One sequence on its way to a client."""

    finish_reason: str | None
    completion_tokens: int

    @property
    def reasoning_tokens(self) -> int: ...

    def feed(self, event: TokenEvent) -> list[dict[str, Any]]:
        """Takes an event in; gives the `choices[0]` of the stream chunks that it makes."""
        ...

    def opening(self) -> list[dict[str, Any]]:
        """Chunks that come before anything else of the stream."""
        ...

    def whole(self) -> dict[str, Any]:
        """The finished choice of an answer that is not streamed."""
        ...


@dataclass(slots=True)
class Answer:
    """One answer in the making."""

    context: Context
    model: str
    prefix: str  # of the id: cmpl or chatcmpl
    kind: str  # `object` of the whole answer
    chunk_kind: str
    prompt_tokens: int
    choices: Sequence[Choice]
    with_reasoning: bool
    prompts: int = 1  # the choices of each are neighbours
    include_usage: bool = False
    usage_in_every_chunk: bool = False
    first_fields: dict[str, Any] = field(default_factory=dict)  # top level, once
    drafts: dict[int, DraftStats] = field(default_factory=dict)  # by choice, where there are any
    cached: dict[int, int] = field(default_factory=dict)  # by choice: prompt tokens not computed
    id: str = ""
    created: int = 0

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())

    def usage(self) -> dict[str, Any]:
        completion = sum(c.completion_tokens for c in self.choices)
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens()},
        }
        if self.with_reasoning:
            reasoning = sum(c.reasoning_tokens for c in self.choices)
            usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
        if (stats := drafts.total(self.drafts.values())) is not None:
            usage["speculation"] = drafts.usage(stats)
        return usage

    def cached_tokens(self) -> int:
        """Of each prompt, what its choices need not compute; a prompt counts once, as in
        prompt_tokens, so the choice that shared least counts.
        """
        n = len(self.choices) // self.prompts
        by_choice = [self.cached.get(index, 0) for index in range(len(self.choices))]
        return sum(min(by_choice[at : at + n]) for at in range(0, len(by_choice), n))

    def whole(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            "choices": [c.whole() for c in self.choices],
            "usage": self.usage(),
            **self.first_fields,
        }

    def chunk(self, choice: dict[str, Any] | None) -> dict[str, Any]:
        """One stream chunk; None makes the last one, which carries the usage alone."""
        chunk = {
            "id": self.id,
            "object": self.chunk_kind,
            "created": self.created,
            "model": self.model,
            "choices": [] if choice is None else [choice],
        }
        if self.include_usage:
            now = choice is None or self.usage_in_every_chunk
            chunk["usage"] = self.usage() if now else None
        if self.first_fields:
            chunk |= self.first_fields
            self.first_fields = {}
        return chunk

    def note(self) -> str:
        """For the access log."""
        done = ",".join(sorted({c.finish_reason or "none" for c in self.choices}))
        completion = sum(c.completion_tokens for c in self.choices)
        line = f"prompt={self.prompt_tokens} completion={completion} finish={done}"
        stats = drafts.total(self.drafts.values())
        return line if stats is None else f"{line} {drafts.note(stats)}"

    def feed(self, index: int, event: TokenEvent) -> list[dict[str, Any]]:
        """Takes a choice's event in; gives the `choices[0]` of the stream chunks that it makes."""
        choice = self.choices[index]
        before = choice.completion_tokens
        if event.cached_tokens:
            self.cached[index] = event.cached_tokens
        made = choice.feed(event)
        if event.drafts is not None:
            used = choice.completion_tokens - before
            part = drafts.emitted_part(event.drafts, len(event.tokens), used)
            if (stats := drafts.total((self.drafts.get(index), part))) is not None:
                self.drafts[index] = stats
        return made


def deliver(
    answer: Answer,
    exchange: Exchange,
    requests: list[Request],
    *,
    stream: bool,
    ignored: list[str],
    timeout_s: float | None = None,
) -> Reply | None:
    """Runs the requests and answers, streamed or not."""
    headers = ignored_header(ignored)
    if not stream:
        with Group(answer.context, requests, exchange.gone, timeout_s) as group:
            _run(answer, group, None)
        return json_reply(answer.whole(), headers=headers, note=answer.note())
    events = EventStream(exchange, headers)
    try:
        with Group(answer.context, requests, exchange.gone, timeout_s) as group:
            events.while_blocked = group.check_backlog
            _run(answer, group, events.send)
        events.while_blocked = None
        if answer.include_usage:
            events.send([answer.chunk(None)])
        events.done()
    except ClientGone:
        raise
    except Exception as error:
        if not events.started:
            raise
        events.fail(error)
        exchange.note = f"{answer.note()} error={type(error).__name__}"
        return None
    exchange.note = answer.note()
    return None


def _run(answer: Answer, group: Group, send: Callable[[list[dict[str, Any]]], None] | None) -> None:
    opened = False
    for index, event in group.events():
        choice = answer.choices[index]
        made = answer.feed(index, event)
        if choice.finish_reason is not None:
            drafted = answer.drafts.get(index)
            group.finish(index, choice.finish_reason, choice.completion_tokens, drafted)
        if send is None:
            continue
        if not opened:  # every choice in order: SDK helpers index lists by what they saw
            opened = True
            made = [c for other in answer.choices for c in other.opening()] + made
        send([answer.chunk(c) for c in made])
