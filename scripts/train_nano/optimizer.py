"""Muon for the matrices, Adam for everything else, with one learning rate for both.

Rule: which of the two a parameter gets depends on its name and rank only (`uses_muon`), and both
keep their state in one tree of the parameters' shape, so a checkpoint is three equal trees.
"""

import dataclasses

import jax
import jax.numpy as jnp

from scripts.train_nano.model import Params

# Looked up by row or read element by element: orthogonalising these makes no sense.
_ADAM_NAMES = ("embed", "head", "router", "conv", "b", "markov_w1", "markov_w2")


@dataclasses.dataclass(frozen=True, slots=True)
class OptimizerSpec:
    adam_lr: float = 4e-3
    muon_lr_factor: float = 4.0
    muon_momentum: float = 0.95
    newton_schulz_steps: int = 5
    muon_decay: float = 0.01
    adam_beta1: float = 0.9
    adam_beta2: float = 0.98
    adam_decay: float = 0.1  # matrices only
    max_grad_norm: float = 1.0


def uses_muon(path: tuple, leaf: jax.Array) -> bool:
    return leaf.ndim >= 2 and path[-1].key not in _ADAM_NAMES


def init_state(params: Params) -> dict[str, Params]:
    """First moments for all; second moments only where Adam uses them (else a zero scalar)."""

    def second(path: tuple, leaf: jax.Array) -> jax.Array:
        return jnp.zeros(()) if uses_muon(path, leaf) else jnp.zeros_like(leaf)

    return {
        "first": jax.tree.map(jnp.zeros_like, params),
        "second": jax.tree_util.tree_map_with_path(second, params),
    }


def orthogonalize(matrix: jax.Array, steps: int) -> jax.Array:
    """Newton-Schulz: pushes all singular values towards 1. Batched over leading axes."""
    rows, columns = matrix.shape[-2:]
    x = matrix.swapaxes(-1, -2) if rows > columns else matrix
    x = x / (jnp.sqrt((x * x).sum((-1, -2), keepdims=True)) + 1e-7)
    for _ in range(steps):
        gram = x @ x.swapaxes(-1, -2)
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ x
    x = x.swapaxes(-1, -2) if rows > columns else x
    return x * max(1.0, rows / columns) ** 0.5


def apply(
    spec: OptimizerSpec,
    params: Params,
    state: dict[str, Params],
    grads: Params,
    lr: jax.Array,  # [] f32, the Adam rate at this step
    step: jax.Array,  # [] f32, from 1
) -> tuple[Params, dict[str, Params], jax.Array]:
    """One update. Returns new parameters, new state and the gradient norm before clipping."""
    norm = jnp.sqrt(sum((g * g).sum() for g in jax.tree.leaves(grads)))
    clip = jnp.minimum(1.0, spec.max_grad_norm / (norm + 1e-6))

    def muon(p: jax.Array, m: jax.Array, v: jax.Array, g: jax.Array) -> tuple:
        m = spec.muon_momentum * m + g
        update = orthogonalize(g + spec.muon_momentum * m, spec.newton_schulz_steps)
        return p - lr * spec.muon_lr_factor * (update + spec.muon_decay * p), m, v

    def adam(p: jax.Array, m: jax.Array, v: jax.Array, g: jax.Array) -> tuple:
        m = spec.adam_beta1 * m + (1 - spec.adam_beta1) * g
        v = spec.adam_beta2 * v + (1 - spec.adam_beta2) * g * g
        mean = m / (1 - spec.adam_beta1**step)
        scale = jnp.sqrt(v / (1 - spec.adam_beta2**step)) + 1e-8
        decay = spec.adam_decay * p if p.ndim > 1 else 0.0
        return p - lr * (mean / scale + decay), m, v

    def one(path: tuple, p: jax.Array, m: jax.Array, v: jax.Array, g: jax.Array) -> tuple:
        return (muon if uses_muon(path, p) else adam)(p, m, v, g * clip)

    moved = jax.tree_util.tree_map_with_path(one, params, state["first"], state["second"], grads)
    params, first, second = jax.tree.transpose(
        jax.tree.structure(params), jax.tree.structure((0, 0, 0)), moved
    )
    return params, {"first": first, "second": second}, norm
