"""From a tick's result to a request's event: cuts what the request asked for out of the arrays.

Rule: events hold native Python numbers and arrays of their own, so that no event keeps a whole
result alive.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from k3serve.types import (
    DraftStats,
    Finish,
    PageWork,
    PromptScores,
    Sampling,
    TickResult,
    TokenEvent,
)


def token_event(
    request_id: int,
    sampling: Sampling,
    slot: int,
    pages: Seq[tuple[int, PageWork]],  # (index in the plan, page) of this slot
    result: TickResult,
    *,
    cached_scores: PromptScores | None = None,  # of the pages before the first that was computed
) -> TokenEvent | None:
    """What the tick brought to the request in `slot`; None for nothing."""
    count = int(result.counts[slot])
    finish = Finish(int(result.finish[slot]))
    scores = prompt_scores(pages, result, cached_scores)
    if not count and finish is Finish.NONE and scores is None:
        return None
    logprobs: tuple[float, ...] = ()
    top_ids: tuple[tuple[int, ...], ...] = ()
    top_logprobs: tuple[tuple[float, ...], ...] = ()
    if sampling.top_logprobs is not None:
        n = sampling.top_logprobs
        logprobs = tuple(result.logprobs[slot, :count].tolist())
        top_ids = tuple(map(tuple, result.top_ids[slot, :count, :n].tolist()))
        top_logprobs = tuple(map(tuple, result.top_logprobs[slot, :count, :n].tolist()))
    return TokenEvent(
        request_id,
        tokens=tuple(result.tokens[slot, :count].tolist()),
        logprobs=logprobs,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        prompt_scores=scores,
        drafts=draft_stats(slot, result),
        finish=finish,
    )


def draft_stats(slot: int, result: TickResult) -> DraftStats | None:
    steps, offered = int(result.slot_steps[slot]), result.offered[slot]
    if not steps or not offered.size:
        return None
    return DraftStats(steps, tuple(offered.tolist()), tuple(result.accepted[slot].tolist()))


def prompt_scores(
    pages: Seq[tuple[int, PageWork]], result: TickResult, cached: PromptScores | None
) -> PromptScores | None:
    """The scores of one slot's pages in this tick, after those from the cache, joined: they follow
    each other in the prompt.

    Row i of a page scores the token at start+i+1; the last row of the final page has no token to
    score.
    """
    parts = [
        (index, page.start + 1, rows)
        for index, page in pages
        if page.score and (rows := len(page.tokens) - page.final) > 0
    ]
    if not any(page.score for _, page in pages) or not (parts or cached):
        return None

    def joined(name: str) -> np.ndarray:
        """[pages, page_tokens, ...] -> [rows, ...], a copy."""
        array = getattr(result, f"score_{name}")
        rows = [array[index, :count] for index, _, count in parts]
        return np.concatenate(rows if cached is None else [getattr(cached, name), *rows])

    return PromptScores(
        start=parts[0][1] if cached is None else cached.start,
        logprobs=joined("logprobs"),
        top_ids=joined("top_ids"),
        top_logprobs=joined("top_logprobs"),
    )
