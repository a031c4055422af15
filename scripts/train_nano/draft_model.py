"""The DSpark draft in plain JAX, in the form that trains: many anchors of a row in one forward.

Rule: a block's rows are those that a server computes for the same anchor: they see the target's
features of the tokens before the anchor (at most `window` of them), the anchor and masks, and
nothing else (k3-architecture.md section 6.3). Matrices are `[in, out]`, all in float32; embedding
and head are the target's and frozen.

Sizes in shapes: B rows, T tokens, A anchors per row, S = block slots.
"""

from typing import Any

import jax
import jax.numpy as jnp

from scripts.train_nano.draft_spec import DraftSpec
from scripts.train_nano.model import Params, rms_norm


def init_params(spec: DraftSpec, key: jax.Array) -> Params:
    """Fresh parameters; output projections start small, the Markov bias and confidence at zero."""
    keys = iter(jax.random.split(key, 16 * (spec.layers + 1)))

    def normal(*shape: int, scale: float | None = None) -> jax.Array:
        return jax.random.normal(next(keys), shape) * (scale or shape[0] ** -0.5)

    return {
        "fc": normal(len(spec.aux_layers) * spec.hidden, spec.hidden),
        "hidden_norm": jnp.ones(spec.hidden),
        "norm": jnp.ones(spec.hidden),
        "layers": [_init_layer(spec, normal) for _ in range(spec.layers)],
        "markov_w1": normal(spec.vocab, spec.markov_rank, scale=0.5),
        "markov_w2": jnp.zeros((spec.vocab, spec.markov_rank)),
        "confidence": jnp.zeros(spec.hidden + spec.markov_rank),
        "confidence_bias": jnp.zeros(()),
    }


def _init_layer(spec: DraftSpec, normal: Any) -> Params:
    hidden, keys = spec.hidden, spec.kv_heads * spec.head_dim
    queries, small = spec.heads * spec.head_dim, (2 * spec.layers) ** -0.5
    return {
        "input_norm": jnp.ones(hidden),
        "post_norm": jnp.ones(hidden),
        "q": normal(hidden, queries),
        "k": normal(hidden, keys),
        "v": normal(hidden, keys),
        "o": normal(queries, hidden, scale=small * queries**-0.5),
        "q_norm": jnp.ones(spec.head_dim),
        "k_norm": jnp.ones(spec.head_dim),
        "gate": normal(hidden, spec.intermediate),
        "up": normal(hidden, spec.intermediate),
        "down": normal(spec.intermediate, hidden, scale=small * spec.intermediate**-0.5),
    }


def context_rows(
    spec: DraftSpec,
    params: Params,
    aux: jax.Array,  # [B, T, streams, hidden]
) -> jax.Array:  # [B, T, hidden]
    """What the draft knows of each token that the target has processed."""
    return rms_norm(aux.reshape(*aux.shape[:2], -1) @ params["fc"], params["hidden_norm"], spec.eps)


def block_rows(
    spec: DraftSpec,
    params: Params,
    embed: jax.Array,  # [vocab, hidden], the target's
    context: jax.Array,  # [B, T, hidden]
    ids: jax.Array,  # [B, T] int32
    anchors: jax.Array,  # [B, A] int32, positions
) -> jax.Array:  # [B, A, S, hidden]
    """Final hidden rows of the blocks that start at these positions."""
    tokens = jnp.take_along_axis(ids, anchors, 1)
    masks = jnp.full((*anchors.shape, spec.block - 1), spec.mask_id, ids.dtype)
    x = embed[jnp.concatenate([tokens[..., None], masks], -1)]
    positions = anchors[..., None] + jnp.arange(spec.block)
    for p in params["layers"]:
        normed = rms_norm(x, p["input_norm"], spec.eps)
        x = x + _attention(spec, p, normed, positions, context, anchors) @ p["o"]
        normed = rms_norm(x, p["post_norm"], spec.eps)
        gate, up = jnp.split(normed @ jnp.concatenate([p["gate"], p["up"]], 1), 2, -1)
        x = x + (jax.nn.silu(gate) * up) @ p["down"]
    return rms_norm(x, params["norm"], spec.eps)


def _attention(
    spec: DraftSpec,
    p: Params,
    x: jax.Array,  # [B, A, S, hidden], normed
    positions: jax.Array,  # [B, A, S]
    context: jax.Array,
    anchors: jax.Array,
) -> jax.Array:  # [B, A, S, heads * head_dim]
    times = jnp.arange(context.shape[1])
    q = rotate(_heads(spec, p["q_norm"], x @ p["q"]), positions, spec.rope_theta)
    q = q.reshape(*q.shape[:3], spec.kv_heads, -1, spec.head_dim) * spec.head_dim**-0.5
    k_old, v_old = keys_values(spec, p, context, times)
    k_own, v_own = keys_values(spec, p, x, positions)

    visible = (times < anchors[..., None]) & (times >= anchors[..., None] - spec.window)
    old = jnp.einsum("bashgd,bthd->bhgast", q, k_old)
    old = jnp.where(visible[:, None, None, :, None], old, -1e30)
    own = jnp.einsum("bashgd,bazhd->bhgasz", q, k_own)
    own = jnp.where(jnp.tril(jnp.ones((spec.block, spec.block), bool)), own, -1e30)
    share = jax.nn.softmax(jnp.concatenate([own, old], -1), -1)
    out = jnp.einsum("bhgasz,bazhd->bashgd", share[..., : spec.block], v_own)
    out = out + jnp.einsum("bhgast,bthd->bashgd", share[..., spec.block :], v_old)
    return out.reshape(*x.shape[:3], -1)


def keys_values(
    spec: DraftSpec, p: Params, x: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:  # [..., kv_heads, head_dim] each
    """A layer's keys and values of context rows or of its own normed rows."""
    k = rotate(_heads(spec, p["k_norm"], x @ p["k"]), positions, spec.rope_theta)
    return k, (x @ p["v"]).reshape(*x.shape[:-1], spec.kv_heads, spec.head_dim)


def _heads(spec: DraftSpec, norm: jax.Array, x: jax.Array) -> jax.Array:
    return rms_norm(x.reshape(*x.shape[:-1], -1, spec.head_dim), norm, spec.eps)


def rotate(
    x: jax.Array,  # [..., heads, dim]
    positions: jax.Array,  # [...], absolute
    theta: float,
) -> jax.Array:
    """Rotary embedding over the whole head, halves rotated against each other (GPT-NeoX)."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half) / half)
    angle = positions[..., None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def slot_logits(
    params: Params,
    head: jax.Array,  # [hidden, vocab], the target's
    hidden: jax.Array,  # [..., hidden], rows of blocks
    previous: jax.Array,  # [...] int32: the token before the one that the slot predicts
) -> jax.Array:  # [..., vocab]
    """Logits of slots after the Markov correction."""
    return hidden @ head + params["markov_w1"][previous] @ params["markov_w2"].T


def confidence_logits(params: Params, hidden: jax.Array, previous: jax.Array) -> jax.Array:  # [...]
    """Before the sigmoid: how likely a slot's token is accepted if all before it were."""
    row = jnp.concatenate([hidden, params["markov_w1"][previous]], -1)
    return row @ params["confidence"] + params["confidence_bias"]
