"""MXFP4 rounding and packing against hand-made cases and a search over all codes."""

import jax
import jax.numpy as jnp
import numpy as np

from scripts.train_nano import mxfp4


def _unpack_byte(byte: int, scale: int) -> list[float]:
    packed = np.full((1, 16), byte, np.uint8)
    return mxfp4.unpack(packed, np.full((1, 1), scale, np.uint8))[0, :2].tolist()


def test_known_bytes() -> None:
    assert _unpack_byte(0x7A, 127) == [-1.0, 6.0]
    assert _unpack_byte(0x1F, 125) == [-1.5, 0.125]
    assert _unpack_byte(0x80, 99) == [0.0, -0.0]
    assert np.signbit(_unpack_byte(0x80, 99)[1])


def test_representable_weights_survive_unchanged() -> None:
    rng = np.random.default_rng(0)
    codes = rng.choice(mxfp4.MAGNITUDES, (64, 48)) * rng.choice([-1, 1], (64, 48))
    codes[0], codes[32] = 6.0, 6.0  # so that the scale of each group is fixed
    w = codes.astype(np.float32) * np.exp2(rng.integers(-12, 3, 48)).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(mxfp4.round_trip(jnp.asarray(w))), w)
    np.testing.assert_array_equal(mxfp4.unpack(*mxfp4.pack(jnp.asarray(w))).T, w)


def test_packed_bytes_hold_what_training_saw() -> None:
    w = jnp.asarray(np.random.default_rng(1).normal(size=(64, 32)).astype(np.float32)) * 0.05
    packed, scale = mxfp4.pack(w)
    assert packed.shape == (32, 32) and scale.shape == (32, 2)
    assert packed.dtype == scale.dtype == np.uint8
    # safetensors writes the buffer as it lies in memory
    assert packed.flags.c_contiguous and scale.flags.c_contiguous
    np.testing.assert_array_equal(mxfp4.unpack(packed, scale).T, mxfp4.round_trip(w))


def test_every_weight_goes_to_the_nearest_code() -> None:
    w = np.random.default_rng(2).normal(size=(32, 200)).astype(np.float32)
    rounded = np.asarray(mxfp4.round_trip(jnp.asarray(w)))
    _, scale = mxfp4.pack(jnp.asarray(w))
    grid = np.concatenate([-mxfp4.MAGNITUDES, mxfp4.MAGNITUDES])
    for column in range(200):
        options = grid * 2.0 ** (int(scale[column, 0]) - 127)
        best = np.abs(w[:, column, None] - options).min(1)
        np.testing.assert_allclose(np.abs(w[:, column] - rounded[:, column]), best, rtol=1e-6)


def test_ties_go_to_the_even_code() -> None:
    w = np.zeros((32, 1), np.float32)
    w[:8, 0] = [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    rounded = np.asarray(mxfp4.round_trip(jnp.asarray(w)))[:8, 0]
    assert rounded.tolist() == [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]


def test_stacked_experts_round_like_single_ones() -> None:
    w = jnp.asarray(np.random.default_rng(3).normal(size=(4, 64, 32)).astype(np.float32))
    together = mxfp4.round_trip(w)
    for i in range(4):
        np.testing.assert_array_equal(together[i], mxfp4.round_trip(w[i]))


def test_straight_through_passes_the_gradient() -> None:
    w = jnp.asarray(np.random.default_rng(4).normal(size=(32, 8)).astype(np.float32))
    value, grad = jax.value_and_grad(lambda w: (mxfp4.straight_through(w) ** 2).sum())(w)
    rounded = mxfp4.round_trip(w)
    np.testing.assert_allclose(value, (rounded**2).sum(), rtol=1e-6)
    np.testing.assert_allclose(grad, 2 * rounded, rtol=1e-5, atol=1e-6)
