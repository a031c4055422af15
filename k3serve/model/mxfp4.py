"""MXFP4 on the device: two 4-bit codes in a byte, one power-of-two scale for 32 input columns.

Rule: every value is exact in bfloat16. checkpoint/mxfp4.py holds the numpy twin and the tests of
both.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

GROUP = 32
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def dequantise(codes: Array, scales: Array, dtype: jnp.dtype) -> Array:
    """codes [..., n/2] u8 (low nibble first), scales [..., n/32] u8 (2^(s-127)) -> [..., n]
    dtype.
    """
    table = jnp.array(VALUES, jnp.float32)
    nibbles = jnp.stack([codes & 15, codes >> 4], axis=-1).astype(jnp.int32)
    values = table[nibbles].reshape(*scales.shape, GROUP)
    # s in the exponent field of a float32 is 2^(s-127), exactly, for s in 1..254
    factors = lax.bitcast_convert_type(scales.astype(jnp.uint32) << 23, jnp.float32)
    return (values * factors[..., None]).reshape(*codes.shape[:-1], -1).astype(dtype)
