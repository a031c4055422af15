"""Sums and gathers over the mesh axis "rank": the only places where ranks exchange data inside the
model.

Rule: a result may depend on the number of ranks, never on where a row stands in the batch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

RANK = "rank"  # the one mesh axis


def rank_sum(x: Array) -> Array:
    """Sum over ranks, added in rank order.

    Not psum: a ring all-reduce adds in an order that depends on the element's place in the buffer,
    so a request's bits would depend on its slot.
    """
    if jax.lax.axis_size(RANK) == 1:
        return x
    parts = lax.all_gather(x, RANK)  # [ranks, ...]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def rank_concat(x: Array) -> Array:
    """The ranks' arrays joined along the last axis, in rank order."""
    if jax.lax.axis_size(RANK) == 1:
        return x
    return lax.all_gather(x, RANK, axis=x.ndim - 1, tiled=True)


def rank_index() -> Array:
    return lax.axis_index(RANK)


def split_sum(parts: list[Array]) -> list[Array]:
    """rank_sum of several arrays that differ in their last axis only, in one exchange."""
    if jax.lax.axis_size(RANK) == 1 or len(parts) == 1:
        return [rank_sum(p) for p in parts]
    total = rank_sum(jnp.concatenate(parts, axis=-1))
    ends, at = [], 0
    for p in parts[:-1]:
        at += p.shape[-1]
        ends.append(at)
    return list(jnp.split(total, ends, axis=-1))
