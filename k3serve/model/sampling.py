"""From a row of logits to the next token: bias, penalties, masks, temperature, top-k, top-p, min-p.

Rule: a row's token is a pure function of that row's logits, its settings and (seed, choice,
position, purpose, offset in a block); nothing here depends on the other rows of the batch. The
order of the steps is that of the first line. No sort: the top-k and top-p cuts find their threshold
by bisection on the float's bits, which is exact, costs 32 passes over the row, and keeps every
token that ties with the last one kept.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from k3serve.types import GREEDY_BELOW

BANNED_BIAS = -100.0  # a logit bias at or under this bans the token

# Independent random streams of one (seed, choice, position).
PURPOSE_TARGET = 0  # a token of the target, in plain and in coupled decoding
PURPOSE_DRAFT = 1  # drafts drawn from the draft's own distribution
PURPOSE_ACCEPT = 2  # the uniform numbers that decide which drafts stay
PURPOSE_RESIDUAL = 3  # the one further token after the accepted drafts
PURPOSES = 16  # stream numbers of one place in a block; spare ones for later purposes


@struct.dataclass
class SamplingRows:
    """Per-row settings; the fields are those of types.Sampling. N rows."""

    seed: jax.Array  # [N, 2] u32: low word, high word
    choice: jax.Array  # [N] i32
    temperature: jax.Array  # [N] f32
    top_p: jax.Array  # [N] f32
    top_k: jax.Array  # [N] i32, 0 = off
    min_p: jax.Array  # [N] f32
    presence_penalty: jax.Array  # [N] f32
    frequency_penalty: jax.Array  # [N] f32
    repetition_penalty: jax.Array  # [N] f32


def penalise(
    logits: jax.Array,  # [N, V] f32
    rows: SamplingRows,
    counts: jax.Array,  # [N, V] i32: how often each token was generated
    seen: jax.Array,  # [N, V] bool: whether the prompt holds the token
) -> jax.Array:
    """Presence and frequency penalties on generated tokens, repetition penalty on these and the
    prompt's (divides positive logits, multiplies negative ones)."""
    generated = counts > 0
    repeated = seen | generated
    factor = rows.repetition_penalty[:, None]
    repetition = jnp.where(logits > 0, logits / factor, logits * factor)
    logits = jnp.where(repeated, repetition, logits)
    logits = logits - rows.frequency_penalty[:, None] * counts.astype(jnp.float32)
    return logits - jnp.where(generated, rows.presence_penalty[:, None], 0.0)


def choose(
    logits: jax.Array,  # [N, V] f32, biased, penalised and masked
    rows: SamplingRows,
    positions: jax.Array,  # [N] i32: absolute position of the token to choose
) -> jax.Array:  # [N] i32
    """The next token of each row."""
    return lax.cond(
        jnp.all(rows.temperature < GREEDY_BELOW),
        lambda: jnp.argmax(logits, axis=-1).astype(jnp.int32),
        lambda: draw(processed(logits, rows), rows, positions, PURPOSE_TARGET),
    )


def processed(logits: jax.Array, rows: SamplingRows) -> jax.Array:  # [N, V] f32
    """Temperature, then the cuts: logs of the distributions to draw from, not normalised.

    logits [N, V] f32 are biased, penalised and masked. -inf where a token is cut; a greedy row
    keeps its best token alone, so drawing from it and accepting drafts by it are greedy too.
    """
    greedy = rows.temperature < GREEDY_BELOW
    top = jnp.max(logits, axis=-1, keepdims=True)
    temperature = jnp.where(greedy, 1.0, rows.temperature)[:, None]
    # the best logit becomes exactly 0 before the division: no overflow at small temperatures
    scaled = jnp.where(logits == -jnp.inf, -jnp.inf, (logits - top) / temperature)
    kept = lax.cond(jnp.any(_cuts(rows)), lambda: truncate(scaled, rows), lambda: scaled)
    best = jnp.argmax(logits, axis=-1)[:, None] == jnp.arange(logits.shape[-1])
    return jnp.where(greedy[:, None], jnp.where(best, 0.0, -jnp.inf), kept)


def draw(
    logits: jax.Array,  # [N, V] f32: logs of what to draw from, not normalised
    rows: SamplingRows,
    positions: jax.Array,  # [N] i32: absolute position of the token to draw
    purpose: int,
    offset: jax.Array | int = 0,  # of a draft in its block
) -> jax.Array:  # [N] i32
    """One sample of each row, with the noise of its (seed, choice, position, purpose, offset)."""

    def noise(seed: jax.Array, choice: jax.Array, position: jax.Array) -> jax.Array:
        return gumbel(seed, choice, position, logits.shape[-1], purpose, offset)

    drawn = logits + jax.vmap(noise)(rows.seed, rows.choice, positions)
    return jnp.argmax(drawn, axis=-1).astype(jnp.int32)


def _cuts(rows: SamplingRows) -> jax.Array:  # [N] bool
    return (rows.top_k > 0) | (rows.top_p < 1.0) | (rows.min_p > 0.0)


def truncate(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """Sets to -inf what top-k, then top-p, then min-p drop; a row that asks for none is unchanged.

    logits [N, V] f32 after temperature. top_p keeps the smallest set of best tokens whose
    probability reaches it (at least one token, so 0 means the best one); min_p is relative to the
    best token.
    """
    vocab = logits.shape[-1]
    keys = _ordered_bits(logits)
    k = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, vocab), vocab)[:, None]
    by_count = _threshold(keys, lambda mask: jnp.sum(mask, axis=-1, keepdims=True) >= k)
    kept = jnp.where(keys >= by_count, logits, -jnp.inf)

    probs = jax.nn.softmax(kept, axis=-1)
    keys = _ordered_bits(probs)
    p = rows.top_p[:, None]
    by_mass = _threshold(
        keys, lambda mask: jnp.sum(jnp.where(mask, probs, 0.0), axis=-1, keepdims=True) >= p
    )
    best = jnp.max(probs, axis=-1, keepdims=True)
    by_mass = jnp.minimum(by_mass, _ordered_bits(best))  # top_p = 0 still keeps the best
    inside = (keys >= by_mass) | (p >= 1.0)
    inside &= probs >= rows.min_p[:, None] * best
    return jnp.where(inside, kept, -jnp.inf)


def _ordered_bits(x: jax.Array) -> jax.Array:
    """u32 keys in the order of the floats (-inf lowest)."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    sign = bits >> 31
    return jnp.where(sign == 1, ~bits, bits | jnp.uint32(0x80000000))


def _threshold(keys: jax.Array, enough: object) -> jax.Array:  # [N, 1] u32
    """The largest key t for which enough(keys >= t) holds; 0 if it never does."""

    def step(i: jax.Array, t: jax.Array) -> jax.Array:
        candidate = t | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(enough(keys >= candidate), candidate, t)  # type: ignore[operator]

    return lax.fori_loop(0, 32, step, jnp.zeros((keys.shape[0], 1), jnp.uint32))


def gumbel(
    seed: jax.Array,  # [2] u32
    choice: jax.Array,  # i32
    position: jax.Array,  # i32
    vocab: int,
    purpose: int,
    offset: jax.Array | int = 0,
) -> jax.Array:  # [vocab] f32
    """Noise of one place in one stream: argmax(logits + noise) is a sample."""
    return jax.random.gumbel(_key(seed, choice, position, purpose, offset), (vocab,), jnp.float32)


def uniforms(
    seed: jax.Array,  # [N, 2] u32
    choice: jax.Array,  # [N] i32
    positions: jax.Array,  # [N, m] i32: absolute position of each draft of a block
    purpose: int = PURPOSE_ACCEPT,
) -> jax.Array:  # [N, m] f32 in [0, 1)
    """One number for each draft; a draft's column is its offset in the block."""

    def one(
        seed: jax.Array, choice: jax.Array, position: jax.Array, offset: jax.Array
    ) -> jax.Array:
        return jax.random.uniform(_key(seed, choice, position, purpose, offset), (), jnp.float32)

    block = jax.vmap(one, in_axes=(None, None, 0, 0))
    return jax.vmap(block, in_axes=(0, 0, 0, None))(
        seed, choice, positions, jnp.arange(positions.shape[1])
    )


def _key(
    seed: jax.Array, choice: jax.Array, position: jax.Array, purpose: int, offset: jax.Array | int
) -> jax.Array:
    """The offset keeps a position's numbers fresh when a later block comes to it again: that the
    earlier block was cut short says something about the numbers which it used."""
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    key = jax.random.fold_in(key, choice)
    key = jax.random.fold_in(key, position)
    return jax.random.fold_in(key, purpose + PURPOSES * offset)
