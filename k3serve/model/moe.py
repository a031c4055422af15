"""Mixture of experts: a sigmoid router, and only the chosen experts' products.

Rule: shapes never depend on the routing. (token, choice) pairs are laid out expert by expert in
blocks of B rows; a loop visits the blocks in use. A row's bits depend on that row alone: a block's
other rows do not enter its products, and its k results are added in the router's order. Where there
are few experts, all of them are computed for all rows: a loop costs more than that.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from k3serve.config import TargetConfig
from k3serve.model.collectives import rank_index, split_sum
from k3serve.model.mxfp4 import dequantise
from k3serve.model.ops import F32, HIGHEST, dot, dot_f32, einsum_f32, gated, rms_norm
from k3serve.model.weights import ExpertWeights, MlpWeights, MoeWeights

ALL_EXPERTS = 8  # with so many or fewer, each row goes through all of them


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


def block_rows(tokens: int, choices: int, experts: int) -> int:
    """Rows of a block: near the mean load of an expert, 8 to 32, at most all tokens."""
    mean = -(-tokens * choices // experts)
    return min(tokens, min(32, max(8, -(-mean // 8) * 8)))


def run_experts(
    config: TargetConfig, w: ExpertWeights, x: Array, chosen: Array, live: Array
) -> Array:
    """Each chosen expert's output. x [N, in], chosen [N, k] -> [N, k, in]; zeros for experts of
    other ranks.
    """
    if w.gate_up is not None and config.num_experts <= ALL_EXPERTS:
        return run_all_experts(config, w, x, chosen)
    tokens, choices = chosen.shape
    stored = w.gate_up if w.gate_up is not None else w.gate_up_codes
    experts = stored.shape[0]
    size = block_rows(tokens, choices, config.num_experts)
    pairs = tokens * choices
    blocks = min(experts, pairs) + pairs // size
    local = chosen - rank_index() * experts
    mine = (local >= 0) & (local < experts) & live[:, None]
    local = jnp.where(mine, local, experts).reshape(-1)  # [pairs]; `experts` stands for none

    earlier = jnp.arange(pairs)[None, :] < jnp.arange(pairs)[:, None]
    in_group = jnp.sum((local[None, :] == local[:, None]) & earlier, axis=1)
    load = jnp.sum(local[None, :] == jnp.arange(experts)[:, None], axis=1)  # [experts]
    ends = jnp.cumsum(-(-load // size))  # blocks up to and with each expert
    starts = jnp.concatenate([jnp.zeros(1, ends.dtype), ends])[local]
    place = jnp.where(local < experts, starts * size + in_group, blocks * size)
    expert_of = jnp.sum(ends[None, :] <= jnp.arange(blocks)[:, None], axis=1)
    source = (
        jnp.full(blocks * size, tokens).at[place].set(jnp.arange(pairs) // choices, mode="drop")
    )
    rows = jnp.concatenate([x, jnp.zeros((1, x.shape[1]), x.dtype)])[source]
    rows = rows.reshape(blocks, size, -1)

    def visit(i: Array, out: Array) -> Array:
        y = one_expert(config, w, rows[i], expert_of[i])
        return lax.dynamic_update_index_in_dim(out, y, i, 0)

    done = lax.fori_loop(0, ends[-1], visit, jnp.zeros_like(rows))
    flat = jnp.concatenate([done.reshape(blocks * size, -1), jnp.zeros((1, x.shape[1]), x.dtype)])
    return flat[place].reshape(tokens, choices, -1)


def run_all_experts(config: TargetConfig, w: ExpertWeights, x: Array, chosen: Array) -> Array:
    """run_experts by two products over all of this rank's experts."""
    experts, tokens = w.gate_up.shape[0], x.shape[0]
    rows = jnp.broadcast_to(x, (experts, *x.shape))
    inner = einsum_f32("eni,eicw->encw", rows, w.gate_up).astype(x.dtype)
    y = einsum_f32("enw,ewi->eni", gated(config, inner), w.down).astype(x.dtype)
    local = chosen - rank_index() * experts
    mine = (local >= 0) & (local < experts)
    picked = y[jnp.clip(local, 0, experts - 1), jnp.arange(tokens)[:, None]]
    return jnp.where(mine[..., None], picked, 0)


def one_expert(config: TargetConfig, w: ExpertWeights, x: Array, expert: Array) -> Array:
    """x [B, in] through one expert's gated MLP; packed weights are unpacked here, one expert at a
    time.
    """
    if w.gate_up is not None:
        return dot(gated(config, dot(x, w.gate_up[expert])), w.down[expert])
    gate_up = dequantise(w.gate_up_codes[expert], w.gate_up_scales[expert], x.dtype)
    down = dequantise(w.down_codes[expert], w.down_scales[expert], x.dtype)
    return dot(gated(config, dot(x, jnp.moveaxis(gate_up, 2, 0))), down.T)
