"""Continuous batching over ticks: requests in, plans out, results in, events out.

Rule: plans may run ahead of results. The device holds the truth about progress; the scheduler
remembers for each plan in flight who sat in which slot, so that a result is always read with its
own tick's occupants and a slot may change hands in any plan.

A slot is released by the first plan made after its request was cancelled, or its finish
committed, or its budget planned: every decode step gives an active slot at least one token, so a
request whose max_tokens are covered by the plans so far has surely ended when they have run, and
its slot can change hands without waiting for the result. (Scored prompts hold a slot no longer
than their pages run.)

Try it: `python -m pytest tests/scheduler`, which runs it against a model of the device.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from k3serve.errors import HostFailure, Overloaded
from k3serve.scheduler import policy
from k3serve.scheduler.cache import PageCache
from k3serve.scheduler.events import token_event
from k3serve.scheduler.slots import Sequence, SlotTable
from k3serve.types import Admit, Finish, PageWork, Plan, Request, TickResult, TickShape, TokenEvent


@dataclass(slots=True)
class _InFlight:
    plan: Plan
    occupants: list[tuple[int, Sequence]]


class Scheduler:
    """One server's queue, slots and cache pages. Not thread-safe: the engine thread owns it."""

    def __init__(self, shape: TickShape, max_queue: int) -> None:
        """max_queue: how many requests may wait when all slots are taken."""
        if shape.num_pages < shape.pages_per_slot:
            raise ValueError(
                f"num_pages={shape.num_pages} cannot hold one full context of "
                f"pages_per_slot={shape.pages_per_slot} pages; give at least that many"
            )
        self.shape = shape
        self.max_open = shape.max_slots + max_queue
        self._waiting: deque[Sequence] = deque()
        self._prefilling: deque[Sequence] = deque()  # in slots, with pages left; next turn first
        self._slots = SlotTable(shape.max_slots)
        self.cache = PageCache(shape)
        self._open: dict[int, Sequence] = {}  # waiting, running, or released with a last event due
        self._in_flight: dict[int, _InFlight] = {}  # by tick

    @property
    def idle(self) -> bool:
        """The next plan would do nothing. Events of plans in flight may still be due."""
        return not self._waiting and not self._slots.used

    def counts(self) -> tuple[int, int]:
        """(running, waiting): slots in use, and requests without one."""
        return self._slots.used, len(self._waiting)

    def add(self, request: Request) -> None:
        """Queues a request. Raises Overloaded when max_slots + max_queue are open already."""
        length = len(request.prompt)
        assert 1 <= length <= self.shape.max_context, f"prompt of {length} tokens in a plan"
        assert request.id not in self._open, f"request id {request.id} is open already"
        if len(self._open) >= self.max_open:
            raise Overloaded(f"{len(self._open)} requests are open already; retry later")
        budget = min(request.sampling.max_tokens, self.shape.max_context - length)
        sequence = Sequence(request, replace(request.sampling, max_tokens=budget))
        self.cache.prepare(sequence)
        self._open[request.id] = sequence
        self._waiting.append(sequence)

    def cancel(self, request_id: int) -> None:
        """Drops a waiting request; frees a running one's slot in the next plan. Unknown ids are
        ignored.
        """
        sequence = self._open.pop(request_id, None)
        if sequence is None:
            return
        sequence.closed = True
        if sequence.slot is not None:
            sequence.leaving = True
        elif not sequence.pages:  # not merely released ahead of its last event
            self._waiting.remove(sequence)

    def plan(self, tick: int) -> Plan:
        """What this tick does. Call with rising tick numbers; results come back through commit."""
        assert tick not in self._in_flight, f"tick {tick} was planned already"
        releases = self._release()
        admits = self._admit()
        occupants = self._slots.occupants()
        by_slot = dict(occupants)
        pages = tuple(
            self.cache.enter(by_slot[page.slot], page)
            for page in policy.take_pages(self._prefilling, self.shape)
        )
        steps = policy.decode_steps(
            self.shape,
            can_decode=any(sequence.can_decode for _, sequence in occupants),
            somebody_waits=bool(pages or self._prefilling or self._waiting),
        )
        for _, sequence in occupants:
            _count_on(sequence, steps, tick)
        plan = Plan(tick, releases, admits, pages, steps)
        self._in_flight[tick] = _InFlight(plan, occupants)
        return plan

    def commit(self, plan: Plan, result: TickResult) -> list[TokenEvent]:
        """Takes a plan's result and gives its events, by rising slot. Commit in the order of the
        plans.
        """
        flight = self._in_flight.pop(plan.tick)
        pages: dict[int, list[tuple[int, PageWork]]] = {}
        for index, page in enumerate(plan.pages):
            pages.setdefault(page.slot, []).append((index, page))
        events = []
        for slot, sequence in flight.occupants:
            if sequence.closed:
                continue
            event = self._event(sequence, slot, pages.get(slot, []), result)
            self._follow(sequence, slot, event, plan.tick)
            if event is not None:
                events.append(event)
        return events

    def _event(
        self, sequence: Sequence, slot: int, pages: list[tuple[int, PageWork]], result: TickResult
    ) -> TokenEvent | None:
        """The sequence's event, with what the cache gave it where that is still to be told."""
        for index, page in pages:
            if page.score:
                self.cache.keep_scores(sequence, index, page, result)
        event = token_event(
            sequence.request.id,
            sequence.sampling,
            slot,
            pages,
            result,
            cached_scores=sequence.cached_scores,
        )
        if event is None:
            return None
        if event.prompt_scores is not None:
            sequence.cached_scores = None
        if not sequence.told_cached:
            sequence.told_cached = True
            event = replace(event, cached_tokens=sequence.cached_tokens)
        return event

    def _follow(self, sequence: Sequence, slot: int, event: TokenEvent | None, tick: int) -> None:
        """Keeps up with the device: counts tokens, sees the finish, checks the budget."""
        sequence.emitted += len(event.tokens) if event else 0
        ended = event is not None and event.finish is not Finish.NONE
        if sequence.emitted > sequence.sampling.max_tokens or (
            tick == sequence.last_tick and not ended
        ):
            raise HostFailure(
                f"tick {tick}: slot {slot} emitted {sequence.emitted} tokens "
                f"{'and ended' if ended else 'without end'}, with a budget of "
                f"{sequence.sampling.max_tokens} that this tick uses up at the latest"
            )
        if ended:
            sequence.closed = True
            sequence.leaving = True
            del self._open[sequence.request.id]

    def _release(self) -> tuple[int, ...]:
        """Slots of those who leave; slots and cache pages are free from here on."""
        leaving = [(slot, q) for slot, q in self._slots.occupants() if q.leaving]
        for _, sequence in leaving:
            self._slots.leave(sequence)
            self.cache.leave(sequence)
            if not sequence.prompt_planned:
                self._prefilling.remove(sequence)
        return tuple(slot for slot, _ in leaving)

    def _admit(self) -> tuple[Admit, ...]:
        """First come, first served: nobody overtakes a request that waits for free cache pages.
        Only one that waits for another's prompt pages lets others pass.
        """
        admits, held = [], []
        while self._waiting and self._slots.free:
            sequence = self._waiting.popleft()
            if self.cache.waits(sequence, self._prefilling):
                held.append(sequence)
                continue
            if not self.cache.admit(sequence):
                held.append(sequence)
                break
            slot = self._slots.enter(sequence)
            self._prefilling.append(sequence)
            admits.append(
                Admit(
                    slot,
                    len(sequence.request.prompt),
                    sequence.sampling,
                    sequence.pages,
                    sequence.restore,
                )
            )
        self._waiting.extendleft(reversed(held))
        return tuple(sorted(admits, key=lambda admit: admit.slot))


def _count_on(sequence: Sequence, steps: int, tick: int) -> None:
    """Counts the tokens that this tick makes certain; a used-up budget frees the slot in the next
    plan.
    """
    if not sequence.prompt_planned:
        return
    first = 1 if sequence.planned_tokens == 0 else 0  # the final page gives the first token
    sequence.planned_tokens += first + steps
    if sequence.planned_tokens >= sequence.sampling.max_tokens:
        sequence.last_tick = tick
        sequence.leaving = True
