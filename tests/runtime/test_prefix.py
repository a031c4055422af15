"""Prefix reuse: whatever the cache gave, the answer is that of an empty one, to the bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import pytest

from k3serve.runtime.engine import Engine
from k3serve.runtime.snapshots import page_bytes, slot_arrays, snapshot_bytes
from k3serve.types import Sampling
from tests.runtime.conftest import Answer, Runner
from tests.runtime.test_speculation import ready

C = 32
Asked = tuple[list[int], Sampling]
SAMPLINGS = (
    Sampling(max_tokens=12, temperature=0.0, top_logprobs=3),
    Sampling(max_tokens=9, temperature=1.0, seed=7, top_logprobs=1, top_p=0.9),
    Sampling(max_tokens=0, temperature=0.0, prompt_logprobs=2),
    Sampling(max_tokens=4, temperature=0.0, prompt_logprobs=1, top_logprobs=2),
    Sampling(  # the penalty knows the tokens of pages that were not computed
        max_tokens=10, temperature=0.0, repetition_penalty=1.4, presence_penalty=0.3,
        top_logprobs=0,
    ),
)  # fmt: skip


@pytest.fixture(params=["rows of one", "drafts, few snapshots"])
def cached(request: Any, engine: Engine, runner: Runner) -> Iterator[Runner]:
    """An engine and a way to use it warm; the shared one is handed back cold."""
    if request.param == "rows of one":
        chosen = Runner(engine)
        chosen.loop = runner.loop  # ticks are counted through
    else:
        chosen = ready(engine, prefix_cache_mib=4)
        assert 2 <= chosen.engine.shape.num_snapshots <= 8  # the test is to evict some
    yield chosen
    chosen.loop.warm = False


def cold(runner: Runner, requests: list[Asked]) -> list[Answer]:
    """Each request alone, by an empty cache."""
    answers = []
    for request in requests:
        runner.forget()
        answers.append(runner.run([request])[0])
    assert all(answer.cached_tokens == 0 for answer in answers)
    return answers


def growing(rng: random.Random, count: int) -> list[Asked]:
    """Prompts that repeat, go on from, or part from earlier ones, many at the border of a page."""
    known: list[list[int]] = [[rng.randrange(500) for _ in range(5 * C)]]
    asked = []
    for _ in range(count):
        base = rng.choice(known[-6:])
        kept = rng.choice([C - 1, C, C + 1, 2 * C, rng.randint(1, len(base)), len(base), len(base)])
        added = rng.choice([0, 1, C - 1, C, C + 1, rng.randint(0, 2 * C)])
        prompt = (base[:kept] + [rng.randrange(500) for _ in range(added)])[: 12 * C]
        known.append(prompt)
        asked.append((prompt, rng.choice(SAMPLINGS)))
    return asked


def test_warm_answers_have_the_bits_of_cold_ones(cached: Runner) -> None:
    asked = growing(random.Random(3), 40)
    expected = cold(cached, asked)
    cached.forget()
    order = list(range(len(asked)))
    reused = 0
    for round_ in range(3):
        random.Random(round_).shuffle(order)
        at = 0
        while at < len(order):
            batch = order[at : at + 1 + round_ * 5]
            at += len(batch)
            for place, answer in zip(batch, cached.run([asked[i] for i in batch]), strict=True):
                assert answer == expected[place], f"request {place} in round {round_}"
                assert answer.cached_tokens < len(asked[place][0])
                reused += answer.cached_tokens
    assert reused > 3 * sum(len(prompt) for prompt, _ in asked) // 10


@pytest.mark.parametrize("length", [C - 1, C, C + 1, 2 * C, 2 * C + 1])
def test_what_a_repeated_prompt_need_not_compute(runner: Runner, length: int) -> None:
    prompt = [(7 * i) % 500 for i in range(length)]
    runner.forget()
    first, second = (runner.run([(prompt, SAMPLINGS[0])])[0] for _ in range(2))
    runner.loop.warm = False
    assert first == second
    assert (first.cached_tokens, second.cached_tokens) == (0, (length - 1) // C * C)


def test_choices_of_one_prompt_compute_it_once(runner: Runner) -> None:
    prompt = [(11 * i) % 500 for i in range(4 * C + 5)]
    choices = [
        (prompt, Sampling(max_tokens=6, temperature=1.0, seed=3, choice=i)) for i in range(4)
    ]
    expected = cold(runner, choices)
    runner.forget()
    together = runner.run(choices)
    runner.loop.warm = False
    assert together == expected
    assert [answer.cached_tokens for answer in together] == [0, 4 * C, 4 * C, 4 * C]


def test_an_answer_is_computed_as_pages_before_it_is_shared(cached: Runner) -> None:
    prompt = [(13 * i) % 500 for i in range(C + 3)]
    cached.forget()
    answer = cached.run([(prompt, Sampling(max_tokens=3 * C, temperature=0.0))])[0]
    following = (prompt + answer.tokens + [5, 6, 7], SAMPLINGS[0])
    second = cached.run([following])[0]
    assert second.cached_tokens == C  # the prompt's own page: no decoded row was adopted
    assert cold(cached, [following])[0] == second


def test_scores_from_the_cache_need_the_next_token_to_be_known(runner: Runner) -> None:
    scored = SAMPLINGS[2]
    prompt = [(17 * i) % 500 for i in range(2 * C)]
    runner.forget()
    base = runner.run([(prompt + [1] * 4, scored)])[0]
    known = base.prompt_top[2 * C - 1][0][5]  # not the best one, yet listed
    unknown = next(i for i in range(500) if i not in base.prompt_top[2 * C - 1][0])
    variants = [(prompt + [token] * 40, scored) for token in (known, unknown)]
    warm = [runner.run([variant])[0] for variant in variants]
    assert warm[0].cached_tokens == 2 * C and warm[1].cached_tokens < 2 * C
    assert cold(runner, variants) == warm
    runner.loop.warm = False


def test_sizes_are_those_of_the_arrays(cached: Runner) -> None:
    engine = cached.engine
    state, shape = engine.state, engine.shape
    draft = engine.speculation.draft
    one = sum(a.nbytes // shape.num_snapshots for a in jax.tree.leaves(state.snapshots))
    assert snapshot_bytes(engine.config, draft, shape, 1, 4) == one
    live = slot_arrays(state.model, state.ring, state.table.seen)
    assert one == sum(a.nbytes // shape.max_slots for a in jax.tree.leaves(live))
    kda = {id(a) for a in jax.tree.leaves(live)}
    pages = sum(
        a.nbytes
        for i, layer in enumerate(state.model.layers)
        if not engine.config.is_kda(i)
        for a in jax.tree.leaves(layer)
        if id(a) not in kda
    )
    assert page_bytes(engine.config, shape, 4) == pages // shape.num_pages


def test_a_server_without_cache_keeps_nothing(engine: Engine) -> None:
    off, on = ready(engine, prefix_cache_mib=0), ready(engine, prefix_cache_mib=4)
    assert off.engine.shape.num_snapshots == 0 and off.engine.state.snapshots is None
    prompt = [(7 * i) % 500 for i in range(3 * C)]
    asked = [(prompt, replace(SAMPLINGS[0], seed=i)) for i in range(2)]
    assert off.run(asked) == on.run(asked)
    assert all(answer.cached_tokens == 0 for answer in off.run(asked))
