"""Matrix products, norms and activations with the model's rounding rules.

Rule: whatever is not a matrix product happens in float32; each result is rounded once, to the
compute dtype.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from k3serve.config import TargetConfig

F32 = jnp.float32
HIGHEST = lax.Precision.HIGHEST


def dot_f32(x: Array, w: Array) -> Array:
    """x [..., in] times w [in, ...], accumulated and returned in float32.

    HIGHEST keeps float32 operands exact on TPU and GPU; bf16 operands take the fast path anyway.
    """
    precision = HIGHEST if x.dtype == F32 else None
    axes = (((x.ndim - 1,), (0,)), ((), ()))
    return lax.dot_general(x, w, axes, precision=precision, preferred_element_type=F32)


def dot(x: Array, w: Array) -> Array:
    """dot_f32, rounded to x's dtype."""
    return dot_f32(x, w).astype(x.dtype)


def einsum_f32(spec: str, *operands: Array) -> Array:
    """einsum of float32 or compute-dtype operands with a float32 result."""
    if jax.default_backend() == "cpu":
        # XLA's CPU runtime knows no batched bf16 x bf16 -> f32 product; products of bf16 are exact
        # in float32
        operands = tuple(o.astype(F32) for o in operands)
    precision = HIGHEST if all(o.dtype == F32 for o in operands) else None
    return jnp.einsum(spec, *operands, precision=precision, preferred_element_type=F32)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / rms(x) * weight over the last axis, in float32, rounded once to x's dtype."""
    return rms_norm_f32(x, weight, eps).astype(x.dtype)


def rms_norm_f32(x: Array, weight: Array, eps: float) -> Array:
    x = x.astype(F32)
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def l2_norm(x: Array) -> Array:
    """x / sqrt(sum x^2 + 1e-6) over the last axis; float32 in and out."""
    return x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def gated(config: TargetConfig, gate_up: Array) -> Array:
    """The MLP's nonlinearity. gate_up [..., 2, width]: gate branch, up branch.

    situ: b*tanh(g/b)*sigmoid(g) * l*tanh(u/l); silu: g*sigmoid(g) * u.
    """
    if config.activation != "situ":
        return silu_gated(gate_up)
    gate = gate_up[..., 0, :].astype(F32)
    up = gate_up[..., 1, :].astype(F32)
    beta, linear = config.situ_beta, config.situ_linear_beta
    out = beta * jnp.tanh(gate / beta) * jax.nn.sigmoid(gate) * (linear * jnp.tanh(up / linear))
    return out.astype(gate_up.dtype)


def silu_gated(gate_up: Array) -> Array:
    """g*sigmoid(g) * u. gate_up [..., 2, width]: gate branch, up branch."""
    gate = gate_up[..., 0, :].astype(F32)
    up = gate_up[..., 1, :].astype(F32)
    return (gate * jax.nn.sigmoid(gate) * up).astype(gate_up.dtype)
