"""The pool of snapshots: states at page ends, from which a prompt that begins alike goes on.

Rule: a snapshot is a copy of all that the page program left in a slot and that no cache page
holds: KDA states, convolution histories, the draft's ring, and which tokens the prompt has shown.
So a restored slot has the very bits of one that computed its pages. Which snapshot holds what is
the scheduler's business (scheduler/prefix.py).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3serve.config import TargetConfig
from k3serve.draft_config import DraftConfig
from k3serve.model.state import KdaState, State
from k3serve.runtime.table import SlotTable
from k3serve.types import TickShape


@struct.dataclass
class SlotArrays:
    """What belongs to one sequence. Leading axis: slots, or the snapshots of the pool."""

    layers: tuple[Any, ...]  # KdaState without rows, or None for an MLA layer
    ring: Any  # the draft's DraftRing, or None
    seen: Any  # [slots, V] bool: tokens of the prompt so far


def slot_arrays(model: State, ring: Any, seen: Any) -> SlotArrays:
    """The part of the state (or of its partition specs) that a snapshot keeps."""
    layers = tuple(
        KdaState(s=layer.s, conv=layer.conv) if isinstance(layer, KdaState) else None
        for layer in model.layers
    )
    return SlotArrays(layers=layers, ring=ring, seen=seen)


def empty_pool(live: SlotArrays, specs: SlotArrays, mesh: Mesh, count: int) -> SlotArrays | None:
    """A pool of `count` snapshots of slots like these; None for a server without any."""
    if count == 0:
        return None
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct((count, *a.shape[1:]), a.dtype), live)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=_is_spec)

    def make() -> SlotArrays:
        made: SlotArrays = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return made

    pool: SlotArrays = jax.jit(make, out_shardings=shardings)()
    return pool


def snapshot_bytes(
    config: TargetConfig, draft: DraftConfig | None, shape: TickShape, ranks: int, itemsize: int
) -> int:
    """What one snapshot takes on each rank. itemsize: of the compute dtype."""
    width = config.kda_heads * config.kda_head_dim
    state = width * config.kda_head_dim * 4
    conv = (config.conv_width - 1) * 3 * width * itemsize
    kda_layers = sum(config.is_kda(i) for i in range(config.num_layers))
    split, whole = kda_layers * (state + conv), config.vocab_size
    if draft is not None:
        ring = draft.ring_slots(shape.rows, shape.max_context)
        lanes = draft.stored_kv_heads(ranks) * draft.head_dim
        split += draft.num_layers * 2 * ring * lanes * itemsize
        whole += ring * 4
    return -(-split // ranks) + whole


def page_bytes(config: TargetConfig, shape: TickShape, itemsize: int) -> int:
    """What one cache page takes on each rank."""
    mla_layers = sum(not config.is_kda(i) for i in range(config.num_layers))
    return mla_layers * shape.page_tokens * config.latent_lanes * itemsize


def save(pool: SlotArrays, live: SlotArrays, slot: Array, index: Array) -> SlotArrays:
    """Copies a slot into snapshot `index` [] i32; a negative one changes nothing."""
    at = jnp.maximum(index, 0)

    def put(kept: Array, array: Array) -> Array:
        row = jnp.where(index >= 0, _row(array, slot), _row(kept, at))
        return lax.dynamic_update_slice_in_dim(kept, row, at, 0)

    saved: SlotArrays = jax.tree.map(put, pool, live)
    return saved


def restore(
    pool: SlotArrays,
    model: State,
    ring: Any,
    table: SlotTable,
    wanted: Array,  # [S] i32: the snapshot for each slot, -1 for none
) -> tuple[State, Any, SlotTable]:
    """Copies snapshots into the slots that want one."""
    order = jnp.nonzero(wanted >= 0, size=wanted.shape[0], fill_value=0)[0]

    def one(i: Array, live: SlotArrays) -> SlotArrays:
        slot = order[i]

        def put(array: Array, kept: Array) -> Array:
            row = _row(kept, wanted[slot])
            return lax.dynamic_update_slice_in_dim(array, row, slot, 0)

        restored: SlotArrays = jax.tree.map(put, live, pool)
        return restored

    live = lax.fori_loop(0, jnp.sum(wanted >= 0), one, slot_arrays(model, ring, table.seen))
    layers = tuple(
        old if new is None else old.replace(s=new.s, conv=new.conv)
        for old, new in zip(model.layers, live.layers, strict=True)
    )
    model = model.replace(layers=layers)  # type: ignore[attr-defined]
    return model, live.ring, table.replace(seen=live.seen)  # type: ignore[attr-defined]


def _is_spec(value: Any) -> bool:
    return isinstance(value, PartitionSpec)


def _row(array: Array, at: Array) -> Array:
    return lax.dynamic_slice_in_dim(array, at, 1)
