"""Acceptance rules against exact tables, by complete enumeration, and by their invariants."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3serve.model.acceptance import Rule, accept_matching, accept_sampled

DATA = Path(__file__).parent.parent / "data" / "acceptance"
SAMPLED = [Rule.TOKEN, Rule.BLOCK, Rule.ONEHOT]
TABLE_RULES = {
    "sampled_draft": Rule.TOKEN,
    "sampled_draft_block": Rule.BLOCK,
    "onehot_draft": Rule.ONEHOT,
    "onehot_draft_block": Rule.BLOCK,
}
VOCAB, DRAFTS = 8, 7  # every table entry is padded to these
BELOW_ONE = np.nextafter(np.float32(1), np.float32(0))

accept = jax.jit(accept_sampled, static_argnums=0)


def table(name: str) -> list[dict[str, Any]]:
    return json.loads((DATA / f"{name}.json").read_text())


def log(probs: Any) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(probs, np.float64)).astype(np.float32)


def softmax(logits: Any) -> np.ndarray:
    x = np.asarray(logits, np.float64)
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def padded(rows: np.ndarray, count: int) -> np.ndarray:
    """[count, VOCAB]: missing tokens are cut, missing rows hold what must never be looked at."""
    full = np.full((count, VOCAB), np.nan, np.float32)
    full[: len(rows)] = -np.inf
    full[: len(rows), : rows.shape[1]] = rows
    return full


def padded_drafts(values: list[Any], kind: type) -> np.ndarray:
    return np.asarray(values + [1] * (DRAFTS - len(values)), kind)


def onehot(tokens: Any, vocab: int) -> np.ndarray:
    return np.eye(vocab)[np.asarray(tokens)]


# ------------------------------------------------------------------------------------ tables


def test_greedy_table() -> None:
    entries = table("greedy")
    for entry in entries:
        chosen = np.argmax(entry["logits"], axis=-1)
        count = len(entry["drafts"])
        drafts = jnp.asarray([entry["drafts"]], jnp.int32)
        accepted = accept_matching(
            jnp.asarray(chosen[None], jnp.int32), drafts, jnp.asarray([count])
        )
        n = int(accepted[0])
        assert accepted.dtype == jnp.int32
        assert n == entry["accepted"]
        emitted = [*entry["drafts"][:n], int(chosen[n])]
        stops = [i for i, token in enumerate(emitted) if token in entry["stop_ids"]]
        assert emitted[: stops[0] + 1 if stops else None] == entry["emitted"]
        fewer = accept_matching(
            jnp.asarray(chosen[None], jnp.int32), drafts, jnp.asarray([count - 1])
        )
        assert int(fewer[0]) == min(n, count - 1)


@pytest.mark.parametrize("name", TABLE_RULES)
def test_vectors(name: str) -> None:
    """All entries of a rule in one tile, each with its own count of offered drafts."""
    entries = [e for e in table("vectors") if e["rule"] == name]
    assert len(entries) > 50
    target, draft, drafts, us = [], [], [], []
    for e in entries:
        vocab = len(e["target"][0])
        target.append(padded(log(e["target"]), DRAFTS + 1))
        q = onehot(e["drafts"], vocab) if e["draft"] is None else e["draft"]
        draft.append(padded(log(q), DRAFTS))
        drafts.append(padded_drafts(e["drafts"], np.int32))
        us.append(padded_drafts(e["u"], np.float32))
    offered = np.asarray([len(e["drafts"]) for e in entries], np.int32)
    accepted, last = accept(TABLE_RULES[name], *map(np.stack, (target, draft, drafts)), offered,
                            np.stack(us))  # fmt: skip
    assert accepted.dtype == jnp.int32
    np.testing.assert_array_equal(accepted, [e["accepted"] for e in entries])
    for got, e in zip(softmax(last), entries, strict=True):
        expected = np.pad(e["last_token_distribution"], (0, VOCAB - len(e["target"][0])))
        np.testing.assert_allclose(got, expected, atol=1e-5)


# ------------------------------------------------------------------------------- enumeration


def world_rows(tables: dict[str, list[float]], path: tuple[int, ...]) -> list[list[float]]:
    """The distributions after every prefix of path, the empty one included."""
    return [tables[",".join(map(str, path[:i]))] for i in range(len(path) + 1)]


class Paths:
    """Every draft path of a small world as one slot each; uniform numbers are found, not drawn."""

    def __init__(
        self, name: str, world: dict[str, Any], offer: Callable[[tuple[int, ...]], int]
    ) -> None:
        self.rule, self.count = TABLE_RULES[name], world["num_drafts"]
        self.paths, self.prob, target, draft = [], [], [], []
        for path in itertools.product(range(world["vocab"]), repeat=self.count):
            q = np.asarray(world_rows(world["draft"], path[:-1]))
            if name.startswith("onehot"):
                q = onehot(q.argmax(-1), world["vocab"])
            prob = np.prod([q[i, d] for i, d in enumerate(path)])
            if prob > 0:
                self.paths.append(path)
                self.prob.append(prob)
                target.append(log(world_rows(world["target"], path)))
                draft.append(log(q))
        self.offered = np.asarray([offer(p) for p in self.paths], np.int32)
        self.run = partial(accept, self.rule, np.stack(target), np.stack(draft),
                           np.asarray(self.paths, np.int32), self.offered)  # fmt: skip
        self.bounds = self._bounds()  # [paths, m]: draft i is taken while u_i < bound

    def rejecting(self) -> np.ndarray:
        return np.full((len(self.paths), self.count), np.inf, np.float32)

    def forced(self, n: int, u: np.ndarray | float) -> np.ndarray:
        """Uniform numbers that leave the decision to draft n alone (0-based), which gets u."""
        us = self.rejecting()
        if self.rule is not Rule.BLOCK:  # the others need all earlier drafts to be accepted
            us[:, :n] = 0
        us[:, n] = u
        return us

    def _bounds(self) -> np.ndarray:
        bounds = np.zeros((len(self.paths), self.count))
        for i in range(self.count):
            # 2^24 even steps; the bound lies in (low, high]
            low, high = np.full(len(self.paths), -1.0), np.full(len(self.paths), 2.0**24)
            for _ in range(25):
                middle = np.floor((low + high) / 2)
                u = np.where(middle < 2**24, middle / 2**24, 0).astype(np.float32)
                taken = np.asarray(self.run(self.forced(i, u))[0]) == i + 1
                low, high = np.where(taken, middle, low), np.where(taken, high, middle)
            bounds[:, i] = high / 2**24
        return bounds

    def prob_accepted(self) -> np.ndarray:  # [paths, m+1]
        probs = np.zeros((len(self.paths), self.count + 1))
        for s in range(len(self.paths)):
            b = self.bounds[s, : self.offered[s]]
            for n in range(self.offered[s] + 1):
                if self.rule is Rule.BLOCK:
                    probs[s, n] = (b[n - 1] if n else 1) * np.prod(1 - b[n:])
                else:
                    probs[s, n] = np.prod(b[:n]) * (1 - b[n] if n < self.offered[s] else 1)
        return probs

    def last(self, n: int) -> np.ndarray:
        """[paths, V]: distribution of the last token for those paths that can accept n."""
        return softmax(self.run(self.forced(n - 1, 0.0) if n else self.rejecting())[1])


@pytest.mark.parametrize("name", TABLE_RULES)
@pytest.mark.parametrize("index", range(4))
def test_enumerations(name: str, index: int) -> None:
    world = table("enumerations")[index]
    expected = world["rules"][name]
    m = world["num_drafts"]
    paths = Paths(name, world, lambda path: m)
    assert [list(p) for p in paths.paths] == [p["drafts"] for p in expected["paths"]]
    probs = paths.prob_accepted()
    prob_n = np.einsum("p,pn->n", paths.prob, probs)
    np.testing.assert_allclose(prob_n, expected["prob_accepted_n"], atol=1e-6)
    for s, entry in enumerate(expected["paths"]):
        np.testing.assert_allclose(probs[s], entry["prob_accepted_n"], atol=2e-6)
    for n in range(m + 1):
        last = paths.last(n)
        for s, entry in enumerate(expected["paths"]):
            if entry["prob_accepted_n"][n] > 1e-9:
                given_n = entry["last_token_distribution_given_n"][n]
                np.testing.assert_allclose(last[s], given_n, atol=1e-5)
    check_output(paths, world, 1e-6)


@pytest.mark.parametrize("name", TABLE_RULES)
@pytest.mark.parametrize("index", [1, 3])
def test_the_offered_count_may_follow_from_earlier_drafts(name: str, index: int) -> None:
    """As a confidence head does it: whether draft i is offered depends on drafts before i."""
    world = table("enumerations")[index]

    def offer(path: tuple[int, ...]) -> int:
        if path[0] == 0:
            return 1
        return 2 if path[1] == path[0] else 3

    check_output(Paths(name, world, offer), world, 1e-6)


def check_output(paths: Paths, world: dict[str, Any], atol: float) -> None:
    """Draft, accept, draw, then let the target finish: exactly the target's distribution."""
    got = Counter(dict.fromkeys(world["output_distribution"], 0.0))
    probs = paths.prob_accepted()
    lasts = [paths.last(n) for n in range(paths.count + 1)]
    for s, path in enumerate(paths.paths):
        for n, token in itertools.product(range(paths.offered[s] + 1), range(world["vocab"])):
            if probs[s, n] == 0 or lasts[n][s, token] == 0:
                continue
            p = paths.prob[s] * probs[s, n] * lasts[n][s, token]
            for rest in itertools.product(range(world["vocab"]), repeat=paths.count - n):
                full = (*path[:n], token, *rest)
                rows = world_rows(world["target"], full[:-1])
                q = np.prod([rows[i][full[i]] for i in range(n + 1, len(full))])
                got[",".join(map(str, full))] += p * q
    for key, value in got.items():
        assert abs(value - world["output_distribution"].get(key, 0.0)) < atol, key


# -------------------------------------------------------------------------------- invariants

N, M, V = 5, 3, 11


def tile(seed: int) -> dict[str, np.ndarray]:
    """A random tile: cuts, extreme logits, greedy rows, drafts the target excludes, all counts."""
    rng = np.random.default_rng(seed)
    scale = rng.choice([0.1, 1.0, 30.0, 1e4], (N, 1, 1))
    target = rng.normal(0, 1, (N, M + 1, V)) * scale
    near = rng.choice([0.0, 1e-7, 0.3, 5.0], (N, 1, 1))
    draft = target[:, :M] + rng.normal(0, 1, (N, M, V)) * near
    for logits in (target, draft):
        cut = rng.random(logits.shape) < rng.choice([0.0, 0.5, 0.95], (N, 1, 1))
        cut[np.arange(V) == logits.argmax(-1)[..., None]] = False
        logits[cut] = -np.inf
    target[0], draft[0] = (
        np.where(np.arange(V) == x.argmax(-1)[..., None], 0, -np.inf) for x in (target[0], draft[0])
    )
    noise = rng.gumbel(size=draft.shape)
    drafts = (draft + noise).argmax(-1)
    drafts = np.where(rng.random((N, M)) < 0.4, target[:, :M].argmax(-1), drafts)
    return {
        "target_logits": target.astype(np.float32),
        "draft_logits": draft.astype(np.float32),
        "drafts": drafts.astype(np.int32),
        "offered": rng.integers(0, M + 1, N).astype(np.int32),
        "uniforms": rng.choice([0.0, BELOW_ONE, rng.random()], (N, M)).astype(np.float32),
    }


def outcome(rule: Rule, values: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    accepted, last = accept(rule, *values.values())
    return np.asarray(accepted), np.asarray(last)


seeds = st.integers(0, 2**32 - 1)
many = settings(max_examples=60, deadline=None, derandomize=True)


@pytest.mark.parametrize("rule", SAMPLED)
@given(seed=seeds)
@many
def test_a_slots_result_depends_on_its_own_rows_alone(rule: Rule, seed: int) -> None:
    values, others = tile(seed), tile(seed + 1)
    accepted, last = outcome(rule, values)
    moved = {k: np.roll(v, 2, axis=0) for k, v in values.items()}
    for kept in range(N):
        at = (kept + 2) % N
        mates = {k: np.where(
            (np.arange(N) == at).reshape(-1, *[1] * (v.ndim - 1)), v, others[k]
        ) for k, v in moved.items()}  # fmt: skip
        got_accepted, got_last = outcome(rule, mates)
        assert got_accepted[at] == accepted[kept]
        np.testing.assert_array_equal(got_last[at], last[kept])


@pytest.mark.parametrize("rule", SAMPLED)
@given(seed=seeds)
@many
def test_rows_beyond_the_offered_ones_are_never_looked_at(rule: Rule, seed: int) -> None:
    values = tile(seed)
    accepted, last = outcome(rule, values)
    garbage = {k: v.copy() for k, v in values.items()}
    for n, k in enumerate(values["offered"]):
        garbage["target_logits"][n, k + 1 :] = np.nan
        garbage["draft_logits"][n, k:] = np.inf
        garbage["drafts"][n, k:] = V - 1
        garbage["uniforms"][n, k:] = np.nan
    got_accepted, got_last = outcome(rule, garbage)
    np.testing.assert_array_equal(got_accepted, accepted)
    np.testing.assert_array_equal(got_last, last)
    assert (accepted <= values["offered"]).all()
    if rule is not Rule.BLOCK:  # these decide from left to right: fewer offered is a cut
        whole = outcome(rule, values | {"offered": np.full(N, M, np.int32)})[0]
        np.testing.assert_array_equal(accepted, np.minimum(whole, values["offered"]))


@pytest.mark.parametrize("rule", SAMPLED)
@given(seed=seeds)
@many
def test_nothing_the_target_excludes_can_be_emitted(rule: Rule, seed: int) -> None:
    values = tile(seed)
    accepted, last = outcome(rule, values)
    assert not np.isnan(last).any()
    for n in range(N):
        target = values["target_logits"][n]
        for i in range(accepted[n]):
            assert target[i, values["drafts"][n, i]] > -np.inf
        row = target[accepted[n]]
        assert (last[n][row == -np.inf] == -np.inf).all()
        assert (last[n] > -np.inf).any()
        if accepted[n] == values["offered"][n]:
            np.testing.assert_array_equal(last[n], row)


@given(seed=seeds)
@many
def test_greedy_rows_are_accepted_by_comparison(seed: int) -> None:
    """Rows of one finite logit, as sampling.processed makes greedy ones, under every rule."""
    values = tile(seed)
    best = values["target_logits"].argmax(-1)
    values["target_logits"] = log(onehot(best, V))
    values["draft_logits"] = log(onehot(values["drafts"], V))
    expected = np.asarray(
        accept_matching(best.astype(np.int32), values["drafts"], values["offered"])
    )
    for rule in SAMPLED:
        accepted, last = outcome(rule, values)
        np.testing.assert_array_equal(accepted, expected)
        np.testing.assert_array_equal(last.argmax(-1), best[np.arange(N), expected])
        assert (np.isfinite(last).sum(-1) == 1).all()


def one(target: Any, draft: Any, drafts: list[int], u: list[float]) -> list[Any]:
    m = len(drafts)
    return [np.asarray(target, np.float32)[None], np.asarray(draft, np.float32)[None],
            np.asarray([drafts], np.int32), np.asarray([m], np.int32),
            np.asarray([u], np.float32)]  # fmt: skip


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
def test_a_draft_equal_to_the_target_is_always_accepted(rule: Rule) -> None:
    logits = np.random.default_rng(5).normal(0, 3, (3, 100))
    values = one(logits, logits[:2], [4, 7], [BELOW_ONE, BELOW_ONE])
    accepted, last = accept(rule, *values)
    assert accepted[0] == 2
    np.testing.assert_array_equal(last[0], logits[2].astype(np.float32))


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
def test_without_a_residual_the_targets_row_is_left(rule: Rule) -> None:
    logits = np.random.default_rng(6).normal(0, 3, (3, 100))
    values = one(logits, logits[:2], [4, 7], [1.0, 1.0])  # 1 rejects whatever the ratio
    accepted, last = accept(rule, *values)
    assert accepted[0] == 0
    np.testing.assert_array_equal(last[0], logits[0].astype(np.float32))


def test_onehot_leaves_the_row_when_the_rejected_draft_was_all_of_it() -> None:
    values = one([[0, -np.inf], [0, 0]], [[0, 0]], [0], [1.0])
    accepted, last = accept(Rule.ONEHOT, *values)
    assert accepted[0] == 0
    np.testing.assert_array_equal(last[0], [0, -np.inf])


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
def test_a_tiny_draft_probability_keeps_its_precision(rule: Rule) -> None:
    """e^-200 is 0 in float32: the ratio exists in log space alone."""
    small = [[-200.5, 0.0], [0.0, 0.0]]
    accepted, _ = accept(rule, *one(small, [[-200.0, 0.0]], [0], [0.6]))
    assert accepted[0] == 1  # ratio e^-0.5 = 0.607
    accepted, last = accept(rule, *one(small, [[-200.0, 0.0]], [0], [0.61]))
    assert accepted[0] == 0
    assert np.isfinite(last[0, 1])


@pytest.mark.parametrize("rule", SAMPLED)
def test_no_drafts_is_plain_decoding(rule: Rule) -> None:
    row = np.random.default_rng(7).normal(0, 1, (2, 1, 6)).astype(np.float32)
    empty = np.zeros((2, 0), np.int32)
    accepted, last = accept_sampled(
        rule, jnp.asarray(row), jnp.zeros((2, 0, 6)), empty, jnp.zeros(2, jnp.int32), empty
    )
    assert np.asarray(accepted).tolist() == [0, 0]
    np.testing.assert_array_equal(last, row[:, 0])


def test_wrong_calls_say_what_to_do() -> None:
    target, draft, drafts, offered, u = one([[0, 0], [0, 0]], [[0, 0]], [0], [0.5])
    with pytest.raises(ValueError, match=r"coupled.*accept_matching"):
        accept_sampled(Rule.COUPLED, target, draft, drafts, offered, u)
    with pytest.raises(ValueError, match="block needs draft_logits"):
        accept_sampled(Rule.BLOCK, target, None, drafts, offered, u)
    accepted, _ = accept_sampled(
        Rule.ONEHOT, *map(jnp.asarray, (target,)), None, drafts, offered, u
    )
    assert accepted[0] in (0, 1)
