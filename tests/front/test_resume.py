"""What a client already has of a request, and what another engine is asked for."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from k3serve.front.resume import MOST_RESUMES, Progress
from k3serve.types import Request, Sampling, TokenEvent
from tests.fakes import prompt_scores

PROMPT = tuple(range(10, 22))


def request(**sampling: object) -> Request:
    return Request(1, PROMPT, Sampling(**({"max_tokens": 20} | sampling)))  # type: ignore[arg-type]


def test_a_request_without_news_is_asked_for_as_it_was() -> None:
    fresh = request(min_tokens=3, prompt_logprobs=2, presence_penalty=1.0)
    progress = Progress(fresh)
    assert progress.rest() == fresh and progress.obstacle() is None


def test_tokens_move_into_the_prompt_and_out_of_both_budgets() -> None:
    progress = Progress(request(min_tokens=5, seed=7, choice=2, temperature=0.5))
    progress.take(TokenEvent(1, (3, 4)))
    progress.take(TokenEvent(1, (5,)))
    rest = progress.rest()
    assert rest.id == 1 and rest.prompt == (*PROMPT, 3, 4, 5)
    assert (rest.sampling.max_tokens, rest.sampling.min_tokens) == (17, 2)
    assert (rest.sampling.seed, rest.sampling.choice, rest.sampling.temperature) == (7, 2, 0.5)
    progress.take(TokenEvent(1, (6,) * 4))
    assert progress.rest().sampling.min_tokens == 0


def test_penalties_that_count_generated_tokens_stand_in_the_way_once_there_are_some() -> None:
    for name in ("presence_penalty", "frequency_penalty"):
        progress = Progress(request(**{name: 0.1}))
        assert progress.obstacle() is None
        progress.take(TokenEvent(1, (3,)))
        assert name in (progress.obstacle() or "")
    repeated = Progress(request(repetition_penalty=1.2))  # counts the prompt's tokens, too
    repeated.take(TokenEvent(1, (3,)))
    assert repeated.obstacle() is None


def test_a_request_is_not_resumed_for_ever() -> None:
    progress = Progress(request())
    progress.resumes = MOST_RESUMES
    assert str(MOST_RESUMES) in (progress.obstacle() or "")


@given(st.lists(st.integers(1, len(PROMPT)), max_size=3), st.integers(1, 5))
def test_prompt_scores_come_once_each_and_in_order(stops: list[int], chunk: int) -> None:
    """However far each engine came: its successor starts over, and only news are passed on."""
    progress = Progress(request(prompt_logprobs=1))
    got: list[float] = []

    def run(until: int) -> None:
        if progress.rest().sampling.prompt_logprobs is None:
            return  # nothing to score any more
        for start in range(1, until, chunk):
            end = min(start + chunk, until)
            event = progress.take(TokenEvent(1, prompt_scores=prompt_scores(PROMPT, start, end)))
            if event.prompt_scores is not None:
                assert event.prompt_scores.start == len(got) + 1
                assert len(event.prompt_scores.top_ids) == len(event.prompt_scores.logprobs)
                got.extend(event.prompt_scores.logprobs)

    for stop in stops:
        run(stop)
    run(len(PROMPT))
    assert np.array_equal(got, prompt_scores(PROMPT, 1, len(PROMPT)).logprobs)


def test_cached_tokens_are_those_of_the_first_engine() -> None:
    progress = Progress(request())
    assert progress.take(TokenEvent(1, cached_tokens=8)).cached_tokens == 8
    assert progress.take(TokenEvent(1, (4,), cached_tokens=12)).cached_tokens == 0
