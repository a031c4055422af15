"""Whole models against numbers that were not made with this code, by pages and by rows, on 1, 2 and
4 ranks.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.model.harness import sequences, worst

LOGITS, STREAMS, STATES = 2e-4, 5e-4, 1e-4
RANKS = [1, 2, 4]
CHECKPOINTS = ["k3_tiny", "kimi_linear_tiny"]


def check_states(golden, state, slots):
    for key in golden.files:
        if key.startswith(("kda_state_L", "kda_conv_")):
            head, number = key.rsplit("_", 1)
            if int(number) not in slots:
                continue
            layer = state.layers[int(head.split("_L")[1])]
            if key.startswith("kda_state"):
                found = np.asarray(layer.s)[int(number)]
            else:
                found = np.asarray(layer.conv)[int(number), :, "qkv".index(head.split("_")[2])]
            assert worst(found, golden[key]) < STATES, key


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_pages(model, name, ranks):
    m = model(name, ranks)
    golden, state = m.goldens(), m.state()
    aux = "aux_0" in golden.files
    for i in sequences(golden):
        out, state = m.prefill(state, i, golden[f"ids_{i}"])
        assert worst(out["logits"], golden[f"logits_{i}"]) < LOGITS, i
        if aux:
            streams = np.stack([out[f"entering_{layer}"] for layer in (3, 5, 8)], 1)
            assert worst(streams, golden[f"aux_{i}"]) < STREAMS, i
            chosen = np.stack([np.sort(out[f"router_{layer}"]) for layer in range(1, 10)])
            assert (chosen == golden[f"router_topk_{i}"]).all(), i
    check_states(golden, state, sequences(golden))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_rows_one_at_a_time(model, name, ranks):
    m = model(name, ranks)
    golden = m.goldens()
    numbers = sequences(golden)
    logits, state = m.recurrent(m.state(), [golden[f"ids_{i}"] for i in numbers])
    for i in numbers:
        assert worst(logits[i], golden[f"logits_{i}"]) < LOGITS, i
    check_states(golden, state, numbers)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_greedy(model, name):
    m = model(name)
    golden = m.goldens()
    numbers = sequences(golden, "greedy_")
    expected = np.stack([golden[f"greedy_{i}"] for i in numbers])
    prompts = [golden[f"ids_{i}"] for i in numbers]
    found = m.greedy(m.state(), prompts, expected.shape[1])
    assert (found == expected).all()


@pytest.mark.parametrize("page_tokens", [16, 32])
def test_other_page_sizes(model, page_tokens):
    m = model("k3_tiny", page_tokens=page_tokens)
    golden, state = m.goldens(), m.state()
    for i in (6, 9, 12):
        out, state = m.prefill(state, i, golden[f"ids_{i}"])
        assert worst(out["logits"], golden[f"logits_{i}"]) < LOGITS
    check_states(golden, state, (6, 9, 12))


def test_packed_experts(model):
    """Unpacking in the expert loop gives what dense experts give, by pages and by rows."""
    packed, dense = model("k3_tiny_chat", expert_format="packed"), model("k3_tiny_chat")
    ids, first = np.arange(100) * 17 % 1500, np.arange(16) < 1
    found, state = packed.prefill(packed.state(), 0, ids)
    rows, _ = packed.rows(state, np.full(16, 7), np.full(16, len(ids)), first)
    expected, state = dense.prefill(dense.state(), 0, ids)
    dense_rows, _ = dense.rows(state, np.full(16, 7), np.full(16, len(ids)), first)
    assert worst(found["logits"], expected["logits"]) < 1e-5
    assert worst(rows[0], dense_rows[0]) < 1e-5


def test_trace_of_every_layer(model):
    m = model("k3_tiny")
    golden = m.goldens("trace")
    out, _ = m.prefill(m.state(), 2, golden["ids"])
    for name in ("attn_mix", "attn_out", "mlp_mix", "mlp_out"):
        found = np.stack([out[f"{name}_{i}"] for i in range(10)])
        assert worst(found, golden[name]) < STREAMS, name
    entering = np.stack([out[f"entering_{i}"] for i in range(11)])
    assert worst(entering, golden["entering"]) < STREAMS
    blocks = np.stack([out[f"block_{i}"] for i in (0, 3, 6, 9)])
    assert worst(blocks, golden["blocks"]) < STREAMS
    assert worst(out["final_10"], golden["final_hidden"]) < STREAMS
    assert worst(out["logits"], golden["logits"]) < LOGITS


@pytest.mark.parametrize("rows", [1, 9])
def test_states_after_each_row(model, rows):
    """A prefix by pages, then nine rows: one by one, or n of a tile of nine."""
    m = model("k3_tiny")
    golden = m.goldens("trace")
    prefix, layer, ids = int(golden["rb_prefix"]), int(golden["rb_layer"]), golden["rb_ids"]
    active = np.arange(16) == 3

    def check(state, n):
        found = m.settled(state).layers[layer]
        assert worst(np.asarray(found.s)[3], golden["rb_states"][n]) < STATES
        conv = np.asarray(found.conv)[3].swapaxes(0, 1)
        assert worst(conv, golden["rb_conv"][n]) < STATES

    out, state = m.prefill(m.state(rows), 3, ids[:prefix])
    check(state, 0)
    assert worst(out["logits"][-1], golden["rb_logits"][0]) < LOGITS
    for n in range(1, 10):
        if rows == 1:
            tokens, at, counts = ids[prefix + n - 1 : prefix + n], prefix + n - 1, active
        else:
            _, state = m.prefill(m.state(rows), 3, ids[:prefix])
            tokens, at, counts = ids[prefix:], prefix, np.where(active, n, 0).astype(np.int32)
        tile = np.broadcast_to(tokens, (16, len(tokens)))
        logits, state = m.rows(state, tile, np.full(16, at), counts)
        check(state, n)
        expected = golden["rb_logits"][n : n + 1] if rows == 1 else golden["rb_logits"][1 : n + 1]
        assert worst(logits[3, : len(expected)], expected) < LOGITS


def test_chats(model):
    """The second K3 checkpoint: prompt scores and greedy answers."""
    m = model("k3_tiny_chat")
    chats = json.loads((m.folder / "chat_goldens.json").read_text())
    assert len(chats) == 20
    for group in (chats[:10], chats[10:]):
        check_chats(m, group)


def check_chats(m, chats):
    state = m.state()
    for i, chat in enumerate(chats):
        out, state = m.prefill(state, i, chat["prompt_ids"])
        logits = out["logits"].astype(np.float64)
        top = logits.max(-1, keepdims=True)
        values = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
        ids = chat["prompt_ids"][1:]
        assert worst(values[np.arange(len(ids)), ids], chat["prompt_logprobs"]) < LOGITS
    found = m.greedy(m.state(), [c["prompt_ids"] for c in chats], 24)
    assert found.tolist() == [c["greedy_ids"] for c in chats]
