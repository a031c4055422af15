"""The C++ kernels against pure JAX with gradients; pure JAX against known numbers."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scripts.train_nano import kernels

native = pytest.mark.skipif(not kernels.native_available(), reason="no g++ on this machine")


def _kda_inputs(shape: tuple[int, ...], seed: int = 0) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(seed), 5)
    q, k, v, z = (jax.random.normal(key, shape) for key in keys[:4])
    unit = [x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k)]
    log_decay = -5 * jax.nn.sigmoid(3 * z - 2)
    return [*unit, v, log_decay, jax.nn.sigmoid(jax.random.normal(keys[4], shape[:3]))]


def _value_and_grads(fn: Callable, inputs: list[jax.Array]) -> list[np.ndarray]:
    @jax.jit
    def both(*args: jax.Array) -> tuple[jax.Array, ...]:
        out, backward = jax.vjp(fn, *args)
        weight = jax.random.normal(jax.random.key(9), out.shape)
        return (out, *backward(weight))

    return [np.asarray(x) for x in both(*inputs)]


def _assert_close(left: list[np.ndarray], right: list[np.ndarray]) -> None:
    for a, b in zip(left, right, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6 * max(1.0, np.abs(b).max()), rtol=0)


@native
@pytest.mark.parametrize(("time", "dim"), [(1, 32), (16, 16), (43, 32)])
def test_native_kda_equals_jax(time: int, dim: int) -> None:
    inputs = _kda_inputs((2, time, 3, dim))
    native_result = _value_and_grads(kernels._kda_native, inputs)
    _assert_close(native_result, _value_and_grads(kernels.kda_chunked, inputs))


@native
def test_native_convolution_equals_jax() -> None:
    x = jax.random.normal(jax.random.key(0), (3, 20, 96)) * 4
    w = jax.random.normal(jax.random.key(1), (4, 96))
    native_result = _value_and_grads(kernels._conv_native, [x, w])
    _assert_close(native_result, _value_and_grads(kernels.conv_silu_jax, [x, w]))


@native
def test_native_gradients_are_repeatable() -> None:
    inputs = _kda_inputs((4, 33, 4, 32))
    first = _value_and_grads(kernels._kda_native, inputs)
    for a, b in zip(first, _value_and_grads(kernels._kda_native, inputs), strict=True):
        np.testing.assert_array_equal(a, b)


def test_chunk_form_equals_the_recurrence() -> None:
    q, k, v, log_decay, beta = (np.asarray(x, np.float64) for x in _kda_inputs((1, 50, 2, 16)))
    state = np.zeros((2, 16, 16))
    expected = []
    for t in range(50):
        state = np.exp(log_decay[0, t])[..., None] * state
        u = beta[0, t, :, None] * (v[0, t] - np.einsum("hkv,hk->hv", state, k[0, t]))
        state += k[0, t, :, :, None] * u[:, None, :]
        expected.append(np.einsum("hkv,hk->hv", state, q[0, t]))
    inputs = [jnp.asarray(x, jnp.float32) for x in (q, k, v, log_decay, beta)]
    np.testing.assert_allclose(kernels.kda_chunked(*inputs)[0], expected, atol=3e-6)


def test_known_answer() -> None:
    """Three tokens worked out by hand."""
    q = np.array([[1, 2, -1], [0.5, -1, 2], [3, 0, 1]])
    k = np.array([[1, 0, 1], [-1, 1, 0.5], [2, -1, 1]])
    v = np.array([[1, -1, 0], [0.5, 2, 0], [-2, 1, 0]])  # the third value column is unused
    z = np.array([[0, 1, -1], [0.5, 0, 2], [-1, -2, 0]])
    log_decay = -5 / (1 + np.exp(-2 * (z + np.array([-1, 0, 0.5]))))
    beta = 1 / (1 + np.exp(-np.array([0.0, 1.0, -1.0])))
    unit_q, unit_k = (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    inputs = [unit_q * 3**-0.5, unit_k, v, log_decay]
    shaped = [jnp.asarray(x, jnp.float32)[None, :, None] for x in inputs]
    out = kernels.kda_chunked(*shaped, jnp.asarray(beta, jnp.float32)[None, :, None])
    wanted = [[0, 0], [-0.02157286, -0.13193496], [-0.33757404, -0.21935187]]
    np.testing.assert_allclose(out[0, :, 0, :2], wanted, atol=1e-6)
