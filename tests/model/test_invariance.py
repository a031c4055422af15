"""A slot's bits depend on its own tokens alone: not on neighbours, slot, pages, or the program
around.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from k3serve.model import head_logits, moe, prefill_page
from tests.model.harness import SLOTS

PROMPT = np.random.default_rng(11).integers(0, 500, 100)
CASES = [("k3_tiny", 1, "float32"), ("k3_tiny", 4, "float32"), ("k3_tiny", 1, "bfloat16")]
CASES += [("kimi_linear_tiny", 1, "float32")]


def bits(array):
    return np.asarray(array).astype(np.float32).tobytes()


def slot_bits(state, slot):
    return [bits(x.s[slot]) + bits(x.conv[slot]) for x in state.layers if hasattr(x, "s")]


@pytest.mark.parametrize(("name", "ranks", "dtype"), CASES)
def test_rows_do_not_see_their_neighbours(model, name, ranks, dtype):
    """A prompt and ten rows in slot 2 alone, and in slot 9 among busy slots of other lengths."""
    m = model(name, ranks, dtype=dtype)
    rng = np.random.default_rng(0)
    out, state = m.prefill(m.state(), 2, PROMPT)
    alone, lonely = [bits(out["logits"])], np.arange(SLOTS) == 2
    for t in range(10):
        logits, state = m.rows(state, np.full(SLOTS, 7 + t), np.full(SLOTS, 100 + t), lonely)
        alone.append(bits(logits[2]))
    expected = slot_bits(state, 2)

    state, lengths = m.state(), rng.integers(1, 250, SLOTS)
    for slot in range(SLOTS):
        if slot != 9:
            _, state = m.prefill(state, slot, rng.integers(0, 500, lengths[slot]))
        if slot == 5:
            out, state = m.prefill(state, 9, PROMPT)
    lengths[9] = 100
    busy = [bits(out["logits"])]
    for t in range(10):
        tokens = rng.integers(0, 500, SLOTS)
        tokens[9] = 7 + t
        active = rng.random(SLOTS) < 0.7
        active[9] = True
        logits, state = m.rows(state, tokens, lengths, active)
        lengths = lengths + active
        busy.append(bits(logits[9]))
    assert busy == alone
    assert slot_bits(state, 9) == expected


def test_idle_slots_keep_every_bit(model):
    m = model("k3_tiny")
    state = m.state()
    for slot in (0, 3):
        _, state = m.prefill(state, slot, PROMPT[: 40 + slot])
    before = jax.tree.map(np.array, state)
    active = np.arange(SLOTS) == 3
    _, state = m.rows(state, np.full(SLOTS, 5), np.where(active, 43, 0), active)
    _, state = m.prefill(state, 7, PROMPT)
    for old, new in zip(before.layers, state.layers, strict=True):
        if hasattr(old, "s"):
            assert bits(old.s[0]) == bits(new.s[0]) and bits(old.conv[0]) == bits(new.conv[0])
            assert bits(old.s[3]) != bits(new.s[3])
        else:
            mine = m.table[0]
            assert bits(old.pages[mine]) == bits(np.asarray(new.pages)[mine])


def test_a_slot_is_fresh_again(model):
    """No reset between two requests of a slot: position 0 starts from zeros, by page and by row."""
    m = model("k3_tiny")
    first, state = m.prefill(m.state(), 4, PROMPT)
    again, state = m.prefill(state, 4, PROMPT)
    assert bits(first["logits"]) == bits(again["logits"])
    active = np.arange(SLOTS) == 4
    used, _ = m.rows(state, np.full(SLOTS, 9), np.zeros(SLOTS), active)
    new, _ = m.rows(m.state(), np.full(SLOTS, 9), np.zeros(SLOTS), active)
    assert bits(used[4]) == bits(new[4])


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_page_program_inside_a_larger_one(model, ranks):
    """The engine runs pages in a device loop under a switch: the bits must be those of a page
    alone.
    """
    m = model("k3_tiny", ranks)
    pages = np.pad(PROMPT, (0, 28)).reshape(2, 64).astype(np.int32)

    def tick(weights, state, kind, tokens, lengths):
        def page(i, carry):
            state, out = carry
            hidden, state = prefill_page(
                m.config,
                weights,
                state,
                jnp.int32(2),
                tokens[i],
                i * 64,
                lengths[i],
                jnp.asarray(m.table[2]),
            )
            logits = head_logits(m.config, weights, hidden)
            return state, out.at[i].set(logits)

        def work(state):
            empty = jnp.zeros((2, 64, m.config.vocab_size))
            return jax.lax.fori_loop(0, 2, page, (state, empty))

        def idle(state):
            return state, jnp.zeros((2, 64, m.config.vocab_size))

        state, out = jax.lax.switch(kind, [idle, work], state)
        return out, state

    out, state = m.jit(tick, 3)(
        m.weights, m.state(), np.int32(1), pages, np.array([64, 36], np.int32)
    )
    expected, alone = m.prefill(m.state(), 2, PROMPT)
    assert bits(np.asarray(out).reshape(128, -1)[:100]) == bits(expected["logits"])
    assert slot_bits(state, 2) == slot_bits(alone, 2)


@pytest.mark.parametrize("tokens", [5, 64])
def test_experts_do_not_see_other_rows(model, tokens):
    m = model("k3_tiny")
    w, rng = m.weights.layers[2].mlp, np.random.default_rng(2)

    def layer(x, live):
        return moe.moe(m.config, w, x, live)

    run = jax.jit(jax.shard_map(layer, mesh=m.mesh, in_specs=P(), out_specs=P(), check_vma=False))
    mine = rng.normal(size=128).astype(np.float32)
    seen = set()
    for trial in range(6):
        x = rng.normal(size=(tokens, 128)).astype(np.float32)
        if trial == 1:
            x[:] = mine  # everybody wants the same experts
        place = int(rng.integers(tokens))
        x[place] = mine
        live = rng.random(tokens) < (0.0 if trial == 2 else 0.8)
        live[place] = True
        seen.add(bits(run(x, live)[place]))
    assert len(seen) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bf16_is_finite_and_near(model, dtype):
    """bf16 flips experts, so only the mean difference means something (the goldens' README: about
    0.12).
    """
    m = model("k3_tiny", dtype=dtype)
    golden = m.goldens()
    out, state = m.prefill(m.state(), 0, golden["ids_12"])
    difference = np.abs(out["logits"] - golden["logits_12"]).mean()
    assert difference < (1e-5 if dtype == "float32" else 0.5)
    logits, _ = m.rows(state, np.full(SLOTS, 5), np.full(SLOTS, 200), np.arange(SLOTS) < 1)
    assert np.isfinite(logits[0]).all()


@pytest.mark.parametrize(
    ("name", "ranks", "dtype"),
    [*CASES, ("k3_tiny_chat", 2, "float32"), ("kimi_linear_tiny", 2, "bfloat16")],
)
def test_accepted_rows_equal_single_steps(model, name, ranks, dtype):
    """For every number of accepted rows n: the state after a step of 8 rows of which n happened,
    and the logits of the next row, are those of n steps of one row, bit for bit."""
    m = model(name, ranks, dtype=dtype)
    ids = np.random.default_rng(4).integers(0, 500, 8)
    lonely, rows = np.arange(SLOTS) == 2, 8

    def tile(tokens):
        return np.broadcast_to(np.pad(tokens, (0, rows - len(tokens))), (SLOTS, rows))

    def counts(n):
        return np.where(lonely, n, 0).astype(np.int32)

    def after(state, n):
        """What anybody can see of n rows: the settled state, the cache rows, the next logits."""
        settled = m.settled(state)
        seen = slot_bits(settled, 2)
        cached = [np.asarray(x.pages)[m.table[2]] for x in state.layers if hasattr(x, "pages")]
        seen += [bits(c.reshape(-1, c.shape[-1])[: 100 + n]) for c in cached]
        logits, _ = m.rows(state, tile([9]), np.full(SLOTS, 100 + n), counts(1))
        return [*seen, bits(logits[2, 0])]

    _, state = m.prefill(m.state(rows), 2, PROMPT)
    single, logits_of = [], []
    for n in range(rows):
        logits, state = m.rows(state, tile(ids[n : n + 1]), np.full(SLOTS, 100 + n), counts(1))
        logits_of.append(bits(logits[2, 0]))
        single.append(after(jax.tree.map(jnp.copy, state), n + 1))
    for n in range(1, rows + 1):
        _, state = m.prefill(m.state(rows), 2, PROMPT)
        logits, state = m.rows(state, tile(ids), np.full(SLOTS, 100), counts(rows))
        assert [bits(row) for row in logits[2]] == logits_of
        state = m.accept(state, np.full(SLOTS, n), lonely)
        assert after(state, n) == single[n - 1], n
