"""MLA without positions: every head attends over one shared latent row per token, kept in cache
pages.

Rule: attention is an online softmax over pages in order of position, in float32; a page with
nothing visible changes no bit. So a row's result depends on its own slot's history, not on how far
the loop runs for others.

Rows absorb the up-projections into query and output (the cache is read once); a page decompresses
keys and values page by page, which costs less from about 170 queries on.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from k3serve.config import TargetConfig
from k3serve.model.collectives import rank_sum
from k3serve.model.ops import F32, dot, dot_f32, einsum_f32, rms_norm
from k3serve.model.state import MlaState, pad_lanes
from k3serve.model.weights import MlaWeights


def queries(config: TargetConfig, w: MlaWeights, x: Array) -> tuple[Array, Array]:
    """x [N, d] -> the compressed-key part [N, heads, nope] and the shared-key part [N, heads,
    rope].
    """
    if w.q is not None:
        q = dot(x, w.q)
    else:
        q = dot(rms_norm(dot(x, w.q_a), w.q_norm, config.mla_norm_eps), w.q_b)
    q = q.reshape(x.shape[0], -1, config.nope_dim + config.rope_dim)
    return q[..., : config.nope_dim], q[..., config.nope_dim :]


def latent_rows(config: TargetConfig, w: MlaWeights, x: Array) -> Array:
    """What the cache keeps of x [N, d]: [N, lanes] = normed latent, shared key, zeros."""
    kv = dot(x, w.kv_a)
    latent = rms_norm(kv[:, : config.kv_lora_rank], w.kv_norm, config.mla_norm_eps)
    rows = jnp.concatenate([latent, kv[:, config.kv_lora_rank :]], axis=-1)
    return pad_lanes(rows, config.latent_lanes)


def finish(w: MlaWeights, x: Array, attended: Array) -> Array:
    """Output gate and projection. x [N, d], attended [N, heads, v] -> [N, d]."""
    y = attended.astype(x.dtype).reshape(x.shape[0], -1)
    if w.gate is not None:
        gate = jax.nn.sigmoid(dot(x, w.gate).astype(F32))
        y = (y.astype(F32) * gate).astype(x.dtype)
    return rank_sum(dot_f32(y, w.out)).astype(x.dtype)


def scale(config: TargetConfig) -> float:
    return float((config.nope_dim + config.rope_dim) ** -0.5)


def over_pages(
    pages: Array | int,
    shape: tuple[int, ...],
    width: int,
    visit: Callable[[Array], tuple[Array, Array, Callable[[Array], Array]]],
) -> Array:
    """Online softmax over pages 0 .. pages-1. visit(i) gives scores [*shape, C], visible
    (broadcasts to scores), and a function from probabilities to the weighted sum of values [*shape,
    width]. Rows that see nothing give 0.
    """
    lowest = jnp.full(shape, -jnp.inf, F32)

    def step(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, norm, total = carry
        scores, visible, weigh = visit(i)
        scores = jnp.where(visible, scores, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        base = jnp.where(jnp.isneginf(new_top), 0.0, new_top)
        p = jnp.exp(scores - base[..., None])
        shrink = jnp.exp(top - base)
        seen = jnp.broadcast_to(jnp.any(visible, axis=-1), shape)
        new_norm = norm * shrink + jnp.sum(p, axis=-1)
        new_total = total * shrink[..., None] + weigh(p)
        return (
            jnp.where(seen, new_top, top),
            jnp.where(seen, new_norm, norm),
            jnp.where(seen[..., None], new_total, total),
        )

    init = (lowest, jnp.zeros(shape, F32), jnp.zeros((*shape, width), F32))
    _, norm, total = lax.fori_loop(0, pages, step, init)
    return total / jnp.where(norm == 0.0, 1.0, norm)[..., None]


def mla_rows(
    config: TargetConfig,
    w: MlaWeights,
    x: Array,
    state: MlaState,
    positions: Array,
    counts: Array,
    page_table: Array,
) -> tuple[Array, MlaState]:
    """R rows of every slot of a tile, at positions[s] .. +R-1. x [G, R, d], page_table [G, MP] ->
    [G, R, d].

    The first counts[s] rows are written to the cache; later ones are computed but leave nothing.
    A row that is not accepted afterwards stays unseen until the next step overwrites it: no row
    looks beyond its own position.
    """
    slots, rows, d = x.shape
    flat = x.reshape(slots * rows, d)
    size = state.pages.shape[1]
    where = positions[:, None] + jnp.arange(rows)  # [S, R]
    live = jnp.arange(rows) < counts[:, None]
    table_at = jnp.minimum(where // size, page_table.shape[1] - 1)
    page = jnp.take_along_axis(page_table, table_at, axis=1)
    page = jnp.where(live, page, state.pages.shape[0])  # out of range: dropped
    new = latent_rows(config, w, flat).reshape(slots, rows, -1)
    pages = state.pages.at[page, where % size].set(new, mode="drop")

    q, q_rope = queries(config, w, flat)
    absorbed = einsum_f32("nhk,hkl->nhl", q, w.k_up).astype(x.dtype)
    full = pad_lanes(jnp.concatenate([absorbed, q_rope], axis=-1), config.latent_lanes)
    heads = full.shape[1]
    full = full.reshape(slots, rows, heads, -1)
    latent = config.kv_lora_rank

    def visit(i: Array) -> tuple[Array, Array, Callable[[Array], Array]]:
        block = pages[page_table[:, i]]  # [S, C, lanes]
        scores = einsum_f32("srhl,scl->srhc", full, block) * scale(config)
        at = i * size + jnp.arange(size)
        visible = (at <= where[..., None])[:, :, None]
        values = block[..., :latent].astype(F32)
        return scores, visible, lambda p: einsum_f32("srhc,scl->srhl", p, values)

    furthest = jnp.max(jnp.where(counts > 0, positions + counts - 1, 0))
    used = jnp.minimum(furthest // size + 1, page_table.shape[1])
    mixed = over_pages(used, (slots, rows, heads), latent, visit)
    mixed = mixed.reshape(slots * rows, heads, latent).astype(x.dtype)
    attended = einsum_f32("nhl,hlv->nhv", mixed, w.v_up)
    return finish(w, flat, attended).reshape(x.shape), MlaState(pages=pages)


def mla_page(
    config: TargetConfig,
    w: MlaWeights,
    x: Array,
    state: MlaState,
    start: Array,
    length: Array,
    page_table_row: Array,
) -> tuple[Array, MlaState]:
    """One page of one slot over its cached pages and itself. x [C, d], page_table_row [MP] -> [C,
    d].
    """
    size = x.shape[0]
    latent = config.kv_lora_rank
    live = (jnp.arange(size) < length)[:, None]
    new = jnp.where(live, latent_rows(config, w, x), 0)
    pages = state.pages.at[page_table_row[start // size]].set(new)
    q, q_rope = queries(config, w, x)
    where = start + jnp.arange(size)

    def visit(i: Array) -> tuple[Array, Array, Callable[[Array], Array]]:
        block = pages[page_table_row[i]]  # [C, lanes]
        keys = einsum_f32("cl,hkl->chk", block[:, :latent], w.k_up).astype(x.dtype)
        values = einsum_f32("cl,hlv->chv", block[:, :latent], w.v_up).astype(x.dtype)
        shared = block[:, latent : latent + config.rope_dim]
        scores = einsum_f32("thk,chk->thc", q, keys) + einsum_f32("thr,cr->thc", q_rope, shared)
        visible = (i * size + jnp.arange(size) <= where[:, None])[:, None]
        wide = values.astype(F32)
        return scores * scale(config), visible, lambda p: einsum_f32("thc,chv->thv", p, wide)

    shape = (size, q.shape[1])
    attended = over_pages(start // size + 1, shape, config.v_head_dim, visit)
    return finish(w, x, attended), MlaState(pages=pages)
