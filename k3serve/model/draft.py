"""The DSpark draft: a small model that guesses the tokens after the anchor, one block at a time.

Rule: pure functions to be called inside shard_map over the axis "rank", like the target's, and
every shape is fixed by the arguments' shapes. The draft sees of a sequence only context rows, made
from the target's streams of rows that were verified; a slot's guesses depend on nothing else.

1. features: the target's streams as they enter the aux layers, side by side
2. context_rows: one projection and norm, then each layer's keys and values
3. commit_page, commit_rows: these into the ring, at position mod ring; nothing of rejected rows
4. block_hidden: the anchor and masks through the layers, once a block
5. base_logits, then token after token: corrected (the Markov head), and confidence

Formulas: DSpark as in the speculators library, DSparkDraftModel.forward.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from k3serve.draft_config import DraftConfig
from k3serve.model.collectives import RANK, rank_concat, rank_index, rank_sum
from k3serve.model.draft_weights import DraftLayerWeights, DraftWeights, check_draft_ranks
from k3serve.model.ops import F32, dot, dot_f32, einsum_f32, rms_norm, silu_gated
from k3serve.model.target import Taps, embed_rows

UNLIKELY = 1e4  # subtracted from logits outside the best M: never chosen beside them, yet finite


@struct.dataclass
class DraftRing:
    """Context of each slot. Position t lies at t mod ring; keys are normed and rotated."""

    k: tuple[Any, ...]  # by layer [slots, ring, stored kv heads*D], split by the last axis
    v: tuple[Any, ...]
    positions: Any  # [slots, ring] i32; -1: empty


def ring_specs(config: DraftConfig) -> DraftRing:
    """How each array is split: in_specs and out_specs of a shard_map."""
    split = (P(None, None, RANK),) * config.num_layers
    return DraftRing(k=split, v=split, positions=P())


def init_ring(
    config: DraftConfig, mesh: Mesh, *, slots: int, rows: int, context: int, dtype: Any
) -> DraftRing:
    """An empty ring of slots that decode `rows` rows a step. Raises ConfigError."""
    ranks = mesh.shape[RANK]
    check_draft_ranks(config, ranks)
    ring = config.ring_slots(rows, context)
    lanes = config.stored_kv_heads(ranks) * config.head_dim

    def make() -> DraftRing:
        def zeros() -> tuple[Array, ...]:
            return tuple(jnp.zeros((slots, ring, lanes), dtype) for _ in range(config.num_layers))

        return DraftRing(k=zeros(), v=zeros(), positions=jnp.full((slots, ring), -1, jnp.int32))

    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        ring_specs(config),
        is_leaf=lambda x: isinstance(x, P),
    )
    return jax.jit(make, out_shardings=shardings)()


# ------------------------------------------------------------------------------------------------
# context


def features(config: DraftConfig, taps: Taps) -> Array:
    """The target's streams that its program left in taps -> [N, aux*d]."""
    return jnp.concatenate([taps["entering", layer] for layer in config.aux_layers], axis=-1)


def context_rows(
    config: DraftConfig,
    weights: DraftWeights,
    feats: Array,  # [N, aux*d]
    positions: Array,  # [N] i32
) -> tuple[list[Array], list[Array]]:
    """Keys and values of each layer, [N, this rank's kv heads*D] each.

    A row's context feeds every layer as it is: it passes no attention, MLP or input norm.
    """
    feats, positions = lax.optimization_barrier((feats, positions))
    context = context_stream(config, weights, feats)
    keys, values = [], []
    for layer in weights.layers:
        k = _rotated_heads(config, dot(context, layer.k), layer.k_norm, positions)
        keys.append(k.reshape(k.shape[0], -1))
        values.append(dot(context, layer.v))
    out: tuple[list[Array], list[Array]] = lax.optimization_barrier((keys, values))
    return out


def context_stream(config: DraftConfig, weights: DraftWeights, feats: Array) -> Array:
    """feats [N, aux*d] -> [N, d], which each layer turns into its key and value."""
    return rms_norm(dot(feats, weights.fc), weights.hidden_norm, config.norm_eps)


def commit_page(
    ring: DraftRing,
    slot: Array,
    keys: list[Array],  # by layer [C, lanes], of positions start .. start+C-1
    values: list[Array],
    start: Array,
    length: Array,
) -> DraftRing:
    """The first `length` rows of a page into one slot; of more rows than the ring holds, the last
    ones. start 0 empties the slot first.
    """
    size, count = ring.positions.shape[1], keys[0].shape[0]
    kept = jnp.where(start == 0, -1, ring.positions[slot])
    ring = ring.replace(positions=ring.positions.at[slot].set(kept))  # type: ignore[attr-defined]
    row = jnp.arange(count)
    live = (row < length) & (row >= length - size)  # a place hit twice has no defined winner
    positions = start + row
    at = jnp.where(live, positions % size, size)  # out of range: dropped
    return _written(ring, (slot, at), positions, keys, values)


def commit_rows(
    ring: DraftRing,
    slots_of_tile: Array,  # [G] i32
    keys: list[Array],  # by layer [G*R, lanes], of positions[g] .. +R-1
    values: list[Array],
    positions: Array,  # [G] i32, of the first row
    accepted: Array,  # [G] i32: rows to keep, 0..R
) -> DraftRing:
    """The first accepted[g] rows of each slot of a tile. A slot of which nothing is accepted keeps
    every bit; one at position 0 is emptied first.
    """
    tile, (slots, size) = slots_of_tile.shape[0], ring.positions.shape
    fresh = jnp.where((positions == 0) & (accepted > 0), slots_of_tile, slots)
    emptied = ring.positions.at[fresh].set(-1, mode="drop")
    ring = ring.replace(positions=emptied)  # type: ignore[attr-defined]
    rows = keys[0].shape[0] // tile
    live = jnp.arange(rows) < accepted[:, None]
    where = positions[:, None] + jnp.arange(rows)  # [G, R]
    at = jnp.where(live, where % size, size)  # out of range: dropped

    def by_slot(parts: list[Array]) -> list[Array]:
        return [part.reshape(tile, rows, -1) for part in parts]

    return _written(ring, (slots_of_tile[:, None], at), where, by_slot(keys), by_slot(values))


def _written(
    ring: DraftRing, at: tuple[Array, Array], positions: Array, keys: Any, values: Any
) -> DraftRing:
    def put(old: Array, new: Array) -> Array:
        return old.at[at].set(new.astype(old.dtype), mode="drop")

    return DraftRing(
        k=tuple(map(put, ring.k, keys)),
        v=tuple(map(put, ring.v, values)),
        positions=put(ring.positions, positions),
    )


# ------------------------------------------------------------------------------------------------
# the block


def block_hidden(
    config: DraftConfig,
    weights: DraftWeights,
    embed: Array,  # the target's embedding; the draft's own, if it has one, is used instead
    ring_tile: DraftRing,
    anchors: Array,  # [G] i32
    positions: Array,  # [G] i32, of the anchors
    drafts: int,
    *,
    taps: Taps | None = None,
) -> Array:  # [G, drafts, d]
    """The block of each slot after the last norm. Row k predicts the token at positions[g]+k+1.

    Of a block only the first `drafts` rows are computed; the block is causal, so the others change
    nothing. Every row sees the context positions-window <= t < positions, and the block up to
    itself. taps: ("block_k", layer) and ("block_v", layer) [G*drafts, kv heads, D].
    """
    assert 1 <= drafts <= config.block_size, (drafts, config.block_size)
    inputs = (ring_tile, anchors, positions)
    ring_tile, anchors, positions = lax.optimization_barrier(inputs)
    tile = anchors.shape[0]
    table = embed if weights.embed is None else weights.embed
    masks = jnp.full((tile, drafts - 1), config.mask_token_id, anchors.dtype)
    tokens = jnp.concatenate([anchors[:, None], masks], axis=1).reshape(-1)
    where = (positions[:, None] + jnp.arange(drafts)).reshape(-1)
    visible = _visible(config, ring_tile.positions, positions, drafts)
    x = embed_rows(table, tokens)
    for i, layer in enumerate(weights.layers):
        normed = rms_norm(x, layer.attn_norm, config.norm_eps)
        q, k, v = block_qkv(config, layer, normed, where)
        if taps is not None:
            taps["block_k", i], taps["block_v", i] = k, v
        mixed = _attend(config, q, k, v, ring_tile.k[i], ring_tile.v[i], visible)
        x = x + rank_sum(dot_f32(mixed.astype(x.dtype), layer.out)).astype(x.dtype)
        normed = rms_norm(x, layer.mlp_norm, config.norm_eps)
        inner = silu_gated(dot(normed, layer.mlp.gate_up))
        x = x + rank_sum(dot_f32(inner, layer.mlp.down)).astype(x.dtype)
    hidden = rms_norm(x, weights.norm, config.norm_eps).reshape(tile, drafts, -1)
    return lax.optimization_barrier(hidden)


def _visible(config: DraftConfig, held: Array, positions: Array, drafts: int) -> Array:
    """Which ring places and block rows each row of the block sees. held [G, ring], positions [G] ->
    [G, 1, 1, drafts, ring + drafts]. The window is that of the anchor, for all rows.
    """
    anchor = positions[:, None]
    context = (held >= 0) & (held < anchor) & (held >= anchor - config.window)
    context = jnp.broadcast_to(context[:, None], (held.shape[0], drafts, held.shape[1]))
    causal = jnp.tril(jnp.ones((drafts, drafts), bool))
    causal = jnp.broadcast_to(causal, (held.shape[0], drafts, drafts))
    return jnp.concatenate([context, causal], axis=-1)[:, None, None]


def block_qkv(
    config: DraftConfig, layer: DraftLayerWeights, normed: Array, positions: Array
) -> tuple[Array, Array, Array]:
    """normed [N, d] -> this rank's queries [N, heads, D], keys and values [N, kv heads, D]; queries
    and keys are normed and rotated.
    """
    q = _rotated_heads(config, dot(normed, layer.q), layer.q_norm, positions)
    k = _rotated_heads(config, dot(normed, layer.k), layer.k_norm, positions)
    return q, k, dot(normed, layer.v).reshape(k.shape)


def _attend(
    config: DraftConfig,
    q: Array,  # [G*m, heads, D]
    k: Array,  # [G*m, kv heads, D]
    v: Array,
    ring_k: Array,  # [G, ring, kv heads*D]
    ring_v: Array,
    visible: Array,  # [G, 1, 1, m, ring + m]
) -> Array:  # [G*m, heads*D] f32
    """One softmax over ring and block, in float32. A query head shares its group's KV head."""
    tile, rows, ring = ring_k.shape[0], visible.shape[3], ring_k.shape[1]
    kv_heads, d = k.shape[1:]
    q = q.reshape(tile, rows, kv_heads, -1, d)
    k, v = (x.reshape(tile, rows, kv_heads, d) for x in (k, v))
    ring_k, ring_v = (x.reshape(tile, ring, kv_heads, d) for x in (ring_k, ring_v))
    parts = [einsum_f32("gmhqd,gthd->ghqmt", q, keys) for keys in (ring_k, k)]
    scores = jnp.where(visible, jnp.concatenate(parts, axis=-1) * d**-0.5, -jnp.inf)
    p = jax.nn.softmax(scores, axis=-1)  # no row is empty: each sees itself
    mixed = einsum_f32("ghqmt,gthd->gmhqd", p[..., :ring], ring_v.astype(F32))
    mixed = mixed + einsum_f32("ghqmt,gthd->gmhqd", p[..., ring:], v.astype(F32))
    return mixed.reshape(tile * rows, -1)


def _rotated_heads(config: DraftConfig, x: Array, norm: Array, positions: Array) -> Array:
    """Head norm, then rotary positions in half-split pairs. x [N, heads*D] -> [N, heads, D]."""
    x = x.reshape(x.shape[0], -1, config.head_dim)
    x = rms_norm(x, norm, config.norm_eps)
    half = config.head_dim // 2
    exponents = np.arange(half, dtype=np.float32) / np.float32(half)
    rates = np.float32(1.0) / np.float32(config.rope_theta) ** exponents
    angles = positions.astype(F32)[:, None, None] * rates
    # the library that trains drafts rounds both to the compute dtype
    cos = jnp.cos(angles).astype(x.dtype).astype(F32)
    sin = jnp.sin(angles).astype(x.dtype).astype(F32)
    a, b = x[..., :half].astype(F32), x[..., half:].astype(F32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


# ------------------------------------------------------------------------------------------------
# heads


def base_logits(
    config: DraftConfig,
    weights: DraftWeights,
    head: Array,  # the target's head; the draft's own, if it has one, is used instead
    hidden: Array,  # [..., d]
) -> Array:  # [..., vocab] f32, the same on every rank
    """Logits before the Markov head."""
    table = head if weights.head is None else weights.head
    return rank_concat(dot_f32(hidden, table))[..., : config.vocab_size]


def markov_bias(config: DraftConfig, weights: DraftWeights, previous: Array) -> Array:
    """What the token before adds to the logits. previous [N] i32 -> [N, vocab] f32, the same on
    every rank.
    """
    bias = dot_f32(weights.markov_in[previous], weights.markov_out)
    return rank_concat(bias)[..., : config.vocab_size]


def top_markov_bias(weights: DraftWeights, previous: Array, tokens: Array) -> Array:
    """markov_bias of some tokens only. previous [N], tokens [N, M] i32 -> [N, M] f32."""
    columns = weights.markov_out.shape[1]
    local = tokens - rank_index() * columns
    mine = (local >= 0) & (local < columns)
    chosen = weights.markov_out[:, jnp.clip(local, 0, columns - 1)]  # [r, N, M]
    bias = einsum_f32("nr,rnm->nm", weights.markov_in[previous], chosen)
    return rank_sum(jnp.where(mine, bias, 0.0))


def corrected(
    config: DraftConfig,
    weights: DraftWeights,
    base: Array,  # [N, vocab] f32
    previous: Array,  # [N] i32
    top: int | None = None,
) -> Array:  # [N, vocab] f32
    """Draft logits: base plus Markov bias. With `top`, only the best so many base logits are
    corrected and the others put out of reach; that spares most of the bias' product.
    """
    if top is None:
        return base + markov_bias(config, weights, previous)
    best, tokens = lax.top_k(base, min(top, config.vocab_size))
    best = best + top_markov_bias(weights, previous, tokens)
    row = jnp.arange(base.shape[0])[:, None]
    return (base - UNLIKELY).at[row, tokens].set(best)


def confidence(
    config: DraftConfig,
    weights: DraftWeights,
    hidden: Array,  # [N, d]
    previous: Array,  # [N] i32
) -> Array:  # [N] f32, 0..1
    """The draft's own estimate that a row's token is accepted, given that those before it are."""
    assert weights.confidence_w is not None, "a draft without confidence head"
    row = hidden.astype(F32)
    if config.confidence_with_markov:
        row = jnp.concatenate([row, weights.markov_in[previous].astype(F32)], axis=-1)
    return jax.nn.sigmoid(jnp.sum(row * weights.confidence_w, axis=-1) + weights.confidence_b)
