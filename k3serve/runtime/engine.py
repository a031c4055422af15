"""The engine: weights, state and the one compiled tick program of a host.

Rule: the program is compiled ahead of time and called as compiled, so nothing can compile while
serving; `compilations` counts what JAX compiles in this process: nothing, after start-up.
Implements lockstep.device.TickDevice.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3serve import wire
from k3serve.config import TargetConfig
from k3serve.errors import HostFailure
from k3serve.model.collectives import RANK
from k3serve.model.draft import init_ring, ring_specs
from k3serve.model.state import init_state, state_specs
from k3serve.runtime.decode import ModelWeights, Speculation
from k3serve.runtime.snapshots import empty_pool, slot_arrays
from k3serve.runtime.table import SlotTable, empty_table
from k3serve.runtime.tick import EngineState, build_tick
from k3serve.types import TickShape

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts backend compilations in this process, through JAX's own monitoring events."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == _COMPILE_EVENT:
            with self._lock:
                self._count += 1

    def reset(self) -> None:
        self.take()

    def take(self) -> int:
        """How many since the last call."""
        with self._lock:
            count, self._count = self._count, 0
        return count


class Engine:
    """One host's part of the lockstep run."""

    def __init__(
        self,
        config: TargetConfig,
        shape: TickShape,
        mesh: Mesh,
        weights: ModelWeights,
        allowed: np.ndarray,  # [vocab] bool: tokens that may be sampled
        *,
        dtype: Any,
        speculation: Speculation | None = None,
    ) -> None:
        self.config = config
        self.shape = shape
        self.speculation = speculation or Speculation()
        assert (self.speculation.draft is None) == (weights.draft is None)
        self.compilations = CompileCounter()
        self.mesh = mesh
        self.weights = weights
        self._plan_size = wire.plan_layout(shape).size
        self._rows = NamedSharding(mesh, PartitionSpec(RANK))
        self._local_ranks = sum(d.process_index == jax.process_index() for d in mesh.devices.flat)
        replicated = NamedSharding(mesh, PartitionSpec())
        self.allowed = jax.make_array_from_callback(
            allowed.shape, replicated, lambda index: allowed[index]
        )
        self.state = self._initial_state(config, dtype)
        self._program = self._compile(config)

    def _specs(self, config: TargetConfig) -> EngineState:
        table = jax.tree.map(
            lambda _: PartitionSpec(),
            jax.eval_shape(partial(empty_table, self.shape, config.vocab_size)),
        )
        tick: Any = PartitionSpec()
        draft = self.speculation.draft
        model = state_specs(config, self.shape.rows)
        ring = None if draft is None else ring_specs(draft)
        pool = slot_arrays(model, ring, table.seen) if self.shape.num_snapshots else None
        return EngineState(model=model, ring=ring, table=table, snapshots=pool, tick=tick)

    def _initial_state(self, config: TargetConfig, dtype: Any) -> EngineState:
        shape, replicated = self.shape, NamedSharding(self.mesh, PartitionSpec())

        def create() -> tuple[SlotTable, jax.Array]:
            return empty_table(shape, config.vocab_size), jnp.int32(0)

        table, tick = jax.jit(create, out_shardings=replicated)()
        model = init_state(
            config,
            self.mesh,
            slots=shape.max_slots,
            num_pages=shape.num_pages,
            page_tokens=shape.page_tokens,
            dtype=dtype,
            rows=shape.rows,
        )
        draft = self.speculation.draft
        ring = None
        if draft is not None:
            ring = init_ring(
                draft,
                self.mesh,
                slots=shape.max_slots,
                rows=shape.rows,
                context=shape.max_context,
                dtype=dtype,
            )
        pool = None
        if shape.num_snapshots:
            live, specs = slot_arrays(model, ring, table.seen), self._specs(config).snapshots
            pool = empty_pool(live, specs, self.mesh, shape.num_snapshots)
        return EngineState(model=model, ring=ring, table=table, snapshots=pool, tick=tick)

    def _compile(self, config: TargetConfig) -> Any:
        specs = self._specs(config)
        weight_specs = jax.tree.map(lambda array: array.sharding.spec, self.weights)
        step = jax.shard_map(
            build_tick(config, self.shape, self.speculation),
            mesh=self.mesh,
            in_specs=(weight_specs, PartitionSpec(), specs, PartitionSpec(RANK)),
            out_specs=(specs, PartitionSpec()),
            check_vma=False,
        )
        plan_rows = jax.ShapeDtypeStruct(
            (self.mesh.size, self._plan_size), jnp.int32, sharding=self._rows
        )
        jitted = jax.jit(step, donate_argnums=2)
        return jitted.lower(self.weights, self.allowed, self.state, plan_rows).compile()

    def dispatch(self, plan_vector: np.ndarray | None) -> jax.Array:
        """Launches the next tick and returns at once; followers pass None and feed zeros."""
        rows = np.zeros((self._local_ranks, self._plan_size), np.int32)
        if plan_vector is not None:
            rows[0] = plan_vector
        plan_rows = jax.make_array_from_process_local_data(self._rows, rows)
        try:
            self.state, result = self._program(self.weights, self.allowed, self.state, plan_rows)
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
