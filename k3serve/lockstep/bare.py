"""The leader's loop without threads and mailboxes: for benchmarks, tests and debugging.

Rule: the same scheduler, codec and order of work as the leader, read one tick late (or not: depth
1), so that what is measured and compared here is what serves.

    loop = BareLoop(engine, engine.shape)
    for event in loop.run(requests): ...
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from k3serve.lockstep.device import TickDevice
from k3serve.lockstep.plan import check_result, pack, unpack_result
from k3serve.scheduler.scheduler import Scheduler
from k3serve.types import Plan, Request, TickShape, TokenEvent


class BareLoop:
    """Drives a device that runs alone or leads; ticks continue from one run() to the next."""

    def __init__(
        self, device: TickDevice, shape: TickShape, *, depth: int = 2, warm: bool = False
    ) -> None:
        """depth: ticks in flight; 1 reads each before the next is planned. warm: a run finds the
        prompts of earlier ones in the prefix cache; otherwise each begins with an empty one.
        """
        self._device = device
        self._shape = shape
        self.depth = depth
        self.warm = warm
        self._scheduler: Scheduler | None = None
        self.tick = 0

    def forget(self) -> None:
        """The next run begins with an empty prefix cache."""
        self._scheduler = None

    def run(self, requests: Iterable[Request]) -> Iterator[TokenEvent]:
        """Runs the requests to their ends, all queued at once, and yields their events."""
        queued = list(requests)
        scheduler = self._scheduler
        if scheduler is None or not self.warm:
            scheduler = Scheduler(self._shape, max_queue=sys.maxsize)
        self._scheduler = scheduler
        for request in queued:
            scheduler.add(request)
        flights: deque[tuple[Plan, Any]] = deque()
        while flights or not scheduler.idle:
            while len(flights) < self.depth and not scheduler.idle:
                plan = scheduler.plan(self.tick)
                self.tick += 1
                flights.append((plan, self._device.dispatch(pack(plan, self._shape))))
            plan, handle = flights.popleft()
            vector = self._device.read(handle)
            check_result(vector, self._shape, plan.tick)
            yield from scheduler.commit(plan, unpack_result(vector, self._shape))
