"""Drives a Scheduler and a FakeDevice through a scripted load, with 1 to 3 plans in flight.

Rule: the books (ledger.py) are audited after every plan and every commit.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field, replace

from k3serve.errors import Overloaded
from k3serve.scheduler.scheduler import Scheduler
from k3serve.types import Plan, Request, Sampling, TickShape, TokenEvent
from tests.scheduler.fake_device import VOCAB, FakeDevice
from tests.scheduler.ledger import audit


@dataclass
class Load:
    """When requests arrive and leave, by tick."""

    arrivals: dict[int, list[Request]] = field(default_factory=dict)
    cancels: dict[int, list[int]] = field(default_factory=dict)  # request ids

    @property
    def requests(self) -> dict[int, Request]:
        return {r.id: r for requests in self.arrivals.values() for r in requests}

    @property
    def cancelled(self) -> set[int]:
        return {request_id for ids in self.cancels.values() for request_id in ids}


@dataclass
class Run:
    plans: list[Plan]
    events: dict[int, list[TokenEvent]]  # by request
    admitted: dict[int, int]  # request id -> tick; needs seeds equal to ids
    first_page: dict[int, int]  # request id -> tick
    page_ticks: dict[int, list[int]]  # request id -> tick of each of its pages
    first_start: dict[int, int]  # request id -> where its first computed page starts
    token_ticks: dict[int, list[int]]  # request id -> ticks that gave it tokens
    refused: dict[int, int]  # request id -> how many were open when the queue was full
    after_cancel: list[TokenEvent]  # events of cancelled requests: must stay empty
    scheduler: Scheduler
    device: FakeDevice


def random_request(rng: random.Random, request_id: int, shape: TickShape) -> Request:
    """Mixed lengths, many of them at a page's edge; scoring, stops, min_tokens, logprobs."""
    c = shape.page_tokens
    length = rng.choice([1, c - 1, c, c + 1, rng.randint(1, shape.max_context)])
    length = min(max(length, 1), shape.max_context)
    budget = rng.choice([0, 1, 2, rng.randint(0, 2 * c), shape.max_context])
    stops = tuple(rng.sample(range(VOCAB), rng.choice([0, 0, 1, 4])))
    sampling = Sampling(
        max_tokens=budget,
        seed=request_id,
        stop_token_ids=stops,
        min_tokens=rng.choice([0, 0, 3]),
        top_logprobs=rng.choice([None, 0, 2]),
        prompt_logprobs=rng.choice([None, None, 3]),
    )
    return Request(request_id, tuple(rng.randrange(VOCAB) for _ in range(length)), sampling)


def random_load(seed: int, count: int, shape: TickShape, *, gap: float, cancels: float) -> Load:
    """count requests, on average `gap` ticks apart; a share of them is cancelled a while later."""
    rng, load, at = random.Random(seed), Load(), 0.0
    for request_id in range(count):
        at += rng.expovariate(1 / gap)
        load.arrivals.setdefault(int(at), []).append(random_request(rng, request_id, shape))
        if rng.random() < cancels:
            left = int(at) + rng.choice([0, 1, 2, rng.randint(0, 60)])
            load.cancels.setdefault(left, []).append(request_id)
    return load


def shared_load(seed: int, count: int, shape: TickShape, *, gap: float, cancels: float) -> Load:
    """random_load whose prompts mostly begin like one another: several choices of one prompt,
    follow-up turns, and prompts that part at any place, page borders included.
    """
    load = random_load(seed, count, shape, gap=gap, cancels=cancels)
    rng, c = random.Random(seed), shape.page_tokens
    roots = [tuple(rng.randrange(VOCAB) for _ in range(shape.max_context)) for _ in range(3)]
    known = list(roots)
    for requests in load.arrivals.values():
        for place, request in enumerate(requests):
            base = rng.choice(known[-8:] + roots)
            kept = rng.choice([0, c - 1, c, c + 1, 2 * c, rng.randint(0, len(base)), len(base)])
            prompt = (base[:kept] + request.prompt)[: shape.max_context]
            if rng.random() < 0.3 and place:  # the same prompt again, at the same time
                prompt = requests[place - 1].prompt
            requests[place] = replace(request, prompt=prompt)
            known.append(prompt)
    return load


def simulate(
    load: Load, shape: TickShape, *, depth: int, max_queue: int = 10**9, max_ticks: int = 1_000_000
) -> Run:
    """depth: plans in flight when a plan is made, that one included. 1 commits every tick at
    once.
    """
    scheduler, device = Scheduler(shape, max_queue), FakeDevice(shape)
    run = Run([], {}, {}, {}, {}, {}, {}, {}, [], scheduler, device)
    cancelled: set[int] = set()
    flights: deque[tuple[Plan, object]] = deque()
    slots: dict[int, int] = {}  # slot -> request id
    last = max([*load.arrivals, *load.cancels], default=0)

    def commit() -> None:
        tick = flights[0][0].tick
        for event in scheduler.commit(*flights.popleft()):
            run.events.setdefault(event.request_id, []).append(event)
            if event.tokens:
                run.token_ticks.setdefault(event.request_id, []).append(tick)
            if event.request_id in cancelled:
                run.after_cancel.append(event)
        audit(scheduler, depth)

    for tick in range(max_ticks):
        for request in load.arrivals.get(tick, ()):
            try:
                scheduler.add(request)
            except Overloaded:
                run.refused[request.id] = len(scheduler._open)
        for request_id in load.cancels.get(tick, ()):
            scheduler.cancel(request_id)
            cancelled.add(request_id)
        if tick > last and scheduler.idle:
            break
        plan = scheduler.plan(tick)
        run.plans.append(plan)
        audit(scheduler, depth)
        for admit in plan.admits:
            slots[admit.slot] = admit.sampling.seed
            run.admitted[admit.sampling.seed] = tick
        for page in plan.pages:
            run.first_page.setdefault(slots[page.slot], tick)
            run.page_ticks.setdefault(slots[page.slot], []).append(tick)
            run.first_start.setdefault(slots[page.slot], page.start)
        flights.append((plan, device.result(plan)))
        if len(flights) == depth:
            commit()
    else:
        raise AssertionError(f"not idle after {max_ticks} ticks")
    while flights:
        commit()
    return run
