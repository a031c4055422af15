"""What the leader and the followers need of the device; the runtime implements it, tests fake it.

Rule: dispatch order is tick order, counted from tick 0, and the same on every host.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np


class TickDevice(Protocol):
    """One host's share of the device. All methods are called from a single thread."""

    def dispatch(self, plan_vector: np.ndarray | None) -> Any:
        """Launches the next tick without waiting for it; gives a handle for `read`.

        The leader passes its packed plan; a follower passes None and feeds zeros to the broadcast.
        """
        ...

    def read(self, handle: Any) -> np.ndarray:
        """The tick's packed result, [result_layout.size] i32. Blocks; raises when the collective
        failed.
        """
        ...

    def done(self, handle: Any) -> bool:
        """Whether `read` would not wait. For measuring only: it decides nothing."""
        ...
