"""Attention residuals: a sub-layer's input is a softmax mix of the finished block sums and the
running sum.

Rule: raw values are mixed, normalised ones only make the scores; all in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax

from k3serve.model.ops import F32


def mix(blocks: Sequence[Array], running: Array, score: Array, eps: float) -> Array:
    """blocks of [N, d], running [N, d], score [d] f32 (norm weight times projection) -> [N, d]."""
    sources = jnp.stack([*blocks, running]).astype(F32)  # [n+1, N, d]
    scale = lax.rsqrt(jnp.mean(sources * sources, axis=-1) + eps)
    weights = jax.nn.softmax(scale * jnp.sum(sources * score, axis=-1), axis=0)
    return jnp.sum(weights[..., None] * sources, axis=0).astype(running.dtype)
