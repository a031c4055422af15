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
class KdaState:
    s: Any  # [slots, heads, K, V] f32
    conv: Any  # [slots, 3 rows, q|k|v, heads*K]: the last rows before the convolution, oldest first


@struct.dataclass
class MlaState:
    pages: (
        Any  # [pages, page tokens, lanes]: normed latent, shared key, zeros; the same on every rank
    )


@struct.dataclass
class State:
    layers: tuple[Any, ...]  # KdaState or MlaState


def state_specs(config: TargetConfig) -> State:
    """How each array is split: in_specs and out_specs of a shard_map."""
    kda = KdaState(s=P(None, RANK, None, None), conv=P(None, None, None, RANK))
    mla = MlaState(pages=P())
    return State(layers=tuple(kda if config.is_kda(i) else mla for i in range(config.num_layers)))


def init_state(
    config: TargetConfig,
    mesh: Mesh,
    *,
    slots: int,
    num_pages: int,
    page_tokens: int,
    dtype: Any,
) -> State:
    """All zeros, made on the devices of the mesh."""
    check_ranks(config, mesh.shape[RANK])
    heads, k = config.kda_heads, config.kda_head_dim

    def layer(index: int) -> KdaState | MlaState:
        if config.is_kda(index):
            return KdaState(
                s=jnp.zeros((slots, heads, k, k), jnp.float32),
                conv=jnp.zeros((slots, config.conv_width - 1, 3, heads * k), dtype),
            )
        return MlaState(pages=jnp.zeros((num_pages, page_tokens, config.latent_lanes), dtype))

    def make() -> State:
        return State(layers=tuple(layer(i) for i in range(config.num_layers)))

    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        state_specs(config),
        is_leaf=lambda x: isinstance(x, P),
    )
    return jax.jit(make, out_shardings=shardings)()


def pad_lanes(rows: Array, lanes: int) -> Array:
    """rows [..., n] with zeros up to [..., lanes]."""
    return jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, lanes - rows.shape[-1])])
