"""The tensor table: the real K3 to the byte, and the golden files name by name."""

from __future__ import annotations

import json

import pytest
from safetensors import safe_open

from k3serve.checkpoint.names import VISION_PREFIXES, tensor_table
from k3serve.config import TargetConfig
from tests.checkpoint.files import DATA


def config(name):
    return TargetConfig.from_dict(json.loads((DATA / "configs" / f"{name}.json").read_text()))


def test_kimi_k3_names_and_bytes():
    table = tensor_table(config("kimi_k3"))
    assert len(table) == 497_220
    assert sum(t.bytes for t in table.values()) == 1_560_860_324_864
    kinds = [t.dtype for t in table.values()]
    assert (kinds.count("U8"), kinds.count("BF16"), kinds.count("F32")) == (494_592, 2_122, 506)
    text = sum(t.bytes for n, t in table.items() if not n.startswith(VISION_PREFIXES))
    assert text == 1_559_965_606_912
    base = "language_model.model.layers."
    assert table[f"{base}3.self_attn.q_b_proj.weight"].shape == (18432, 1536)
    assert table[f"{base}92.block_sparse_moe.experts.895.w2.weight_scale"].shape == (3584, 96)


def test_kimi_linear_names():
    table = tensor_table(config("kimi_linear_48b"))
    layer = "model.layers.1."
    assert table[f"{layer}self_attn.A_log"].shape == (1, 1, 32, 1)
    assert table[f"{layer}block_sparse_moe.experts.255.w1.weight"].shape == (1024, 2304)
    assert "model.layers.3.self_attn.q_proj.weight" in table
    assert not any("packed" in name or "res_proj" in name for name in table)


@pytest.mark.parametrize("name", ["k3_tiny", "k3_tiny_chat", "kimi_linear_tiny"])
def test_golden_files_hold_exactly_the_table(name):
    table, found = tensor_table(TargetConfig.from_dir(DATA / name)), {}
    for file in (DATA / name).glob("*.safetensors"):
        with safe_open(file, "numpy") as f:
            slices = {key: f.get_slice(key) for key in f.keys()}
            found |= {k: (tuple(s.get_shape()), s.get_dtype()) for k, s in slices.items()}
    assert set(found) == set(table)
    for tensor, (shape, dtype) in found.items():
        assert table[tensor].accepts(shape) and table[tensor].accepts_dtype(dtype), tensor
