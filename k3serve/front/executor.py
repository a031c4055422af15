"""The engine as HTTP threads see it (types.Executor), whichever process is the engine just now.

Rule: one lock, held for a few instructions. A request is open here from submit to its last event,
also while there is no engine; what an engine of the past still says is not heard.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from k3serve.errors import Overloaded
from k3serve.front.resume import Progress
from k3serve.link import Drain
from k3serve.lockstep.inbox import Mailbox
from k3serve.lockstep.plan import check_request
from k3serve.types import Cancel, Capacity, Finish, Request, State, TickShape, TokenEvent

log = logging.getLogger("k3serve")

RESTART_S = 5.0  # when to ask again while the engine restarts; it takes about as long
_REFUSALS = {
    State.STARTING: "the server is starting",
    State.RESTARTING: "the server lost a host and restarts; retry soon",
    State.DRAINING: "the server is shutting down; ask another one",
    State.FAILED: "the server lost a host and ends; ask another one",
}


class Engine(Protocol):
    """The engine's end of a link.Link."""

    def send(self, message: Any) -> None: ...


@dataclass(slots=True)
class _Open:
    progress: Progress
    mailbox: Mailbox = field(default_factory=Mailbox)


class EngineClient:
    """Requests to the engine, events back. Thread-safe; submit never blocks."""

    def __init__(self, shape: TickShape, max_queue: int, *, resume: bool = False) -> None:
        """shape: what to tell clients before an engine has said its own."""
        self._shape = shape
        self._max_queue = max_queue
        self._resume = resume
        self._lock = threading.Lock()
        self._open: dict[int, _Open] = {}
        self._engine: Engine | None = None  # the one that serves
        self._state = State.STARTING
        self._running = 0
        self.resumed = 0  # requests that went on in another engine

    # ----------------------------------------------------------------------- HTTP threads

    def submit(self, request: Request) -> Mailbox:
        with self._lock:
            if self._state is not State.READY or self._engine is None:
                wait_s = RESTART_S if self._state is State.RESTARTING else 1.0
                raise Overloaded(_REFUSALS[self._state], status=503, retry_after_s=wait_s)
            check_request(request, self._shape)
            if len(self._open) >= self._shape.max_slots + self._max_queue:
                raise Overloaded(
                    f"the queue is full: {self._max_queue} requests wait already; retry later"
                )
            assert request.id not in self._open, f"request id {request.id} is open already"
            entry = self._open[request.id] = _Open(Progress(request))
            self._engine.send(request)
            return entry.mailbox

    def cancel(self, request_id: int) -> None:
        with self._lock:
            if self._open.pop(request_id, None) is not None and self._engine is not None:
                self._engine.send(Cancel(request_id))

    def state(self) -> State:
        return self._state

    def capacity(self) -> Capacity:
        with self._lock:
            shape, running = self._shape, min(self._running, len(self._open))
            waiting = len(self._open) - running
            return Capacity(shape.max_slots, shape.max_context, self._max_queue, running, waiting)

    # ------------------------------------------------------------------------- the front

    def attach(self, engine: Engine, shape: TickShape) -> None:
        """An engine is ready. It gets what its predecessor left open."""
        with self._lock:
            if self._state in (State.DRAINING, State.FAILED):
                return
            self._engine, self._shape, self._state = engine, shape, State.READY
            for entry in self._open.values():
                entry.progress.resumes += 1
                self.resumed += 1
                engine.send(entry.progress.rest())
            if self._open:
                log.info("%d requests go on where they stopped", len(self._open))

    def deliver(self, engine: Engine, events: Iterable[TokenEvent]) -> None:
        with self._lock:
            if engine is not self._engine:
                return
            for event in events:
                entry = self._open.get(event.request_id)
                if entry is None:
                    continue  # cancelled meanwhile
                if event.finish is not Finish.NONE:
                    del self._open[event.request_id]
                entry.mailbox.put(entry.progress.take(event))

    def report(self, running: int) -> None:
        self._running = running

    def lose(self, reason: str, *, restarts: bool) -> None:
        """The engine is gone. What cannot go on in another one ends with an error."""
        with self._lock:
            self._engine, self._running = None, 0
            if self._state is State.FAILED:
                return
            if restarts and self._state is not State.DRAINING:
                if self._state is State.READY:
                    self._state = State.RESTARTING
            else:
                self._state = State.FAILED
            keep = self._state is State.RESTARTING and self._resume
            for request_id, entry in list(self._open.items()):
                obstacle = entry.progress.obstacle() if keep else None
                if keep and obstacle is None:
                    continue
                del self._open[request_id]
                error = f"{reason}; {obstacle}" if obstacle else reason
                entry.mailbox.put(TokenEvent(request_id, finish=Finish.ERROR, error=error))

    def drain(self, timeout_s: float) -> bool:
        """Takes no more requests. True: an engine was asked to finish what runs."""
        with self._lock:
            if self._state is not State.FAILED:
                self._state = State.DRAINING
            if self._engine is not None:
                self._engine.send(Drain(timeout_s))
                return True
            for request_id, entry in self._open.items():
                entry.mailbox.put(TokenEvent(request_id, finish=Finish.CANCELLED))
            self._open.clear()
            return False
