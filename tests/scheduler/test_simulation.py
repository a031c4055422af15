"""The scheduler against a model of the device: thousands of random arrivals and cancels."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3serve.scheduler.policy import BUSY_STEPS
from k3serve.scheduler.prefix import page_keys
from k3serve.types import Finish, Request, Sampling, TickShape
from tests.scheduler.fake_device import expected, score
from tests.scheduler.simulate import Load, Run, random_load, shared_load, simulate

SHAPE = TickShape(
    max_slots=4,
    page_tokens=8,
    pages_per_tick=2,
    steps_per_tick=6,
    rows=1,
    pages_per_slot=6,
    num_pages=20,  # less than max_slots * pages_per_slot: requests wait for pages too
)

ANY_LOAD = {
    "seed": st.integers(0, 2**32),
    "count": st.integers(0, 25),
    "gap": st.sampled_from([0.01, 0.5, 4.0]),
    "depth": st.integers(1, 3),
    "max_slots": st.integers(1, 5),
    "page_tokens": st.integers(1, 5),
    "pages_per_tick": st.integers(1, 4),
    "steps_per_tick": st.integers(1, 5),
    "pages_per_slot": st.integers(1, 6),
    "spare_pages": st.integers(0, 12),
}


def check_complete(run: Run, load: Load, shape: TickShape) -> None:
    """Every request got exactly its own tokens and scores; nothing leaked; nobody starved."""
    assert not run.after_cancel
    for request in load.requests.values():
        if request.id in run.refused:
            assert request.id not in run.events and request.id not in run.admitted
            continue
        tokens, finish = expected(request, shape.max_context)
        events = run.events.get(request.id, [])
        got = [token for event in events for token in event.tokens]
        if request.id in load.cancelled and not (events and events[-1].finish):
            assert got == tokens[: len(got)]
        else:
            assert got == tokens
            assert [event.finish for event in events][-1] is finish
        assert all(event.finish is Finish.NONE for event in events[:-1])
        check_logprobs(request, events, got)
        check_scores(request, events, finished=bool(events and events[-1].finish))
    assert run.scheduler.idle and run.scheduler.counts() == (0, 0)
    assert not run.device.slots, "a slot was never released"
    assert run.scheduler.cache.unused == shape.num_pages
    assert not run.scheduler._open and not run.scheduler._in_flight
    for request_id, events in run.events.items():
        assert [e.cached_tokens for e in events] == [run.first_start[request_id]] + [0] * (
            len(events) - 1
        )
    if not shape.num_snapshots:  # else one that waits for another's pages is overtaken
        order = [i for i in load.requests if i in run.admitted]
        assert [run.admitted[i] for i in order] == sorted(run.admitted[i] for i in order)
    bound = -(-shape.max_slots // shape.pages_per_tick)
    for request_id, tick in run.first_page.items():
        assert tick - run.admitted[request_id] < bound
    for ticks in run.page_ticks.values():  # and no prompt waits long between two of its pages
        assert all(after - before <= bound for before, after in itertools.pairwise(ticks))
    for ticks in run.token_ticks.values():  # whoever decodes gets tokens in every tick
        assert ticks == list(range(ticks[0], ticks[-1] + 1))


def check_logprobs(request, events, got) -> None:
    top = request.sampling.top_logprobs
    logprobs = [value for event in events for value in event.logprobs]
    top_ids = [ids for event in events for ids in event.top_ids]
    if top is None:
        assert not logprobs and not top_ids
        return
    assert logprobs == [-token / 64 for token in got]
    assert top_ids == [tuple(token + i for i in range(top)) for token in got]
    assert all(type(value) is float for value in logprobs)


def check_scores(request, events, *, finished: bool) -> None:
    chunks = [event.prompt_scores for event in events if event.prompt_scores is not None]
    values = [value for chunk in chunks for value in chunk.logprobs.tolist()]
    position = 1
    for chunk in chunks:
        assert chunk.start == position
        assert len(chunk.logprobs) == len(chunk.top_ids) == len(chunk.top_logprobs) > 0
        position += len(chunk.logprobs)
    if request.sampling.prompt_logprobs is None:
        assert not chunks
        return
    pairs = [score(*pair) for pair in itertools.pairwise(request.prompt)]
    assert values == (pairs if finished else pairs[: len(values)])


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("gap", [0.3, 3.0, 12.0])
def test_thousands_of_random_requests_all_end_right(depth, gap):
    load = random_load(seed=int(gap * 10), count=700, shape=SHAPE, gap=gap, cancels=0.2)
    check_complete(simulate(load, SHAPE, depth=depth), load, SHAPE)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("gap", [0.3, 3.0, 12.0])
@pytest.mark.parametrize("snapshots", [1, 3, 40])
def test_prompts_that_share_pages_all_end_right(depth, gap, snapshots):
    shape = replace(SHAPE, num_snapshots=snapshots, num_pages=20 + 2 * snapshots)
    load = shared_load(seed=int(gap * 10), count=300, shape=shape, gap=gap, cancels=0.2)
    run = simulate(load, shape, depth=depth)
    check_complete(run, load, shape)
    reused = sum(run.first_start.values())
    share = {1: 0.01, 3: 0.1, 40: 0.6}[snapshots]
    assert share * most_reusable(run, load, shape) <= reused <= most_reusable(run, load, shape)


def most_reusable(run: Run, load: Load, shape: TickShape) -> int:
    """Tokens of whole pages that earlier prompts began with, of all that got a slot."""
    total, seen = 0, set()
    for request_id, request in load.requests.items():
        if request_id not in run.first_start:
            continue
        keys = page_keys(request.prompt, shape.page_tokens)
        usable = keys[: (len(request.prompt) - 1) // shape.page_tokens]
        known = itertools.takewhile(seen.__contains__, usable)
        total += shape.page_tokens * sum(1 for _ in known)
        seen |= set(keys)
    return total


@settings(max_examples=150, deadline=None)
@given(**ANY_LOAD, num_snapshots=st.integers(1, 6))
def test_shared_pages_any_shape_any_load(seed, count, gap, depth, spare_pages, **sizes):
    shape = TickShape(**sizes, rows=1, num_pages=sizes["pages_per_slot"] + spare_pages)
    load = shared_load(seed, count, shape, gap=gap, cancels=0.3)
    check_complete(simulate(load, shape, depth=depth), load, shape)


@pytest.mark.parametrize("depth", [1, 2])
def test_several_rows_a_step(depth):
    """Steps that yield 1 to 4 tokens, as drafts will make them."""
    shape = replace(SHAPE, rows=4)
    load = random_load(seed=5, count=300, shape=shape, gap=2.0, cancels=0.2)
    check_complete(simulate(load, shape, depth=depth), load, shape)


@settings(max_examples=150, deadline=None)
@given(**ANY_LOAD, rows=st.integers(1, 3))
def test_any_shape_any_load(seed, count, gap, depth, spare_pages, **sizes):
    shape = TickShape(**sizes, num_pages=sizes["pages_per_slot"] + spare_pages)
    load = random_load(seed, count, shape, gap=gap, cancels=0.3)
    check_complete(simulate(load, shape, depth=depth), load, shape)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("max_queue", [0, 3, 20])
def test_a_full_queue_refuses_and_keeps_its_budget(depth, max_queue):
    shape = replace(SHAPE, num_snapshots=8, num_pages=36)
    load = shared_load(seed=max_queue, count=1000, shape=shape, gap=0.3, cancels=0.2)
    run = simulate(load, shape, depth=depth, max_queue=max_queue)
    check_complete(run, load, shape)
    assert 0 < len(run.refused) < len(load.requests)
    assert set(run.refused.values()) == {shape.max_slots + max_queue}, "refused too early"


def plain(request_id: int, prompt: int, answer: int) -> Request:
    """A greedy request that runs to its budget; prompts of two ids share nothing."""
    return Request(request_id, (request_id, *[7] * (prompt - 1)), Sampling(answer, seed=request_id))


LONG = replace(SHAPE, pages_per_slot=64, num_pages=4 * 64)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("pages", [1, 2, 16, 32, 63])
def test_the_first_token_of_a_long_prompt_takes_ticks_in_proportion_to_its_length(pages, depth):
    """Alone, and beside streams, which cost it nothing."""
    prompt = pages * LONG.page_tokens
    for streams in ([], [plain(i, 3, 500) for i in (1, 2, 3)]):
        run = simulate(Load({0: streams, 5: [plain(9, prompt, 2)]}), LONG, depth=depth)
        assert run.token_ticks[9][0] - 5 == -(-pages // LONG.pages_per_tick) - 1


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_beside_other_prompts_a_long_one_gets_its_share_of_pages(depth):
    """Three other slots prefill without end: of two pages a tick, one in four is the long one's."""
    others = {tick: [plain(100 + tick, 80, 1)] for tick in range(200)}
    load = Load({**others, 5: [plain(9, 40 * LONG.page_tokens, 2), *others[5]]})
    run = simulate(load, LONG, depth=depth)
    fair = 40 * LONG.max_slots // LONG.pages_per_tick
    assert fair // 2 < run.token_ticks[9][0] - run.admitted[9] <= fair


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_stream_waits_no_longer_beside_a_long_prompt_than_for_one_busy_tick(depth):
    """Every tick gives it BUSY_STEPS tokens, and holds at most pages_per_tick pages."""
    streams = [plain(i, 3, 200) for i in (1, 2, 3)]
    load = Load({0: streams, 5: [plain(9, 60 * LONG.page_tokens, 2)]})
    run = simulate(load, LONG, depth=depth)
    busy = [plan for plan in run.plans[5:] if plan.pages]
    assert len(busy) == 30
    assert all(len(plan.pages) == LONG.pages_per_tick for plan in busy)
    for stream in streams:
        given = dict(zip(run.token_ticks[stream.id], run.events[stream.id], strict=True))
        assert {len(given[plan.tick].tokens) for plan in busy} == {BUSY_STEPS}


def test_same_inputs_same_plans():
    load = random_load(seed=1, count=200, shape=SHAPE, gap=1.0, cancels=0.2)
    assert simulate(load, SHAPE, depth=2).plans == simulate(load, SHAPE, depth=2).plans


def test_steps_are_short_exactly_while_somebody_waits():
    load = random_load(seed=2, count=200, shape=SHAPE, gap=2.0, cancels=0.0)
    run = simulate(load, SHAPE, depth=1)
    arrived = admitted = pages_left = 0
    seen = set()
    for plan in run.plans:
        arrived += len(load.arrivals.get(plan.tick, ()))
        admitted += len(plan.admits)
        pages_left += sum(SHAPE.pages_for(admit.prompt_len) for admit in plan.admits)
        waits = bool(plan.pages) or pages_left > len(plan.pages) or arrived > admitted
        pages_left -= len(plan.pages)
        assert plan.decode_steps in (0, BUSY_STEPS if waits else SHAPE.steps_per_tick)
        seen.add((waits, plan.decode_steps))
    assert {(True, BUSY_STEPS), (False, SHAPE.steps_per_tick)} <= seen
