"""Loading a draft: the tensors of the published file, each rank its slice, and damage that is
named.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from safetensors import safe_open
from safetensors.numpy import load_file

from k3serve.checkpoint.draft import draft_tensors, load_draft
from k3serve.checkpoint.hf import Checkpoint
from k3serve.config import TargetConfig
from k3serve.draft_config import DraftConfig
from k3serve.errors import CheckpointError, ConfigError
from k3serve.model.draft_weights import check_draft_ranks, draft_layout
from tests.checkpoint.files import DATA, copy, edit
from tests.test_draft_config import published

TARGET = TargetConfig.from_dir(DATA / "k3_tiny")
K = "layers.1.self_attn.k_proj.weight"


def loaded(folder=DATA / "k3_tiny_dspark", ranks=1, dtype=np.float32, progress=None):
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("rank",))
    return load_draft(folder, DraftConfig.from_dir(folder, TARGET), mesh, dtype, progress)


def test_the_published_file_number_by_number():
    tensors = draft_tensors(DraftConfig.from_dict(*published()))
    assert sum(prod(t.shape) for t in tensors.values()) == 4_744_900_481
    assert tensors["fc.weight"].shape == (7168, 35840)
    assert tensors["confidence_head.proj.weight"].shape == (1, 7424)


def test_the_golden_file_holds_exactly_the_table():
    table = draft_tensors(DraftConfig.from_dir(DATA / "k3_tiny_dspark", TARGET))
    with safe_open(DATA / "k3_tiny_dspark" / "model.safetensors", "numpy") as file:
        found = {k: tuple(file.get_slice(k).get_shape()) for k in file.keys()}
    assert found == {name: tensor.shape for name, tensor in table.items()}


def test_values_come_from_the_right_tensors():
    w = loaded()
    t = load_file(DATA / "k3_tiny_dspark" / "model.safetensors")
    t = {name: values.astype(np.float32) for name, values in t.items()}
    layer, base = w.layers[1], "layers.1."
    pairs = [
        (w.embed, t["embed_tokens.weight"]),
        (w.head, t["lm_head.weight"].T),
        (w.fc, t["fc.weight"].T),
        (w.hidden_norm, t["hidden_norm.weight"]),
        (w.norm, t["norm.weight"]),
        (w.markov_in, t["markov_head.markov_w1.weight"]),
        (w.markov_out, t["markov_head.markov_w2.weight"].T),
        (w.confidence_w, t["confidence_head.proj.weight"][0]),
        (w.confidence_b, t["confidence_head.proj.bias"]),
        (layer.attn_norm, t[f"{base}input_layernorm.weight"]),
        (layer.mlp_norm, t[f"{base}post_attention_layernorm.weight"]),
        (layer.q_norm, t[f"{base}self_attn.q_norm.weight"]),
        (layer.k_norm, t[f"{base}self_attn.k_norm.weight"]),
        (layer.mlp.gate_up[:, 0], t[f"{base}mlp.gate_proj.weight"].T),
        (layer.mlp.gate_up[:, 1], t[f"{base}mlp.up_proj.weight"].T),
        (layer.mlp.down, t[f"{base}mlp.down_proj.weight"].T),
        (layer.out, t[f"{base}self_attn.o_proj.weight"].T),
    ]
    pairs += [(getattr(layer, p), t[f"{base}self_attn.{p}_proj.weight"].T) for p in "qkv"]
    assert all(np.array_equal(np.asarray(a), b) for a, b in pairs)


def test_four_ranks_hold_slices_and_copies_of_two_kv_heads():
    one, four = loaded(ranks=1), loaded(ranks=4)
    k, copies = np.asarray(one.layers[0].k), np.asarray(four.layers[0].k)
    assert k.shape == (128, 32) and copies.shape == (128, 64)
    for rank in range(4):
        shard = four.layers[0].k.addressable_shards[rank]
        assert np.array_equal(shard.data, k[:, 16 * (rank // 2) :][:, :16])
        assert four.layers[0].q.addressable_shards[rank].data.shape == (128, 16)
        assert four.markov_out.addressable_shards[rank].data.shape == (8, 160)
    same = jax.tree.map(np.array_equal, one.replace(layers=()), four.replace(layers=()))
    assert all(jax.tree.leaves(same))


def test_bfloat16_and_progress():
    seen = []
    w = loaded(ranks=2, dtype="bfloat16", progress=lambda done, total: seen.append((done, total)))
    assert w.fc.dtype == "bfloat16" and w.norm.dtype == np.float32
    assert seen[-1][0] == seen[-1][1] > 0 and len(seen) == len(jax.tree.leaves(w))


def test_float32_files_are_accepted(tmp_path):
    folder = copy("k3_tiny_dspark", tmp_path)
    edit(folder, K, lambda t: t.update({n: v.astype(np.float32) for n, v in t.items()}))
    assert np.array_equal(loaded(folder).fc, loaded().fc)


def test_no_confidence_head(tmp_path):
    folder = copy("k3_tiny_dspark", tmp_path)
    config = (folder / "config.json").read_text()
    without = config.replace('"enable_confidence_head": true', '"enable_confidence_head": false')
    (folder / "config.json").write_text(without)
    with pytest.raises(CheckpointError, match=r"confidence_head.proj.bias: found in"):
        loaded(folder)
    edit(folder, K, lambda t: [t.pop(n) for n in list(t) if n.startswith("confidence_head")])
    w = loaded(folder)
    assert w.confidence_w is None and w.confidence_b is None


@pytest.mark.parametrize("missing", [["embed_tokens.weight"], ["lm_head.weight"]])
def test_embedding_and_head_may_be_missing(tmp_path, missing):
    folder = copy("k3_tiny_dspark", tmp_path)
    edit(folder, K, lambda t: [t.pop(name) for name in missing])
    w = loaded(folder)
    assert (w.embed is None) == (missing == ["embed_tokens.weight"])
    assert (w.head is None) == (missing == ["lm_head.weight"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop(K), rf"{K}: missing .*1 tensors missing"),
        (lambda t: t.update({K: t[K][:16]}), rf"{K}: shape \[16, 128\].*expected \[32, 128\]"),
        (lambda t: t.update({K: t[K].astype(np.int32)}), f"{K}: dtype I32.*expected BF16 or F32"),
        (lambda t: t.update({"d2t": np.zeros(640, np.int32)}), "d2t: found in .*no such tensor"),
        (lambda t: t.update({"vision_tower.x": t[K]}), "vision_tower.x: found in"),
        (lambda t: t.pop("confidence_head.proj.bias"), "confidence_head.proj.bias: missing"),
    ],
)
def test_damage_is_named(tmp_path, change, said):
    folder = copy("k3_tiny_dspark", tmp_path)
    edit(folder, K, change)
    with pytest.raises(CheckpointError, match=said):
        loaded(folder)


def test_a_truncated_file(tmp_path):
    folder = copy("k3_tiny_dspark", tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        loaded(folder)


def test_a_rank_reads_no_more_than_its_share(monkeypatch):
    """Rank 3 of 4: of the two KV heads it reads one."""
    read = {}
    original = Checkpoint.read

    def spy(self, name, index=()):
        part = original(self, name, index)
        read[name] = read.get(name, 0) + part.size
        return part

    monkeypatch.setattr(Checkpoint, "read", spy)
    loaded(ranks=4)
    assert read[K] == 4 * 16 * 128  # one head for each rank
    assert read["layers.0.self_attn.q_proj.weight"] == 64 * 128
    assert read["fc.weight"] == 128 * 384  # once for all: it is the same on every rank


@pytest.mark.parametrize(
    ("heads", "kv_heads", "mlp", "ranks", "said"),
    [
        (4, 2, 192, 3, "3 ranks do not divide the draft's num_attention_heads=4"),
        (4, 2, 190, 4, "intermediate_size=190"),
        (12, 4, 192, 6, "6 ranks and the draft's num_key_value_heads=4: neither divides"),
        (12, 6, 192, 4, "4 ranks and the draft's num_key_value_heads=6: neither divides"),
    ],
)
def test_ranks_that_do_not_divide(heads, kv_heads, mlp, ranks, said):
    c = DraftConfig.from_dir(DATA / "k3_tiny_dspark", TARGET)
    c = replace(c, heads=heads, kv_heads=kv_heads, mlp_width=mlp)
    with pytest.raises(ConfigError, match=said):
        draft_layout(c, ranks, np.float32, own_embed=True, own_head=True)


def test_ranks_that_divide():
    c = DraftConfig.from_dict(*published())
    for ranks in (1, 2, 4, 8, 16, 32):
        check_draft_ranks(c, ranks)
