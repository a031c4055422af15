"""Sampling with drafts, end to end: many seeds against the exact distribution of the output.

A tiny world: the logits of target and draft follow from the token before. Every slot drafts,
accepts and draws step after step, as the tick does, until LENGTH tokens stand; the tokens of all
slots of a case must fit the target's distribution of whole sequences, computed here in float64 by
code of its own. All cases share one tile. Seeds are fixed: the tests are deterministic.
"""

from __future__ import annotations

import itertools
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2

from k3serve.model.acceptance import Rule, accept_matching, accept_sampled
from k3serve.model.sampling import (
    PURPOSE_DRAFT,
    PURPOSE_RESIDUAL,
    PURPOSE_TARGET,
    SamplingRows,
    choose,
    draw,
    gumbel,
    penalise,
    processed,
    uniforms,
)

VOCAB, DRAFTS, LENGTH = 5, 2, 3
SEEDS = 8_000  # slots of each case
PROMPT = (3, 0)  # seen by the repetition penalty; the last one is the first anchor
P_LIMIT = 1e-3

_rng = np.random.default_rng(20)
BASE = _rng.normal(0, 1.2, (VOCAB, VOCAB)).astype(np.float32)  # logits after each token
FAR = (BASE + _rng.normal(0, 1.0, BASE.shape)).astype(np.float32)  # an ordinary draft
NEAR = (BASE + np.float32(1e-7) * _rng.choice([-2, -1, 0, 1, 2], BASE.shape)).astype(np.float32)
WRONG = (-2 * BASE).astype(np.float32)

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature 0.6": {"temperature": 0.6},
    "temperature 1.7": {"temperature": 1.7},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.75},
    "min_p": {"min_p": 0.2},
    "presence": {"presence_penalty": 1.3},
    "frequency": {"frequency_penalty": 0.9},
    "repetition": {"repetition_penalty": 1.8},
    "bias": {"bias": {1: 1.5, 2: -1.0, 4: -100.0}},
    "near": {"draft": NEAR},
    "equal": {"draft": BASE},
    "wrong draft": {"draft": WRONG},
    "row policy": {"policy": True},
    "all": {
        "temperature": 1.4, "top_k": 4, "top_p": 0.95, "min_p": 0.05, "presence_penalty": 0.4,
        "frequency_penalty": 0.3, "repetition_penalty": 1.2, "bias": {0: 0.7}, "policy": True,
    },
}  # fmt: skip
NAMES = tuple(CASES)
SETTINGS = {
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "repetition_penalty": 1.0,
}  # fmt: skip

# ------------------------------------------------------------------------- exact distribution


def exact_row(case: dict[str, Any], earlier: tuple[int, ...]) -> np.ndarray:
    """[VOCAB] probabilities of the token after `earlier` generated ones, step by step as stated."""
    s = SETTINGS | case
    logits = BASE[(*PROMPT, *earlier)[-1]].astype(np.float64)
    for token in range(VOCAB):
        bias = s.get("bias", {}).get(token, 0.0)
        logits[token] += -np.inf if bias <= -100 else bias
        times = earlier.count(token)
        if times or token in PROMPT:
            r = s["repetition_penalty"]
            logits[token] = logits[token] / r if logits[token] > 0 else logits[token] * r
        logits[token] -= s["frequency_penalty"] * times + s["presence_penalty"] * (times > 0)
    probs = np.exp((logits - logits.max()) / s["temperature"])
    order = np.argsort(-probs)
    if s["top_k"]:
        probs[order[s["top_k"] :]] = 0
    probs /= probs.sum()
    if s["top_p"] < 1:
        before = np.cumsum(probs[order]) - probs[order]
        probs[order[before >= s["top_p"]]] = 0
    probs[probs < s["min_p"] * probs.max()] = 0
    return probs / probs.sum()


def exact(name: str) -> np.ndarray:
    """[VOCAB ** LENGTH] probabilities of whole outputs."""
    out = []
    for tokens in itertools.product(range(VOCAB), repeat=LENGTH):
        steps = [exact_row(CASES[name], tokens[:i])[tokens[i]] for i in range(LENGTH)]
        out.append(np.prod(steps))
    return np.asarray(out)


def p_value(observed: np.ndarray, probs: np.ndarray) -> float:
    """Chi-square of counts against probs; cells that expect fewer than 5 are taken together."""
    assert observed[probs == 0].sum() == 0, "tokens outside the target's support"
    expected = probs * observed.sum()
    small = expected < 5
    if 0 < expected[small].sum() < 5:  # too little even together: with the smallest of the others
        small |= expected <= expected[~small].min()
    e, o = expected[~small], observed[~small]
    if expected[small].sum() > 0:
        e, o = np.append(e, expected[small].sum()), np.append(o, observed[small].sum())
    return float(chi2.sf(((o - e) ** 2 / e).sum(), len(e) - 1))


# ----------------------------------------------------------------------------- the procedure


def per_slot(names: tuple[str, ...]) -> tuple[SamplingRows, dict[str, jax.Array]]:
    """Settings of SEEDS slots for each case; slot s runs case s % len(names)."""
    cases = [SETTINGS | CASES[name] for name in names]
    slots = SEEDS * len(cases)
    which = np.arange(slots) % len(cases)

    def column(key: str, kind: Any) -> jax.Array:
        return jnp.asarray(np.asarray([c[key] for c in cases], kind)[which])

    kinds = {key: np.int32 if key == "top_k" else np.float32 for key in SETTINGS}
    seed = np.stack([np.arange(slots) * 7919 + 5, np.arange(slots) % 3], axis=1).astype(np.uint32)
    rows = SamplingRows(
        seed=jnp.asarray(seed),
        choice=jnp.asarray(np.arange(slots) % 2, jnp.int32),
        **{key: column(key, kind) for key, kind in kinds.items()},
    )
    bias = np.zeros((len(cases), VOCAB), np.float32)
    for i, case in enumerate(cases):
        for token, value in case.get("bias", {}).items():
            bias[i, token] = -np.inf if value <= -100 else value
    world = {
        "bias": jnp.asarray(bias[which]),
        "draft": jnp.asarray(np.stack([c.get("draft", FAR) for c in cases])[which]),
        "target": jnp.asarray(np.broadcast_to(BASE, (slots, VOCAB, VOCAB))),
        "policy": jnp.asarray(np.asarray([c.get("policy", False) for c in cases])[which]),
    }
    return rows, world


def row_logits(
    table: jax.Array, previous: jax.Array, counts: jax.Array, rows: SamplingRows, bias: jax.Array
) -> jax.Array:  # [N, V]: biased and penalised
    seen = jnp.zeros(counts.shape, bool).at[:, jnp.asarray(PROMPT)].set(True)
    logits = table[jnp.arange(previous.shape[0]), previous] + bias
    return penalise(logits, rows, counts, seen)


def one_step(
    rule: Rule,
    broken: str,  # what the step does wrong on purpose
    rows: SamplingRows,
    world: dict[str, jax.Array],
    state: tuple[jax.Array, jax.Array, jax.Array],  # tokens [N, T], produced [N], offered [N]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    tokens, produced, offered = state
    slots, span = tokens.shape
    at = jnp.arange(slots)
    written = jnp.arange(span) < produced[:, None]
    counts = jnp.sum(
        (tokens[..., None] == jnp.arange(VOCAB)) & written[..., None], axis=1, dtype=jnp.int32
    )
    previous = jnp.where(produced > 0, tokens[at, jnp.maximum(produced - 1, 0)], PROMPT[-1])
    position = len(PROMPT) + produced
    drafts, draft_rows, target_rows = [], [], []
    for i in range(DRAFTS + 1):
        logits = row_logits(world["target"], previous, counts, rows, world["bias"])
        target_rows.append(processed(logits, rows))
        if i == DRAFTS:
            break
        logits = row_logits(world["draft"], previous, counts, rows, world["bias"])
        draft_rows.append(processed(logits, rows))
        if rule is Rule.ONEHOT:
            previous = jnp.argmax(draft_rows[-1], axis=-1).astype(jnp.int32)
        elif rule is Rule.COUPLED:
            previous = draw(draft_rows[-1], rows, position + i, PURPOSE_TARGET)
        else:
            offset = 0 if broken == "stale noise" else i
            previous = draw(draft_rows[-1], rows, position + i, PURPOSE_DRAFT, offset)
        drafts.append(previous)
        if broken != "stale counts":
            counts = counts.at[at, previous].add(1)
    drafts = jnp.stack(drafts, axis=1)
    target = jnp.stack(target_rows, axis=1)
    accepted, last = accept(
        rule, broken, rows, target, jnp.stack(draft_rows, axis=1), drafts, offered, position
    )
    block = jnp.where(jnp.arange(DRAFTS + 1) < accepted[:, None], jnp.pad(drafts, ((0, 0), (0, 1))),
                      last[:, None])  # fmt: skip
    column = produced[:, None] + jnp.arange(DRAFTS + 1)
    column = jnp.where(jnp.arange(DRAFTS + 1) <= accepted[:, None], column, span)
    tokens = tokens.at[at[:, None], column].set(block, mode="drop")
    fewer = jnp.where(accepted == offered, DRAFTS, accepted)  # the slot's own recent acceptance
    offered = jnp.where(world["policy"], fewer, DRAFTS)
    return tokens, produced + accepted + 1, offered


def accept(
    rule: Rule,
    broken: str,
    rows: SamplingRows,
    target: jax.Array,
    draft: jax.Array,
    drafts: jax.Array,
    offered: jax.Array,
    position: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Accepted counts and last tokens [N]."""
    at = jnp.arange(len(drafts))
    positions = position[:, None] + jnp.arange(DRAFTS + 1)
    if rule is Rule.COUPLED:
        chosen = [
            draw(target[:, i], rows, positions[:, i], PURPOSE_TARGET) for i in range(DRAFTS + 1)
        ]
        chosen = jnp.stack(chosen, axis=1)
        accepted = accept_matching(chosen, drafts, offered)
        return accepted, chosen[at, accepted]
    if broken == "stale noise":
        single = [uniforms(rows.seed, rows.choice, positions[:, i : i + 1]) for i in range(DRAFTS)]
        u = jnp.concatenate(single, axis=1)
    else:
        u = uniforms(rows.seed, rows.choice, positions[:, :DRAFTS])
    accepted, logits = accept_sampled(rule, target, draft, drafts, offered, u)
    if broken == "no residual":
        logits = target[at, accepted]
    purpose = PURPOSE_DRAFT if broken == "shared noise" else PURPOSE_RESIDUAL
    return accepted, draw(logits, rows, position + accepted, purpose)


@cache
def outputs(
    rule: Rule, broken: str = "", names: tuple[str, ...] = NAMES
) -> np.ndarray:  # [N, LENGTH]
    """Decodes every slot; a step emits one token or more, so LENGTH steps are enough."""
    slots = SEEDS * len(names)

    @jax.jit
    def run(rows: SamplingRows, world: dict[str, jax.Array]) -> jax.Array:
        start = jnp.zeros((slots, LENGTH), jnp.int32), jnp.zeros(slots, jnp.int32)
        state = (*start, jnp.full(slots, DRAFTS, jnp.int32))
        step = partial(one_step, rule, broken, rows, world)
        return jax.lax.fori_loop(0, LENGTH, lambda _, state: step(state), state)[0]

    return np.asarray(run(*per_slot(names)))


def counted(tokens: np.ndarray) -> np.ndarray:  # [VOCAB ** LENGTH]
    code = tokens @ VOCAB ** np.arange(LENGTH)[::-1]
    return np.bincount(code, minlength=VOCAB**LENGTH)


# ------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rule", list(Rule))
def test_output_has_the_targets_distribution(rule: Rule, name: str) -> None:
    tokens = outputs(rule)[NAMES.index(name) :: len(NAMES)]
    assert p_value(counted(tokens), exact(name)) > P_LIMIT


@pytest.mark.parametrize(
    ("rule", "broken", "name"),
    [
        (Rule.TOKEN, "no residual", "plain"),
        (Rule.BLOCK, "no residual", "plain"),
        (Rule.TOKEN, "stale counts", "presence"),
        (Rule.TOKEN, "shared noise", "top_k"),
        (Rule.BLOCK, "stale noise", "top_p"),
    ],
)
def test_a_wrong_procedure_is_noticed(rule: Rule, broken: str, name: str) -> None:
    """The last one says why a draft's offset in its block is part of its random numbers: with those
    of the position alone, a block that was cut short leaks into the next one."""
    tokens = outputs(rule, broken, (name,) * 4)
    assert p_value(counted(tokens), exact(name)) < 1e-6


def test_coupled_output_is_that_of_plain_decoding() -> None:
    slots = SEEDS * len(NAMES)
    rows, world = per_slot(NAMES)

    @jax.jit
    def plain(rows: SamplingRows, world: dict[str, jax.Array]) -> jax.Array:
        counts = jnp.zeros((slots, VOCAB), jnp.int32)
        previous, tokens = jnp.full(slots, PROMPT[-1], jnp.int32), []
        for i in range(LENGTH):
            logits = row_logits(world["target"], previous, counts, rows, world["bias"])
            previous = choose(logits, rows, jnp.full(slots, len(PROMPT) + i, jnp.int32))
            counts = counts.at[jnp.arange(slots), previous].add(1)
            tokens.append(previous)
        return jnp.stack(tokens, axis=1)

    np.testing.assert_array_equal(outputs(Rule.COUPLED), plain(rows, world))


def flips(purpose: int, offset: int = 0) -> np.ndarray:
    """[20000] fair coins at successive positions of one seed and choice."""
    seed, choice = jnp.asarray([7, 0], jnp.uint32), jnp.int32(0)
    noise = jax.jit(jax.vmap(lambda position: gumbel(seed, choice, position, 2, purpose, offset)))(
        jnp.arange(20_000)
    )
    return np.asarray(jnp.argmax(noise, axis=-1))


@pytest.mark.parametrize(
    ("purpose", "offset"),
    [(PURPOSE_DRAFT, 0), (PURPOSE_RESIDUAL, 0), (PURPOSE_DRAFT, 1), (PURPOSE_DRAFT, 6)],
)
def test_streams_are_independent_of_the_targets(purpose: int, offset: int) -> None:
    joint = np.bincount(2 * flips(PURPOSE_TARGET) + flips(purpose, offset), minlength=4)
    assert p_value(joint, np.full(4, 0.25)) > P_LIMIT


def test_uniform_numbers_fill_the_unit_interval_evenly_and_independently() -> None:
    n = 20_000
    positions = jnp.arange(n)[:, None] + jnp.arange(2)
    u = uniforms(jnp.full((n, 2), 3, jnp.uint32), jnp.zeros(n, jnp.int32), positions)
    assert u.dtype == jnp.float32
    cells = np.floor(np.asarray(u) * 8).astype(int)
    assert cells.min() == 0
    assert cells.max() == 7
    joint = np.bincount(8 * cells[:, 0] + cells[:, 1], minlength=64)
    assert p_value(joint, np.full(64, 1 / 64)) > P_LIMIT
    # the same position at another offset, as the next block meets it
    joint = np.bincount(8 * cells[1:, 0] + cells[:-1, 1], minlength=64)
    assert p_value(joint, np.full(64, 1 / 64)) > P_LIMIT


def test_a_drafts_numbers_depend_on_its_place_alone() -> None:
    seed = jnp.asarray([[1, 2], [3, 9], [5, 5]], jnp.uint32)
    choice = jnp.asarray([0, 2, 1])
    positions = jnp.asarray([[4, 5, 6], [41, 42, 43], [7, 8, 9]])
    together = uniforms(seed, choice, positions)
    alone = uniforms(seed[1:2], choice[1:2], positions[1:2, :2])
    np.testing.assert_array_equal(alone[0], together[1, :2])
    other = uniforms(seed[1:2], choice[1:2], positions[1:2, :2], PURPOSE_DRAFT)
    assert (np.asarray(other) != np.asarray(alone)).all()
