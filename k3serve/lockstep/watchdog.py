"""Notices a tick that does not come back, from a thread of its own: the reader itself is blocked.

Rule: one timer, armed around every call into the device; it fires once, and never polls faster than
once per timeout_s.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from k3serve.errors import HostFailure

T = TypeVar("T")


class Watchdog:
    """Guards one thread's calls into the device; calls on_timeout(HostFailure) when one lasts too
    long.

    Until `started` is called, calls may take start_timeout_s: tick 0 waits for all hosts to be
    ready.
    """

    def __init__(
        self, timeout_s: float, start_timeout_s: float, on_timeout: Callable[[HostFailure], None]
    ) -> None:
        self._timeout_s = timeout_s
        self._limit_s = max(timeout_s, start_timeout_s)
        self._on_timeout = on_timeout
        self._watched: tuple[int, float, float] | None = None  # tick, limit, deadline
        self._late: HostFailure | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="k3serve-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def started(self) -> None:
        """The first tick is back: timeout_s holds from now on."""
        self._limit_s = self._timeout_s

    def stop(self) -> None:
        self._stopped.set()

    def guard(self, tick: int, call: Callable[[], T]) -> T:
        """Makes the call under the time limit. Whatever it raises becomes a HostFailure that
        names the tick; a call that returns after its limit raises too.
        """
        self._watched = (tick, self._limit_s, time.monotonic() + self._limit_s)
        try:
            value = call()
        except HostFailure as failure:
            raise HostFailure(f"tick {tick}: {failure}") from failure
        except Exception as error:
            raise HostFailure(f"tick {tick} failed on the device: {error!r}") from error
        finally:
            self._watched = None
        if self._late is not None:
            raise self._late
        return value

    def _run(self) -> None:
        # A call that begins later has at least timeout_s to go: sleeping that long misses nothing.
        wait_s = self._timeout_s
        while not self._stopped.wait(wait_s):
            wait_s = self._timeout_s
            if (watched := self._watched) is None:
                continue
            tick, limit_s, deadline = watched
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                self._late = HostFailure(
                    f"tick {tick} did not come back within {limit_s:g} s: "
                    "a host died, hangs, or is slower than the time limit of a tick"
                )
                self._on_timeout(self._late)
                return
            wait_s = min(left_s, self._timeout_s)
