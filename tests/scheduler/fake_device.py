"""A model of the device in plain Python: what a tick does to slots, and what it must never be
asked.

Rule: a request's tokens and scores are a pure function of its prompt and settings (`expected`),
however its pages and steps are spread over ticks; every assert here is a promise that plans must
keep.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from k3serve import wire
from k3serve.lockstep.plan import unpack_result, wire_tick
from k3serve.types import (
    MAX_TOP_LOGPROBS,
    Admit,
    Finish,
    PageWork,
    Plan,
    Request,
    Sampling,
    TickResult,
    TickShape,
)

VOCAB = 61


def next_token(prompt: tuple[int, ...], sampling: Sampling, index: int) -> int:
    """The index-th token after the prompt; stop ids are masked for the first min_tokens."""
    token = (hash(prompt) + 7 * sampling.seed + 1009 * sampling.choice + 97 * index**2) % VOCAB
    if index < sampling.min_tokens:
        while token in sampling.stop_token_ids:
            token = (token + 1) % VOCAB
    return token


def score(token: int, following: int) -> float:
    return -(1 + (31 * token + following) % 256) / 64  # exact in float32


def expected(request: Request, max_context: int) -> tuple[list[int], Finish]:
    """Every token of the request, and why it ends, on a server with all the time in the world."""
    sampling = request.sampling
    budget = min(sampling.max_tokens, max_context - len(request.prompt))
    tokens: list[int] = []
    while len(tokens) < budget:
        tokens.append(next_token(request.prompt, sampling, len(tokens)))
        if tokens[-1] in sampling.stop_token_ids:
            return tokens, Finish.STOP
    return tokens, Finish.LENGTH


@dataclass
class _Slot:
    admit: Admit
    prompt: list[int] = field(default_factory=list)
    emitted: int = 0
    decoding: bool = False


class FakeDevice:
    """Runs plans one after another; `tick` gives the packed result."""

    def __init__(self, shape: TickShape) -> None:
        self.shape = shape
        self.slots: dict[int, _Slot] = {}
        self.layout = wire.result_layout(shape)
        self.pages: dict[int, tuple[int, ...]] = {}  # cache page -> the prompt up to its end
        self.snapshots: dict[int, tuple[int, ...]] = {}  # -> the prompt that it has seen

    def result(self, plan: Plan) -> TickResult:
        return unpack_result(self.tick(plan), self.shape)

    def tick(self, plan: Plan) -> np.ndarray:
        out = self.layout.zeros()
        self.layout.array(out, "tick")[...] = wire_tick(plan.tick)
        self.layout.array(out, "stop")[...] = plan.stop
        for slot in plan.releases:
            assert slot in self.slots, f"slot {slot} is released but free"
            del self.slots[slot]
        for admit in plan.admits:
            self._admit(admit)
        assert len(plan.pages) <= self.shape.pages_per_tick
        for index, page in enumerate(plan.pages):
            self._page(index, page, out)
        assert 0 <= plan.decode_steps <= self.shape.steps_per_tick
        could_decode = any(state.decoding for state in self.slots.values())
        assert plan.decode_steps or not could_decode, "a decoding slot gets no step"
        steps = 0
        while steps < plan.decode_steps and any(s.decoding for s in self.slots.values()):
            steps += 1
            for slot, state in self.slots.items():
                # Some steps accept several rows, as drafts will.
                for _ in range(1 + (state.emitted * 5 + len(state.prompt)) % self.shape.rows):
                    if state.decoding:
                        self._emit(slot, state, out)
        self.layout.array(out, "steps")[...] = steps
        return out

    def _admit(self, admit: Admit) -> None:
        assert admit.slot not in self.slots, f"slot {admit.slot} is admitted but taken"
        assert 1 <= admit.prompt_len + admit.sampling.max_tokens <= self.shape.max_context
        assert len(admit.pages) == self.shape.pages_for(
            admit.prompt_len + admit.sampling.max_tokens
        )
        whole = admit.prompt_len // self.shape.page_tokens
        for state in self.slots.values():
            theirs = state.admit.prompt_len // self.shape.page_tokens
            shared = set(state.admit.pages) & set(admit.pages)
            assert shared <= set(admit.pages[:whole]) & set(state.admit.pages[:theirs])
        assert len(set(admit.pages)) == len(admit.pages)
        assert all(0 <= page < self.shape.num_pages for page in admit.pages)
        state = self.slots[admit.slot] = _Slot(admit)
        if admit.restore is not None:
            assert 0 <= admit.restore < self.shape.num_snapshots
            state.prompt = list(self.snapshots[admit.restore])
            assert 0 < len(state.prompt) < admit.prompt_len
            self._check_pages(state)

    def _check_pages(self, state: _Slot) -> None:
        """The cache pages before the next one hold what the slot's own prompt began with."""
        size = self.shape.page_tokens
        for index in range(len(state.prompt) // size):
            held = self.pages[state.admit.pages[index]]
            assert held == tuple(state.prompt[: (index + 1) * size]), "another prompt's page"

    def _page(self, index: int, page: PageWork, out: np.ndarray) -> None:
        state = self.slots[page.slot]
        assert page.start == len(state.prompt) and page.start % self.shape.page_tokens == 0
        self._check_pages(state)
        state.prompt += page.tokens
        self.pages[state.admit.pages[page.start // self.shape.page_tokens]] = tuple(state.prompt)
        if page.save is not None:
            assert 0 <= page.save < self.shape.num_snapshots
            assert len(page.tokens) == self.shape.page_tokens, "a snapshot of a partial page"
            self.snapshots[page.save] = tuple(state.prompt)
        assert page.final == (len(state.prompt) == state.admit.prompt_len)
        assert page.final or len(page.tokens) == self.shape.page_tokens
        assert (page.next_token == -1) == page.final
        # Every row is filled, asked for or not: what is not asked for must not come out.
        following = [*page.tokens[1:], page.next_token]
        for row, pair in enumerate(zip(page.tokens, following, strict=True)):
            self.layout.array(out, "score_logprobs")[index, row] = score(*pair)
            self.layout.array(out, "score_top_ids")[index, row] = pair[0] + np.arange(
                MAX_TOP_LOGPROBS
            )
            self.layout.array(out, "score_top_logprobs")[index, row] = [
                score(pair[0], pair[0] + i) for i in range(MAX_TOP_LOGPROBS)
            ]
        if page.final:
            if state.admit.sampling.max_tokens == 0:
                self.layout.array(out, "finish")[page.slot] = Finish.LENGTH
            else:
                state.decoding = True
                self._emit(page.slot, state, out)

    def _emit(self, slot: int, state: _Slot, out: np.ndarray) -> None:
        sampling = state.admit.sampling
        if state.emitted:  # the anchor's row is written; a first token has none yet
            at = (len(state.prompt) + state.emitted - 1) // self.shape.page_tokens
            self.pages[state.admit.pages[at]] = (-1, slot)
        token = next_token(tuple(state.prompt), sampling, state.emitted)
        counts = self.layout.array(out, "counts")
        at = (slot, counts[slot])
        self.layout.array(out, "tokens")[at] = token
        self.layout.array(out, "logprobs")[at] = -token / 64
        self.layout.array(out, "top_ids")[at] = token + np.arange(MAX_TOP_LOGPROBS)
        self.layout.array(out, "top_logprobs")[at] = -token / 64 - np.arange(MAX_TOP_LOGPROBS)
        counts[slot] += 1
        state.emitted += 1
        if token in sampling.stop_token_ids:
            self._finish(slot, state, Finish.STOP, out)
        elif state.emitted == sampling.max_tokens:
            self._finish(slot, state, Finish.LENGTH, out)

    def _finish(self, slot: int, state: _Slot, finish: Finish, out: np.ndarray) -> None:
        state.decoding = False
        self.layout.array(out, "finish")[slot] = finish
