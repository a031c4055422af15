"""The compiled tick against its promises: goldens, invariance, budgets, seeds, faults."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from k3serve import wire
from k3serve.lockstep.plan import pack
from k3serve.runtime.engine import CompileCounter, Engine
from k3serve.types import Finish, Plan, Sampling
from scripts.bench_serve import COMPILED_LATE
from tests.runtime.conftest import CONFIG, Answer, Runner
from tests.serving import TINY_CHAT

GOLDENS = json.loads((TINY_CHAT / "chat_goldens.json").read_text())


def greedy(n: int, **more: Any) -> Sampling:
    return Sampling(max_tokens=n, temperature=0.0, **more)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Random prompts whose lengths include the borders of pages (32 tokens)."""
    rng = random.Random(seed)
    lengths = [1, 31, 32, 33, 64, 65] + [rng.randint(1, 150) for _ in range(count)]
    return [[rng.randrange(1536) for _ in range(n)] for n in lengths[:count]]


def test_greedy_answers_and_scores_equal_the_goldens(runner: Runner) -> None:
    requests = [(g["prompt_ids"], greedy(24, top_logprobs=5, prompt_logprobs=0)) for g in GOLDENS]
    for answer, golden in zip(runner.run(requests), GOLDENS, strict=True):
        assert answer.tokens == golden["greedy_ids"]
        np.testing.assert_allclose(answer.logprobs, golden["greedy_logprobs"], atol=2e-4)
        np.testing.assert_allclose(answer.prompt_logprobs, golden["prompt_logprobs"], atol=2e-4)
        assert answer.finish is Finish.LENGTH


MIXED = [
    greedy(20, top_logprobs=3),
    Sampling(max_tokens=25, temperature=1.0, seed=5, top_logprobs=0),
    Sampling(max_tokens=15, temperature=0.8, seed=2**63 + 11, top_p=0.9, top_k=40),
    Sampling(max_tokens=9, temperature=1.2, seed=0, min_p=0.02, choice=3, prompt_logprobs=2),
    greedy(0, prompt_logprobs=1),
    Sampling(
        max_tokens=30, temperature=0.7, seed=9, presence_penalty=0.5, frequency_penalty=0.3,
        repetition_penalty=1.2, logit_bias=((7, -100.0), (11, 4.0)), top_logprobs=1,
    ),
]  # fmt: skip


def mixed_requests() -> list[tuple[list[int], Sampling]]:
    return [(p, MIXED[i % len(MIXED)]) for i, p in enumerate(prompts(18))]


@pytest.fixture(scope="module")
def alone(runner: Runner) -> list[Answer]:
    """Each mixed request run by itself."""
    return [runner.run([request])[0] for request in mixed_requests()]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("order", [0, 1, 2])
def test_a_request_keeps_its_bits_whatever_shares_the_batch(
    runner: Runner, alone: list[Answer], depth: int, order: int
) -> None:
    places = list(range(len(alone)))
    random.Random(order).shuffle(places)
    requests = mixed_requests()
    together = runner.run([requests[i] for i in places], depth)
    for place, answer in zip(places, together, strict=True):
        assert answer == alone[place], f"request {place}"


def test_top_lists_hold_the_chosen_value_itself(runner: Runner) -> None:
    answer = runner.run([(prompts(3)[2], greedy(20, top_logprobs=4))])[0]
    for token, value, ids, values in zip(
        answer.tokens, answer.logprobs, answer.top_ids, answer.top_logprobs, strict=True
    ):
        assert len(ids) == 4 and ids[0] == token
        assert values[0] == value == max(values)


def test_stop_ids_end_a_request_and_min_tokens_puts_them_off(runner: Runner) -> None:
    prompt = GOLDENS[0]["prompt_ids"]
    full = runner.run([(prompt, greedy(24))])[0].tokens
    stop = full[6]
    first = full.index(stop)
    answer = runner.run([(prompt, greedy(24, stop_token_ids=(1700, stop)))])[0]
    assert answer.tokens == full[: first + 1] and answer.finish is Finish.STOP
    later = runner.run([(prompt, greedy(24, stop_token_ids=(stop,), min_tokens=first + 3))])[0]
    assert stop not in later.tokens[: first + 3]
    assert later.tokens[:first] == full[:first]


def test_a_stop_id_as_the_last_allowed_token_counts_as_stop(runner: Runner) -> None:
    prompt = GOLDENS[0]["prompt_ids"]
    full = runner.run([(prompt, greedy(24))])[0].tokens
    place = full.index(full[4])
    answer = runner.run([(prompt, greedy(place + 1, stop_token_ids=(full[4],)))])[0]
    assert answer.finish is Finish.STOP


@pytest.mark.parametrize("budget", [0, 1, 2, 8, 9, 10, 31])
def test_budgets_are_kept_exactly(runner: Runner, budget: int) -> None:
    answer = runner.run([(prompts(2)[1], greedy(budget))])[0]
    assert len(answer.tokens) == budget and answer.finish is Finish.LENGTH


def test_bias_bans_and_forces(runner: Runner) -> None:
    prompt = GOLDENS[0]["prompt_ids"]
    best = runner.run([(prompt, greedy(1))])[0].tokens[0]
    banned = runner.run([(prompt, greedy(40, logit_bias=((best, -100.0),)))])[0]
    assert best not in banned.tokens
    forced = runner.run([(prompt, greedy(5, logit_bias=((77, 100.0),)))])[0]
    assert forced.tokens == [77] * 5


def test_logprobs_are_of_the_models_own_distribution(runner: Runner) -> None:
    prompt = GOLDENS[0]["prompt_ids"]
    plain = runner.run([(prompt, greedy(1, top_logprobs=5))])[0]
    bent = runner.run(
        [(prompt, greedy(1, top_logprobs=5, logit_bias=((3, 50.0),), repetition_penalty=1.5))]
    )[0]
    assert bent.tokens == [3]
    assert bent.top_ids == plain.top_ids and bent.top_logprobs == plain.top_logprobs
    assert bent.logprobs[0] < plain.logprobs[0]


def test_penalties_count_each_generated_token_once(runner: Runner) -> None:
    """Against a plain computation on the model's own log-probabilities, token by token."""
    prompt, settings = GOLDENS[1]["prompt_ids"], {"frequency_penalty": 2.0, "presence_penalty": 1.0}
    tokens = runner.run([(prompt, greedy(12, **settings))])[0].tokens
    for n in range(12):
        context = [*prompt, *tokens[:n]]
        row = runner.run([(context, greedy(1, top_logprobs=20))])[0]
        scores = {
            i: v - 2.0 * tokens[:n].count(i) - 1.0 * (i in tokens[:n])
            for i, v in zip(row.top_ids[0], row.top_logprobs[0], strict=True)
        }
        best = sorted(scores.values())[-2:]
        if best[1] - best[0] > 1e-3:  # the context runs as pages: near ties may turn
            assert tokens[n] == max(scores, key=lambda i: scores[i]), n


def test_seeds_replay_and_choices_differ(runner: Runner) -> None:
    prompt = prompts(3)[2]

    def sampled(**more: Any) -> Sampling:
        return Sampling(max_tokens=16, temperature=1.0, **({"seed": 1} | more))

    first = [a.tokens for a in runner.run([(prompt, sampled(choice=c)) for c in range(4)])]
    assert len({tuple(t) for t in first}) == 4
    assert [a.tokens for a in runner.run([(prompt, sampled(choice=c)) for c in range(4)])] == first
    other = [runner.run([(prompt, sampled(seed=s))])[0].tokens for s in (0, 2, 2**32 + 1)]
    assert len({tuple(t) for t in [*other, first[0]]}) == 4


# ------------------------------------------------------------------------------------ faults


@pytest.mark.parametrize(
    ("word", "fault"),
    [("magic", "MAGIC"), ("version", "VERSION"), ("tick", "TICK"), ("prompt_len", "CHECKSUM")],
)
def test_a_wrong_plan_is_a_fault_and_changes_nothing(
    engine: Engine, runner: Runner, word: str, fault: str
) -> None:
    before = runner.run([(prompts(2)[1], greedy(6))])[0]
    layout = wire.plan_layout(engine.shape)
    vector = pack(Plan(tick=runner.loop.tick), engine.shape)
    layout.array(vector, word).flat[0] += 1
    if word != "prompt_len":
        layout.array(vector, "checksum")[...] = wire.checksum(vector)
    result = engine.read(engine.dispatch(vector))
    runner.loop.tick += 1
    codes = wire.result_layout(engine.shape)
    assert codes.array(result, "fault") == wire.Fault[fault]
    assert not codes.array(result, "counts").any()
    assert runner.run([(prompts(2)[1], greedy(6))])[0] == before


def test_a_second_hosts_words_are_seen(engine: Engine, runner: Runner) -> None:
    """What a follower would add to the sum if it fed anything but zeros."""
    vector = pack(Plan(tick=runner.loop.tick), engine.shape)
    noise = np.zeros_like(vector)
    noise[-40] = 1
    result = engine.read(engine.dispatch(vector + noise))
    runner.loop.tick += 1
    assert wire.result_layout(engine.shape).array(result, "fault") == wire.Fault.CHECKSUM


def test_a_late_compilation_is_counted_and_logged(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """Without this, what servers are asked at their end could be silent for another reason."""
    counter = CompileCounter()
    counter.ready()
    jax.block_until_ready(jax.jit(lambda x: x * 3 + 41)(np.arange(7)))
    assert counter.take() == len([m for m in caplog.messages if COMPILED_LATE in m]) >= 1
    assert counter.take() == 0
    assert engine.compilations.take() >= 1  # the other tests' counter


# --------------------------------------------------------------------------- the score command


def test_prompt_scores_equal_the_score_command_bit_for_bit(engine: Engine, runner: Runner) -> None:
    from k3serve.score import score

    sequences = [p for p in prompts(10, seed=4) if len(p) > 1]
    answers = runner.run([(p, greedy(1, prompt_logprobs=1)) for p in sequences])
    lines = [{"tokens": p} for p in sequences]
    offline = score(TINY_CHAT, lines, page_tokens=engine.shape.page_tokens)
    engine.compilations.reset()  # score compiles its own program
    for i, answer in enumerate(answers):
        assert answer.prompt_logprobs == offline[f"logprobs_{i}"][1:].tolist(), i


# ------------------------------------------------------------------------------------- ranks


def test_two_ranks_in_one_process_keep_the_goldens(engine: Engine) -> None:
    from k3serve.startup import build_engine

    two = Runner(build_engine(replace(CONFIG, ranks=2)))
    engine.compilations.reset()  # the second engine's own program
    answers = two.run([(g["prompt_ids"], greedy(24)) for g in GOLDENS])
    assert [a.tokens for a in answers] == [g["greedy_ids"] for g in GOLDENS]
