"""Mixture of experts: a sigmoid router, and only the chosen experts' products.

Rule: shapes never depend on the routing. (token, choice) pairs are laid out expert by expert in
blocks of B rows; a loop visits the blocks in use. On CPU, where each trip copies its expert's
weights, the first block of every expert is computed in one product over all, and where there are
few rows, each goes through its experts by itself. A row's bits depend on that row alone: a block's
other rows do not enter its products, and its k results are added in the router's order. Where there
are few experts, all of them are computed for all rows: a loop costs more than that.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax

from k3serve.config import TargetConfig
from k3serve.model.collectives import rank_index, split_sum
from k3serve.model.mxfp4 import dequantise
from k3serve.model.ops import F32, HIGHEST, dot, dot_f32, einsum_f32, gated, rms_norm
from k3serve.model.weights import ExpertWeights, MlpWeights, MoeWeights

ALL_EXPERTS = 8  # with so many or fewer, each row goes through all of them
PAIR_MEAN = 1  # with so few or fewer, each row goes through its experts by itself
PAIR_ROWS = 16  # rows of its weights that are added in one go
WIDE_MEAN = 4  # with so many rows an expert or more, all experts' first rows go in one product


def mlp_partial(config: TargetConfig, w: MlpWeights, x: Array) -> Array:
    """This rank's columns of a gated MLP. x [N, d] -> [N, d] f32, still to be summed over ranks."""
    return dot_f32(gated(config, dot(x, w.gate_up)), w.down)


def route(config: TargetConfig, w: MoeWeights, x: Array) -> tuple[Array, Array]:
    """x [N, d] -> the chosen experts [N, k], best first, and their weights [N, k] f32. Ties go to
    the lower id.
    """
    logits = jnp.dot(x.astype(F32), w.router, precision=HIGHEST)
    scores = jax.nn.sigmoid(logits)
    _, chosen = lax.top_k(scores + w.router_bias, config.experts_per_token)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if config.renormalize:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return chosen, weights * config.routed_scale


def moe(config: TargetConfig, w: MoeWeights, x: Array, live: Array) -> Array:
    """x [N, d], live [N] bool (False: the row costs no expert work and its result means nothing) ->
    [N, d].
    """
    chosen, weights = route(config, w, x)
    inner = x if w.latent_down is None else dot(x, w.latent_down)
    per_choice = run_experts(config, w.experts, inner, chosen, live)
    routed = jnp.zeros(inner.shape, F32)
    for i in range(config.experts_per_token):
        routed = routed + weights[:, i, None] * per_choice[:, i].astype(F32)
    parts = [routed] if w.shared is None else [routed, mlp_partial(config, w.shared, x)]
    routed, *shared = split_sum(parts)
    out = routed.astype(x.dtype)
    if w.latent_norm is not None:
        out = rms_norm(out, w.latent_norm, config.norm_eps)
    if w.latent_up is not None:
        out = dot(out, w.latent_up)
    return out + shared[0].astype(x.dtype) if shared else out


def block_rows(tokens: int, mean: float) -> int:
    """Rows of a block of the loop: near the mean load of an expert, 8 to 32, at most all tokens."""
    return min(tokens, min(32, max(8, -(-math.ceil(mean) // 8) * 8)))


def wide_rows(tokens: int, mean: float) -> int:
    """Rows that each expert has in the product over all: seldom fewer than its load, and whole
    vectors.
    """
    return min(tokens, -(-math.ceil(1.25 * mean + 4) // 8) * 8)


@struct.dataclass
class Groups:
    """(token, choice) pairs sorted by expert; within one, in their own order."""

    order: Any  # [pairs] pairs, expert by expert; those of no expert of this rank come last
    starts: Any  # [experts + 1] where each expert's pairs begin in `order`
    load: Any  # [experts] how many pairs each has
    rank: Any  # [pairs] each pair's place among those of its expert


def group(local: Array, experts: int) -> Groups:
    """local [pairs]: the expert of each pair, `experts` for none. One sort of unique numbers: 0.1
    ms for 2,048 pairs on CPU, where comparing all with all takes 1.1.
    """
    pairs = local.shape[0]
    order = jnp.sort(local * pairs + jnp.arange(pairs)) % pairs
    load = jnp.sum(local[None, :] == jnp.arange(experts)[:, None], axis=1)
    starts = jnp.concatenate([jnp.zeros(1, load.dtype), jnp.cumsum(load)])
    rank = jnp.arange(pairs) - starts[local[order]]
    rank = jnp.zeros_like(rank).at[order].set(rank, unique_indices=True)
    return Groups(order, starts, load, rank)


def run_experts(
    config: TargetConfig, w: ExpertWeights, x: Array, chosen: Array, live: Array
) -> Array:
    """Each chosen expert's output. x [N, in], chosen [N, k] -> [N, k, in]; zeros for experts of
    other ranks.
    """
    tokens, choices = chosen.shape
    if w.gate_up is not None and config.num_experts <= ALL_EXPERTS:
        return run_all_experts(config, w, x, chosen)
    stored = w.gate_up if w.gate_up is not None else w.gate_up_codes
    experts = stored.shape[0]
    local = chosen - rank_index() * experts
    mine = (local >= 0) & (local < experts) & live[:, None]
    local = jnp.where(mine, local, experts).reshape(-1)  # [pairs]; `experts` stands for none
    groups = group(local, experts)
    mean = tokens * choices / config.num_experts
    loose = w.gate_up is not None and on_cpu(x)
    if loose and mean >= WIDE_MEAN:
        out = run_wide(config, w, x, local, groups, wide_rows(tokens, mean))
    elif loose and mean <= PAIR_MEAN:
        out = run_pairs(config, w, x, local, groups)
    else:
        out = run_blocks(config, w, x, local, groups, block_rows(tokens, mean))
    return out.reshape(tokens, choices, -1)


def on_cpu(x: Array) -> bool:
    """Where a loop over experts copies each one's weights, and float32 products come in batches."""
    return x.dtype == F32 and jax.default_backend() == "cpu"


def run_blocks(
    config: TargetConfig, w: ExpertWeights, x: Array, local: Array, groups: Groups, size: int
) -> Array:
    """run_experts by a loop over the blocks in use: [pairs, in]."""
    (pairs,), tokens = local.shape, x.shape[0]
    experts = groups.load.shape[0]
    blocks = min(experts, pairs) + pairs // size
    ends = jnp.cumsum(-(-groups.load // size))  # blocks up to and with each expert
    starts = jnp.concatenate([jnp.zeros(1, ends.dtype), ends])[local]
    place = jnp.where(local < experts, starts * size + groups.rank, blocks * size)
    expert_of = jnp.sum(ends[None, :] <= jnp.arange(blocks)[:, None], axis=1)
    token = jnp.arange(pairs) // (pairs // tokens)
    source = jnp.full(blocks * size, tokens).at[place].set(token, mode="drop")
    rows = with_zero_row(x)[source].reshape(blocks, size, -1)

    def visit(i: Array, out: Array) -> Array:
        y = one_expert(config, w, rows[i], expert_of[i])
        return lax.dynamic_update_index_in_dim(out, y, i, 0)

    done = lax.fori_loop(0, ends[-1], visit, jnp.zeros_like(rows))
    return with_zero_row(done.reshape(blocks * size, -1))[place]


def run_pairs(
    config: TargetConfig, w: ExpertWeights, x: Array, local: Array, groups: Groups
) -> Array:
    """run_experts row by row, expert by expert, so that its weights are still near: [pairs, in]."""
    (pairs,), tokens = local.shape, x.shape[0]

    def visit(i: Array, out: Array) -> Array:
        pair = groups.order[i]
        row, expert = x[pair // (pairs // tokens)], local[pair]
        inner = row_times_expert(row, w.gate_up, expert)
        y = row_times_expert(gated(config, inner), w.down, expert)
        return lax.dynamic_update_index_in_dim(out, y, pair, 0)

    return lax.fori_loop(0, groups.starts[-1], visit, jnp.zeros((pairs, x.shape[1]), x.dtype))


def row_times_expert(x: Array, w: Array, expert: Array) -> Array:
    """x [in] times w[expert], [E, in, ...] f32 -> [...] f32, which reads the weights where they
    lie: a product would copy them first (0.06 ms against 0.12 for 512 x 512 numbers on CPU).
    """
    size = math.gcd(x.shape[0], PAIR_ROWS)

    def some(i: Array, total: Array) -> Array:
        at: list[Array | int] = [expert, i * size, *[0] * (w.ndim - 2)]
        block = lax.dynamic_slice(w, at, (1, size, *w.shape[2:]))[0]
        part = lax.dynamic_slice_in_dim(x, i * size, size)
        for k in range(size):
            total = total + part[k] * block[k]
        return total

    return lax.fori_loop(0, x.shape[0] // size, some, jnp.zeros(w.shape[2:], F32))


def run_wide(
    config: TargetConfig, w: ExpertWeights, x: Array, local: Array, groups: Groups, size: int
) -> Array:
    """run_experts by products over all experts, each with its first `size` rows: [pairs, in].

    More rows of an expert follow in a loop over blocks of as many rows: in products of one shape a
    row has the same bits wherever it stands, in products of another it has not.
    """
    (pairs,), tokens = local.shape, x.shape[0]
    experts = groups.load.shape[0]
    padded = with_zero_row(x)

    def rows_at(first: Array, count: Array) -> tuple[Array, Array]:
        """Pairs and rows of `size` places of `order` from first on, of which count are in use."""
        lane = jnp.arange(size)
        at = jnp.minimum(first[..., None] + lane, pairs - 1)
        pair = jnp.where(lane < count[..., None], groups.order[at], pairs)
        return pair, padded[pair // (pairs // tokens)]

    _, rows = rows_at(groups.starts[:-1], groups.load)
    y = every_expert(config, w, rows).reshape(experts * size, -1)
    at = jnp.minimum(local, experts - 1) * size + jnp.minimum(groups.rank, size - 1)
    out = jnp.where((local < experts)[:, None], y[at], 0)

    more = jnp.maximum(-(-groups.load // size) - 1, 0)  # further blocks of each expert
    ends = jnp.cumsum(more)

    def visit(i: Array, out: Array) -> Array:
        expert = jnp.sum(ends <= i)
        done = (i - ends[expert] + more[expert] + 1) * size
        pair, rows = rows_at(groups.starts[expert] + done, groups.load[expert] - done)
        return out.at[pair].set(one_expert(config, w, rows, expert), mode="drop")

    return lax.fori_loop(0, ends[-1], visit, out)


def with_zero_row(x: Array) -> Array:
    return jnp.concatenate([x, jnp.zeros((1, x.shape[1]), x.dtype)])


def run_all_experts(config: TargetConfig, w: ExpertWeights, x: Array, chosen: Array) -> Array:
    """run_experts by two products over all of this rank's experts."""
    experts, tokens = w.gate_up.shape[0], x.shape[0]
    y = every_expert(config, w, jnp.broadcast_to(x, (experts, *x.shape)))
    local = chosen - rank_index() * experts
    mine = (local >= 0) & (local < experts)
    picked = y[jnp.clip(local, 0, experts - 1), jnp.arange(tokens)[:, None]]
    return jnp.where(mine[..., None], picked, 0)


def every_expert(config: TargetConfig, w: ExpertWeights, rows: Array) -> Array:
    """rows [E, n, in], n for each of this rank's experts -> [E, n, in]."""
    inner = einsum_f32("eni,eicw->encw", rows, w.gate_up).astype(rows.dtype)
    return einsum_f32("enw,ewi->eni", gated(config, inner), w.down).astype(rows.dtype)


def one_expert(config: TargetConfig, w: ExpertWeights, x: Array, expert: Array) -> Array:
    """x [B, in] through one expert's gated MLP; packed weights are unpacked here, one expert at a
    time.
    """
    if w.gate_up is not None:
        return dot(gated(config, dot(x, w.gate_up[expert])), w.down[expert])
    gate_up = dequantise(w.gate_up_codes[expert], w.gate_up_scales[expert], x.dtype)
    down = dequantise(w.down_codes[expert], w.down_scales[expert], x.dtype)
    return dot(gated(config, dot(x, jnp.moveaxis(gate_up, 2, 0))), down.T)
