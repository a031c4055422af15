"""Everything that HTTP threads and the engine thread share: messages in, events out, the server's
state.

Rule: one lock, held for a few instructions, never while the device works. HTTP threads call
submit, cancel, and their own mailbox; the engine thread calls the rest.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from k3serve.errors import Overloaded
from k3serve.types import Cancel, Finish, Request, State, TokenEvent


class EventSink(Protocol):
    """Where the events of a request go. Called under the inbox's lock: it must not wait."""

    def put(self, event: TokenEvent) -> None: ...


class Mailbox:
    """One request's events on their way to its HTTP thread (types.Outbox)."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()

    def put(self, event: TokenEvent) -> None:
        self._events.put(event)

    def get(self, timeout_s: float | None = None) -> TokenEvent | None:
        try:
            return self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def waiting(self) -> int:
        return self._events.qsize()


class Inbox:
    """Requests and cancels in order of arrival; the mailboxes of open requests; STARTING ..
    FAILED.
    """

    def __init__(self, max_slots: int, max_queue: int) -> None:
        self._max_open = max_slots + max_queue
        self._max_queue = max_queue
        self._lock = threading.Condition()
        self._messages: deque[Request | Cancel] = deque()
        self._open: dict[int, EventSink] = {}
        self._state = State.STARTING
        self._running = 0

    @property
    def state(self) -> State:
        return self._state

    def load(self) -> tuple[int, int]:
        """(running, waiting) requests; one that is still in the inbox waits."""
        with self._lock:
            return self._running, max(0, len(self._open) - self._running)

    def submit(self, request: Request, mailbox: EventSink) -> None:
        """Queues the request, whose events go to mailbox. Raises Overloaded: 429 when full, 503
        when the server takes no more.
        """
        with self._lock:
            if self._state is State.DRAINING:
                raise Overloaded("the server is shutting down; ask another one", status=503)
            if self._state is State.FAILED:
                raise Overloaded(
                    "the server lost a host and is about to restart; retry later", status=503
                )
            if len(self._open) >= self._max_open:
                raise Overloaded(
                    f"the queue is full: {self._max_queue} requests wait already; retry later"
                )
            assert request.id not in self._open, f"request id {request.id} is open already"
            self._open[request.id] = mailbox
            self._messages.append(request)
            self._lock.notify()

    def cancel(self, request_id: int) -> None:
        with self._lock:
            if request_id in self._open:
                self._messages.append(Cancel(request_id))
                self._lock.notify()

    def take(self) -> list[Request | Cancel]:
        """All messages so far, oldest first."""
        with self._lock:
            messages = list(self._messages)
            self._messages.clear()
            return messages

    def empty(self) -> bool:
        with self._lock:
            return not self._messages

    def wait(self, timeout_s: float) -> bool:
        """Until a message comes or the server stops being READY; False when timeout_s passed
        first.
        """
        with self._lock:
            return self._lock.wait_for(
                lambda: bool(self._messages) or self._state is not State.READY, timeout_s
            )

    def report(self, running: int) -> None:
        with self._lock:
            self._running = running

    def deliver(self, events: Iterable[TokenEvent]) -> None:
        """Puts events in the mailboxes of open requests; a last event closes its request."""
        with self._lock:
            for event in events:
                mailbox = self._open.get(event.request_id)
                if mailbox is None:
                    continue  # cancelled, or failed meanwhile
                if event.finish is not Finish.NONE:
                    del self._open[event.request_id]
                mailbox.put(event)

    def move_to(self, state: State) -> bool:
        """Changes the state. Nothing follows FAILED, and only FAILED follows DRAINING: False
        then.
        """
        with self._lock:
            if self._state is State.FAILED:
                return False
            if self._state is State.DRAINING and state is not State.FAILED:
                return False
            self._state = state
            self._lock.notify_all()
            return True

    def close_all(self, finish: Finish, error: str | None = None) -> list[int]:
        """Ends every open request with one last event; gives their ids."""
        with self._lock:
            self._messages.clear()
            ids = list(self._open)
            for request_id, mailbox in self._open.items():
                mailbox.put(TokenEvent(request_id, finish=finish, error=error))
            self._open.clear()
            return ids
