"""The engine: weights, state and the one compiled tick program of a host.

Rule: the program is compiled ahead of time and called as compiled, so nothing can compile while
serving; `compilations` counts what JAX compiles in this process: nothing, after start-up.
Implements lockstep.device.TickDevice.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

import jax
import numpy as np

from k3serve.errors import HostFailure
from k3serve.runtime.decode import ModelWeights
from k3serve.runtime.program import Program

log = logging.getLogger("k3serve")

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts backend compilations in this process, through JAX's own monitoring events."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._ready = False
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == _COMPILE_EVENT:
            with self._lock:
                self._count += 1
            if self._ready:
                log.warning("a program was compiled after start-up, in %.1f s", duration_secs)

    def reset(self) -> None:
        self.take()

    def ready(self) -> None:
        """From here on nothing should compile; what does is logged, too, on every host."""
        self.reset()
        self._ready = True

    def take(self) -> int:
        """How many since the last call."""
        with self._lock:
            count, self._count = self._count, 0
        return count


class Engine:
    """One host's part of the lockstep run."""

    def __init__(
        self,
        program: Program,
        compiled: Any,  # program.compile()
        weights: ModelWeights,
        allowed: np.ndarray,  # [vocab] bool: tokens that may be sampled
    ) -> None:
        self.config = program.config
        self.shape = program.shape
        self.speculation = program.speculation
        self.compilations = CompileCounter()
        self.mesh = program.mesh
        self.weights = weights
        self._compiled = compiled
        self._plan_size = program.plan_size
        self._rows = program.plan_rows
        own = jax.process_index()
        self._local_ranks = sum(d.process_index == own for d in program.mesh.devices.flat)
        self.allowed = jax.make_array_from_callback(
            allowed.shape, program.replicated, lambda index: allowed[index]
        )
        self.state = program.new_state()

    def dispatch(self, plan_vector: np.ndarray | None) -> jax.Array:
        """Launches the next tick and returns at once; followers pass None and feed zeros."""
        rows = np.zeros((self._local_ranks, self._plan_size), np.int32)
        if plan_vector is not None:
            rows[0] = plan_vector
        plan_rows = jax.make_array_from_process_local_data(self._rows, rows)
        try:
            self.state, result = self._compiled(self.weights, self.allowed, self.state, plan_rows)
        except Exception as error:
            raise HostFailure(f"the tick could not be launched: {error}") from error
        return result

    def read(self, handle: jax.Array) -> np.ndarray:  # [result_len] i32
        """Waits for a tick; returns its result vector. Raises HostFailure when a host is gone."""
        try:
            return np.asarray(handle.addressable_data(0))
        except Exception as error:
            raise HostFailure(f"the tick did not come back: {error}") from error

    def done(self, handle: jax.Array) -> bool:
        return bool(handle.is_ready())  # type: ignore[attr-defined]  # JAX types lack it
