"""What a running sequence leaves on the device: KDA states and convolution histories by slot, MLA
rows by page.

Rule: arrays are indexed by slot or by cache page and nothing else, so that the runtime can copy,
snapshot and donate them without knowing the model. Latent rows are padded to 128 lanes: XLA copies
a donated array with other rows.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from k3serve.config import TargetConfig, check_ranks
from k3serve.model.collectives import RANK


@struct.dataclass
class KdaRows:
    """The rows of a slot's last decode step, kept to be replayed: only the first State.accepted of
    them will have happened. One state and R such rows cost far less than R states.
    """

    k: Any  # [slots, R, heads, K] f32, normalised
    v: Any  # [slots, R, heads, V] f32
    g: Any  # [slots, R, heads, K] f32, log decay
    beta: Any  # [slots, R, heads] f32
    u: Any  # [slots, R, q|k|v, heads*K]: before the convolution


@struct.dataclass
class KdaState:
    s: Any  # [slots, heads, K, V] f32, before `rows`
    conv: Any  # [slots, 3 rows, q|k|v, heads*K]: the last rows before the convolution, oldest first
    rows: Any = None  # KdaRows, or None where a step has one row, which is in `s` at once


@struct.dataclass
class MlaState:
    pages: (
        Any  # [pages, page tokens, lanes]: normed latent, shared key, zeros; the same on every rank
    )


@struct.dataclass
class State:
    layers: tuple[Any, ...]  # KdaState or MlaState
    accepted: Any = None  # [slots] i32: rows of the last decode step that count; None: all


def state_specs(config: TargetConfig, rows: int = 1) -> State:
    """How each array is split: in_specs and out_specs of a shard_map."""
    by_head, last = P(None, None, RANK, None), P(None, None, None, RANK)
    replayed = KdaRows(k=by_head, v=by_head, g=by_head, beta=P(None, None, RANK), u=last)
    kda = KdaState(s=P(None, RANK, None, None), conv=last, rows=replayed if rows > 1 else None)
    mla = MlaState(pages=P())
    return State(
        layers=tuple(kda if config.is_kda(i) else mla for i in range(config.num_layers)),
        accepted=P() if rows > 1 else None,
    )


def init_state(
    config: TargetConfig,
    mesh: Mesh,
    *,
    slots: int,
    num_pages: int,
    page_tokens: int,
    dtype: Any,
    rows: int = 1,
) -> State:
    """All zeros, made on the devices of the mesh. rows: R, the rows of a decode step."""
    check_ranks(config, mesh.shape[RANK])
    heads, k = config.kda_heads, config.kda_head_dim

    def layer(index: int) -> KdaState | MlaState:
        if config.is_kda(index):
            return KdaState(
                s=jnp.zeros((slots, heads, k, k), jnp.float32),
                conv=jnp.zeros((slots, config.conv_width - 1, 3, heads * k), dtype),
                rows=_no_rows(config, slots, rows, dtype) if rows > 1 else None,
            )
        return MlaState(pages=jnp.zeros((num_pages, page_tokens, config.latent_lanes), dtype))

    def make() -> State:
        return State(
            layers=tuple(layer(i) for i in range(config.num_layers)),
            accepted=jnp.zeros(slots, jnp.int32) if rows > 1 else None,
        )

    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        state_specs(config, rows),
        is_leaf=lambda x: isinstance(x, P),
    )
    return jax.jit(make, out_shardings=shardings)()


def _no_rows(config: TargetConfig, slots: int, rows: int, dtype: Any) -> KdaRows:
    heads, k = config.kda_heads, config.kda_head_dim
    by_head = jnp.zeros((slots, rows, heads, k), jnp.float32)
    return KdaRows(
        k=by_head,
        v=by_head,
        g=by_head,
        beta=jnp.zeros((slots, rows, heads), jnp.float32),
        u=jnp.zeros((slots, rows, 3, heads * k), dtype),
    )


def tile_of(tree: Any, first: Any, slots: int) -> Any:
    """The rows of `slots` slots from `first` on, of every array of a tree indexed by slot."""
    return jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, first, slots), tree)


def with_tile(tree: Any, tile: Any, first: Any) -> Any:
    """The tree with a tile of its slots replaced."""
    return jax.tree.map(
        lambda a, part: jax.lax.dynamic_update_slice_in_dim(a, part, first, 0), tree, tile
    )


def accept_rows(state: State, first: Any, accepted: Array, active: Array) -> State:
    """Says how many rows of the last decode step have happened, in the tile of slots from `first`
    on. accepted [G] i32, at least 1; slots that are not active [G] keep what they have.
    """
    if state.accepted is None:
        return state
    old = tile_of(state.accepted, first, accepted.shape[0])
    kept = jnp.where(active, accepted, old)
    return state.replace(accepted=with_tile(state.accepted, kept, first))  # type: ignore[attr-defined]


def pad_lanes(rows: Array, lanes: int) -> Array:
    """rows [..., n] with zeros up to [..., lanes]."""
    return jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, lanes - rows.shape[-1])])
