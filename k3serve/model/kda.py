"""KDA, the gated delta rule with a decay per key channel: rows one by one, or a page
chunk-parallel.

Rule: both forms compute the same recurrence per head, in float32, from the same inputs:

    S <- diag(e^g) S;   u = beta (v - S^T k);   S <- S + k u^T;   o = S^T q

A row with g = 0 and beta = 0 leaves S as it is; that is how padding rows are written.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax

from k3serve.config import TargetConfig
from k3serve.model.collectives import rank_sum
from k3serve.model.ops import F32, dot, dot_f32, einsum_f32, l2_norm, rms_norm_f32
from k3serve.model.state import KdaRows, KdaState
from k3serve.model.weights import KdaWeights

CHUNK = 64  # most rows of a chunk: 2.1 ms for 64, 12.8 for 256 at once, with 8 heads of 64 on CPU
SUB = 16  # rows of a sub-block: inside one, the solver goes row by row


@struct.dataclass
class KdaInputs:
    """Inputs of the recurrence, float32. Leading axes are rows."""

    q: Any  # [..., heads, K], normalised and scaled
    k: Any  # [..., heads, K], normalised
    v: Any  # [..., heads, V]
    g: Any  # [..., heads, K] log decay, <= 0
    beta: Any  # [..., heads]


def log_decay(config: TargetConfig, z: Array, a_log: Array, dt_bias: Array) -> Array:
    """z [..., heads, K] f32, a_log [heads], dt_bias [heads, K] -> [..., heads, K], at most 0."""
    x = z + dt_bias
    rate = jnp.exp(a_log)[:, None]
    if config.gate_lower_bound is None:
        return -rate * jax.nn.softplus(x)
    return config.gate_lower_bound * jax.nn.sigmoid(rate * x)


def convolve(window: Array, taps: Array) -> Array:
    """Depthwise causal convolution and SiLU. window [..., rows+3, 3, W], taps [4, 3, W] -> [...,
    rows, 3, W] f32.
    """
    rows = window.shape[-3] - taps.shape[0] + 1
    total = jnp.zeros((*window.shape[:-3], rows, *window.shape[-2:]), F32)
    for j in range(taps.shape[0]):
        total = total + taps[j] * window[..., j : j + rows, :, :].astype(F32)
    return jax.nn.silu(total)


def prepare(config: TargetConfig, w: KdaWeights, x: Array, conv: Array, live: Array) -> KdaInputs:
    """Everything before the recurrence, for rows of any number.

    x [N, d]; conv [N, 3, W] f32: q, k, v after convolution and SiLU; live [N] bool: False makes the
    row a no-op.
    """
    k = config.kda_head_dim
    heads = w.a_log.shape[0]
    qkv = conv.astype(x.dtype).astype(F32).reshape(-1, 3, heads, k)
    z = dot(dot(x, w.decay_a), w.decay_b).astype(F32).reshape(-1, heads, k)
    g = log_decay(config, z, w.a_log, w.dt_bias.reshape(heads, k))
    beta = jax.nn.sigmoid(dot(x, w.beta).astype(F32))
    return KdaInputs(
        q=l2_norm(qkv[:, 0]) * k**-0.5,
        k=l2_norm(qkv[:, 1]),
        v=qkv[:, 2],
        g=jnp.where(live[:, None, None], g, 0.0),
        beta=jnp.where(live[:, None], beta, 0.0),
    )


def finish(config: TargetConfig, w: KdaWeights, x: Array, o: Array) -> Array:
    """Output norm, gate and projection. x [N, d], o [N, heads, V] f32 -> [N, d]."""
    heads, v = o.shape[1:]
    gate = dot(x, w.gate) if w.gate is not None else dot(dot(x, w.gate_a), w.gate_b)
    gate = jax.nn.sigmoid(gate.astype(F32)).reshape(-1, heads, v)
    o = o.astype(x.dtype)
    y = rms_norm_f32(o, w.out_norm, config.norm_eps) * gate
    y = y.astype(x.dtype).reshape(-1, heads * v)
    return rank_sum(dot_f32(y, w.out)).astype(x.dtype)


def project(w: KdaWeights, x: Array) -> Array:
    """q, k, v before the convolution. x [N, d] -> [N, 3, W]."""
    return dot(x, w.qkv)


# ------------------------------------------------------------------------------------------------
# rows


def recur(s: Array, row: KdaInputs) -> tuple[Array, Array]:
    """One row of the recurrence. s [..., K, V] -> (s, o [..., V]).

    The decayed state is read once, for k and q together: o = S^T q + (k . q) u. As a product this
    costs 5 us a row on CPU with 2 slots of K3-nano, as two sums over K 10 us.
    """
    s = jnp.exp(row.g)[..., None] * s
    read = einsum_f32("...xk,...kv->...xv", jnp.stack([row.k, row.q], axis=-2), s)
    u = row.beta[..., None] * (row.v - read[..., 0, :])
    s = s + row.k[..., None] * u[..., None, :]
    return s, read[..., 1, :] + jnp.sum(row.k * row.q, axis=-1, keepdims=True) * u


def kda_rows(
    config: TargetConfig,
    w: KdaWeights,
    x: Array,
    state: KdaState,
    positions: Array,
    counts: Array,
    accepted: Array | None,
) -> tuple[Array, KdaState]:
    """R rows of every slot of a tile, whose state this is. x [G, R, d]; positions [G] of the first
    row; counts [G] rows that are real; accepted [G] rows of the state's own that have happened.

    With R = 1 the row is in the new state. Otherwise the state stands before the new rows, which
    it holds to be replayed. A slot at position 0 starts from zeros; one with count 0 keeps its
    state bit for bit.
    """
    slots, rows, _ = x.shape
    flat = x.reshape(slots * rows, -1)
    fresh = positions == 0
    if accepted is not None:
        accepted = jnp.where(fresh, 0, accepted)
    before = history(state, accepted)
    before = jnp.where(fresh[:, None, None, None], 0, before)
    u = project(w, flat).reshape(slots, rows, *before.shape[2:]).astype(before.dtype)
    window = jnp.concatenate([before, u], axis=1)  # [G, 3+R, 3, W]
    conv = convolve(window, w.conv).reshape(slots * rows, *before.shape[2:])
    live = jnp.arange(rows) < counts[:, None]
    inputs = prepare(config, w, flat, conv, live.reshape(-1))
    inputs = jax.tree.map(lambda a: a.reshape(slots, rows, *a.shape[1:]), inputs)

    start = jnp.where(fresh[:, None, None, None], 0.0, state.s)
    if accepted is None:
        s, o = recur(start, jax.tree.map(lambda a: a[:, 0], inputs))
        new = KdaState(s=s, conv=window[:, 1:])
        o = o[:, None]
    else:
        s, o = replay(start, state.rows, accepted, inputs, counts)
        kept = KdaRows(k=inputs.k, v=inputs.v, g=inputs.g, beta=inputs.beta, u=u)
        new = KdaState(s=s, conv=before, rows=kept)
    y = finish(config, w, flat, o.reshape(slots * rows, *o.shape[2:]))
    active = counts > 0
    new = jax.tree.map(
        lambda a, old: jnp.where(active.reshape(-1, *[1] * (a.ndim - 1)), a, old), new, state
    )
    return y.reshape(x.shape), new


def history(state: KdaState, accepted: Array | None) -> Array:
    """The three newest rows before the convolution [G, 3, 3, W]."""
    if accepted is None:
        return state.conv
    window = jnp.concatenate([state.conv, state.rows.u], axis=1)
    size = state.conv.shape[1]
    return jax.vmap(lambda a, n: lax.dynamic_slice_in_dim(a, n, size))(window, accepted)


def replay(
    start: Array, old: KdaRows, accepted: Array, new: KdaInputs, counts: Array
) -> tuple[Array, Array]:
    """The accepted old rows, then the new ones. Returns the state between the two and the outputs
    of the new rows [G, R, heads, V].

    Both runs go through one loop body, so that a row leaves the same bits in the state whether it
    was replayed from a step of its own or from the middle of another's.
    """
    rows = new.beta.shape[1]
    real = jnp.arange(rows) < accepted[:, None]
    old_inputs = KdaInputs(
        q=jnp.zeros_like(old.k),
        k=old.k,
        v=old.v,
        g=jnp.where(real[..., None, None], old.g, 0.0),
        beta=jnp.where(real[..., None], old.beta, 0.0),
    )
    by_row = jax.tree.map(
        lambda a, b: jnp.concatenate([a, b], axis=1).swapaxes(0, 1), old_inputs, new
    )
    trips = jnp.stack([jnp.max(accepted), jnp.max(counts)])

    def run(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        s, between, out = carry

        def one(t: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            s, out = carry
            at = i * rows + t
            s, o = recur(s, jax.tree.map(lambda a: a[at], by_row))
            return s, out.at[at].set(o)

        s, out = lax.fori_loop(0, trips[i], one, (s, out))
        return s, jnp.where(i == 0, s, between), out

    out = jnp.zeros((2 * rows, *start.shape[:2], start.shape[-1]), F32)
    _, between, out = lax.fori_loop(0, 2, run, (start, start, out))
    return between, out[rows:].swapaxes(0, 1)


# ------------------------------------------------------------------------------------------------
# a page


def chunks(s: Array, rows: KdaInputs) -> tuple[Array, Array]:
    """A page's rows in chunks that follow one another: a chunk's cost grows faster than its rows.
    s [heads, K, V], rows with leading axis C (a multiple of 16) -> (s, o [C, heads, V]).
    """
    size = rows.k.shape[0]
    width = math.gcd(size, CHUNK)
    if width == size:
        return chunk(s, rows)
    parts = jax.tree.map(lambda a: a.reshape(size // width, width, *a.shape[1:]), rows)
    s, o = lax.scan(chunk, s, parts)
    return s, o.reshape(size, *o.shape[2:])


def chunk(s: Array, rows: KdaInputs) -> tuple[Array, Array]:
    """C rows at once. s [heads, K, V], rows with leading axis C (16, 32 or 64) -> (s, o [C, heads,
    V]).

    With G the running sum of g, A_ij = x_i . (k_j e^(G_i-G_j)) and L = beta A_kk below the
    diagonal: (I + L) V' = beta (V - K e^G S);  O = Q e^G S + A_qk V';  S <- e^(G_last) S + (K
    e^(G_last-G))^T V'. Every exponent is <= 0, whatever the gates.
    """
    q, k, v, g = (jnp.swapaxes(a, 0, 1) for a in (rows.q, rows.k, rows.v, rows.g))  # [H, C, K]
    beta = rows.beta.T[..., None]  # [H, C, 1]
    pairs = pair_products(q, k, g)
    size = k.shape[1]
    lower = jnp.where(jnp.arange(size) < jnp.arange(size)[:, None], beta * pairs.kk, 0.0)
    from_start, to_end = jnp.exp(pairs.before), jnp.exp(pairs.after)
    right = beta * jnp.concatenate([v, k * from_start], axis=-1)
    solved = solve_unit_lower(lower, right)
    u, weights = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    delta = u - einsum_f32("hck,hkv->hcv", weights, s)
    o = einsum_f32("hck,hkv->hcv", q * from_start, s) + einsum_f32("hcj,hjv->hcv", pairs.qk, delta)
    grown = einsum_f32("hck,hcv->hkv", k * to_end, delta)
    return from_start[:, -1][..., None] * s + grown, jnp.swapaxes(o, 0, 1)


def solve_unit_lower(lower: Array, right: Array) -> Array:
    """X with (I + lower) X = right. lower [H, C, C], zero on and above the diagonal; right [H, C,
    N].

    Own code, for the library's solver calls BLAS on CPU, whose threads fight XLA's: 45 ms for 4
    heads on 2 busy cores against 0.1 ms (measured).
    """
    heads, size, _ = lower.shape
    blocks = size // SUB
    tiles = lower.reshape(heads, blocks, SUB, blocks, SUB)
    diagonal = jnp.stack([tiles[:, i, :, i] for i in range(blocks)], axis=1)

    def row(i: Array, inverse: Array) -> Array:
        known = jnp.sum(
            diagonal[:, :, i, :, None] * inverse, axis=2
        )  # rows from i on have no weight
        return inverse.at[:, :, i].add(-known)

    identity = jnp.broadcast_to(jnp.eye(SUB, dtype=F32), diagonal.shape)
    inverse = lax.fori_loop(1, SUB, row, identity)
    done: list[Array] = []
    for i in range(blocks):
        rest = right[:, i * SUB : (i + 1) * SUB]
        if i:
            left = lower[:, i * SUB : (i + 1) * SUB, : i * SUB]
            rest = rest - einsum_f32("hij,hjn->hin", left, jnp.concatenate(done, axis=1))
        done.append(einsum_f32("hij,hjn->hin", inverse[:, i], rest))
    return jnp.concatenate(done, axis=1)


@struct.dataclass
class PairProducts:
    """What the rows of a chunk are to one another, and their decays to its ends."""

    qk: Any  # [H, C, C] sum over channels of q_i k_j e^(G_i - G_j) for j <= i, else 0
    kk: Any  # [H, C, C] the same of k_i k_j
    before: Any  # [H, C, K] log decay from the chunk's start, the row included
    after: Any  # [H, C, K] log decay of the rows after it, to the chunk's end


def pair_products(q: Array, k: Array, g: Array) -> PairProducts:
    """Pairs of neighbouring blocks of 1, 2, 4 ... rows are joined until one is left.

    Between a row of the second and a row of the first, the exponent is split at their border into
    two parts that are <= 0. Each part is added up directly: a difference of two long sums would
    lose digits behind strong gates. No pair needs an exponential of its own: 0.6 ms for 8 heads of
    64 on CPU, against 1.6 with exponentials pair by pair in sub-blocks of 16.
    """
    heads, size, width = k.shape
    both = jnp.stack([q, k], axis=2)  # [H, C, 2, K]
    out = jnp.sum(both * k[:, :, None], axis=-1)[:, :, None, :, None]
    before, after = g[:, :, None], jnp.zeros_like(g)[:, :, None]  # [H, blocks, rows, K]
    rows = 1
    while rows < size:
        assert size % (2 * rows) == 0, f"a chunk of {size} rows is no power of two"
        shape = (heads, size // (2 * rows), 2, rows)
        before, after = before.reshape(*shape, width), after.reshape(*shape, width)
        out = out.reshape(*shape, 2, rows)
        x = both.reshape(*shape, 2, width)[:, :, 1] * jnp.exp(before[:, :, 1])[:, :, :, None]
        y = k.reshape(*shape, width)[:, :, 0] * jnp.exp(after[:, :, 0])
        cross = einsum_f32("hbixk,hbjk->hbixj", x, y)
        upper = jnp.concatenate([out[:, :, 0], jnp.zeros_like(cross)], axis=-1)
        out = jnp.concatenate([upper, jnp.concatenate([cross, out[:, :, 1]], axis=-1)], axis=2)
        first, second = before[:, :, 0, -1:], before[:, :, 1, -1:]  # sums over whole blocks
        before = jnp.concatenate([before[:, :, 0], before[:, :, 1] + first], axis=2)
        after = jnp.concatenate([after[:, :, 0] + second, after[:, :, 1]], axis=2)
        rows *= 2
    return PairProducts(out[:, 0, :, 0], out[:, 0, :, 1], before[:, 0], after[:, 0])


def kda_page(
    config: TargetConfig,
    w: KdaWeights,
    x: Array,
    state: KdaState,
    slot: Array,
    start: Array,
    length: Array,
) -> tuple[Array, KdaState]:
    """One page of one slot. x [C, d]; rows from length on are padding. start 0 begins from
    zeros.
    """
    size = x.shape[0]
    fresh = start == 0
    before = jnp.where(fresh, 0, state.conv[slot])
    window = jnp.concatenate([before, project(w, x).astype(before.dtype)], axis=0)
    live = jnp.arange(size) < length
    inputs = prepare(config, w, x, convolve(window, w.conv), live)
    s, o = chunks(jnp.where(fresh, 0.0, state.s[slot]), inputs)
    newest = lax.dynamic_slice_in_dim(window, length, before.shape[0])
    new_state = state.replace(  # type: ignore[attr-defined]
        s=state.s.at[slot].set(s), conv=state.conv.at[slot].set(newest)
    )
    return finish(config, w, x, o), new_state
