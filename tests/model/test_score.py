"""score(): the arrays it promises, one compilation for all lengths, and the engine's bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3serve.errors import RequestError
from k3serve.model import head_logits, page_scores, prefill_page
from k3serve.score import score
from tests.model.harness import DATA, worst

FOLDER = DATA / "k3_tiny"
NUMBERS = (0, 2, 6, 9, 12)  # 1 to 200 tokens


@pytest.fixture(scope="module")
def golden():
    return np.load(FOLDER / "goldens.npz")


@pytest.fixture(scope="module")
def arrays(golden):
    lines = [{"tokens": golden[f"ids_{i}"].tolist()} for i in NUMBERS]
    return score(FOLDER, lines, want_logits=True, top=5)


def test_values(golden, arrays):
    for i, number in enumerate(NUMBERS):
        logits = golden[f"logits_{number}"]
        length = len(logits)
        assert worst(arrays[f"logits_{i}"], logits) < 2e-4
        assert (arrays[f"greedy_{i}"] == logits.argmax(-1)).all()
        logprobs = arrays[f"logprobs_{i}"]
        assert logprobs.dtype == np.float32 and np.isnan(logprobs[0])
        if length > 1:
            assert worst(logprobs[1:], golden[f"prompt_logprobs_{number}"]) < 2e-4
        top = np.sort(logits, -1)[:, ::-1][:, :5]
        norm = np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
        assert worst(arrays[f"top_logprobs_{i}"], top - norm) < 2e-4
        assert arrays[f"top_ids_{i}"].shape == (length, 5)
        assert arrays[f"greedy_{i}"].dtype == arrays[f"top_ids_{i}"].dtype == np.int32


def test_a_token_among_the_best_has_the_same_bits(golden, arrays):
    found = 0
    for i, number in enumerate(NUMBERS):
        ids = golden[f"ids_{number}"]
        hit = arrays[f"top_ids_{i}"][:-1] == ids[1:, None]
        rows, columns = np.nonzero(hit)
        found += len(rows)
        chosen = arrays[f"logprobs_{i}"][1:][rows]
        assert (chosen == arrays[f"top_logprobs_{i}"][rows, columns]).all()
    assert found > 0


def test_only_what_is_asked_for():
    linear = DATA / "kimi_linear_tiny"
    arrays = score(linear, [{"text": "ab"}], encode=lambda text: [ord(c) for c in text])
    assert sorted(arrays) == ["greedy_0", "logprobs_0"]
    assert score(FOLDER, []) == {}


def test_same_bits_as_in_a_device_loop(model, golden, arrays):
    """As the engine does it: several pages in a loop, another slot, other pages, another cache
    size, fewer outputs.
    """
    m = model("k3_tiny")
    ids = golden["ids_12"]
    tokens = np.pad(ids, (0, 56)).reshape(4, 64).astype(np.int32)
    after = np.pad(ids[1:], (0, 57), constant_values=-1).reshape(4, 64).astype(np.int32)
    lengths = np.array([64, 64, 64, 8], np.int32)

    def tick(weights, state, tokens, after, lengths):
        def page(i, carry):
            state, out = carry
            table = jnp.asarray(m.table[3])
            hidden, state = prefill_page(
                m.config, weights, state, jnp.int32(3), tokens[i], i * 64, lengths[i], table
            )
            scores = page_scores(head_logits(m.config, weights, hidden), after[i], 20)
            return state, jax.tree.map(lambda o, s: o.at[i].set(s), out, scores)

        empty = (
            jnp.zeros((4, 64)),
            jnp.zeros((4, 64, 20), jnp.int32),
            jnp.zeros((4, 64, 20)),
        )
        state, out = jax.lax.fori_loop(0, 4, page, (state, empty))
        return out, state

    (logprobs, top_ids, top), _ = m.jit(tick, 3)(m.weights, m.state(), tokens, after, lengths)
    assert np.array_equal(np.ravel(logprobs)[:199], arrays["logprobs_4"][1:])
    assert np.array_equal(np.reshape(top_ids, (256, 20))[:200, :5], arrays["top_ids_4"])
    assert np.array_equal(np.reshape(top, (256, 20))[:200, :5], arrays["top_logprobs_4"])


def test_two_ranks_and_one_compilation(golden, arrays):
    lines = [{"tokens": golden[f"ids_{i}"].tolist()} for i in NUMBERS]
    compiled = []

    def count(event, *_, **__):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(count)
    after = []
    two = score(FOLDER, lines, ranks=2, progress=lambda done, total: after.append(len(compiled)))
    jax.monitoring.clear_event_listeners()
    assert after[0] == after[-1] > 0
    for i in range(len(NUMBERS)):
        found, expected = two[f"logprobs_{i}"][1:], arrays[f"logprobs_{i}"][1:]
        assert worst(found, expected) < 2e-4


BAD_TOKENS = [[], [640], [-1], [True], "12", None]
BAD_LINES = [{}, {"text": "a"}, {"text": 3}, {"tokens": [1], "text": "a"}, [1, 2]]


@pytest.mark.parametrize("line", [*BAD_LINES, *({"tokens": t} for t in BAD_TOKENS)])
def test_bad_lines_are_named(line):
    with pytest.raises(RequestError, match="input line 2"):
        score(FOLDER, [{"tokens": [1]}, line])


def test_bad_settings_are_named():
    for setting in ({"top": -1}, {"top": 641}, {"ranks": 0}, {"ranks": 99}):
        name = next(iter(setting))
        with pytest.raises(RequestError, match=f"{name}="):
            score(FOLDER, [{"tokens": [1]}], **setting)
