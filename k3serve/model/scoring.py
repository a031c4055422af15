"""Log-probabilities of a page's next tokens, and the best tokens at each position.

Rule: the one function by which prompts are scored, in the engine and by the `score` command, so
that both give the same bits. A token's value is read from the array that the best values are taken
from.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax


def log_probs(logits: Array) -> Array:
    """logits [N, vocab] f32 -> log-softmax, held as an array of its own so that all readers see the
    same bits.
    """
    return lax.optimization_barrier(jax.nn.log_softmax(lax.optimization_barrier(logits), axis=-1))


def page_scores(logits: Array, next_tokens: Array, top: int) -> tuple[Array, Array, Array]:
    """Scores of the tokens after each position.

    logits [C, vocab] f32; next_tokens [C] i32, negative where there is none; top: how many best
    tokens. Returns logprobs [C] f32 (NaN where there is no next token), top_ids [C, top] i32 (best
    first, ties to the lower id), top_logprobs [C, top] f32.
    """
    values = log_probs(logits)
    best, ids = lax.top_k(values, top)
    at = jnp.clip(next_tokens, 0, logits.shape[-1] - 1)
    chosen = jnp.take_along_axis(values, at[:, None], axis=-1)[:, 0]
    return jnp.where(next_tokens < 0, jnp.nan, chosen), ids.astype(jnp.int32), best
