"""MXFP4: four-bit floats in groups of 32 input columns that share a power-of-two scale.

Rule: the rounding used while training and the bytes written on export come from the same function,
so a checkpoint read back equals what the last training steps saw. Weights here are `[..., in, out]`
(as used by `x @ w`); the packed bytes are `[out, in / 2]` as in the K3 checkpoint.
"""

import jax
import jax.numpy as jnp
import numpy as np

GROUP = 32
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
BIAS = 127  # E8M0: scale byte s stands for 2^(s - 127)

# Rounding boundaries between neighbouring magnitudes. A tie goes to the even code.
_BOUNDS = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2
_TIES_UP = np.array([False, True, False, True, False, True, False])


def _codes(scaled: jax.Array) -> jax.Array:
    """Index into MAGNITUDES of the nearest magnitude; values above 6 saturate."""
    x = jnp.abs(scaled)[..., None]
    return jnp.where(jnp.asarray(_TIES_UP), x >= _BOUNDS, x > _BOUNDS).sum(-1)


def _exponents(groups: jax.Array) -> jax.Array:  # [..., GROUP, out] -> [..., out] int32
    """Power of two per group: of the two that bring the largest value near 6, the better one."""
    largest = jnp.abs(groups).max(-2)
    _, exponent = jnp.frexp(jnp.maximum(largest, 2.0**-100))  # largest = m * 2^e, 0.5 <= m < 1
    low = exponent - 3  # largest lands in [4, 8) and may saturate at 6
    errors = []
    for candidate in (low, low + 1):
        scaled = groups * jnp.exp2(-candidate.astype(jnp.float32))[..., None, :]
        rounded = jnp.asarray(MAGNITUDES)[_codes(scaled)]
        gap = (rounded - jnp.abs(scaled)) * jnp.exp2(candidate.astype(jnp.float32))[..., None, :]
        errors.append((gap**2).sum(-2))
    return jnp.where(errors[0] <= errors[1], low, low + 1)


def _quantize(w: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Signs and codes `[..., groups, GROUP, out]`, and exponents `[..., groups, out]`."""
    *lead, rows, out = w.shape
    groups = w.reshape(*lead, rows // GROUP, GROUP, out)
    exponents = _exponents(groups)
    scaled = groups * jnp.exp2(-exponents.astype(jnp.float32))[..., None, :]
    return scaled < 0, _codes(scaled), exponents


def round_trip(w: jax.Array) -> jax.Array:
    """The value each weight has after quantisation."""
    negative, codes, exponents = _quantize(w)
    magnitude = jnp.asarray(MAGNITUDES)[codes]
    value = jnp.where(negative, -magnitude, magnitude)
    return (value * jnp.exp2(exponents.astype(jnp.float32))[..., None, :]).reshape(w.shape)


def straight_through(w: jax.Array) -> jax.Array:
    """`round_trip(w)` whose gradient is that of `w`."""
    return w + jax.lax.stop_gradient(round_trip(w) - w)


def pack(w: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """Checkpoint bytes of one `[in, out]` matrix: packed `[out, in/2]` u8, scale `[out, in/32]`."""
    negative, codes, exponents = (np.asarray(x) for x in _quantize(w))
    nibbles = (codes | (negative << 3)).reshape(w.shape).T.astype(np.uint8)
    scales = (exponents + BIAS).T
    assert ((scales > 0) & (scales < 255)).all(), "scale bytes 0 and 255 are reserved"
    packed = nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)  # column-major: safetensors would garble it
    return np.ascontiguousarray(packed), np.ascontiguousarray(scales.astype(np.uint8))


def unpack(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Inverse of `pack`: f32 `[out, in]`."""
    nibbles = np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)
    value = np.where(nibbles & 8, -1.0, 1.0).astype(np.float32) * MAGNITUDES[nibbles & 7]
    factor = np.exp2(scale.astype(np.float32) - BIAS)
    return value * np.repeat(factor, GROUP, axis=1)
