"""The tick program of a run: what it is made of, its state, and how it is compiled.

Rule: shapes and shardings suffice. Nothing here needs a weight, so the program is compiled while
the weights are still being read (startup.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3serve import wire
from k3serve.config import TargetConfig
from k3serve.model.collectives import RANK
from k3serve.model.draft import init_ring, ring_specs
from k3serve.model.state import init_state, state_specs
from k3serve.runtime.decode import ModelWeights, Speculation
from k3serve.runtime.snapshots import empty_pool, slot_arrays
from k3serve.runtime.table import empty_table
from k3serve.runtime.tick import EngineState, build_tick
from k3serve.types import TickShape


@dataclass(frozen=True, slots=True)
class Program:
    """All that is static in a run."""

    config: TargetConfig
    shape: TickShape
    mesh: Mesh
    weights: ModelWeights  # of jax.ShapeDtypeStructs with shardings
    dtype: Any  # of the state
    speculation: Speculation = field(default_factory=Speculation)

    def __post_init__(self) -> None:
        assert (self.speculation.draft is None) == (self.weights.draft is None)

    @property
    def plan_size(self) -> int:
        return wire.plan_layout(self.shape).size

    @property
    def plan_rows(self) -> NamedSharding:
        """How [ranks, plan_size] i32 is split: the leader's row is the plan, the rest zeros."""
        return NamedSharding(self.mesh, PartitionSpec(RANK))

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def new_state(self) -> EngineState:
        """The state before the first tick, made on the devices."""
        made: EngineState = jax.jit(self._state, out_shardings=self._state_shardings())()
        return made

    def compile(self) -> Any:
        """(weights, allowed, state, plan rows) -> (state, result), compiled; the state is donated.

        Needs the persistent cache or some time: seconds for K3-nano on a CPU.
        """
        specs = self._specs()
        weight_specs = jax.tree.map(lambda shape: shape.sharding.spec, self.weights)
        step = jax.shard_map(
            build_tick(self.config, self.shape, self.speculation),
            mesh=self.mesh,
            in_specs=(weight_specs, PartitionSpec(), specs, PartitionSpec(RANK)),
            out_specs=(specs, PartitionSpec()),
            check_vma=False,
        )
        state = jax.tree.map(
            lambda array, sharding: jax.ShapeDtypeStruct(
                array.shape, array.dtype, sharding=sharding
            ),
            jax.eval_shape(self._state),
            self._state_shardings(),
        )
        allowed = jax.ShapeDtypeStruct((self.config.vocab_size,), bool, sharding=self.replicated)
        plans = jax.ShapeDtypeStruct(
            (self.mesh.size, self.plan_size), jnp.int32, sharding=self.plan_rows
        )
        jitted = jax.jit(step, donate_argnums=2)
        return jitted.lower(self.weights, allowed, state, plans).compile()

    def _state(self) -> EngineState:
        shape, config, draft = self.shape, self.config, self.speculation.draft
        slots, rows = shape.max_slots, shape.rows
        table = empty_table(shape, config.vocab_size)
        model = init_state(
            config,
            self.mesh,
            slots=slots,
            num_pages=shape.num_pages,
            page_tokens=shape.page_tokens,
            dtype=self.dtype,
            rows=rows,
        )
        ring = None
        if draft is not None:
            ring = init_ring(
                draft,
                self.mesh,
                slots=slots,
                rows=rows,
                context=shape.max_context,
                dtype=self.dtype,
            )
        pool = None
        if shape.num_snapshots:
            live, specs = slot_arrays(model, ring, table.seen), self._specs().snapshots
            pool = empty_pool(live, specs, self.mesh, shape.num_snapshots)
        return EngineState(model=model, ring=ring, table=table, snapshots=pool, tick=jnp.int32(0))

    def _specs(self) -> EngineState:
        table = jax.tree.map(
            lambda _: PartitionSpec(),
            jax.eval_shape(partial(empty_table, self.shape, self.config.vocab_size)),
        )
        tick: Any = PartitionSpec()
        draft = self.speculation.draft
        model = state_specs(self.config, self.shape.rows)
        ring = None if draft is None else ring_specs(draft)
        pool = slot_arrays(model, ring, table.seen) if self.shape.num_snapshots else None
        return EngineState(model=model, ring=ring, table=table, snapshots=pool, tick=tick)

    def _state_shardings(self) -> Any:
        return jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec),
            self._specs(),
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )
