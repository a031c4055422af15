"""A pod of hosts in threads: a tick runs when every host has dispatched it, on one FakeDevice.

Rule: like the real thing it sums the hosts' rows, checks the plan, and reports what it refuses in
every host's result. Tests steer it (hold and step ticks, faults, broken and hanging collectives);
no sleeps.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from k3serve import wire
from k3serve.errors import HostFailure
from k3serve.lockstep.plan import plan_layout, unpack
from k3serve.types import Plan, TickShape
from tests.scheduler.fake_device import FakeDevice

T = TypeVar("T")

WAIT_S = 30.0  # a test that waits so long has failed


def in_background(function: Callable[..., T], *args: Any, **options: Any) -> Future[T]:
    """The call's future, from a daemon thread: a host that hangs fails its test, not the whole
    run.
    """
    future: Future[T] = Future()

    def call() -> None:
        try:
            future.set_result(function(*args, **options))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return future


@dataclass
class _Tick:
    number: int
    rows: dict[int, np.ndarray] = field(default_factory=dict)  # by host
    done: threading.Event = field(default_factory=threading.Event)
    result: np.ndarray | None = None
    error: Exception | None = None


class FakePod:
    def __init__(self, shape: TickShape, hosts: int = 1, *, held: bool = False) -> None:
        self.shape, self.hosts = shape, hosts
        self.model = FakeDevice(shape)
        self.dispatched: queue.Queue[Plan] = queue.Queue()  # the leader's, as they come
        self.plans: list[Plan] = []  # of ticks that ran
        self.damage: dict[int, tuple[str, int]] = {}  # tick -> plan field to overwrite on the way
        self.echo: dict[int, int] = {}  # tick -> wrong tick number in its result
        self.broken: dict[int, Exception] = {}  # tick -> what every read of it raises
        self.hanging: set[int] = set()  # ticks that never come back
        self.dispatches = [0] * hosts
        self.reads = [0] * hosts
        self.most_ahead = 0  # ticks that the leader ever had dispatched and not read
        self._held = held
        self._steps = threading.Semaphore(0)
        self._ready: queue.Queue[_Tick | None] = queue.Queue()
        self._ticks: dict[int, _Tick] = {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def device(self, host: int = 0) -> FakeHost:
        return FakeHost(self, host)

    def step(self, ticks: int = 1) -> None:
        """Lets held ticks run."""
        self._steps.release(ticks)

    def let_go(self) -> None:
        self._held = False
        self._steps.release()

    def close(self) -> None:
        self._ready.put(None)
        self.let_go()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def next_plan(self) -> Plan:
        """The leader's next dispatch, waiting for it."""
        return self.dispatched.get(timeout=WAIT_S)

    def put(self, host: int, row: np.ndarray) -> _Tick:
        with self._lock:
            number = self.dispatches[host]
            self.dispatches[host] += 1
            tick = self._ticks.setdefault(number, _Tick(number))
            tick.rows[host] = row
            if len(tick.rows) == self.hosts:
                self._ready.put(tick)
        return tick

    def _run(self) -> None:
        while (tick := self._ready.get()) is not None:
            if self._held:
                self._steps.acquire()
            if tick.number in self.hanging:
                continue
            try:
                if tick.number in self.broken:
                    raise self.broken[tick.number]
                tick.result = self._execute(tick)
            except Exception as error:
                tick.error = error
            tick.done.set()

    def _execute(self, tick: _Tick) -> np.ndarray:
        vector = np.sum(list(tick.rows.values()), axis=0, dtype=np.int32)
        if tick.number in self.damage:
            name, value = self.damage[tick.number]
            plan_layout(self.shape).array(vector, name)[...] = value
        layout = wire.result_layout(self.shape)
        try:
            plan = unpack(vector, self.shape, tick=tick.number)
        except HostFailure as failure:
            refused = layout.zeros()
            name = next(fault for fault in wire.Fault if f"check {fault.name}" in str(failure))
            layout.array(refused, "tick")[...] = tick.number
            layout.array(refused, "fault")[...] = name
            return refused
        self.plans.append(plan)
        result = self.model.tick(plan)
        layout.array(result, "tick")[...] = self.echo.get(tick.number, tick.number)
        return result


class FakeHost:
    """One host's TickDevice."""

    def __init__(self, pod: FakePod, host: int) -> None:
        self.pod, self.host = pod, host

    def dispatch(self, plan_vector: np.ndarray | None) -> _Tick:
        if plan_vector is None:
            return self.pod.put(self.host, plan_layout(self.pod.shape).zeros())
        tick = self.pod.put(self.host, plan_vector)
        ahead = self.pod.dispatches[self.host] - self.pod.reads[self.host]
        self.pod.most_ahead = max(self.pod.most_ahead, ahead)
        self.pod.dispatched.put(unpack(plan_vector, self.pod.shape))
        return tick

    def read(self, tick: _Tick) -> np.ndarray:
        tick.done.wait()
        if tick.error is not None:
            raise tick.error
        assert tick.result is not None
        self.pod.reads[self.host] += 1
        return tick.result

    def done(self, tick: _Tick) -> bool:
        return tick.done.is_set()
