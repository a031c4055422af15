"""Doubles for everything above the device: a byte tokenizer, and an executor that follows a script.

Rule: nothing here sleeps. A script waits only for a threading.Event that the test sets.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from k3serve.errors import Overloaded
from k3serve.types import (
    MAX_TOP_LOGPROBS,
    Capacity,
    DraftStats,
    Finish,
    PromptScores,
    Request,
    State,
    TokenEvent,
)
from tests.text import byte_tokenizer

SPECIALS = byte_tokenizer.NAMES


class ByteTokenizer(byte_tokenizer.ByteTokenizer):
    """256 bytes, the named specials behind them, and whatever pieces a test adds behind those."""

    def __init__(self) -> None:
        super().__init__()
        self._first_added = super().vocab_size
        self._added: dict[bytes, int] = {}
        self._pieces: list[bytes] = []

    def piece(self, data: bytes | str) -> int:
        """The id of one token that holds exactly these bytes; made when there is none."""
        raw = data.encode() if isinstance(data, str) else data
        if len(raw) == 1:
            return raw[0]
        if raw not in self._added:
            self._added[raw] = self.vocab_size
            self._pieces.append(raw)
        return self._added[raw]

    @property
    def vocab_size(self) -> int:  # type: ignore[override]
        return self._first_added + len(self._pieces)

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < self._first_added:
            return super().token_bytes(token_id)
        return self._pieces[token_id - self._first_added]

    def is_special(self, token_id: int) -> bool:
        return token_id < self._first_added and super().is_special(token_id)


# --------------------------------------------------------------------------- scores


def score(token: int, position: int) -> float:
    """Some log-probability, a float32 that many decimals cannot hide."""
    return float(np.float32(-0.1 - ((token * 7 + position * 13) % 101) / 97))


def ranked(token: int, position: int, rank: int = 0) -> list[tuple[int, float]]:
    """MAX_TOP_LOGPROBS candidates, best first, with `token` at `rank`."""
    own = score(token, position)
    others = [i for i in range(33, 80) if i != token]
    return [
        (token if r == rank else others[r], float(np.float32(own + 0.25 * (rank - r))))
        for r in range(MAX_TOP_LOGPROBS)
    ]


def prompt_scores(prompt: Sequence[int], start: int, end: int) -> PromptScores:
    rows = [ranked(prompt[i], i) for i in range(start, end)]
    return PromptScores(
        start,
        np.array([score(prompt[i], i) for i in range(start, end)], np.float32),
        np.array([[t for t, _ in r] for r in rows], np.int32).reshape(-1, MAX_TOP_LOGPROBS),
        np.array([[v for _, v in r] for r in rows], np.float32).reshape(-1, MAX_TOP_LOGPROBS),
    )


# --------------------------------------------------------------------------- scripts

Item = TokenEvent | threading.Event
Script = Callable[[Request], Iterable[Item]]


def events_of(
    request: Request,
    tokens: Sequence[int],
    *,
    per_event: int = 1,
    rank: int = 0,
    page: int = 4,
) -> Iterator[TokenEvent]:
    """What an engine would send for these tokens: scores page by page, then tokens up to a stop id
    or the budget, `per_event` at a time."""
    sampling = request.sampling
    if sampling.prompt_logprobs is not None:
        for start in range(1, len(request.prompt), page):
            end = min(start + page, len(request.prompt))
            yield TokenEvent(request.id, prompt_scores=prompt_scores(request.prompt, start, end))
    cut = list(tokens[: sampling.max_tokens])
    stops = [i for i, t in enumerate(cut) if t in sampling.stop_token_ids]
    if stops:
        cut = cut[: stops[0] + 1]
    finish = Finish.STOP if stops else Finish.LENGTH
    if not cut:
        yield TokenEvent(request.id, finish=finish)
    for begin in range(0, len(cut), per_event):
        ids = cut[begin : begin + per_event]
        at = len(request.prompt) + begin
        logprobs: tuple[float, ...] = ()
        top_ids: tuple[tuple[int, ...], ...] = ()
        top_values: tuple[tuple[float, ...], ...] = ()
        if sampling.top_logprobs is not None:
            logprobs = tuple(score(t, at + i) for i, t in enumerate(ids))
            rows = [ranked(t, at + i, rank)[: sampling.top_logprobs] for i, t in enumerate(ids)]
            top_ids = tuple(tuple(t for t, _ in r) for r in rows)
            top_values = tuple(tuple(v for _, v in r) for r in rows)
        last = begin + per_event >= len(cut)
        yield TokenEvent(
            request.id,
            tuple(ids),
            logprobs,
            top_ids,
            top_values,
            finish=finish if last else Finish.NONE,
        )


def says(tokens: Sequence[int], **how: Any) -> Script:
    """Every request gets these tokens."""
    return lambda request: events_of(request, tokens, **how)


ROWS = 8  # of a scripted server with a draft


def drafted(*accepted: int, offered: int = ROWS - 1) -> DraftStats:
    """One decode step per number: so many of the drafts offered were accepted."""
    places = range(ROWS - 1)
    return DraftStats(
        len(accepted),
        tuple(len(accepted) * (place < offered) for place in places),
        tuple(sum(count > place for count in accepted) for place in places),
    )


def joined(events: Sequence[TokenEvent], drafts: DraftStats | None = None) -> TokenEvent:
    """Several events as one."""
    return TokenEvent(
        events[0].request_id,
        tuple(t for e in events for t in e.tokens),
        tuple(v for e in events for v in e.logprobs),
        tuple(v for e in events for v in e.top_ids),
        tuple(v for e in events for v in e.top_logprobs),
        drafts=drafts,
        finish=events[-1].finish,
    )


def speculates(tokens: Sequence[int], *ticks: Sequence[int], offered: int = ROWS - 1) -> Script:
    """A server with a draft: the prompt's token comes alone, then one event per tick.

    A tick is a sequence of decode steps, each the number of drafts that it accepts. What the ticks
    leave comes in steps without accepted drafts. A stop token or the budget cuts as on the device.
    """

    def script(request: Request) -> Iterator[TokenEvent]:
        singles = list(events_of(request, tokens))
        waiting = iter(ticks)
        while singles and singles[0].prompt_scores is not None:
            yield singles.pop(0)
        yield singles.pop(0)
        while singles:
            accepted, taken = [], []
            for wanted in next(waiting, (0,)):
                step, singles = singles[: wanted + 1], singles[wanted + 1 :]
                taken += step
                accepted += [len(step) - 1] if step else []
            yield joined(taken, drafted(*accepted, offered=offered))

    return script


def hangs_after(tokens: Sequence[int], gate: threading.Event) -> Script:
    """These tokens one by one, then nothing until the gate opens; then the end."""

    def script(request: Request) -> Iterator[Item]:
        for token in tokens:
            yield TokenEvent(request.id, (token,))
        yield gate
        yield TokenEvent(request.id, finish=Finish.LENGTH)

    return script


class ScriptedOutbox:
    """Plays a script; an Event in it holds everything behind it back."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._items = iter(items)
        self._next: Item | None = None
        self._never = threading.Event()
        self.backlog = 0  # a script has no events before they are asked for; a test may say so

    def get(self, timeout_s: float | None = None) -> TokenEvent | None:
        item = self._next or next(self._items, self._never)
        self._next = None
        if isinstance(item, TokenEvent):
            return item
        if not item.wait(timeout_s):
            self._next = item
            return None
        return self.get(timeout_s)

    def waiting(self) -> int:
        return self.backlog


class FakeExecutor:
    """types.Executor by script; remembers what it was asked."""

    def __init__(self, script: Script, **capacity: int) -> None:
        self.script = script
        self.limits = {"max_slots": 8, "max_context": 4096, "max_queue": 64} | capacity
        self.now = State.READY
        self.refuse_after: int | None = None  # how many submits until the queue is full
        self.submitted: list[Request] = []
        self.cancelled: list[int] = []
        self._changed = threading.Condition()

    def submit(self, request: Request) -> ScriptedOutbox:
        with self._changed:
            if self.now is not State.READY:
                raise Overloaded(f"the server is {self.now.value}", status=503)
            if self.refuse_after is not None and len(self.submitted) >= self.refuse_after:
                raise Overloaded("the queue is full")
            self.submitted.append(request)
            self._changed.notify_all()
        return ScriptedOutbox(self.script(request))

    def cancel(self, request_id: int) -> None:
        with self._changed:
            self.cancelled.append(request_id)
            self._changed.notify_all()

    def state(self) -> State:
        return self.now

    def capacity(self) -> Capacity:
        open_now = len(self.submitted) - len(set(self.cancelled))
        return Capacity(**self.limits, running=open_now)

    def wait_for(self, condition: Callable[[FakeExecutor], bool], timeout_s: float = 10) -> None:
        """Until the condition holds; checked at each submit and cancel."""
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self), timeout_s), "waited in vain"
