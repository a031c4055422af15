"""The scheduler's single decisions, plan by plan."""

import numpy as np
import pytest

from k3serve.errors import HostFailure, Overloaded
from k3serve.lockstep.plan import unpack_result
from k3serve.scheduler.scheduler import Scheduler
from k3serve.types import Admit, Finish, PageWork, Request, Sampling, TickShape
from tests.scheduler.fake_device import FakeDevice, next_token

SHAPE = TickShape(
    max_slots=2,
    page_tokens=4,
    pages_per_tick=2,
    steps_per_tick=5,
    rows=1,
    pages_per_slot=8,
    num_pages=16,
)


def request(request_id: int, length: int = 3, max_tokens: int = 20, **sampling) -> Request:
    return Request(request_id, tuple(range(length)), Sampling(max_tokens, **sampling))


def running(*requests: Request) -> tuple[Scheduler, FakeDevice]:
    scheduler, device = Scheduler(SHAPE, max_queue=4), FakeDevice(SHAPE)
    for each in requests:
        scheduler.add(each)
    return scheduler, device


def test_a_request_is_admitted_and_its_pages_run_in_one_plan():
    scheduler, _ = running(request(1, length=6, max_tokens=7, prompt_logprobs=0))
    plan = scheduler.plan(0)
    assert plan.admits == (
        Admit(0, 6, Sampling(7, prompt_logprobs=0), pages=(0, 1, 2, 3)),  # 13 positions
    )
    assert plan.pages == (
        PageWork(0, 0, (0, 1, 2, 3), next_token=4, final=False, score=True),
        PageWork(0, 4, (4, 5), next_token=-1, final=True, score=True),
    )
    assert plan.decode_steps == 2


def test_a_short_prompt_passes_a_long_one():
    scheduler, _ = running(request(1, length=32, max_tokens=0), request(2, length=3))
    slots = [[page.slot for page in scheduler.plan(tick).pages] for tick in range(4)]
    assert slots == [[0, 1], [0, 0], [0, 0], [0, 0]]


def test_no_decode_steps_while_no_slot_can_decode():
    scheduler, _ = running(request(1, length=12, max_tokens=0), request(2, max_tokens=1))
    assert [scheduler.plan(tick).decode_steps for tick in range(4)] == [0, 0, 0, 0]


def test_first_come_first_served_even_where_a_later_one_would_fit():
    shape = TickShape(**{**_fields(SHAPE), "num_pages": 8})
    scheduler = Scheduler(shape, max_queue=4)
    for each in (request(1, 16, 4), request(2, 16, 4), request(3, 1, 1)):
        scheduler.add(each)
    assert [admit.prompt_len for admit in scheduler.plan(0).admits] == [16]  # 2 lacks pages
    assert scheduler.counts() == (1, 2)


def test_cancelled_while_waiting_never_runs():
    scheduler, _ = running(request(1), request(2), request(3), request(4))
    scheduler.plan(0)
    scheduler.cancel(3)
    scheduler.cancel(1)
    plan = scheduler.plan(1)
    assert plan.releases == (0,)
    assert [page.slot for page in plan.pages] == [0]
    assert scheduler.counts() == (2, 0)
    scheduler.cancel(99)  # unknown: ignored


@pytest.mark.parametrize("length", [3, 32], ids=["decoding", "prefilling"])
def test_cancel_frees_the_slot_in_the_next_plan_and_silences_ticks_in_flight(length):
    scheduler, device = running(request(1, length))
    plans = [scheduler.plan(0), scheduler.plan(1)]
    scheduler.cancel(1)
    scheduler.add(request(2))
    plans.append(scheduler.plan(2))
    assert plans[2].releases == (0,) and [admit.slot for admit in plans[2].admits] == [0]
    ids = [e.request_id for plan in plans for e in scheduler.commit(plan, device.result(plan))]
    assert ids == [2]


def test_a_stop_learnt_late_frees_the_slot_in_the_first_plan_after_its_commit():
    stop = next_token((0, 1, 2), Sampling(20), 1)  # the second token, out of tick 0's first step
    scheduler, device = running(request(1, stop_token_ids=(stop,)))
    plans = [scheduler.plan(0), scheduler.plan(1)]
    (event,) = scheduler.commit(plans[0], device.result(plans[0]))
    assert event.finish is Finish.STOP and event.tokens[-1] == stop
    plans.append(scheduler.plan(2))
    assert [plan.releases for plan in plans] == [(), (), (0,)] and scheduler.idle
    assert [e for plan in plans[1:] for e in scheduler.commit(plan, device.result(plan))] == []


def test_a_budget_that_is_surely_used_up_frees_the_slot_without_waiting_for_the_result():
    scheduler, device = running(*(request(i, length=4, max_tokens=0) for i in range(6)))
    plans = [scheduler.plan(tick) for tick in range(3)]  # nothing committed meanwhile
    assert [plan.releases for plan in plans] == [(), (0, 1), (0, 1)]
    events = [e for plan in plans for e in scheduler.commit(plan, device.result(plan))]
    assert [(e.request_id, e.finish) for e in events] == [(i, Finish.LENGTH) for i in range(6)]


def test_cancel_between_release_and_last_event_gives_no_event():
    scheduler, device = running(request(1, length=4, max_tokens=0))
    plans = [scheduler.plan(0), scheduler.plan(1)]
    assert plans[1].releases == (0,)
    scheduler.cancel(1)
    assert [e for plan in plans for e in scheduler.commit(plan, device.result(plan))] == []


def test_budget_is_cut_to_the_context():
    scheduler, _ = running(request(1, length=30, max_tokens=1000))
    admit = scheduler.plan(0).admits[0]
    assert admit.sampling.max_tokens == 2 and len(admit.pages) == SHAPE.pages_per_slot


def test_a_device_that_keeps_running_over_the_budget_is_a_host_failure():
    scheduler, device = running(request(1, length=4, max_tokens=2))
    plan = scheduler.plan(0)
    vector = device.tick(plan)
    device.layout.array(vector, "finish")[:] = 0
    with pytest.raises(HostFailure, match=r"slot 0 emitted 2 tokens without end, with a budget"):
        scheduler.commit(plan, unpack_result(vector, SHAPE))


def test_events_hold_native_numbers_and_arrays_of_their_own():
    scheduler, device = running(request(1, length=6, top_logprobs=2, prompt_logprobs=2))
    plan = scheduler.plan(0)
    result = device.result(plan)
    (event,) = scheduler.commit(plan, result)
    assert {type(token) for token in event.tokens} == {int}
    assert {type(v) for row in event.top_logprobs for v in row} == {float}
    assert {type(v) for row in event.top_ids for v in row} == {int}
    assert event.prompt_scores.logprobs.dtype == np.float32
    assert not np.shares_memory(event.prompt_scores.logprobs, result.score_logprobs)


def test_queue_limit():
    scheduler, _ = running(*(request(i) for i in range(6)))  # 2 slots + 4 waiting
    with pytest.raises(Overloaded, match="6 requests are open"):
        scheduler.add(request(6))


def test_pool_smaller_than_one_context_is_refused():
    shape = TickShape(**{**_fields(SHAPE), "num_pages": 7})
    with pytest.raises(ValueError, match=r"num_pages=7 cannot hold .* pages_per_slot=8"):
        Scheduler(shape, max_queue=1)


def _fields(shape: TickShape) -> dict[str, int]:
    return {name: getattr(shape, name) for name in shape.__dataclass_fields__}
