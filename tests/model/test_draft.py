"""The draft against the numbers of the speculators library, and what a slot's guesses depend on."""

from __future__ import annotations

from functools import cache

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from k3serve.model.draft import UNLIKELY
from tests.model.draft_harness import PAGE, ROWS, Draft, ints
from tests.model.harness import DATA, SLOTS, worst

GOLDENS = np.load(DATA / "k3_tiny_dspark" / "goldens.npz")
ANCHORS = [int(p) for p in GOLDENS["anchors"]]
FEATS = GOLDENS["aux"].reshape(len(GOLDENS["aux"]), -1)
SLOT_OF = {p: (5 * i + 2) % SLOTS for i, p in enumerate(ANCHORS)}


@pytest.fixture(scope="module")
def draft(model):
    return cache(lambda ranks=1, dtype="float32": Draft(model("k3_tiny", ranks), dtype=dtype))


@pytest.fixture(scope="module")
def filled(draft):
    """ranks -> a ring with each anchor's context in its slot, and the anchors' blocks."""

    @cache
    def make(ranks):
        m = draft(ranks)
        ring = m.ring()
        for p in ANCHORS:
            ring = m.fill(ring, SLOT_OF[p], FEATS[:p])
        return ring, m.block(ring, np.arange(SLOTS, dtype=np.int32), *tile())

    return make


def tile():
    """Anchor tokens and positions of all slots; unused slots stand at 0."""
    anchors, positions = np.zeros(SLOTS, np.int32), np.zeros(SLOTS, np.int32)
    for p in ANCHORS:
        anchors[SLOT_OF[p]], positions[SLOT_OF[p]] = GOLDENS["ids"][p], p
    return anchors, positions


def file_heads(stored):
    """[..., stored heads, D] -> the file's heads; copies must be equal."""
    heads, stored = GOLDENS["context_k"].shape[2], np.asarray(stored)
    copies = stored.reshape(*stored.shape[:-2], heads, -1, stored.shape[-1])
    assert (copies == copies[..., :1, :]).all()
    return copies[..., 0, :]


def bits(values):
    return np.asarray(values).astype(np.float32).tobytes()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_context_rows(draft, ranks):
    c, keys, values = draft(ranks).context(FEATS, np.arange(len(FEATS), dtype=np.int32))
    assert worst(c, GOLDENS["context_c"]) < 1e-4
    for name, found in (("context_k", keys), ("context_v", values)):
        for layer, rows in enumerate(found):
            rows = file_heads(np.asarray(rows).reshape(len(FEATS), -1, 16))
            assert worst(rows, GOLDENS[name][layer]) < 1e-4


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_blocks_of_all_anchors(filled, ranks):
    _, (hidden, base, keys, values) = filled(ranks)
    for p in ANCHORS:
        slot = SLOT_OF[p]
        assert worst(hidden[slot], GOLDENS[f"hidden_{p}"]) < 1e-4
        assert worst(base[slot], GOLDENS[f"base_logits_{p}"]) < 1e-4
        for name, found in (("block_k", keys), ("block_v", values)):
            for layer, rows in enumerate(found):
                rows = np.asarray(rows).reshape(SLOTS, 8, -1, 16)[slot]
                assert worst(file_heads(rows), GOLDENS[f"{name}_{p}"][layer]) < 1e-4


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_markov_and_confidence_heads(draft, filled, ranks):
    _, (hidden, base, *_) = filled(ranks)
    for p in ANCHORS:
        rows = hidden[SLOT_OF[p]], ints(GOLDENS[f"tf_tokens_{p}"])
        logits, sure = draft(ranks).exact_head(base[SLOT_OF[p]], *rows)
        assert worst(logits, GOLDENS[f"tf_logits_{p}"]) < 1e-4
        assert worst(sure, GOLDENS[f"tf_confidence_{p}"]) < 1e-5


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_greedy_drafts(draft, filled, ranks):
    ring, _ = filled(ranks)
    drafts, logits, sure = draft(ranks).draft(ring, *tile())
    for p in ANCHORS:
        assert drafts[SLOT_OF[p]].tolist() == GOLDENS[f"greedy_drafts_{p}"].tolist()
        assert worst(logits[SLOT_OF[p]], GOLDENS[f"greedy_logits_{p}"]) < 1e-4
        assert worst(sure[SLOT_OF[p]], GOLDENS[f"greedy_confidence_{p}"]) < 1e-5


@pytest.mark.parametrize("dropped", ["embed_tokens.weight", "lm_head.weight"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_embedding_and_head_of_the_target(model, filled, tmp_path, ranks, dropped):
    """The golden draft's copies equal the target's, so the blocks keep their bits without them."""
    tensors = load_file(DATA / "k3_tiny_dspark" / "model.safetensors")
    del tensors[dropped]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((DATA / "k3_tiny_dspark" / "config.json").read_text())
    m = Draft(model("k3_tiny", ranks), tmp_path)
    assert (m.weights.embed is None) == (dropped == "embed_tokens.weight")
    assert (m.weights.head is None) == (dropped == "lm_head.weight")
    ring, expected = filled(ranks)
    found = m.block(ring, np.arange(SLOTS, dtype=np.int32), *tile())
    assert bits(found[0]) == bits(expected[0]) and bits(found[1]) == bits(expected[1])


def test_a_drafts_own_embedding_and_head_win(model, filled, tmp_path):
    tensors = load_file(DATA / "k3_tiny_dspark" / "model.safetensors")
    for name in ("embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name] * 2
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((DATA / "k3_tiny_dspark" / "config.json").read_text())
    m = Draft(model("k3_tiny"), tmp_path)
    ring, (hidden, *_) = filled(1)
    other, base, *_ = m.block(ring, np.arange(SLOTS, dtype=np.int32), *tile())
    assert worst(other, hidden) > 0.1
    head = np.asarray(model("k3_tiny").weights.head)
    assert worst(base[2], np.asarray(other[2]) @ (head * 2)) < 1e-3


def test_fewer_drafts_are_the_first_rows(draft, filled):
    """The block is causal: leaving out its end changes no row by more than rounding."""
    from k3serve.model import draft as d

    m, (ring, (hidden, *_)) = draft(), filled(1)

    def short(w, t, ring, anchors, positions):
        return d.block_hidden(m.config, w, t.embed, ring, anchors, positions, 3)

    program = m.map(short, (m.ring_specs, *[jax.P()] * 2), jax.P())
    assert worst(program(ring, *tile()), hidden[:, :3]) < 1e-5


# ------------------------------------------------------------------------------------------------
# the ring


def by_rows(m, feats, slot=3, seed=0):
    """A ring filled like decoding does: a page, then tiles of which some rows are accepted, among
    other slots that do the same out of step. Rejected rows hold nonsense.
    """
    rng = np.random.default_rng(seed)
    ring = m.fill(m.ring(), slot, feats[:20])
    at = 20
    while at < len(feats):
        n = int(min(rng.integers(1, ROWS + 1), len(feats) - at))
        rows = rng.normal(size=(SLOTS, ROWS, feats.shape[1])).astype(np.float32)
        rows[slot, :n] = feats[at : at + n]
        positions, accepted = rng.integers(0, 200, SLOTS), rng.integers(0, ROWS + 1, SLOTS)
        positions[slot], accepted[slot] = at, n
        slots = np.arange(SLOTS, dtype=np.int32)
        ring = m.rows(ring, slots, rows, ints(positions), ints(accepted))
        at += n
    return ring


def context_of(ring, slot, window, p):
    """The visible context of one slot by position: {t: bits of its keys and values}."""
    held = np.asarray(ring.positions)[slot]
    places = {int(t): i for i, t in enumerate(held) if p - window <= t < p and t >= 0}
    layers = [np.asarray(x)[slot] for x in (*ring.k, *ring.v)]
    return {t: [x[i] for x in layers] for t, i in places.items()}


@pytest.mark.parametrize("length", [21, 60, 75, 141])
def test_rows_and_pages_leave_the_same_context(draft, length):
    """Before and long after the ring has wrapped; nothing of rejected rows is visible."""
    m = draft()
    window = m.config.window
    paged = context_of(m.fill(m.ring(), 7, FEATS[:length]), 7, window, length)
    rowed = context_of(by_rows(m, FEATS[:length]), 3, window, length)
    assert set(paged) == set(rowed) == set(range(max(0, length - window), length))
    for t in paged:
        assert all(worst(a, b) < 1e-5 for a, b in zip(paged[t], rowed[t], strict=True))


def test_a_ring_filled_by_rows_drafts_the_goldens(draft):
    m, p = draft(), 141
    ring = by_rows(m, FEATS[:p])
    anchors, positions = np.full(SLOTS, GOLDENS["ids"][p]), np.full(SLOTS, p)
    drafts, logits, _ = m.draft(ring, anchors, positions)
    assert drafts[3].tolist() == GOLDENS[f"greedy_drafts_{p}"].tolist()
    assert worst(logits[3], GOLDENS[f"greedy_logits_{p}"]) < 1e-4


def test_the_whole_window_survives_a_step(draft):
    """Of eight rows one is accepted at a wrapped position: no key inside the window is lost."""
    m = draft()
    ring = m.fill(m.ring(), 0, FEATS[:100])
    rows = np.repeat(FEATS[None, 100 : 100 + ROWS], SLOTS, 0)
    accepted = np.where(np.arange(SLOTS) == 0, 1, 0)
    slots = np.arange(SLOTS, dtype=np.int32)
    ring = m.rows(ring, slots, rows, np.full(SLOTS, 100, np.int32), ints(accepted))
    window = m.config.window
    assert set(context_of(ring, 0, window, 101)) == set(range(101 - window, 101))
    assert int(np.asarray(ring.positions).max()) == 100  # the eight rejected rows left nothing


def test_accepted_rows_leave_the_bits_of_single_steps(draft):
    """For every accepted count, also across the ring's end: the whole ring of a step of nine rows
    is that of steps of one row in the same program."""
    m, p, slot = draft(), 77, 5
    ring = m.fill(m.ring(), slot, FEATS[:p])
    slots = np.arange(SLOTS, dtype=np.int32)

    def step(ring, start, count):
        rows = np.full((SLOTS, ROWS, FEATS.shape[1]), 7.0, np.float32)
        rows[slot] = FEATS[start : start + ROWS]
        where = np.where(slots == slot, start, 50)
        return m.rows(ring, slots, rows, ints(where), ints(np.where(slots == slot, count, 0)))

    single = ring
    for n in range(1, ROWS + 1):
        single, together = step(single, p + n - 1, 1), step(ring, p, n)
        for a, b in zip(*map(jax.tree.leaves, (single, together)), strict=True):
            assert bits(a) == bits(b), n
    assert p % ring.positions.shape[1] + ROWS > ring.positions.shape[1]


def test_positions_from_the_anchor_on_are_not_seen(draft):
    """A ring that was filled three rows further drafts for the earlier anchor as if it were not."""
    m, p = draft(), 77
    ring = m.fill(m.ring(), 0, FEATS[: p + 3])
    anchors, positions = np.full(SLOTS, GOLDENS["ids"][p]), np.full(SLOTS, p)
    hidden, *_ = m.block(ring, np.arange(SLOTS, dtype=np.int32), ints(anchors), ints(positions))
    assert worst(hidden[0], GOLDENS[f"hidden_{p}"]) < 1e-4


def test_slots_keep_every_bit_when_nothing_is_accepted(draft, filled):
    m, (ring, _) = draft(), filled(1)
    rows = np.ones((SLOTS, ROWS, FEATS.shape[1]), np.float32)
    slots, nothing = np.arange(SLOTS, dtype=np.int32), np.zeros(SLOTS, np.int32)
    same = m.rows(ring, slots, rows, tile()[1], nothing)
    assert all(bits(a) == bits(b) for a, b in zip(*map(jax.tree.leaves, (ring, same)), strict=True))
    other = m.fill(ring, 1, FEATS[:70])
    kept = np.arange(SLOTS) != 1
    for a, b in zip(*map(jax.tree.leaves, (ring, other)), strict=True):
        assert bits(np.asarray(a)[kept]) == bits(np.asarray(b)[kept])


def test_a_slot_is_fresh_again(draft):
    """A new request starts at page 0, or at row 0: what the last one left is not seen."""
    m = draft()
    used = m.fill(m.ring(), 4, FEATS[:120])
    for count in (3, PAGE + 5):
        a = m.fill(used, 4, FEATS[40 : 40 + count])
        b = m.fill(m.ring(), 4, FEATS[40 : 40 + count])
        inputs = np.full(SLOTS, 77, np.int32), np.full(SLOTS, count, np.int32)
        slots = np.arange(SLOTS, dtype=np.int32)
        assert bits(m.block(a, slots, *inputs)[0][4]) == bits(m.block(b, slots, *inputs)[0][4])
        assert bits(np.asarray(a.positions)[4]) == bits(np.asarray(b.positions)[4])
    rows, zeros = np.repeat(FEATS[None, :ROWS], SLOTS, 0), np.zeros(SLOTS, np.int32)
    ring = m.rows(used, np.arange(SLOTS, dtype=np.int32), rows, zeros, zeros + 2)
    assert sorted(np.asarray(ring.positions)[4])[-3:] == [-1, 0, 1]


# ------------------------------------------------------------------------------------------------
# independence


@pytest.mark.parametrize(("ranks", "dtype"), [(1, "float32"), (4, "float32"), (1, "bfloat16")])
def test_a_slot_does_not_see_its_neighbours(draft, ranks, dtype):
    """The same tokens alone in slot 1, and in slot 11 among busy slots: rings and blocks equal."""
    m, rng = draft(ranks, dtype), np.random.default_rng(3)
    slots = np.arange(SLOTS, dtype=np.int32)
    feats = FEATS.astype(m.dtype)

    def run(slot, busy):
        ring = m.ring()
        for other in range(SLOTS) if busy else ():
            ring = m.fill(ring, other, rng.permutation(feats)[: rng.integers(1, 150)])
        ring = m.fill(ring, slot, feats[:90])
        rows = np.stack([rng.permutation(feats)[:ROWS] for _ in range(SLOTS)])
        rows[slot] = feats[90 : 90 + ROWS]
        where, accepted = rng.integers(1, 150, SLOTS), rng.integers(0, ROWS, SLOTS)
        where[slot], accepted[slot] = 90, 4
        order = rng.permutation(slots) if busy else slots  # the tile's order is not the slots'
        accepted = accepted * busy + (slots == slot) * accepted * (not busy)
        ring = m.rows(ring, order, rows[order], ints(where[order]), ints(accepted[order]))
        anchors, positions = rng.integers(0, 600, SLOTS), rng.integers(1, 150, SLOTS)
        anchors[slot], positions[slot] = 33, 94
        out = m.block(ring, order, ints(anchors[order]), ints(positions[order]))
        at = list(order).index(slot)
        logits, sure = m.exact_head(out[1][:, 2], out[0][:, 2], ints(anchors[order]))
        kept = [np.asarray(x)[slot] for x in jax.tree.leaves(ring)]
        return [bits(x) for x in (*kept, out[0][at], out[1][at], logits[at], sure[at])]

    assert run(1, False) == run(11, True)


# ------------------------------------------------------------------------------------------------
# the Markov head with the best logits only


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_top_markov_bias(draft, filled, ranks):
    m = draft(ranks)
    _, (hidden, base, *_) = filled(ranks)
    flat, rows = np.asarray(base).reshape(-1, 640), np.asarray(hidden).reshape(-1, 128)
    previous = ints(np.random.default_rng(1).integers(0, 640, len(flat)))
    exact, _ = m.exact_head(flat, rows, previous)
    whole, _ = m.head(640)(flat, rows, previous)
    assert worst(whole, exact) < 1e-5
    some, _ = m.head(16)(flat, rows, previous)
    some, exact = np.asarray(some), np.asarray(exact)
    best = np.argsort(-flat, axis=-1, kind="stable")[:, :16]
    inside = np.zeros(flat.shape, bool)
    np.put_along_axis(inside, best, True, axis=1)
    assert worst(some[inside], exact[inside]) < 1e-5
    assert worst(some[~inside], flat[~inside] - UNLIKELY) < 1e-2
    assert (some.argmax(-1) == np.where(inside, exact, -np.inf).argmax(-1)).all()
