"""The draft's training form against the public library's numbers and a plain reference."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from scripts.train_nano import draft_export, draft_model
from scripts.train_nano.draft_spec import DraftSpec

GOLDENS = Path(__file__).parents[1] / "data/k3_tiny_dspark"
_block_rows = jax.jit(draft_model.block_rows, static_argnums=0)
SMALL = DraftSpec(
    aux_layers=(0, 1), vocab=40, hidden=24, layers=2, heads=4, kv_heads=2, head_dim=8,
    intermediate=16, window=5, block=4, markov_rank=3, mask_id=39,
)  # fmt: skip


def test_training_form_gives_the_numbers_of_the_library() -> None:
    """All anchors in one forward, teacher forcing; anchors before and beyond the window."""
    spec, params = draft_export.load(GOLDENS)
    tensors = load_file(GOLDENS / "model.safetensors")
    embed, head = (
        jnp.asarray(tensors[name], jnp.float32)
        for name in ("embed_tokens.weight", "lm_head.weight")
    )
    g = np.load(GOLDENS / "goldens.npz")
    aux, anchors = jnp.asarray(g["aux"])[None], jnp.asarray(g["anchors"])[None]
    ids = jnp.asarray(g["ids"])[None]
    context = draft_model.context_rows(spec, params, aux)
    np.testing.assert_allclose(context[0], g["context_c"], atol=1e-4)
    for index, layer in enumerate(params["layers"]):
        k, v = draft_model.keys_values(spec, layer, context[0], jnp.arange(aux.shape[1]))
        np.testing.assert_allclose(k, g["context_k"][index], atol=1e-4)
        np.testing.assert_allclose(v, g["context_v"][index], atol=1e-4)

    rows = _block_rows(spec, params, embed, context, ids, anchors)[0]
    assert len(rows) == 9
    for hidden, anchor in zip(rows, g["anchors"], strict=True):
        previous = ids[0, anchor : anchor + spec.block]
        np.testing.assert_array_equal(previous, g[f"tf_tokens_{anchor}"])
        logits = draft_model.slot_logits(params, head.T, hidden, previous)
        confidence = jax.nn.sigmoid(draft_model.confidence_logits(params, hidden, previous))
        np.testing.assert_allclose(hidden, g[f"hidden_{anchor}"], atol=1e-4)
        np.testing.assert_allclose(hidden @ head.T, g[f"base_logits_{anchor}"], atol=1e-4)
        np.testing.assert_allclose(logits, g[f"tf_logits_{anchor}"], atol=1e-4)
        np.testing.assert_allclose(confidence, g[f"tf_confidence_{anchor}"], atol=1e-5)


def test_config_has_the_fields_of_the_library() -> None:
    wanted = json.loads((GOLDENS / "config.json").read_text())
    spec = draft_export.read_spec(wanted)
    got = draft_export.config(spec, target="k3_tiny")
    wanted["transformer_layer_config"]["max_position_embeddings"] = 2048
    assert got == wanted


# ----------------------------------------------------------------------------------- reference


@pytest.fixture(scope="module")
def small_params() -> dict:
    """Parameters in which nothing is zero or one by construction."""
    leaves, tree = jax.tree.flatten(
        jax.jit(draft_model.init_params, static_argnums=0)(SMALL, jax.random.key(0))
    )
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [x + 0.2 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, noisy)


def _norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + SMALL.eps) * weight


def _turn(x: np.ndarray, position: int) -> np.ndarray:
    half = len(x) // 2
    z = (x[:half] + 1j * x[half:]) * np.exp(
        1j * position * SMALL.rope_theta ** (-np.arange(half) / half)
    )
    return np.concatenate([z.real, z.imag])


def _reference_block(
    p: dict, embed: np.ndarray, aux: np.ndarray, anchor_id: int, anchor: int
) -> np.ndarray:
    """One block, one row and one head at a time, from the equations of section 6.3."""
    dim = SMALL.head_dim
    first = max(0, anchor - SMALL.window)
    context = [_norm(aux[t].ravel() @ p["fc"], p["hidden_norm"]) for t in range(first, anchor)]
    x = [embed[anchor_id]] + [embed[SMALL.mask_id]] * (SMALL.block - 1)
    for layer in p["layers"]:
        own = [_norm(row, layer["input_norm"]) for row in x]
        seen = list(enumerate(context, first)) + list(enumerate(own, anchor))
        new = []
        for j, row in enumerate(own):
            heads = []
            for head in range(SMALL.heads):
                part = slice(head * dim, (head + 1) * dim)
                shared = head * SMALL.kv_heads // SMALL.heads
                kv = slice(shared * dim, (shared + 1) * dim)
                q = _turn(_norm((row @ layer["q"])[part], layer["q_norm"]), anchor + j)
                keys = [(t, c) for t, c in seen if t <= anchor + j]
                scores = [
                    q @ _turn(_norm((c @ layer["k"])[kv], layer["k_norm"]), t) / dim**0.5
                    for t, c in keys
                ]
                weights = np.exp(scores) / np.exp(scores).sum()
                heads.append(
                    sum(w * (c @ layer["v"])[kv] for w, (_, c) in zip(weights, keys, strict=True))
                )
            row = x[j] + np.concatenate(heads) @ layer["o"]
            normed = _norm(row, layer["post_norm"])
            gate = normed @ layer["gate"]
            new.append(row + (gate / (1 + np.exp(-gate)) * (normed @ layer["up"])) @ layer["down"])
        x = new
    return np.stack([_norm(row, p["norm"]) for row in x])


def test_many_anchors_in_one_forward_equal_blocks_computed_one_by_one(small_params: dict) -> None:
    rng = np.random.default_rng(0)
    aux = rng.normal(size=(2, 12, 2, SMALL.hidden))
    ids = rng.integers(0, 39, (2, 12)).astype(np.int32)
    embed = rng.normal(size=(SMALL.vocab, SMALL.hidden))
    anchors = np.array([[0, 3, 5, 11], [6, 1, 10, 7]], np.int32)  # before and beyond the window
    context = draft_model.context_rows(SMALL, small_params, jnp.asarray(aux, jnp.float32))
    got = _block_rows(SMALL, small_params, jnp.asarray(embed, jnp.float32), context, ids, anchors)
    exact = jax.tree.map(lambda x: np.asarray(x, np.float64), small_params)
    for row in range(2):
        for place, anchor in enumerate(anchors[row]):
            wanted = _reference_block(exact, embed, aux[row], ids[row, anchor], int(anchor))
            np.testing.assert_allclose(got[row, place], wanted, atol=2e-5)
