"""POST /v1/completions: raw text or ids in, text out; echo with log-probabilities for evaluation.

Rule: the text and the arrays of a choice depend on its tokens only, never on how they were cut into
events: streamed chunks add up to the answer that is not streamed.
"""

from __future__ import annotations

from typing import Any

from k3serve.api.answers import Answer, deliver
from k3serve.api.context import Context
from k3serve.api.exchange import Exchange
from k3serve.api.inputs import budget, prompts_of, requests_of, stops_of
from k3serve.api.logprobs import CompletionLogprobs, Scored, scored_prompt, scored_tokens
from k3serve.api.replies import Reply
from k3serve.api.schema import CompletionBody, parse
from k3serve.api.tokens import Detokenizer, Pieces
from k3serve.errors import RequestError
from k3serve.text.stops import StopMatcher
from k3serve.types import Finish, TokenEvent

DEFAULT_MAX_TOKENS = 16  # OpenAI's


def completions(context: Context, exchange: Exchange) -> Reply | None:
    body, ignored = parse(CompletionBody, exchange.json())
    model = context.check_model(body.model)
    if body.prompt is None:
        raise RequestError("prompt is missing; send a string or token ids", param="prompt")
    prompts = prompts_of(context, body.prompt)
    stops = stops_of(body.stop)
    if stops:
        context.need_tokenizer("stop")
    budgets = [
        budget(context, len(p), body.max_tokens, default=DEFAULT_MAX_TOKENS, param="max_tokens")
        for p in prompts
    ]
    requests = requests_of(context, body, prompts, budgets, body.top_count)
    answer = Answer(
        context,
        model,
        prefix="cmpl",
        kind="text_completion",
        chunk_kind="text_completion",
        prompt_tokens=sum(map(len, prompts)),
        prompts=len(prompts),
        choices=[
            TextChoice(context, body, i, request.prompt, stops)
            for i, request in enumerate(requests)
        ],
        with_reasoning=False,
        include_usage=body.include_usage,
        usage_in_every_chunk=body.usage_in_every_chunk,
    )
    return deliver(
        answer,
        exchange,
        requests,
        stream=bool(body.stream),
        ignored=ignored,
        timeout_s=body.timeout,
    )


class TextChoice:
    """One sequence of /v1/completions (answers.Choice)."""

    reasoning_tokens = 0  # raw text has no channels

    def __init__(
        self,
        context: Context,
        body: CompletionBody,
        index: int,
        prompt: tuple[int, ...],
        stops: tuple[str, ...],
    ) -> None:
        self.index = index
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.completion_tokens = 0
        self._prompt = prompt
        self._echo = bool(body.echo)
        self._top = body.logprobs
        self._skip = body.skip_special_tokens is not False
        self._include_stop = bool(body.include_stop_str_in_output)
        self._min_tokens = body.min_tokens or 0
        self._want_ids = bool(body.return_token_ids) or context.tokenizer is None
        self._eos_ids = context.eos_ids
        pieces = Pieces(context)
        self._decoder = Detokenizer(pieces, self._skip)
        self._matcher = StopMatcher(stops, self._include_stop) if stops else None
        self._scores: list[Scored] = [Scored(prompt[0], None)]
        self._logprobs = CompletionLogprobs(pieces, Detokenizer(pieces, self._skip))
        self._chunks: list[dict[str, Any]] = []
        self._begun = False
        self._prompt_text = ""

    def opening(self) -> list[dict[str, Any]]:
        return []

    def feed(self, event: TokenEvent) -> list[dict[str, Any]]:
        if event.prompt_scores is not None and self._top is not None:
            self._scores += scored_prompt(self._prompt, event.prompt_scores, self._top)
        if not event.tokens and event.finish is Finish.NONE:
            return []
        text, used = self._text_of(event)
        self.completion_tokens += used
        logprobs = None
        if self._top is not None:
            logprobs = self._merge(self._echoed_scores(), scored_tokens(event, used))
        text = self._echoed_text() + text
        tokens = list(event.tokens[:used])
        chunk = self._chunk(text, logprobs, tokens)
        self._begun = True
        self._chunks.append(chunk)
        if not (text or logprobs or self._want_ids or self.finish_reason):
            return []
        return [chunk]

    def _chunk(
        self, text: str, logprobs: dict[str, Any] | None, tokens: list[int]
    ) -> dict[str, Any]:
        chunk: dict[str, Any] = {
            "index": self.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
        }
        if self._want_ids:
            chunk["token_ids"] = tokens
            if not self._begun:
                chunk["prompt_token_ids"] = list(self._prompt)
        return chunk

    # ------------------------------------------------------------------ text and ends

    def _text_of(self, event: TokenEvent) -> tuple[str, int]:
        """(new text, how many of the event's tokens count); sets the finish reason."""
        if not self._begun and self._echo:  # a character may span the border
            self._prompt_text = self._decoder.feed(self._prompt, skip_special=False)
        ended = event.finish is Finish.STOP and not self._include_stop
        spoken = len(event.tokens) - ended  # a stop token is no text
        if self._matcher is None:
            text, used = self._decoder.feed(event.tokens[:spoken]), len(event.tokens)
        else:
            text, used = self._match(event, spoken)
        if self.finish_reason is None and event.finish is not Finish.NONE:
            text += self._flush(event)
        return text, used

    def _match(self, event: TokenEvent, spoken: int) -> tuple[str, int]:
        assert self._matcher is not None
        parts: list[str] = []
        for used, token in enumerate(event.tokens[:spoken], start=1):
            text = self._decoder.feed((token,))
            if self.completion_tokens + used <= self._min_tokens:
                parts.append(text)  # stops count only after min_tokens
                continue
            ready, hit = self._matcher.feed(text)
            parts.append(ready)
            if hit is not None:
                self.finish_reason, self.stop_reason = "stop", hit
                return "".join(parts), used
        return "".join(parts), len(event.tokens)

    def _flush(self, event: TokenEvent) -> str:
        """The text still held back when the tokens end, and why they ended."""
        text = self._decoder.flush()
        self.finish_reason = "stop" if event.finish is Finish.STOP else "length"
        if event.finish is Finish.STOP and event.tokens[-1] not in self._eos_ids:
            self.stop_reason = event.tokens[-1]
        if self._matcher is None:
            return text
        ready, hit = self._matcher.feed(text)
        if hit is None:
            ready += self._matcher.flush()
            hit = self._matcher.hit
        if hit is not None:
            self.finish_reason, self.stop_reason = "stop", hit
        return ready

    # ------------------------------------------------------------------ echo

    def _echoed_text(self) -> str:
        return self._prompt_text if self._echo and not self._begun else ""

    def _echoed_scores(self) -> dict[str, list[Any]] | None:
        """The prompt's arrays, once."""
        if not self._echo or self._begun:
            return None
        assert len(self._scores) == len(self._prompt), "prompt scores are incomplete"
        return self._logprobs.arrays(self._scores, skip_special=False)

    def _merge(
        self, echoed: dict[str, list[Any]] | None, entries: list[Scored]
    ) -> dict[str, list[Any]]:
        made = self._logprobs.arrays(entries, self._skip)
        return made if echoed is None else {k: echoed[k] + made[k] for k in made}

    # ------------------------------------------------------------------ not streamed

    def whole(self) -> dict[str, Any]:
        last = dict(self._chunks[-1])
        last["text"] = "".join(c["text"] for c in self._chunks)
        for key in ("token_ids", "logprobs"):
            if last.get(key) is not None:
                last[key] = _joined([c[key] for c in self._chunks])
        if self._want_ids:
            last["prompt_token_ids"] = list(self._prompt)
        return last


def _joined(parts: list[Any]) -> Any:
    if isinstance(parts[0], dict):
        return {k: _joined([p[k] for p in parts]) for k in parts[0]}
    return [item for part in parts for item in part]
