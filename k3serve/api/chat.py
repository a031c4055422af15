"""POST /v1/chat/completions: messages in; reasoning, content and tool calls out.

Rule: the message that is not streamed is built from the very deltas of the stream. The one
difference: a tool call that never closed is left out there, while a stream has already shown it.

Stop strings are looked for in the content only, not in reasoning or arguments.
"""

from __future__ import annotations

from typing import Any

from k3serve.api.answers import Answer, deliver
from k3serve.api.context import Context
from k3serve.api.exchange import Exchange
from k3serve.api.inputs import budget, requests_of, stops_of
from k3serve.api.logprobs import chat_entries, scored_tokens
from k3serve.api.prompt import ChatPrompt, chat_prompt
from k3serve.api.replies import Reply
from k3serve.api.schema import ChatBody, parse
from k3serve.api.tokens import Pieces
from k3serve.text.channels import ChannelParser, Delta, Kind
from k3serve.text.stops import StopMatcher
from k3serve.types import Finish, TokenEvent


def chat_completions(context: Context, exchange: Exchange) -> Reply | None:
    body, ignored = parse(ChatBody, exchange.json())
    model = context.check_model(body.model)
    stops = stops_of(body.stop)
    prompt = chat_prompt(context, body, ignored)
    if body.parallel_tool_calls is False:
        ignored.append("parallel_tool_calls (not enforced)")
    if body.skip_special_tokens is False:
        ignored.append("skip_special_tokens")
    name, asked = "max_tokens", body.max_tokens
    if body.max_completion_tokens is not None:  # the newer name wins
        name, asked = "max_completion_tokens", body.max_completion_tokens
    tokens = budget(context, len(prompt.ids), asked, default=None, param=name)
    requests = requests_of(context, body, [prompt.ids], [tokens], body.top_count)
    answer = Answer(
        context,
        model,
        prefix="chatcmpl",
        kind="chat.completion",
        chunk_kind="chat.completion.chunk",
        prompt_tokens=len(prompt.ids),
        choices=[ChatChoice(context, body, i, prompt, stops) for i in range(len(requests))],
        with_reasoning=True,
        include_usage=body.include_usage,
        usage_in_every_chunk=body.usage_in_every_chunk,
        first_fields={"prompt_token_ids": list(prompt.ids)} if body.return_token_ids else {},
    )
    return deliver(
        answer,
        exchange,
        requests,
        stream=bool(body.stream),
        ignored=ignored,
        timeout_s=body.timeout,
    )


class ChatChoice:
    """One sequence of /v1/chat/completions (answers.Choice)."""

    def __init__(
        self,
        context: Context,
        body: ChatBody,
        index: int,
        prompt: ChatPrompt,
        stops: tuple[str, ...],
    ) -> None:
        self.index = index
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.completion_tokens = 0
        self._named_tool = prompt.named_tool
        self._want_logprobs = bool(body.logprobs)
        self._want_ids = bool(body.return_token_ids)
        self._want_reasoning = body.include_reasoning is not False
        self._min_tokens = body.min_tokens or 0
        self._eos_ids = context.eos_ids
        self._known_ids = context.tokenizer.vocab_size
        self._pieces = Pieces(context)
        self._parser = ChannelParser(
            context.tokenizer,
            thinking_open=prompt.channel == "think",
            response_open=prompt.channel == "response",
        )
        stopping = StopMatcher(stops, bool(body.include_stop_str_in_output)) if stops else None
        self._matcher = stopping
        self._message = _Message()
        self._logprobs: list[dict[str, Any]] = []
        self._token_ids: list[int] = []

    @property
    def reasoning_tokens(self) -> int:
        return self._parser.reasoning_tokens

    def opening(self) -> list[dict[str, Any]]:
        return [self._chunk({"role": "assistant", "content": ""})]

    def feed(self, event: TokenEvent) -> list[dict[str, Any]]:
        deltas, used = self._deltas_of(event)
        self.completion_tokens += used
        wire = [w for d in deltas if (w := self._message.add(d, self._want_reasoning))]
        chunks = [self._chunk(delta) for delta in wire]
        if used and (self._want_logprobs or self._want_ids):
            self._annotate(chunks, event, used)
        if self.finish_reason is not None:
            last = self._chunk({})
            last["finish_reason"] = self.finish_reason
            last["stop_reason"] = self.stop_reason
            chunks.append(last)
        return chunks

    def _chunk(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _annotate(self, chunks: list[dict[str, Any]], event: TokenEvent, used: int) -> None:
        """Puts the event's scores and ids on its first chunk, which is made where text waits."""
        if not chunks:
            chunks.append(self._chunk({}))
        if self._want_logprobs:
            entries = chat_entries(self._pieces, scored_tokens(event, used))
            self._logprobs += entries
            chunks[0]["logprobs"] = {"content": entries, "refusal": None}
        if self._want_ids:
            self._token_ids += event.tokens[:used]
            chunks[0]["token_ids"] = list(event.tokens[:used])

    # ------------------------------------------------------------------ text and ends

    def _deltas_of(self, event: TokenEvent) -> tuple[list[Delta], int]:
        """(what the event adds, how many of its tokens count); sets the finish reason."""
        spoken = len(event.tokens) - (event.finish is Finish.STOP)
        ids = [t for t in event.tokens[:spoken] if t < self._known_ids]
        if self._matcher is None:
            deltas, used = self._parser.feed(ids), len(event.tokens)
        else:
            deltas, used = self._match(event, spoken)
        if self.finish_reason is None and event.finish is not Finish.NONE:
            self._end(event, deltas)
        return deltas, used

    def _match(self, event: TokenEvent, spoken: int) -> tuple[list[Delta], int]:
        """Token by token, so that what counts does not depend on how events are cut."""
        deltas: list[Delta] = []
        for used, token in enumerate(event.tokens[:spoken], start=1):
            fed = self._parser.feed([token] if token < self._known_ids else [])
            active = self.completion_tokens + used > self._min_tokens
            deltas += self._watch(fed, active)
            if self.finish_reason is not None:
                return deltas, used
        return deltas, len(event.tokens)

    def _watch(self, fed: list[Delta], active: bool) -> list[Delta]:
        """The deltas with content held back where it may become a stop string."""
        assert self._matcher is not None
        kept: list[Delta] = []
        for delta in fed:
            if delta.kind is not Kind.CONTENT:
                kept += self._release()  # no stop string spans channels
                if self.finish_reason is None:
                    kept.append(delta)
            elif not active:
                kept.append(delta)
            else:
                ready, hit = self._matcher.feed(delta.text)
                kept += _content(ready)
                self._hit(hit)
            if self.finish_reason is not None:
                break
        return kept

    def _release(self) -> list[Delta]:
        assert self._matcher is not None
        text = self._matcher.flush()
        self._hit(self._matcher.hit)
        return _content(text)

    def _hit(self, stop: str | None) -> None:
        if stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop

    def _end(self, event: TokenEvent, deltas: list[Delta]) -> None:
        """The tokens are over: what was held back, and why."""
        rest = self._parser.finish()
        if self._matcher is None:
            deltas += rest
        else:
            deltas += self._watch(rest, active=True)
            if self.finish_reason is None:
                deltas += self._release()
        if self.finish_reason is not None:
            return
        if event.finish is not Finish.STOP:
            self.finish_reason = "length"
            return
        called = self._parser.calls > 0 and not self._parser.open_call
        self.finish_reason = "tool_calls" if called and not self._named_tool else "stop"
        if event.tokens[-1] not in self._eos_ids:
            self.stop_reason = event.tokens[-1]

    # ------------------------------------------------------------------ not streamed

    def whole(self) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": self.index,
            "message": self._message.whole(),
            "logprobs": None,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
        }
        if self._want_logprobs:
            choice["logprobs"] = {"content": self._logprobs, "refusal": None}
        if self._want_ids:
            choice["token_ids"] = self._token_ids
        return choice


def _content(text: str) -> list[Delta]:
    return [Delta(Kind.CONTENT, text=text)] if text else []


class _Message:
    """Deltas -> their wire form, and the message that they add up to."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._arguments: list[list[str]] = []
        self._closed: set[int] = set()

    def add(self, delta: Delta, want_reasoning: bool) -> dict[str, Any] | None:
        """The `delta` of a stream chunk, or None where nothing is to be said."""
        match delta.kind:
            case Kind.CONTENT:
                self._content.append(delta.text)
                return {"content": delta.text}
            case Kind.REASONING:
                if not want_reasoning:
                    return None
                self._reasoning.append(delta.text)
                return {"reasoning_content": delta.text}
            case Kind.CALL_START:
                call = {"id": delta.id, "type": "function"}
                self._calls.append({**call, "name": delta.name})
                self._arguments.append([])
                function = {"name": delta.name, "arguments": ""}
                return {"tool_calls": [{"index": delta.index, **call, "function": function}]}
            case Kind.CALL_ARGUMENTS:
                self._arguments[delta.index].append(delta.text)
                piece = {"index": delta.index, "function": {"arguments": delta.text}}
                return {"tool_calls": [piece]}
            case Kind.CALL_END:
                self._closed.add(delta.index)
                return None

    def whole(self) -> dict[str, Any]:
        calls = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": "".join(self._arguments[i])},
            }
            for i, call in enumerate(self._calls)
            if i in self._closed
        ]
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content or None}
        if not calls:
            message["content"] = content
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if calls:
            message["tool_calls"] = calls
        return message
