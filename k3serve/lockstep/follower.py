"""A follower's life: launch the next tick, read the last one's stop and fault, until told to stop.

Rule: decides nothing. Imports neither scheduler, api nor text; its only clock is the watchdog's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from k3serve.errors import HostFailure
from k3serve.lockstep.device import TickDevice
from k3serve.lockstep.plan import check_result
from k3serve.lockstep.watchdog import Watchdog
from k3serve.types import TickShape


def follow(
    device: TickDevice,
    shape: TickShape,
    *,
    tick_timeout_s: float = 30.0,
    start_timeout_s: float = 600.0,
    sync: bool = False,
    on_timeout: Callable[[HostFailure], None] = lambda failure: None,
) -> None:
    """Returns when the leader ended the run. Raises HostFailure on a fault or a broken collective.

    tick_timeout_s must be well above the leader's idle interval. When a tick does not come back in
    time this thread is blocked in the device, so on_timeout is called in another one: it should end
    the process. start_timeout_s bounds tick 0, which waits for all hosts.
    """
    watchdog = Watchdog(tick_timeout_s, start_timeout_s, on_timeout)
    watchdog.start()

    def dispatch(tick: int) -> Any:
        return watchdog.guard(tick, lambda: device.dispatch(None))

    def stops(tick: int, handle: Any) -> bool:
        return check_result(watchdog.guard(tick, lambda: device.read(handle)), shape, tick)

    try:
        tick, stopping = 0, False
        running = dispatch(0)
        while not stopping:
            # The leader launches one closing tick after the one that says stop: a follower that
            # overlaps has launched it by the time it reads the stop.
            following = None if sync else dispatch(tick + 1)
            stopping = stops(tick, running)
            watchdog.started()
            running = dispatch(tick + 1) if sync else following
            tick += 1
        stops(tick, running)
    finally:
        watchdog.stop()
