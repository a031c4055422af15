"""The experts' loops and the product over all: right, and a row's bits its own, whatever runs."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from k3serve.model import moe
from k3serve.model.weights import ExpertWeights

EXPERTS, INNER, WIDTH, TOKENS, CHOICES = 16, 512, 64, 64, 8


class Experts:
    """Random experts, and run_experts as one compiled program."""

    def __init__(self, tokens: int = TOKENS) -> None:
        self.random = np.random.default_rng(5)
        self.gate_up = self.numbers(EXPERTS, INNER, 2, WIDTH) / INNER**0.5
        self.down = self.numbers(EXPERTS, WIDTH, INNER) / WIDTH**0.5
        self.x = self.numbers(tokens, INNER)
        config = SimpleNamespace(num_experts=EXPERTS, activation="silu")
        self.weights = ExpertWeights(self.gate_up, self.down, None, None, None, None)
        mesh = Mesh(np.array(jax.devices()[:1]), ("rank",))

        def program(weights, x, chosen, live):
            return moe.run_experts(config, weights, x, chosen, live)

        mapped = jax.shard_map(program, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        self.compiled = jax.jit(mapped)

    def numbers(self, *shape):
        return self.random.standard_normal(shape).astype(np.float32)

    def run(self, chosen, x=None, live=None):
        x = self.x if x is None else x
        live = np.ones(len(x), bool) if live is None else live
        return np.asarray(self.compiled(self.weights, x, jnp.asarray(chosen, jnp.int32), live))

    def choices(self, skew: float = 0.0):
        """[N, k] distinct experts; a larger skew makes low ids more likely."""
        noise = self.random.gumbel(size=(len(self.x), EXPERTS)) - skew * np.arange(EXPERTS)
        return np.argsort(-noise, axis=1)[:, :CHOICES]

    def expected(self, row, expert):
        gate_up = np.einsum("i,icw->cw", self.x[row].astype(float), self.gate_up[expert])
        inner = gate_up[0] / (1 + np.exp(-gate_up[0])) * gate_up[1]
        return inner @ self.down[expert]


@pytest.fixture(scope="module")
def experts():
    return Experts()


def wide_size():
    return moe.wide_rows(TOKENS, TOKENS * CHOICES / EXPERTS)


def all_on_one():
    """Every pair on one expert: more rows than its part of the wide product holds."""
    chosen = np.full((TOKENS, CHOICES), 3)
    assert chosen.size > 4 * wide_size()
    return chosen


def test_the_wide_form_gives_each_pair_its_experts_product(experts):
    chosen = experts.choices(skew=0.5)
    assert np.bincount(chosen.reshape(-1)).max() > wide_size()  # the loop runs as well
    found = experts.run(chosen)
    for row in range(0, TOKENS, 7):
        for i, expert in enumerate(chosen[row]):
            assert np.abs(found[row, i] - experts.expected(row, expert)).max() < 1e-5


def test_a_rows_bits_depend_on_nothing_but_the_row(experts):
    """Its place, the load of its expert, and what the other rows choose make no difference."""
    first = experts.choices()
    alone = experts.run(all_on_one())
    assert (alone == alone[:, :1]).all()  # in the product or in the loop, as first or as fortieth
    for skew in (0.0, 0.3, 2.0):
        chosen = experts.choices(skew)
        chosen[::5] = first[::5]
        found = experts.run(chosen)
        assert (found[::5] == experts.run(first)[::5]).all()
        on_three = chosen == 3
        assert on_three.any()
        assert (found[on_three] == alone[np.nonzero(on_three)[0], 0]).all()
        order = experts.random.permutation(TOKENS)
        assert (experts.run(chosen[order], experts.x[order]) == found[order]).all()


def test_rows_that_are_not_live_give_zeros_and_change_nothing(experts):
    chosen, live = experts.choices(skew=0.5), experts.random.random(TOKENS) < 0.5
    found, whole = experts.run(chosen, live=live), experts.run(chosen)
    assert (found[live] == whole[live]).all()
    assert not found[~live].any()
    assert not experts.run(chosen, live=np.zeros(TOKENS, bool)).any()


def test_the_loop_alone_gives_the_same_products(experts, monkeypatch):
    chosen = experts.choices(skew=0.5)
    wide = experts.run(chosen)
    monkeypatch.setattr(moe, "on_cpu", lambda x: False)
    assert np.abs(Experts().run(chosen) - wide).max() < 1e-5


def test_few_rows_an_expert_go_through_the_loop(monkeypatch):
    monkeypatch.setattr(moe, "run_wide", None)
    few = Experts(tokens=4)
    chosen = few.choices()
    found = few.run(chosen)
    assert np.abs(found[2, 5] - few.expected(2, chosen[2, 5])).max() < 1e-5


def test_a_row_or_two_go_through_their_experts_one_by_one(monkeypatch):
    """One row an expert on average: right, and with the same bits beside any other row."""
    monkeypatch.setattr(moe, "run_wide", None)
    monkeypatch.setattr(moe, "run_blocks", None)
    two = Experts(tokens=2)
    chosen = two.choices()
    found = two.run(chosen)
    for row, i in np.ndindex(2, CHOICES):
        assert np.abs(found[row, i] - two.expected(row, chosen[row, i])).max() < 1e-5
    swapped = two.run(chosen[::-1], two.x[::-1])
    assert (swapped == found[::-1]).all()
    same = two.run(chosen[[0, 0]], two.x[[0, 0]])  # each expert twice
    assert (same == found[0]).all()
    one = two.run(chosen, live=np.array([True, False]))
    assert (one[0] == found[0]).all() and not one[1].any()


def test_pairs_are_grouped_by_expert_in_their_own_order():
    local = jnp.array([2, 0, 3, 2, 0, 2, 3])  # of 3 experts; 3: none
    found = moe.group(local, 3)
    assert np.asarray(found.order).tolist() == [1, 4, 0, 3, 5, 2, 6]
    assert np.asarray(found.load).tolist() == [2, 0, 3]
    assert np.asarray(found.starts).tolist() == [0, 2, 2, 5]
    assert np.asarray(found.rank).tolist() == [0, 0, 0, 1, 1, 2, 1]
