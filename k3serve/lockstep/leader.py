"""The leader's engine: one thread that plans, dispatches, reads one tick late, and hands out
events.

Rule: the engine thread alone touches the scheduler and the device. Plan n+1 is on its way before
result n is read (`sync` switches that off, for debugging and for the tests that compare both).
Any failure has one shape: every open request gets a last event with Finish.ERROR, the state
becomes FAILED, on_failure is called once.

The end of a run is two ticks on every host, whether or not a host overlaps: one that says stop,
and one closing tick, which an overlapping follower has launched by the time it reads the stop.

    leader = Leader(device, shape, max_queue=64, on_failure=lambda failure: os._exit(1))
    leader.start()
    outbox = leader.submit(request)        # from any thread
    leader.drain(timeout_s=30)
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from k3serve.errors import HostFailure
from k3serve.lockstep.clock import TickClock
from k3serve.lockstep.device import TickDevice
from k3serve.lockstep.inbox import EventSink, Inbox, Mailbox
from k3serve.lockstep.plan import check_request, check_result, pack, unpack_result
from k3serve.lockstep.watchdog import Watchdog
from k3serve.scheduler.scheduler import Scheduler
from k3serve.types import (
    Cancel,
    Capacity,
    Finish,
    Plan,
    Request,
    State,
    TickShape,
    TickTimes,
    TokenEvent,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TickStats:
    """What a finished tick did, for metrics."""

    tick: int
    duration_s: float  # from dispatch to the result on the host; with overlap, ticks overlap too
    prompt_tokens: int  # computed in pages
    tokens: int  # generated
    decode_steps: int  # run by the device
    running: int  # slots in use, as of the latest plan
    waiting: int
    times: TickTimes  # since the tick before


@dataclass(frozen=True, slots=True)
class _Flight:
    plan: Plan
    handle: Any
    dispatched_at: float


class Leader:
    """A pod's types.Executor. Thread-safe, except that the engine thread owns all behind the
    inbox.
    """

    def __init__(
        self,
        device: TickDevice,
        shape: TickShape,
        *,
        max_queue: int,
        idle_interval_s: float = 0.25,
        tick_timeout_s: float = 30.0,
        start_timeout_s: float = 600.0,
        sync: bool = False,
        on_failure: Callable[[HostFailure], None] | None = None,
        on_tick: Callable[[TickStats], None] | None = None,
    ) -> None:
        """start_timeout_s bounds tick 0, which waits for all hosts. on_tick runs in the engine
        thread, on_failure in the thread that noticed; neither may raise or block."""
        self._device = device
        self._shape = shape
        self._max_queue = max_queue
        self._idle_interval_s = idle_interval_s
        self._sync = sync
        self._on_failure = on_failure
        self._on_tick = on_tick
        self._scheduler = Scheduler(shape, max_queue)
        self._inbox = Inbox(shape.max_slots, max_queue)
        self._watchdog = Watchdog(tick_timeout_s, start_timeout_s, self._fail)
        self._clock = TickClock(device.done)
        self._tick = 0
        self._drain_by = float("inf")  # monotonic; what is open then is cancelled
        self._drained = True  # nothing had to be cancelled at the end
        self._started = threading.Event()  # the first tick is back, or never will be
        self._ended = threading.Event()
        self._failure: HostFailure | None = None
        self._thread = threading.Thread(target=self._run, name="k3serve-engine", daemon=True)

    # -------------------------------------------------------------------------------- any thread

    def start(self) -> None:
        """Starts the engine. Requests are taken from now on; the state is READY after the first
        tick.
        """
        self._watchdog.start()
        self._thread.start()

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        """Whether the first tick came back on all hosts within timeout_s."""
        self._started.wait(timeout_s)
        return self.state() is State.READY

    def submit(self, request: Request) -> Mailbox:
        mailbox = Mailbox()
        self.submit_to(request, mailbox)
        return mailbox

    def submit_to(self, request: Request, sink: EventSink) -> None:
        """submit, with the events to a place of the caller's."""
        check_request(request, self._shape)
        self._inbox.submit(request, sink)

    def cancel(self, request_id: int) -> None:
        """Frees the slot one tick later; the mailbox gets a last event with Finish.CANCELLED,
        unless the request ended before.
        """
        self._inbox.cancel(request_id)

    def state(self) -> State:
        return self._inbox.state

    @property
    def failure(self) -> HostFailure | None:
        """Why the state is FAILED."""
        return self._failure

    def capacity(self) -> Capacity:
        running, waiting = self._inbox.load()
        shape = self._shape
        return Capacity(shape.max_slots, shape.max_context, self._max_queue, running, waiting)

    def begin_drain(self, timeout_s: float) -> None:
        """Takes no more requests from now on; what is still open after timeout_s is cancelled, and
        the run ends on every host. Does not wait: a signal handler may call it."""
        self._drain_by = min(self._drain_by, time.monotonic() + timeout_s)
        self._inbox.move_to(State.DRAINING)
        if self._thread.ident is None:  # never started: nothing to end
            self._ended.set()

    def wait_ended(self, timeout_s: float | None = None) -> bool:
        """Whether the run ended, by a drain or a failure, within timeout_s."""
        return self._ended.wait(timeout_s)

    def drain(self, timeout_s: float) -> bool:
        """begin_drain, then waits. True when every open request could end by itself."""
        self.begin_drain(timeout_s)
        self.wait_ended()
        return self._drained and self._failure is None

    def stop(self) -> None:
        """drain, without waiting for open requests: they are cancelled."""
        self.drain(0.0)

    # ----------------------------------------------------------------------------- engine thread

    def _run(self) -> None:
        try:
            self._finish(self._dispatch(self._scheduler.plan(0)))
            self._watchdog.started()
            self._inbox.move_to(State.READY)
            self._started.set()
            self._serve()
            self._end()
        except HostFailure as failure:
            self._fail(failure)
        except Exception as error:
            log.exception("the engine thread broke")
            self._fail(HostFailure(f"the engine thread broke at tick {self._tick}: {error!r}"))
        finally:
            self._watchdog.stop()
            self._started.set()
            self._ended.set()

    def _serve(self) -> None:
        """Ticks until drained or failed. `flight` is the tick that runs while the next one is
        planned.
        """
        flight: _Flight | None = None
        while self.state() is not State.FAILED:
            self._clock.wake()
            self._take_messages()
            if self._scheduler.idle:
                if flight is not None:  # its events first: nothing else is to be done
                    self._finish(flight)
                    flight = None
                    continue
                if self.state() is State.DRAINING:
                    if self._inbox.empty():  # nothing comes in any more
                        return
                    continue
                self._clock.rest()
                if self._inbox.wait(self._idle_interval_s):
                    continue
            following = self._dispatch(self._scheduler.plan(self._tick))
            if flight is not None:
                self._finish(flight)
            flight = following
            if self._sync:
                self._finish(flight)
                flight = None

    def _end(self) -> None:
        """The stop and its closing tick."""
        if self.state() is State.FAILED:
            return
        stops = [
            self._dispatch(replace(self._scheduler.plan(self._tick), stop=True)) for _ in range(2)
        ]
        for flight in stops:
            self._finish(flight)

    def _take_messages(self) -> None:
        for message in self._inbox.take():
            if isinstance(message, Cancel):
                self._scheduler.cancel(message.request_id)
                self._inbox.deliver([TokenEvent(message.request_id, finish=Finish.CANCELLED)])
            else:
                self._scheduler.add(message)
        if time.monotonic() >= self._drain_by:
            for request_id in self._inbox.close_all(Finish.CANCELLED):
                self._drained = False
                self._scheduler.cancel(request_id)

    def _dispatch(self, plan: Plan) -> _Flight:
        self._inbox.report(self._scheduler.counts()[0])
        self._tick = plan.tick + 1
        vector = pack(plan, self._shape)
        self._clock.lap("plan")
        dispatched_at = time.monotonic()
        self._clock.dispatches()
        handle = self._watchdog.guard(plan.tick, lambda: self._device.dispatch(vector))
        self._clock.dispatched(handle)
        return _Flight(plan, handle, dispatched_at)

    def _finish(self, flight: _Flight) -> None:
        """Reads a tick's result and hands out its events."""
        tick = flight.plan.tick
        vector = self._watchdog.guard(tick, lambda: self._device.read(flight.handle))
        self._clock.waited(flight.handle)
        check_result(vector, self._shape, tick)
        result = unpack_result(vector, self._shape)
        events = self._scheduler.commit(flight.plan, result)
        self._clock.lap("commit")
        self._inbox.deliver(events)
        if self._on_tick is not None:
            running, waiting = self._scheduler.counts()
            self._on_tick(
                TickStats(
                    tick=tick,
                    duration_s=time.monotonic() - flight.dispatched_at,
                    prompt_tokens=sum(len(page.tokens) for page in flight.plan.pages),
                    tokens=int(result.counts.sum()),
                    decode_steps=result.steps,
                    running=running,
                    waiting=waiting,
                    times=self._clock.take(),
                )
            )
        self._clock.lap("deliver")

    def _fail(self, failure: HostFailure) -> None:
        """From the engine thread or the watchdog; the first one counts."""
        if not self._inbox.move_to(State.FAILED):
            return
        self._failure = failure
        log.error("host failure: %s", failure)
        self._inbox.close_all(Finish.ERROR, str(failure))
        if self._on_failure is not None:
            self._on_failure(failure)
        self._started.set()
        self._ended.set()
