"""Drafts change nothing but speed: every request against the same one without drafts."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from k3serve import wire
from k3serve.model import RANK
from k3serve.model import draft as dspark
from k3serve.runtime.engine import Engine
from k3serve.runtime.tick import _Tick
from k3serve.settings import ServeConfig
from k3serve.types import DraftStats, Finish, Request, Sampling
from scripts import bench_spec
from tests.runtime.conftest import Runner

DATA = Path(__file__).parents[1] / "data"
TRACES = json.loads((DATA / "k3_tiny_dspark" / "spec_traces.json").read_text())
NANO = ServeConfig(context=512, max_slots=4, page_tokens=32, steps_per_tick=3)
TINY = replace(
    NANO,
    checkpoint=DATA / "k3_tiny",
    draft=str(DATA / "k3_tiny_dspark"),
    context=256,
    steps_per_tick=1,
    allow_reserved=True,
)
RULES = ("coupled", "block", "token", "onehot")


@cache
def built(**changes: Any) -> Runner:
    from k3serve.startup import build_engine

    return Runner(build_engine(replace(NANO, **changes)))


@pytest.fixture(scope="module", autouse=True)
def no_engine_stays() -> Iterator[None]:
    yield
    built.cache_clear()


@pytest.fixture
def drafting(engine: Engine) -> Runner:
    return ready(engine)


def ready(engine: Engine, **changes: Any) -> Runner:
    runner = built(**changes)
    engine.compilations.take()  # what was compiled is this engine's own program
    return runner


def greedy(n: int, **more: Any) -> Sampling:
    return Sampling(max_tokens=n, temperature=0.0, **more)


@cache
def prompts(count: int) -> list[list[int]]:
    """Held-out chats of K3-nano's curriculum; the first ones cut at the borders of pages."""
    chats = [list(chat) for chat in bench_spec.chats(count + 5) if len(chat) < 450][:count]
    for i, length in enumerate((1, 31, 32, 33, 64, 65)):
        chats[i] = (chats[i] * 3)[:length]
    return chats


def plain(requests: list[tuple[list[int], Sampling]]) -> list[tuple[list[int], Sampling]]:
    return [(prompt, replace(sampling, speculate=False)) for prompt, sampling in requests]


def stats_of(runner: Runner, requests: list[tuple[list[int], Sampling]]) -> list[DraftStats | None]:
    """The drafts of each request, all ticks together."""
    found: dict[int, list[DraftStats]] = {i: [] for i in range(len(requests))}
    queued = [Request(i, tuple(p), s) for i, (p, s) in enumerate(requests)]
    for event in runner.loop.run(queued):
        if event.drafts is not None:
            found[event.request_id].append(event.drafts)

    def added(parts: list[DraftStats]) -> DraftStats | None:
        if not parts:
            return None
        return DraftStats(
            sum(p.steps for p in parts),
            tuple(np.sum([p.offered for p in parts], axis=0).tolist()),
            tuple(np.sum([p.accepted for p in parts], axis=0).tolist()),
        )

    return [added(parts) for parts in found.values()]


MIXED = [
    greedy(40, top_logprobs=3),
    Sampling(max_tokens=25, temperature=1.0, seed=5, top_logprobs=0),
    Sampling(max_tokens=15, temperature=0.8, seed=2**63 + 11, top_p=0.9, top_k=40),
    Sampling(max_tokens=19, temperature=1.2, seed=0, min_p=0.02, choice=3, prompt_logprobs=2),
    greedy(0, prompt_logprobs=1),
    greedy(30, presence_penalty=0.7, frequency_penalty=2.0, repetition_penalty=1.3),
    Sampling(
        max_tokens=30, temperature=0.7, seed=9, presence_penalty=0.5, frequency_penalty=0.3,
        repetition_penalty=1.2, logit_bias=((7, -100.0), (11, 4.0)), top_logprobs=1,
    ),
    greedy(30, logit_bias=((77, 100.0),)),
    greedy(33, min_tokens=20, stop_token_ids=tuple(range(16))),
]  # fmt: skip


def mixed() -> list[tuple[list[int], Sampling]]:
    return [(p, MIXED[i % len(MIXED)]) for i, p in enumerate(prompts(27))]


# --------------------------------------------------------------------------- nothing but speed


def test_greedy_equals_the_libraries_traces(engine: Engine) -> None:
    """K3's tiny checkpoint with a draft of the public library, one step a tick: all tokens; and
    the first step, in which every draft is offered, accepts what the library's draft got right."""
    from k3serve.startup import build_engine

    runner = Runner(build_engine(TINY))
    engine.compilations.take()  # this engine's own program
    traces = [trace for trace in TRACES if trace["num_drafts"] == 7]
    requests = [(trace["prompt"], greedy(len(trace["tokens"]))) for trace in traces]
    answers = runner.run(requests)
    assert [a.tokens for a in answers] == [trace["tokens"] for trace in traces]
    assert runner.run(plain(requests)) == answers
    for trace in traces:
        queued = [Request(0, tuple(trace["prompt"]), greedy(len(trace["tokens"])))]
        stats = [e.drafts for e in runner.loop.run(queued) if e.drafts is not None]
        assert stats[0].steps == 1 and sum(stats[0].offered) == 7
        assert sum(stats[0].accepted) == trace["cycles"][0]["accepted"]


@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_change_no_bit_of_any_request(drafting: Runner, depth: int) -> None:
    """Greedy and, by rule coupled, sampled: tokens, logprobs and top lists, alone and together."""
    expected = [drafting.run([request])[0] for request in plain(mixed())]
    assert drafting.run(mixed(), depth) == expected
    shuffled = list(range(len(expected)))
    random.Random(depth).shuffle(shuffled)
    together = drafting.run([mixed()[i] for i in shuffled], depth)
    assert together == [expected[i] for i in shuffled]
    accepted = [s for s in stats_of(drafting, mixed()) if s is not None and sum(s.accepted)]
    assert len(accepted) > 10  # drafts were at work


def test_a_server_without_a_draft_has_the_same_bits(engine: Engine, drafting: Runner) -> None:
    without = ready(engine, draft="none")
    assert without.engine.shape.rows == drafting.engine.shape.rows == 8
    assert without.run(mixed()) == drafting.run(mixed())


@pytest.mark.parametrize("rule", ["block", "token", "onehot"])
def test_greedy_is_the_same_by_every_rule(engine: Engine, drafting: Runner, rule: str) -> None:
    requests = [(p, s) for p, s in mixed() if s.temperature == 0.0]
    assert ready(engine, acceptance=rule).run(mixed())  # with sampled neighbours in the tile
    assert ready(engine, acceptance=rule).run(requests) == drafting.run(requests)


@pytest.mark.parametrize("rule", ["block", "token", "onehot"])
def test_sampled_requests_replay_whatever_shares_the_batch(engine: Engine, rule: str) -> None:
    runner = ready(engine, acceptance=rule)
    alone = [runner.run([request])[0] for request in mixed()]
    places = list(range(len(alone)))
    random.Random(3).shuffle(places)
    together = runner.run([mixed()[i] for i in places])
    assert together == [alone[i] for i in places]


def test_two_ranks_and_one_tile_for_all_slots(engine: Engine, drafting: Runner) -> None:
    """Another program, so roundings differ from one rank's; with and without drafts they do not."""
    two = ready(engine, ranks=2, tile_slots=4)
    assert two.run(mixed()) == two.run(plain(mixed()))
    requests = [(p, greedy(40)) for p in prompts(27)]
    tokens, expected = ([a.tokens for a in runner.run(requests)] for runner in (two, drafting))
    assert sum(a == b for a, b in zip(tokens, expected, strict=True)) >= 25


@pytest.mark.parametrize("rows", [2, 4, 8])
def test_pc_39_and_pc_43_every_depth_of_drafts(engine: Engine, drafting: Runner, rows: int) -> None:
    """Identifiers to copy, and penalties. The row policy makes blocks of every length up to R-1."""
    rng = random.Random(43)
    words = ["".join(rng.choice("0123456789abcdef") for _ in range(16)) for _ in range(8)]
    copies = [list(f"{w} {w} {w} ".encode()) for w in words]
    requests = [(copy, greedy(24, top_logprobs=0)) for copy in copies]
    requests += [
        (prompts(27)[9], greedy(40, **{name: 2.0}))
        for name in ("frequency_penalty", "presence_penalty", "repetition_penalty")
    ]
    runner = ready(engine, rows=rows)
    expected = [runner.run([request])[0] for request in plain(requests)]
    assert [runner.run([request])[0] for request in requests] == expected
    assert runner.run(requests) == expected
    tokens = [a.tokens for a in drafting.run(plain(requests))]
    assert [a.tokens for a in expected] == tokens
    stats = stats_of(runner, requests)
    accepted = np.sum([s.accepted for s in stats if s is not None], axis=0)
    assert accepted.shape == (rows - 1,) and accepted.all()  # drafts in every place were taken


def test_the_best_draft_logits_alone_change_no_bit_either(engine: Engine, drafting: Runner) -> None:
    top = ready(engine, markov_top=16)
    assert top.run(mixed()) == drafting.run(mixed())
    assert any(s is not None and sum(s.accepted) > 5 for s in stats_of(top, mixed()))


def test_prefill_computes_context_rows_and_no_block(
    drafting: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traces the tick with and without its decode steps, and counts calls."""
    engine, calls = drafting.engine, Counter[str]()

    def counted(function: Any) -> Any:
        def call(*inputs: Any) -> Any:
            calls[function.__name__] += 1
            return function(*inputs)

        return call

    for function in (dspark.block_hidden, dspark.context_rows):
        monkeypatch.setattr(dspark, function.__name__, counted(function))
    tick = _Tick(engine.config, engine.shape, engine.speculation)
    specs = jax.tree.map(lambda a: a.sharding.spec, (engine.weights, engine.allowed, engine.state))
    plan = np.zeros((1, wire.plan_layout(engine.shape).size), np.int32)

    def trace() -> dict[str, int]:
        calls.clear()
        mapped = jax.shard_map(
            tick.run, mesh=engine.mesh, in_specs=(*specs, P(RANK)), out_specs=P(), check_vma=False
        )
        jax.eval_shape(mapped, engine.weights, engine.allowed, engine.state, plan)
        return dict(calls)

    assert trace() == {"block_hidden": 1, "context_rows": 2}
    monkeypatch.setattr(tick, "_decode", lambda w, allowed, running, plan: (running, plan[0]))
    assert trace() == {"context_rows": 1}


# ------------------------------------------------------------------- ends inside a block (PC-36)


def test_pc_36_a_stop_token_at_every_place_of_a_block(drafting: Runner) -> None:
    """Also with all drafts accepted: a bias makes target and draft say one token for ever."""
    prompt = prompts(27)[7]
    full = drafting.run([(prompt, greedy(40, speculate=False))])[0].tokens
    for place in range(30):
        stop = full[place]
        end = full.index(stop)
        answer = drafting.run([(prompt, greedy(40, stop_token_ids=(stop,), top_logprobs=0))])[0]
        assert answer.tokens == full[: end + 1] and answer.finish is Finish.STOP
        assert len(answer.logprobs) == end + 1
    always = greedy(30, logit_bias=((77, 100.0),))
    stats = stats_of(drafting, [(prompt, always)])[0]
    assert stats is not None and stats.accepted == stats.offered and stats.offered[-1] > 0
    for n in range(1, 20):
        answer = drafting.run([(prompt, replace(always, max_tokens=n))])[0]
        assert answer.tokens == [77] * n and answer.finish is Finish.LENGTH
        held = replace(always, min_tokens=n, stop_token_ids=(77,))
        answer = drafting.run([(prompt, held)])[0]  # 77 is masked while n tokens are not out
        assert 77 not in answer.tokens[:n]


def test_pc_46_counts_end_where_the_answer_ends(drafting: Runner) -> None:
    """A step emits its accepted drafts and one token more; the last one may be cut."""
    prompt = prompts(27)[7]
    full = drafting.run([(prompt, greedy(40, speculate=False))])[0].tokens
    for place in range(2, 30):
        request = (prompt, greedy(40, stop_token_ids=(full[place],)))
        tokens = drafting.run([request])[0].tokens
        stats = stats_of(drafting, [request])[0]
        if len(tokens) == 1:
            assert stats is None
            continue
        assert stats is not None
        decoded = len(tokens) - 1  # the first token comes from the prompt's last page
        assert stats.steps + sum(stats.accepted) in (decoded, decoded + 1)
        assert sum(stats.accepted) <= decoded
        assert all(a <= o for a, o in zip(stats.accepted, stats.offered, strict=True))
        assert list(stats.accepted) == sorted(stats.accepted, reverse=True)


@pytest.mark.parametrize("settings", [
    {"frequency_penalty": 2.0}, {"presence_penalty": 1.5}, {"repetition_penalty": 1.5},
])  # fmt: skip
def test_pc_39_penalties_count_each_committed_token_once(
    engine: Engine, drafting: Runner, settings: dict[str, float]
) -> None:
    request = (prompts(27)[9], greedy(40, **settings))
    expected = drafting.run(plain([request]))[0]
    assert drafting.run([request])[0] == expected
    fewer = ready(engine, rows=4)  # another program: three drafts at most
    assert fewer.run([request]) == fewer.run(plain([request]))
    assert fewer.run([request])[0].tokens == expected.tokens


def test_rows_verified_follow_the_slots_own_history(drafting: Runner) -> None:
    """Offered and accepted drafts, place by place, are the same alone and among others."""
    requests = [(p, s) for p, s in mixed() if s.max_tokens > 1]
    alone = [stats_of(drafting, [request])[0] for request in requests]
    assert stats_of(drafting, requests) == alone
    offers = [sum(s.offered) / s.steps for s in alone if s is not None]
    assert min(offers) < 5 < max(offers)  # the policy was at work


def test_a_request_that_wants_no_drafts_gets_none(drafting: Runner) -> None:
    prompt = prompts(27)[7]
    both = [(prompt, greedy(20)), (prompt, greedy(20, speculate=False))]
    with_drafts, without = stats_of(drafting, both)
    assert with_drafts is not None and sum(with_drafts.accepted) > 0
    assert without is not None and sum(without.offered) == 0
    assert with_drafts.steps < without.steps == 19


# -------------------------------------------------------------------------------- distribution


@pytest.mark.parametrize("rule", RULES)
def test_sampled_tokens_have_the_targets_distribution(
    engine: Engine, drafting: Runner, rule: str
) -> None:
    """Four tokens after a prompt, 1,000 seeds with drafts against 1,000 others without: a
    chi-square test of homogeneity over the last three tokens. Deterministic by its seeds."""
    prompt, count = prompts(27)[12], 1000

    def draws(runner: Runner, start: int, speculate: bool) -> Counter[tuple[int, ...]]:
        settings = Sampling(max_tokens=5, temperature=2.0, top_k=5, speculate=speculate)
        seeds = [(prompt, replace(settings, seed=start + i)) for i in range(count)]
        return Counter(tuple(a.tokens[1:4]) for a in runner.run(seeds))

    runner = ready(engine, acceptance=rule)
    found, expected = draws(runner, 0, True), draws(drafting, 50_000, False)
    categories = [k for k in found | expected if found[k] + expected[k] >= 10]
    rare = (
        count - sum(found[k] for k in categories),
        count - sum(expected[k] for k in categories),
    )
    table = np.array([(found[k], expected[k]) for k in categories] + [rare], float)
    table = table[table.sum(1) > 0]
    mean = table.mean(axis=1, keepdims=True)
    chi = float(((table - mean) ** 2 / mean).sum())
    freedom = len(table) - 1
    assert freedom >= 8
    # Wilson-Hilferty: the cube root of a chi-square is nearly normal
    z = ((chi / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert z < 3.1, (chi, freedom)
