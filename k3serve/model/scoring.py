"""Log-probabilities of given tokens and of the best ones, from one array, so that equal means equal."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax


def page_scores(logits: Array, next_tokens: Array, top: int) -> tuple[Array, Array, Array]:
    """logits [N, V] f32, next_tokens [N] i32 -> ([N] f32, ids [N, top] i32, values [N, top] f32)."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    values, ids = lax.top_k(logprobs, top)
    at = jnp.clip(next_tokens, 0, logits.shape[-1] - 1)
    chosen = jnp.take_along_axis(logprobs, at[:, None], axis=-1)[:, 0]
    return chosen, ids.astype(jnp.int32), values
