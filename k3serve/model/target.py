"""The target model's two programs: rows of all slots (decode), and one page of one slot (prefill).

Rule: pure functions to be called inside shard_map over the axis "rank". Every shape is fixed by the
arguments' shapes, so a slot's results do not depend on what else runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from k3serve.config import TargetConfig
from k3serve.model import attn_res
from k3serve.model.collectives import rank_concat, rank_index, rank_sum
from k3serve.model.kda import kda_page, kda_rows
from k3serve.model.mla import mla_page, mla_rows
from k3serve.model.moe import mlp_partial, moe, route
from k3serve.model.ops import dot_f32, rms_norm
from k3serve.model.state import State, accept_rows, tile_of, with_tile
from k3serve.model.weights import LayerWeights, MlpWeights, Weights

Taps = dict[tuple[str, int], Array]
"""Intermediate values by (name, layer), filled while the program is traced: "entering" (the
residual stream or AttnRes running sum as it enters the layer), "attn_mix", "attn_out", "mlp_mix",
"mlp_out" [N, d], "router" [N, k], "block" [N, d], and ("final", layers) before the last norm.
Return what you need from the traced function.
"""

Mixer = Callable[[int, LayerWeights, Array, Any], tuple[Array, Any]]


def embed(config: TargetConfig, weights: Weights, tokens: Array) -> Array:
    """tokens [N] i32 -> [N, d]."""
    return embed_rows(weights.embed, tokens)


def embed_rows(table: Array, tokens: Array) -> Array:
    """Rows of a table that is split over ranks by rows; the argument is this rank's part. tokens
    [N] i32 -> [N, d]. Exactly one rank holds each row; the others add zeros.
    """
    rows = table.shape[0]
    local = tokens - rank_index() * rows
    mine = (local >= 0) & (local < rows)
    found = table[jnp.clip(local, 0, rows - 1)]
    return rank_sum(jnp.where(mine[:, None], found, 0))


def local_head_logits(weights: Weights, hidden: Array) -> Array:
    """This rank's columns of the logits. hidden [N, d] -> [N, padded vocab / ranks] f32; padding
    columns are 0.
    """
    return dot_f32(hidden, weights.head)


def head_logits(config: TargetConfig, weights: Weights, hidden: Array) -> Array:
    """hidden [N, d], as the two programs return it -> [N, vocab] f32, the same on every rank."""
    return rank_concat(local_head_logits(weights, hidden))[:, : config.vocab_size]


def decode_rows(
    config: TargetConfig,
    weights: Weights,
    state: State,
    tokens: Array,
    positions: Array,
    active: Array,
    page_table: Array,
    first: Array | int = 0,
    *,
    taps: Taps | None = None,
) -> tuple[Array, State]:
    """R rows of every slot of a tile, in recurrent form. R is that of init_state.

    The tile is the G slots from `first` on. tokens [G, R] i32; positions [G] i32, of the first row;
    active [G] bool, or i32 numbers of real rows; page_table [G, MP] i32. Returns hidden [G, R, d],
    ready for head_logits, and the state after the real rows; accept_rows may take some back.
    A slot that is not active keeps its state bit for bit; one at position 0 starts from zeros.
    """
    slots, rows = tokens.shape
    counts = jnp.where(active, rows, 0) if active.dtype == bool else active
    live = (jnp.arange(rows) < counts[:, None]).reshape(-1)
    accepted = None if state.accepted is None else tile_of(state.accepted, first, slots)
    assert rows == 1 or accepted is not None, "init_state was not told how many rows a step has"

    def mixer(index: int, layer: LayerWeights, x: Array, layer_state: Any) -> tuple[Array, Any]:
        x = x.reshape(slots, rows, -1)
        out: tuple[Array, Any]
        if config.is_kda(index):
            tile = tile_of(layer_state, first, slots)
            y, tile = kda_rows(config, layer.attn, x, tile, positions, counts, accepted)
            out = y, with_tile(layer_state, tile, first)
        else:
            out = mla_rows(config, layer.attn, x, layer_state, positions, counts, page_table)
        return out[0].reshape(slots * rows, -1), out[1]

    hidden, new_state = run_layers(config, weights, state, tokens.reshape(-1), live, mixer, taps)
    new_state = accept_rows(new_state, first, counts, counts > 0)
    return hidden.reshape(slots, rows, -1), new_state


def prefill_page(
    config: TargetConfig,
    weights: Weights,
    state: State,
    slot: Array,
    tokens: Array,
    start: Array,
    length: Array,
    page_table_row: Array,
    *,
    taps: Taps | None = None,
) -> tuple[Array, State]:
    """One page of one slot's prompt, chunk-parallel.

    slot i32; tokens [C] i32 with C = the cache's page size, a multiple of 16; start i32, a multiple
    of C; length i32 in 1..C: rows from it on are padding; page_table_row [MP] i32. Returns hidden
    [C, d], ready for head_logits, and the state. start 0 begins from zeros; otherwise the slot's
    previous page must have been computed before.
    """

    def mixer(index: int, layer: LayerWeights, x: Array, layer_state: Any) -> tuple[Array, Any]:
        if config.is_kda(index):
            return kda_page(config, layer.attn, x, layer_state, slot, start, length)
        return mla_page(config, layer.attn, x, layer_state, start, length, page_table_row)

    if state.accepted is not None:  # nothing of the slot's former occupant is to be replayed
        state = state.replace(accepted=state.accepted.at[slot].set(0))  # type: ignore[attr-defined]
    live = jnp.arange(tokens.shape[0]) < length
    return run_layers(config, weights, state, tokens, live, mixer, taps)


def run_layers(
    config: TargetConfig,
    weights: Weights,
    state: State,
    tokens: Array,
    live: Array,
    mixer: Mixer,
    taps: Taps | None,
) -> tuple[Array, State]:
    """Embedding, all layers, output mix and final norm. tokens [N], live [N] -> hidden [N, d] and
    the new state.

    The barriers keep XLA from fusing across the program's border, so that its bits are the same in
    any larger program.
    """
    tap = (lambda *_: None) if taps is None else (lambda k, i, v: taps.__setitem__((k, i), v))
    state, tokens = lax.optimization_barrier((state, tokens))
    running = embed(config, weights, tokens)
    blocks: list[Array] = []
    new_layers = []
    for i, layer in enumerate(weights.layers):
        tap("entering", i, running)
        mixed = _mixed(config, blocks, running, layer.attn_mix)
        starts_block = config.attn_res_block and i % config.attn_res_block == 0
        if starts_block:
            tap("block", i, running)
            blocks.append(running)
        out, new = mixer(
            i, layer, rms_norm(mixed, layer.attn_norm, config.norm_eps), state.layers[i]
        )
        new_layers.append(new)
        tap("attn_mix", i, mixed)
        tap("attn_out", i, out)
        running = out if starts_block else running + out
        mixed = _mixed(config, blocks, running, layer.mlp_mix)
        x = rms_norm(mixed, layer.mlp_norm, config.norm_eps)
        out = _mlp(config, layer, x, live)
        tap("mlp_mix", i, mixed)
        tap("mlp_out", i, out)
        if taps is not None and not isinstance(layer.mlp, MlpWeights):
            tap("router", i, route(config, layer.mlp, x)[0])
        running = running + out
    tap("entering", config.num_layers, running)
    final = _mixed(config, blocks, running, weights.out_mix)
    tap("final", config.num_layers, final)
    hidden = rms_norm(final, weights.norm, config.norm_eps)
    new_state = State(layers=tuple(new_layers), accepted=state.accepted)
    return lax.optimization_barrier((hidden, new_state))


def _mixed(config: TargetConfig, blocks: list[Array], running: Array, score: Array | None) -> Array:
    if score is None or not blocks:
        return running
    return attn_res.mix(blocks, running, score, config.norm_eps)


def _mlp(config: TargetConfig, layer: LayerWeights, x: Array, live: Array) -> Array:
    if isinstance(layer.mlp, MlpWeights):
        return rank_sum(mlp_partial(config, layer.mlp, x)).astype(x.dtype)
    return moe(config, layer.mlp, x, live)


__all__ = [
    "Taps",
    "decode_rows",
    "embed",
    "embed_rows",
    "head_logits",
    "local_head_logits",
    "prefill_page",
]
