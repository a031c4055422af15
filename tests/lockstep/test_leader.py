"""The engine loop against a pod of threads: overlap, cancel, limits, drain, and every way to
fail.
"""

import queue
import random
import threading
from dataclasses import replace

import pytest

from k3serve.errors import HostFailure, Overloaded, RequestError
from k3serve.lockstep.leader import Leader, TickStats
from k3serve.scheduler.scheduler import Scheduler
from k3serve.types import Finish, Outbox, Request, Sampling, State, TokenEvent
from tests.lockstep.conftest import SHAPE
from tests.lockstep.fake_pod import WAIT_S, FakeHost, in_background
from tests.scheduler.fake_device import expected
from tests.scheduler.simulate import random_request


def request(request_id: int, length: int = 3, max_tokens: int = 20, **sampling) -> Request:
    return Request(request_id, tuple(range(length)), Sampling(max_tokens, **sampling))


def events_of(outbox: Outbox) -> list[TokenEvent]:
    """All events of a request, to its last."""
    events: list[TokenEvent] = []
    while not events or events[-1].finish is Finish.NONE:
        event = outbox.get(WAIT_S)
        assert event is not None, f"no last event; so far {events}"
        events.append(event)
    return events


def tokens_of(outbox: Outbox) -> tuple[list[int], Finish]:
    events = events_of(outbox)
    return [token for event in events for token in event.tokens], events[-1].finish


@pytest.mark.parametrize("sync", [False, True])
def test_each_request_gets_exactly_its_own_tokens(make_pod, make_leader, sync):
    rng = random.Random(3)
    requests = [random_request(rng, i, SHAPE) for i in range(40)]
    leader = make_leader(make_pod(), sync=sync, max_queue=40)
    outboxes = [leader.submit(each) for each in requests]
    assert [tokens_of(outbox) for outbox in outboxes] == [
        expected(each, SHAPE.max_context) for each in requests
    ]


@pytest.mark.parametrize(("sync", "ahead"), [(False, 2), (True, 1)])
def test_overlap_keeps_two_ticks_on_the_device_and_sync_one(make_pod, make_leader, sync, ahead):
    pod = make_pod(held=True)
    leader = make_leader(pod, sync=sync)
    assert pod.next_plan().tick == 0
    outbox = leader.submit(request(1, max_tokens=29))
    pod.step()  # tick 0; tick 1 is held
    assert [pod.next_plan().tick for _ in range(ahead)] == [1, 2][:ahead]
    pod.let_go()
    assert tokens_of(outbox)[1] is Finish.LENGTH
    assert pod.most_ahead == ahead


def test_200_requests_from_8_threads_with_cancels(make_pod, make_leader):
    leader = make_leader(make_pod(), max_queue=200)

    def client(number: int) -> None:
        rng = random.Random(number)
        for i in range(25):
            each = random_request(rng, number * 25 + i, SHAPE)
            outbox = leader.submit(each)
            tokens, finish = expected(each, SHAPE.max_context)
            if rng.random() < 0.2:
                leader.cancel(each.id)
                got, why = tokens_of(outbox)
                assert got == tokens[: len(got)] and why in (Finish.CANCELLED, finish)
            else:
                assert tokens_of(outbox) == (tokens, finish)

    for client_done in [in_background(client, number) for number in range(8)]:
        client_done.result(WAIT_S)
    assert leader.drain(WAIT_S)
    capacity = leader.capacity()
    assert (capacity.running, capacity.waiting) == (0, 0)


def test_only_the_engine_thread_touches_scheduler_and_device(make_pod, make_leader, monkeypatch):
    """Invariant 5: one writer per thing, whatever the HTTP threads do."""
    callers: dict[str, set[str]] = {}

    def watch(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def call(*args, **options):
            callers.setdefault(name, set()).add(threading.current_thread().name)
            return original(*args, **options)

        monkeypatch.setattr(owner, name, call)

    for name in ("add", "cancel", "plan", "commit"):
        watch(Scheduler, name)
    for name in ("dispatch", "read"):
        watch(FakeHost, name)
    leader = make_leader(make_pod(), max_queue=40)

    def client(number: int) -> None:
        for i in range(5):
            outbox = leader.submit(request(number * 5 + i))
            if i == 2:
                leader.cancel(number * 5 + i)
            tokens_of(outbox)

    for done in [in_background(client, number) for number in range(4)]:
        done.result(WAIT_S)
    assert leader.drain(WAIT_S)
    assert set(callers) == {"add", "cancel", "plan", "commit", "dispatch", "read"}
    assert set().union(*callers.values()) == {"k3serve-engine"}


def test_a_new_request_is_in_the_next_plan_while_others_decode(make_pod, make_leader):
    pod = make_pod(held=True)
    leader = make_leader(pod)
    assert pod.next_plan().tick == 0
    leader.submit(request(1, max_tokens=29))
    pod.step()
    assert [pod.next_plan().tick for _ in range(2)] == [1, 2]
    leader.submit(request(2))
    pod.step()  # tick 1 comes back, 2 runs, 3 is planned
    assert [admit.slot for admit in pod.next_plan().admits] == [1]


def test_an_idle_leader_wakes_at_once_and_dispatches_nothing_in_between(make_pod, make_leader):
    pod = make_pod()
    leader = make_leader(pod, idle_interval_s=3600.0, sync=True)
    assert leader.wait_ready(WAIT_S)
    for each in range(3):
        assert len(tokens_of(leader.submit(request(each, max_tokens=1)))[0]) == 1
    assert leader.drain(WAIT_S)
    # Tick 0; per request one plan that does it all and one that releases; stop and closing tick.
    assert [bool(plan.admits) for plan in pod.plans] == [False, *[True, False] * 3, False, False]
    assert [plan.stop for plan in pod.plans] == [False] * 7 + [True] * 2


def test_idle_ticks_keep_coming(make_pod, make_leader):
    pod = make_pod()
    make_leader(pod, idle_interval_s=0.001)
    plans = [pod.next_plan() for _ in range(10)]
    assert [(p.tick, p.admits, p.decode_steps) for p in plans] == [(i, (), 0) for i in range(10)]


def test_cancel_frees_the_slot_one_tick_later(make_pod, make_leader):
    pod = make_pod(held=True)
    leader = make_leader(pod)
    pod.next_plan()
    outbox = leader.submit(request(1, max_tokens=29))
    pod.step(2)
    assert [pod.next_plan().tick for _ in range(3)] == [1, 2, 3]
    leader.cancel(1)
    leader.cancel(1)
    leader.cancel(99)
    pod.step()
    assert pod.next_plan().releases == (0,)
    pod.let_go()
    assert tokens_of(outbox)[1] is Finish.CANCELLED
    assert outbox.get(0) is None


def test_cancelled_in_the_queue_never_runs(make_pod, make_leader):
    pod = make_pod(held=True)
    leader = make_leader(pod)
    outboxes = [leader.submit(request(i)) for i in range(3)]
    leader.cancel(1)
    pod.let_go()
    assert [tokens_of(outbox)[1] for outbox in outboxes] == [
        Finish.LENGTH,
        Finish.CANCELLED,
        Finish.LENGTH,
    ]
    assert leader.drain(WAIT_S)
    assert sum(len(plan.admits) for plan in pod.plans) == 2


def test_pc_79_a_full_queue_is_a_429_at_once(make_pod, make_leader):
    pod = make_pod(held=True)
    leader = make_leader(pod, max_queue=4)
    outboxes = [leader.submit(request(i)) for i in range(SHAPE.max_slots + 4)]
    with pytest.raises(Overloaded, match="the queue is full: 4 requests wait") as caught:
        leader.submit(request(100))
    assert caught.value.status == 429 and caught.value.retry_after_s
    assert leader.capacity().waiting == 7
    leader.cancel(6)
    pod.let_go()
    assert tokens_of(outboxes[6])[1] is Finish.CANCELLED
    outboxes[6] = leader.submit(request(101))
    assert [tokens_of(outbox)[1] for outbox in outboxes] == [Finish.LENGTH] * 7


def test_a_bad_request_is_its_own_400_and_harms_nobody(make_pod, make_leader):
    leader = make_leader(make_pod())
    good = leader.submit(request(1))
    for bad in (request(2, temperature=float("nan")), request(3, seed=2**64), request(4, 33)):
        with pytest.raises(RequestError) as caught:
            leader.submit(bad)
        assert caught.value.status == 400
    assert tokens_of(good) == expected(request(1), SHAPE.max_context)
    assert leader.state() is State.READY


def test_stats_of_every_tick(make_pod, make_leader):
    stats: list[TickStats] = []
    leader = make_leader(make_pod(), on_tick=stats.append)
    for i in range(5):
        tokens_of(leader.submit(request(i, length=7, max_tokens=6)))
    assert leader.drain(WAIT_S)
    assert [each.tick for each in stats] == list(range(len(stats)))
    assert sum(each.tokens for each in stats) == 5 * 6
    assert sum(each.prompt_tokens for each in stats) == 5 * 7
    assert sum(each.decode_steps for each in stats) == 5 * 5
    assert max(each.running for each in stats) == 1 and stats[-1].running == 0
    for phase in ("plan", "dispatch", "wait", "commit", "deliver"):
        assert sum(getattr(each.times, phase) for each in stats) > 0, phase


# ------------------------------------------------------------------------------------------ drain


def test_pc_55_drain_finishes_what_is_open_and_takes_no_more(make_pod, make_leader):
    pod = make_pod(held=True)
    leader = make_leader(pod)
    outboxes = [leader.submit(request(i)) for i in range(5)]
    leader.begin_drain(WAIT_S)
    assert leader.state() is State.DRAINING
    with pytest.raises(Overloaded, match="shutting down") as caught:
        leader.submit(request(9))
    assert caught.value.status == 503
    pod.let_go()
    assert [tokens_of(outbox)[1] for outbox in outboxes] == [Finish.LENGTH] * 5
    assert leader.wait_ended(WAIT_S)
    assert [plan.stop for plan in pod.plans[-3:]] == [False, True, True]
    assert leader.drain(0)  # again: nothing more happens


def test_drain_cancels_what_is_open_at_its_deadline(make_pod, make_leader):
    pod = make_pod(held=True)
    leader = make_leader(pod)
    outboxes = [leader.submit(request(i, max_tokens=29)) for i in range(5)]
    leader.begin_drain(0.0)
    pod.let_go()
    assert [tokens_of(outbox)[1] for outbox in outboxes] == [Finish.CANCELLED] * 5
    assert leader.wait_ended(WAIT_S) and not leader.drain(0)
    assert not pod.model.slots and pod.plans[-1].stop


def test_drain_of_a_leader_that_never_started(make_pod):
    assert Leader(make_pod().device(), SHAPE, max_queue=1).drain(1.0)


# ---------------------------------------------------------------------------------------- failure


def damaged(pod):
    pod.damage[4] = ("decode_steps", 3)
    return r"tick 4: a host refused the plan, check CHECKSUM \(4\) failed"


def lost_step(pod):
    pod.echo[4] = 3
    return "tick 4: the device answered for tick 3"


def broken_collective(pod):
    pod.broken[4] = ConnectionError("connection reset by peer")
    return r"tick 4 failed on the device: ConnectionError\('connection reset by peer'\)"


def hanging(pod):
    pod.hanging.add(4)
    return "tick 4 did not come back within 1 s"


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("break_pod", [damaged, lost_step, broken_collective, hanging])
def test_every_failure_answers_all_open_requests_once(make_pod, make_leader, break_pod, sync):
    pod = make_pod(held=True)
    message = break_pod(pod)
    failures: queue.Queue[HostFailure] = queue.Queue()
    limit_s = 1.0 if pod.hanging else WAIT_S
    leader = make_leader(pod, on_failure=failures.put, sync=sync, tick_timeout_s=limit_s)
    outboxes = [leader.submit(request(i, max_tokens=29)) for i in range(6)]
    pod.let_go()
    for outbox in outboxes:
        last = events_of(outbox)[-1]
        assert last.finish is Finish.ERROR and outbox.get(0) is None
        with pytest.raises(HostFailure, match=message):
            raise HostFailure(last.error)
    with pytest.raises(HostFailure, match=message):
        raise failures.get(timeout=WAIT_S)
    assert leader.state() is State.FAILED and not leader.drain(0)
    assert failures.empty(), "on_failure was called twice"
    with pytest.raises(Overloaded) as caught:
        leader.submit(request(9))
    assert caught.value.status == 503
    capacity = leader.capacity()
    assert capacity.waiting == 0


def test_a_hang_that_ends_after_all_stays_a_failure(make_pod, make_leader):
    pod = make_pod(held=True)
    failures: queue.Queue[HostFailure] = queue.Queue()
    leader = make_leader(pod, on_failure=failures.put, tick_timeout_s=0.05, start_timeout_s=0.05)
    outbox = leader.submit(request(1))
    assert "tick 0 did not come back" in str(failures.get(timeout=WAIT_S))
    assert not leader.wait_ready(0)
    pod.let_go()
    leader._thread.join(WAIT_S)
    assert [event.finish for event in events_of(outbox)] == [Finish.ERROR]
    assert leader.state() is State.FAILED and failures.empty() and len(pod.plans) == 1


def test_tick_0_may_take_longer_than_a_tick(make_pod, make_leader):
    pod = make_pod(held=True)
    leader = make_leader(pod, tick_timeout_s=0.01, start_timeout_s=WAIT_S)
    assert not leader.wait_ready(0.1)  # ten tick limits
    assert leader.state() is State.STARTING
    pod.let_go()
    assert leader.wait_ready(WAIT_S)


def test_a_bug_in_the_engine_has_the_same_shape(make_pod, make_leader):
    failures: queue.Queue[HostFailure] = queue.Queue()

    def on_tick(stats: TickStats) -> None:
        if stats.tokens:
            raise KeyError("a metric")

    leader = make_leader(make_pod(), on_tick=on_tick, on_failure=failures.put)
    assert events_of(leader.submit(request(1)))[-1].finish is Finish.ERROR
    assert "the engine thread broke" in str(failures.get(timeout=WAIT_S))
    assert "KeyError('a metric')" in str(leader.failure)


def test_same_id_twice_is_refused_and_free_again_after_the_end(make_pod, make_leader):
    leader = make_leader(make_pod())
    tokens_of(leader.submit(request(1)))
    outbox = leader.submit(replace(request(1), prompt=(9,)))
    assert tokens_of(outbox)[1] is Finish.LENGTH


def test_a_request_that_comes_just_before_the_drain_is_served(make_pod, make_leader):
    """Submitted after the engine looked into its inbox, and before it looked at the state."""
    leader = make_leader(make_pod(), sync=True, idle_interval_s=0.01)
    assert leader.wait_ready(WAIT_S)
    take, asked, outboxes = leader._inbox.take, threading.Event(), []

    def take_then_race():
        messages = take()
        if not asked.is_set():
            asked.set()
            outboxes.append(leader.submit(request(1)))
            leader.begin_drain(WAIT_S)
        return messages

    leader._inbox.take = take_then_race
    assert leader.wait_ended(WAIT_S)
    assert tokens_of(outboxes[0]) == expected(request(1), SHAPE.max_context)
