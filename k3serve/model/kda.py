"""KDA, the gated delta rule with a decay per key channel: rows one by one, or a page
chunk-parallel.

Rule: both forms compute the same recurrence per head, in float32, from the same inputs:

    S <- diag(e^g) S;   u = beta (v - S^T k);   S <- S + k u^T;   o = S^T q

A row with g = 0 and beta = 0 leaves S as it is; that is how padding rows are written.
"""

from __future__ import annotations

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

SUB = 16  # rows of a sub-block: inside one, decays are formed pairwise


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


def chunk(s: Array, rows: KdaInputs) -> tuple[Array, Array]:
    """C rows at once. s [heads, K, V], rows with leading axis C (a multiple of 16) -> (s, o [C,
    heads, V]).

    With G the running sum of g, A_ij = x_i . (k_j e^(G_i-G_j)) and L = beta A_kk below the
    diagonal: (I + L) V' = beta (V - K e^G S);  O = Q e^G S + A_qk V';  S <- e^(G_last) S + (K
    e^(G_last-G))^T V'. Every exponent is <= 0, whatever the gates.
    """
    q, k, v, g = (jnp.swapaxes(a, 0, 1) for a in (rows.q, rows.k, rows.v, rows.g))  # [H, C, K]
    beta = rows.beta.T[..., None]  # [H, C, 1]
    decay = sub_block_decays(g)
    a_qk, a_kk = pair_products(q, k, decay)
    size = k.shape[1]
    row, col = jnp.arange(size)[:, None], jnp.arange(size)[None, :]
    a_qk = jnp.where(col <= row, a_qk, 0.0)
    lower = jnp.where(col < row, beta * a_kk, 0.0)
    from_start = jnp.exp((decay.local + decay.before[:, :, None]).reshape(k.shape))
    to_end = jnp.exp((decay.suffix + decay.after[:, :, None]).reshape(k.shape))
    right = beta * jnp.concatenate([v, k * from_start], axis=-1)
    solved = solve_unit_lower(lower, right)
    u, weights = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    delta = u - einsum_f32("hck,hkv->hcv", weights, s)
    o = einsum_f32("hck,hkv->hcv", q * from_start, s) + einsum_f32("hcj,hjv->hcv", a_qk, delta)
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
class SubBlockDecays:
    """Sums of log decays, each added up directly: a difference of two long sums would lose digits
    behind strong gates.
    """

    local: Any  # [H, blocks, 16, K] from the sub-block's start, the row included
    suffix: Any  # [H, blocks, 16, K] of the rows after, to the sub-block's end
    before: Any  # [H, blocks, K] of all earlier sub-blocks
    after: Any  # [H, blocks, K] of all later ones
    between: Any  # [H, I, J, K] of those after J and before I


def sub_block_decays(g: Array) -> SubBlockDecays:
    """g [H, C, K]."""
    heads, size, width = g.shape
    g = g.reshape(heads, size // SUB, SUB, width)
    local = jnp.cumsum(g, axis=2)
    backward = lax.cumsum(g, axis=2, reverse=True)
    suffix = jnp.pad(backward[:, :, 1:], ((0, 0), (0, 0), (0, 1), (0, 0)))
    b = jnp.arange(size // SUB)
    earlier = b[:, None] > b  # [I, J]: J lies before I
    inside = (earlier[:, None] & earlier.T[None]).astype(F32)  # [I, J, B]: J < B < I

    def added(mask: Array) -> Array:
        return einsum_f32("...b,hbk->h...k", mask.astype(F32), local[:, :, -1])

    return SubBlockDecays(local, suffix, added(earlier), added(earlier.T), added(inside))


def pair_products(q: Array, k: Array, decay: SubBlockDecays) -> tuple[Array, Array]:
    """A_qk and A_kk [H, C, C]: sum over channels of x_i k_j e^(G_i - G_j); right for j <= i, any
    number above.

    Between sub-blocks I > J, the exponent is split at the first row of I into two parts that are <=
    0. Inside one, the differences are formed pair by pair.
    """
    heads, size, width = k.shape
    blocks = size // SUB
    both = jnp.stack([q, k], axis=1).reshape(heads, 2, blocks, SUB, width)
    by_block = k.reshape(heads, blocks, SUB, width)
    local = decay.local
    first = local[:, :, :1]

    earlier = jnp.arange(blocks)[:, None] > jnp.arange(blocks)
    exponent = first[:, :, None] + decay.between[:, :, :, None] + decay.suffix[:, None]
    exponent = jnp.where(earlier[None, :, :, None, None], exponent, -jnp.inf)
    columns = (by_block[:, None] * jnp.exp(exponent)).reshape(heads, blocks, size, width)
    rows = both * jnp.exp(local - first)[:, None]
    across = einsum_f32("hxbik,hbjk->hxbij", rows, columns).reshape(heads, 2, size, size)

    ordered = (jnp.arange(SUB)[:, None] >= jnp.arange(SUB))[..., None]
    exponent = jnp.where(ordered, local[:, :, :, None] - local[:, :, None], -jnp.inf)
    pairs = jnp.exp(exponent) * by_block[:, :, None]  # [H, blocks, i, j, K]
    within = jnp.sum(both[:, :, :, :, None] * pairs[:, None], axis=-1)  # [H, 2, blocks, i, j]
    diagonal = jnp.eye(blocks, dtype=bool)[:, None, :, None]
    tiled = jnp.where(diagonal, within[:, :, :, :, None, :], 0.0).reshape(heads, 2, size, size)
    out = across + tiled
    return out[:, 0], out[:, 1]


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
    s, o = chunk(jnp.where(fresh, 0.0, state.s[slot]), inputs)
    newest = lax.dynamic_slice_in_dim(window, length, before.shape[0])
    new_state = state.replace(  # type: ignore[attr-defined]
        s=state.s.at[slot].set(s), conv=state.conv.at[slot].set(newest)
    )
    return finish(config, w, x, o), new_state
