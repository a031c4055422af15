"""Where the engine thread's time goes, and how long the device had nothing to do meanwhile.

Rule: the device's idle time is never understated. When the queue ran dry is not told by the device;
it is looked for at every lap, and the time counts from the last look that found a tick running to
the dispatch of the next. Time without work (`rest`) counts nowhere.

    clock.wake(); ...; clock.lap("plan"); clock.dispatches(); handle = ...; clock.dispatched(handle)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from k3serve.types import TickTimes


class TickClock:
    """One engine thread's. Awake from the first `lap` or dispatch on, until `rest`."""

    def __init__(
        self, done: Callable[[Any], bool], now: Callable[[], float] = time.perf_counter
    ) -> None:
        """done: whether a handle's tick has run; asked without waiting."""
        self._done = done
        self._now = now
        self._seconds = {field.name: 0.0 for field in fields(TickTimes)}
        self._at: float | None = None  # the end of the last lap; None while resting
        self._newest: Any = None  # the last tick dispatched, until it was seen to be done
        self._ran_at: float | None = None  # when a tick was last known to run; None after a rest

    def lap(self, phase: str) -> None:
        """What was done since the last lap belongs to the phase."""
        now = self._now()
        if self._at is not None:
            self._seconds[phase] += now - self._at
        self._at = now
        self._look(now)

    def wake(self) -> None:
        """There may be work; without effect when awake."""
        if self._at is None:
            self._at = self._now()

    def rest(self) -> None:
        """Nothing is to be done until the next `wake`."""
        self._at = self._newest = self._ran_at = None

    def dispatches(self) -> None:
        """The next tick is about to be dispatched: if all others have run, the device waited."""
        now = self._now()
        self._look(now)
        if self._newest is None and self._ran_at is not None:
            self._seconds["device_idle"] += now - self._ran_at

    def dispatched(self, handle: Any) -> None:
        self._newest = handle
        self._ran_at = self._now()
        self.lap("dispatch")

    def waited(self, handle: Any) -> None:
        """The handle's result has been read."""
        if handle is self._newest:  # it ran until this moment: nobody had seen it done
            self._newest = None
            self._ran_at = self._now()
        self.lap("wait")

    def take(self) -> TickTimes:
        """What was counted since the last call."""
        times = TickTimes(**self._seconds)
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        return times

    def _look(self, now: float) -> None:
        if self._newest is None:
            return
        if self._done(self._newest):
            self._newest = None
        else:
            self._ran_at = now
