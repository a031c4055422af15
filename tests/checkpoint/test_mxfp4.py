"""MXFP4 known answers, on the host and on the device."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from k3serve.checkpoint.mxfp4 import check_scales, dequantise
from k3serve.errors import CheckpointError
from k3serve.model.mxfp4 import dequantise as dequantise_jax
from tests.checkpoint.files import DATA

BOTH = [dequantise, dequantise_jax]


@pytest.mark.parametrize("function", BOTH)
@pytest.mark.parametrize(
    ("byte", "scale", "low", "high"),
    [
        (0x7A, 127, -1.0, 6.0),
        (0x1F, 125, -1.5, 0.125),
        (0x80, 3, 0.0, -0.0),
        (0x80, 200, 0.0, -0.0),
    ],
)
def test_known_answers(function, byte, scale, low, high):
    codes, scales = np.full((1, 16), byte, np.uint8), np.full((1, 1), scale, np.uint8)
    found = np.asarray(function(codes, scales, np.dtype(np.float32)))
    assert found.tolist() == [[low, high] * 16]
    assert np.signbit(found[0, 1]) == np.signbit(high)


@pytest.mark.parametrize("function", BOTH)
def test_golden_expert(function):
    golden = np.load(DATA / "k3_tiny" / "components.npz")
    layer = int(golden["moe_layer"])
    base = f"language_model.model.layers.{layer}.block_sparse_moe.experts.3."
    with safe_open(DATA / "k3_tiny" / f"model-{layer + 1:05}-of-000013.safetensors", "numpy") as f:
        for part in ("w1", "w2", "w3"):
            codes = f.get_tensor(f"{base}{part}.weight_packed")
            scales = f.get_tensor(f"{base}{part}.weight_scale")
            found = np.asarray(function(codes, scales, np.dtype(np.float32)))
            assert (found == golden[f"mxfp4_expert3_{part}"]).all()


def test_both_agree_on_every_code_and_scale_and_bf16_is_exact():
    codes = np.tile(np.arange(256, dtype=np.uint8), 254).reshape(254, 256)
    scales = np.repeat(np.arange(1, 255, dtype=np.uint8), 16).reshape(254, 16)
    with np.errstate(over="ignore"):  # 6 * 2^127 is no float32; both must say so alike
        host = dequantise(codes, scales)
        device = np.asarray(dequantise_jax(codes, scales, np.dtype(np.float32)))
        narrow = dequantise(codes, scales, ml_dtypes.bfloat16).astype(np.float32)
    normal = (np.abs(host) >= np.finfo(np.float32).tiny) | (host == 0)  # CPUs may flush the others
    assert (host == device)[normal].all()
    assert (host == narrow).all()


@pytest.mark.parametrize("byte", [0, 255])
def test_unusable_scales_are_named(byte):
    scales = np.full((4, 2), 120, np.uint8)
    scales[2, 1] = byte
    with pytest.raises(CheckpointError, match=rf"w1: scale byte {byte} found at \[2, 1\]"):
        check_scales("w1", scales)
