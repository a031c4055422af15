"""Sampling: cuts against a sort, distributions by chi-square, seeds as pure functions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3serve.model import sampling
from k3serve.model.sampling import SamplingRows, penalise

choose = jax.jit(sampling.choose)
truncate = jax.jit(sampling.truncate)

VOCAB = 12
LOGITS = np.array([1.0, 0.5, 2.0, -1.0, 0.0, 2.0, -3.0, 1.5, -0.5, 0.25, -np.inf, 0.75], np.float32)


def rows(n: int, **settings: Any) -> SamplingRows:
    """n equal rows; a setting may be one value or n of them."""
    defaults = {
        "seed": [7, 0], "choice": 0, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
    }  # fmt: skip
    kinds = {"seed": np.uint32, "choice": np.int32, "top_k": np.int32}
    values = {}
    for name, value in (defaults | settings).items():
        array = np.asarray(value, kinds.get(name, np.float32))
        shape = (n, 2) if name == "seed" else (n,)
        values[name] = jnp.asarray(np.broadcast_to(array, shape))
    return SamplingRows(**values)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def reference_cut(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Mask of kept tokens, by sorting; ties with the last kept one are kept."""
    keep = np.ones(len(logits), bool)
    if top_k:
        keep &= logits >= np.sort(logits)[::-1][min(top_k, len(logits)) - 1]
    probs = softmax(np.where(keep, logits, -np.inf).astype(np.float64))
    if top_p < 1:
        order = np.sort(probs)[::-1]
        reached = np.cumsum(order) >= top_p - 1e-9
        keep &= probs >= order[int(np.argmax(reached))] - 1e-12
    return keep & (probs >= min_p * probs.max())


@pytest.mark.parametrize("top_k", [0, 1, 2, 3, 5, 11, 12, 1000])
@pytest.mark.parametrize("top_p", [0.0, 1e-9, 0.3, 0.6, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.2, 1.0])
def test_cuts_equal_the_sorted_reference(top_k: int, top_p: float, min_p: float) -> None:
    row = rows(1, top_k=top_k, top_p=top_p, min_p=min_p)
    kept = np.asarray(truncate(jnp.asarray(LOGITS)[None], row))[0]
    expected = reference_cut(LOGITS, top_k, top_p, min_p)
    finite = np.isfinite(LOGITS)
    np.testing.assert_array_equal(np.isfinite(kept), expected & finite)
    np.testing.assert_array_equal(kept[np.isfinite(kept)], LOGITS[np.isfinite(kept)])


def test_cuts_of_random_rows_equal_the_reference() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (64, 50)).astype(np.float32)
    k, p = rng.integers(0, 60, 64), rng.uniform(0, 1, 64).astype(np.float32)
    kept = np.asarray(truncate(jnp.asarray(logits), rows(64, top_k=k, top_p=p)))
    for i in range(64):
        expected = reference_cut(logits[i], int(k[i]), float(p[i]), 0.0)
        np.testing.assert_array_equal(np.isfinite(kept[i]), expected, err_msg=f"row {i}")


@pytest.mark.parametrize("temperature", [0.0, -0.0, 5e-324, 1e-12, 1e-6, 1e-4])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    logits = jnp.asarray(np.tile([0.5, 3.0, -np.inf, 2.9], (32, 1)), jnp.float32)
    tokens = choose(logits, rows(32, temperature=temperature), jnp.arange(32))
    assert np.asarray(tokens).tolist() == [1] * 32


def test_greedy_and_sampled_rows_do_not_affect_each_other() -> None:
    logits = jnp.asarray(np.random.default_rng(1).normal(0, 1, (8, 100)), jnp.float32)
    mixed = rows(8, temperature=[0, 1, 0, 1, 0, 1, 0, 1], top_k=[0, 0, 3, 3, 0, 0, 0, 0])
    together = np.asarray(choose(logits, mixed, jnp.arange(8)))
    for i in range(8):
        alone = jax.tree.map(lambda x, i=i: x[i : i + 1], mixed)
        assert together[i] == choose(logits[i : i + 1], alone, jnp.arange(i, i + 1))[0]


def chi_square_passes(observed: np.ndarray, probs: np.ndarray) -> bool:
    """Whether counts fit probs: the statistic stays under a 1e-4 quantile (Wilson-Hilferty)."""
    inside = probs > 0
    assert observed[~inside].sum() == 0
    expected = probs[inside] * observed.sum()
    statistic = ((observed[inside] - expected) ** 2 / expected).sum()
    df = inside.sum() - 1
    limit = df * (1 - 2 / (9 * df) + 3.72 * np.sqrt(2 / (9 * df))) ** 3
    return bool(statistic < limit)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"top_k": 4},
        {"top_p": 0.7},
        {"min_p": 0.3},
        {"temperature": 1.3, "top_k": 7, "top_p": 0.8, "min_p": 0.1},
    ],
    ids=str,
)
def test_samples_have_the_stated_distribution(settings: dict[str, float]) -> None:
    n = 20_000
    logits = jnp.broadcast_to(jnp.asarray(LOGITS), (n, VOCAB))
    tokens = np.asarray(choose(logits, rows(n, **settings), jnp.arange(n)))
    scaled = LOGITS / settings.get("temperature", 1.0)
    kept = reference_cut(
        scaled, int(settings.get("top_k", 0)), settings.get("top_p", 1.0), settings.get("min_p", 0)
    )
    probs = softmax(np.where(kept, scaled, -np.inf).astype(np.float64))
    assert chi_square_passes(np.bincount(tokens, minlength=VOCAB), probs)


def test_the_chi_square_check_can_fail() -> None:
    n = 20_000
    logits = jnp.broadcast_to(jnp.asarray(LOGITS), (n, VOCAB))
    tokens = np.asarray(choose(logits, rows(n, temperature=1.1), jnp.arange(n)))
    assert not chi_square_passes(np.bincount(tokens, minlength=VOCAB), softmax(LOGITS))


def test_choices_and_seeds_are_independent_streams() -> None:
    n = 20_000
    logits = jnp.zeros((n, 2), jnp.float32)
    first = np.asarray(choose(logits, rows(n), jnp.arange(n)))
    for other in (
        choose(logits, rows(n, choice=1), jnp.arange(n)),
        choose(logits, rows(n, seed=[8, 0]), jnp.arange(n)),
        choose(logits, rows(n, seed=[7, 1]), jnp.arange(n)),
    ):
        joint = np.bincount(2 * first + np.asarray(other), minlength=4)
        assert chi_square_passes(joint, np.full(4, 0.25))


def test_a_draw_depends_on_seed_choice_and_position_alone() -> None:
    logits = jnp.asarray(np.random.default_rng(2).normal(0, 1, (1, 500)), jnp.float32)
    alone = choose(logits, rows(1, seed=[3, 9], choice=2), jnp.asarray([41]))[0]
    others = jnp.asarray(np.random.default_rng(3).normal(0, 1, (5, 500)), jnp.float32)
    batch = jnp.concatenate([others, logits])
    settings = rows(6, seed=[[1, 1]] * 5 + [[3, 9]], choice=[0] * 5 + [2])
    position = jnp.asarray([1, 2, 3, 4, 5, 41])
    assert choose(batch, settings, position)[5] == alone


def test_penalties_follow_the_formulas() -> None:
    logits = jnp.asarray([[2.0, -2.0, 1.0, 0.5]], jnp.float32)
    counts = jnp.asarray([[3, 1, 0, 0]], jnp.int32)
    seen = jnp.asarray([[False, False, True, False]])
    row = rows(1, presence_penalty=0.25, frequency_penalty=0.5, repetition_penalty=2.0)
    expected = [2.0 / 2 - 1.5 - 0.25, -2.0 * 2 - 0.5 - 0.25, 1.0 / 2, 0.5]
    np.testing.assert_allclose(penalise(logits, row, counts, seen)[0], expected, rtol=1e-6)
