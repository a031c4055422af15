"""KDA and short-convolution kernels: C++ through the XLA FFI when a compiler is there, else JAX.

Rule: both paths compute the same function and the same gradients (tests compare them); the C++
one is only faster. `kda` and `conv_silu` are what the model calls.

Try it: `python -m scripts.train_nano.kernels` says which path this machine uses.
"""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

CHUNK = 16  # tokens per chunk; also the distance between stored states in kernels.cc

# -ffast-math itself is avoided: it would switch the whole process to flush-to-zero.
_FLAGS = (
    "-O3 -march=native -mprefer-vector-width=512 -std=c++17 -fPIC -shared -fopenmp -w "
    "-fno-math-errno -fno-trapping-math -fassociative-math -fno-signed-zeros -ffinite-math-only"
).split()


@functools.cache
def native_available() -> bool:
    """Compiles and registers the C++ kernels once; False when this machine has no compiler."""
    compiler = shutil.which("g++")
    if compiler is None or os.environ.get("K3NANO_PURE_JAX"):
        return False
    library = ctypes.CDLL(str(_compile(compiler)))
    for name in ("KdaForward", "KdaBackward", "ConvForward", "ConvBackward"):
        capsule = jax.ffi.pycapsule(getattr(library, name))
        jax.ffi.register_ffi_target(f"k3nano_{name}", capsule, platform="cpu")
    return True


def _compile(compiler: str) -> Path:
    """Builds kernels.cc into the temporary folder, named by its content, and returns the path."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # else OpenMP spins against XLA's threads
    source = Path(__file__).with_name("kernels.cc")
    key = hashlib.sha256(source.read_bytes() + " ".join(_FLAGS).encode()).hexdigest()[:16]
    target = Path(tempfile.gettempdir()) / f"k3nano-{os.getuid()}" / f"kernels-{key}.so"
    if not target.exists():
        target.parent.mkdir(mode=0o700, exist_ok=True)
        partial = target.with_suffix(f".{os.getpid()}")
        command = [compiler, *_FLAGS, "-I", jax.ffi.include_dir(), str(source), "-o", str(partial)]
        subprocess.run(command, check=True)
        partial.replace(target)
    return target


def _call(name: str, *args: jax.Array, out: tuple[tuple[int, ...], ...]) -> Sequence[jax.Array]:
    shapes = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in out)
    return jax.ffi.ffi_call(f"k3nano_{name}", shapes)(*args)


# ------------------------------------------------------------------------------------------- KDA


def kda(
    q: jax.Array,  # [batch, time, heads, dim] f32, normalised and scaled
    k: jax.Array,  # [batch, time, heads, dim] f32, normalised
    v: jax.Array,  # [batch, time, heads, dim] f32
    log_decay: jax.Array,  # [batch, time, heads, dim] f32, in [-5, 0)
    beta: jax.Array,  # [batch, time, heads] f32
) -> jax.Array:  # [batch, time, heads, dim] f32
    """Gated delta rule from an empty state."""
    if native_available():
        return _kda_native(q, k, v, log_decay, beta)
    return kda_chunked(q, k, v, log_decay, beta)


@jax.custom_vjp
def _kda_native(
    q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array
) -> jax.Array:
    return _kda_native_fwd(q, k, v, log_decay, beta)[0]


def _kda_native_fwd(
    q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    batch, time, heads, dim = q.shape
    decay = jnp.exp(log_decay)
    states = (batch, heads, -(-time // CHUNK), dim, dim)
    out, checkpoints = _call("KdaForward", q, k, v, decay, beta, out=(q.shape, states))
    return out, (q, k, v, decay, beta, checkpoints)


def _kda_native_bwd(saved: tuple[jax.Array, ...], d_out: jax.Array) -> tuple[jax.Array, ...]:
    q, beta = saved[0], saved[4]
    return tuple(_call("KdaBackward", *saved, d_out, out=(q.shape,) * 4 + (beta.shape,)))


_kda_native.defvjp(_kda_native_fwd, _kda_native_bwd)


def kda_chunked(
    q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array
) -> jax.Array:
    """The same recurrence in chunk form (section 2.3.1), safe because log_decay >= -5."""
    batch, time, heads, dim = q.shape
    padded = -(-time // CHUNK) * CHUNK

    def chunks(x: jax.Array) -> jax.Array:  # -> [chunks, batch, heads, CHUNK, width]
        x = jnp.pad(x, ((0, 0), (0, padded - time), (0, 0), (0, 0)))
        return x.reshape(batch, -1, CHUNK, heads, x.shape[-1]).transpose(1, 0, 3, 2, 4)

    q, k, v, g, b = (chunks(x) for x in (q, k, v, log_decay, beta[..., None]))
    total = jnp.cumsum(g, 3)  # inclusive cumulative log decay
    middle = jax.lax.stop_gradient(total[:, :, :, CHUNK // 2 - 1 : CHUNK // 2])
    rows = jnp.concatenate([k, q], 3) * jnp.exp(jnp.concatenate([total, total], 3) - middle)
    scores = jnp.einsum("nbhik,nbhjk->nbhij", rows, k * jnp.exp(middle - total))
    below = jnp.tril(jnp.ones((CHUNK, CHUNK)), -1)
    eye = jnp.eye(CHUNK)
    a_kk, a_qk = scores[..., :CHUNK, :] * below * b, scores[..., CHUNK:, :] * (below + eye)
    inverse = _unit_lower_inverse(a_kk) * b.swapaxes(-1, -2)
    decayed = jnp.exp(total)
    mixed = inverse @ jnp.concatenate([v, k * decayed], -1)
    update, removal = mixed[..., :dim], mixed[..., dim:]
    k_last = k * jnp.exp(total[..., -1:, :] - total)

    def step(state: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple]:
        update, removal, k_last, decay = chunk
        new = update - removal @ state
        return decay[..., None] * state + k_last.swapaxes(-1, -2) @ new, (state, new)

    start = jnp.zeros((batch, heads, dim, dim))
    _, (states, new) = jax.lax.scan(step, start, (update, removal, k_last, decayed[..., -1, :]))
    out = (q * decayed) @ states + a_qk @ new
    return out.transpose(1, 0, 3, 2, 4).reshape(batch, padded, heads, dim)[:, :time]


def _unit_lower_inverse(strict: jax.Array) -> jax.Array:
    """(I + L)^-1 for strictly lower triangular L of size 16: (I-L)(I+L^2)(I+L^4)(I+L^8)."""
    eye = jnp.eye(strict.shape[-1])
    square = strict @ strict
    fourth = square @ square
    return (eye - strict) @ (eye + square) @ (eye + fourth) @ (eye + fourth @ fourth)


# ---------------------------------------------------------------------------- short convolution


def conv_silu(
    x: jax.Array,  # [batch, time, width] f32
    w: jax.Array,  # [4, width] f32; the last row taps the current token
) -> jax.Array:  # [batch, time, width] f32
    """Causal depthwise convolution, then SiLU."""
    return _conv_native(x, w) if native_available() else conv_silu_jax(x, w)


@jax.custom_vjp
def _conv_native(x: jax.Array, w: jax.Array) -> jax.Array:
    return _call("ConvForward", x, w, out=(x.shape,))[0]


_conv_native.defvjp(
    lambda x, w: (_conv_native(x, w), (x, w)),
    lambda saved, dy: tuple(
        _call("ConvBackward", *saved, dy, out=(saved[0].shape, saved[1].shape))
    ),
)


def conv_silu_jax(x: jax.Array, w: jax.Array) -> jax.Array:
    """The same in plain JAX."""
    time, taps = x.shape[1], w.shape[0]
    padded = jnp.pad(x, ((0, 0), (taps - 1, 0), (0, 0)))
    return jax.nn.silu(sum(padded[:, i : i + time] * w[i] for i in range(taps)))


if __name__ == "__main__":
    print("C++ kernels" if native_available() else "pure JAX (no g++ found)")
