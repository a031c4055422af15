"""Several sequences at once on behalf of one HTTP request: submit, listen, cancel.

Rule: whatever way the `with` block is left, no slot keeps working for a request that nobody reads.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType

from k3serve.api.context import Context
from k3serve.api.exchange import ClientGone
from k3serve.errors import Overloaded, RequestError
from k3serve.types import DraftStats, Finish, Outbox, Request, State, TokenEvent

_SWEEP_S = 0.02  # how long one quiet sequence can hide news of the others


@dataclass(slots=True)
class _Open:
    """A sequence that is not finished."""

    request: Request
    outbox: Outbox
    heard: bool = False  # of any event
    first_event_s: float = 0.0  # of an event with tokens; 0: none yet
    last_event_s: float = 0.0


def _failed(reason: str) -> RequestError:
    return RequestError(
        f"the server failed while it generated: {reason}",
        status=503,
        code="server_failed",
        retry_after_s=5.0,
    )


class Group:
    """Use as `with Group(...) as group: for index, event in group.events(): ...`.

    The index is the position in `requests`. Raises RequestError when the queue is full (nothing
    stays submitted then) and when the server fails; ClientGone when nobody waits any more.
    """

    def __init__(
        self,
        context: Context,
        requests: list[Request],
        gone: Callable[[], bool],
        timeout_s: float | None = None,  # what the client asked for; the server's own holds too
    ) -> None:
        self._context = context
        self._gone = gone
        self._started_s = time.monotonic()
        self._checked_s = self._started_s
        limits = [s for s in (timeout_s, context.settings.request_timeout_s) if s]
        self._limit_s = min(limits, default=math.inf)
        self._open: dict[int, _Open] = {}
        try:
            for index, request in enumerate(requests):
                self._open[index] = _Open(request, context.executor.submit(request))
        except Overloaded:
            context.metrics.rejections.inc()
            self._cancel_all()
            raise
        except BaseException:
            self._cancel_all()
            raise
        choices = 1 + max(request.sampling.choice for request in requests)
        context.metrics.request_params_n.observe(choices)

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        reason = "abort" if kind is not None and issubclass(kind, ClientGone) else "error"
        if isinstance(error, RequestError) and error.status == 504:
            reason = "timeout"
        for index in list(self._open):
            self.finish(index, reason, 0)

    def _cancel_all(self) -> None:
        for entry in self._open.values():
            self._context.executor.cancel(entry.request.id)
        self._open.clear()

    def finish(
        self, index: int, reason: str, tokens: int, drafts: DraftStats | None = None
    ) -> None:
        """The sequence needs nothing more: counts it, and frees its slot if it still has one."""
        entry = self._open.pop(index)
        self._context.executor.cancel(entry.request.id)  # finished ids are ignored
        metrics = self._context.metrics
        metrics.finished(reason)
        metrics.e2e.observe(time.monotonic() - self._started_s)
        metrics.prompt_tokens.inc(len(entry.request.prompt))
        metrics.request_prompt_tokens.observe(len(entry.request.prompt))
        metrics.generation_tokens.inc(tokens)
        metrics.request_generation_tokens.observe(tokens)
        if drafts is not None:
            metrics.drafted(drafts)
        metrics.request_params_max_tokens.observe(entry.request.sampling.max_tokens)
        if tokens > 1:
            span_s = entry.last_event_s - entry.first_event_s
            metrics.time_per_output_token.observe(span_s / (tokens - 1))

    def events(self) -> Iterator[tuple[int, TokenEvent]]:
        """Events of all sequences as they come, until `finish` was called for each."""
        while self._open:
            first = self._busiest()
            wait_s = min(self._context.settings.gone_check_s, self._time_left())
            event = self._get(first, wait_s if len(self._open) == 1 else _SWEEP_S)
            if event is not None:
                yield first, event
            for index in [i for i in self._open if i != first]:
                while index in self._open and (event := self._get(index, 0.0)) is not None:
                    yield index, event
            self._check_client()

    def _time_left(self) -> float:
        """Seconds; RequestError 504 when there are none."""
        left_s = self._started_s + self._limit_s - time.monotonic()
        if left_s <= 0:
            raise RequestError(
                f"the answer was not complete within {self._limit_s:g} s and was given up; lower "
                "max_tokens, or raise `timeout` (the server's own limit is --request-timeout)",
                status=504,
                code="timeout",
            )
        return left_s

    def check_backlog(self) -> None:
        """While a write waits for the client: gives up when too much waits behind it."""
        self._time_left()
        if any(e.outbox.waiting() > self._context.settings.max_outbox for e in self._open.values()):
            raise ClientGone("client reads too slowly")

    def _busiest(self) -> int:
        """Of the running sequences the one that was silent longest: all of them get an event per
        tick, so its news comes first and the others' are there by then."""
        running = [(e.last_event_s, i) for i, e in self._open.items() if e.last_event_s]
        return min(running)[1] if running else next(iter(self._open))

    def _get(self, index: int, timeout_s: float) -> TokenEvent | None:
        entry = self._open[index]
        event = entry.outbox.get(timeout_s)
        if event is None:
            if timeout_s and self._context.executor.state() is State.FAILED:
                raise _failed("it lost a host")  # should its last event not have reached us
            return None
        if event.finish is Finish.ERROR:
            raise _failed(event.error or "unknown reason")
        if event.finish is Finish.CANCELLED:
            raise RequestError(
                "the server is shutting down and ended this request",
                status=503,
                code="unavailable",
                retry_after_s=5.0,
            )
        if not entry.heard:
            entry.heard = True
            self._context.metrics.prefix_queries.inc(len(entry.request.prompt))
            self._context.metrics.prefix_hits.inc(event.cached_tokens)
        self._time(entry, len(event.tokens))
        return event

    def _time(self, entry: _Open, tokens: int) -> None:
        now = time.monotonic()
        if tokens and entry.last_event_s:
            self._context.metrics.inter_token.observe((now - entry.last_event_s) / tokens)
        elif tokens:
            self._context.metrics.time_to_first_token.observe(now - self._started_s)
        if tokens:
            entry.first_event_s = entry.first_event_s or now
            entry.last_event_s = now

    def _check_client(self) -> None:
        now = time.monotonic()
        if now - self._checked_s >= self._context.settings.gone_check_s:
            self._checked_s = now
            if self._gone():
                raise ClientGone
