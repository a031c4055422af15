"""Names, shapes and dtypes of the K3 checkpoint, mapped to and from the training parameters.

Rule: a file here is what a loader of the real Kimi K3 expects:
matrices are `[out, in]`, experts are MXFP4 bytes, a few tensors are float32, the rest bfloat16.
"""

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from scripts.train_nano import mxfp4
from scripts.train_nano.model import Params
from scripts.train_nano.spec import N_RANKS, NAMED_SPECIALS, ModelSpec

PREFIX = "language_model.model."
HEAD = "language_model.lm_head.weight"
_EXPERTS = "block_sparse_moe.experts"
_QKV = ("q", "k", "v")

# checkpoint name below the layer -> training name. Matrices are transposed, vectors are not.
_NORMS = {
    "input_layernorm.weight": "input_norm",
    "post_attention_layernorm.weight": "post_norm",
    "self_attention_res_norm.weight": "attn_res_norm",
    "mlp_res_norm.weight": "mlp_res_norm",
}
_SCORES = {  # stored [1, hidden]
    "self_attention_res_proj.weight": "attn_res_proj",
    "mlp_res_proj.weight": "mlp_res_proj",
}
_KDA = {f"self_attn.{name}_proj.weight": name for name in ("q", "k", "v", "g", "b", "o")} | {
    "self_attn.f_a_proj.weight": "f_a",
    "self_attn.f_b_proj.weight": "f_b",
}
_KDA_F32 = {"self_attn.dt_bias": "dt_bias", "self_attn.o_norm.weight": "o_norm"}
_MLA = {
    "self_attn.q_a_proj.weight": "q_a",
    "self_attn.q_a_layernorm.weight": "q_a_norm",
    "self_attn.q_b_proj.weight": "q_b",
    "self_attn.kv_a_proj_with_mqa.weight": "kv_a",
    "self_attn.kv_a_layernorm.weight": "kv_a_norm",
    "self_attn.kv_b_proj.weight": "kv_b",
    "self_attn.g_proj.weight": "g",
    "self_attn.o_proj.weight": "o",
}
_DENSE = {f"mlp.{name}_proj.weight": name for name in ("gate", "up", "down")}
_MOE = {
    "block_sparse_moe.gate.weight": "router",
    "block_sparse_moe.routed_expert_down_proj.weight": "latent_down",
    "block_sparse_moe.routed_expert_norm.weight": "latent_norm",
    "block_sparse_moe.routed_expert_up_proj.weight": "latent_up",
} | {
    f"block_sparse_moe.shared_experts.{name}_proj.weight": f"shared_{name}"
    for name in ("gate", "up", "down")
}
_MOE_F32 = {"block_sparse_moe.gate.e_score_correction_bias": "router_bias"}


def _layer_names(spec: ModelSpec, index: int) -> tuple[dict[str, str], dict[str, str]]:
    """The bf16 and the f32 tensors of a layer that map one to one."""
    bf16 = dict(_NORMS)
    f32: dict[str, str] = {}
    if index in spec.mla_layers:
        bf16 |= _MLA
    else:
        bf16, f32 = bf16 | _KDA, f32 | _KDA_F32
    if index == 0:
        bf16 |= _DENSE
    else:
        bf16, f32 = bf16 | _MOE, f32 | _MOE_F32
    return bf16, f32


# ------------------------------------------------------------------------------------- export


def _bf16(x: Any) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(x, np.float32)).astype(ml_dtypes.bfloat16)


def _f32(x: Any) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(x, np.float32))


def to_checkpoint(spec: ModelSpec, params: Params) -> dict[str, np.ndarray]:
    """All tensors of the checkpoint, by name."""
    embed = np.asarray(params["embed"], np.float32)
    tensors = {
        PREFIX + "embed_tokens.weight": _bf16(embed),
        HEAD: _bf16(head_rows(embed)),
        PREFIX + "norm.weight": _bf16(params["norm"]),
        PREFIX + "output_attn_res_norm.weight": _bf16(params["out_res_norm"]),
        PREFIX + "output_attn_res_proj.weight": _bf16(params["out_res_proj"])[None],
    }
    for index, layer in enumerate(params["layers"]):
        for name, value in _layer_tensors(spec, index, layer):
            tensors[f"{PREFIX}layers.{index}.{name}"] = value
    return tensors


def head_rows(embed: np.ndarray) -> np.ndarray:
    """The output head: the embedding, with zero rows for the reserved ids that nothing trained."""
    rows = embed.copy()
    for offset in range(len(embed) - N_RANKS):
        if offset not in NAMED_SPECIALS:
            rows[N_RANKS + offset] = 0.0
    return rows


def _layer_tensors(spec: ModelSpec, index: int, p: Params) -> Iterator[tuple[str, np.ndarray]]:
    bf16, f32 = _layer_names(spec, index)
    for name, key in bf16.items():
        yield name, _bf16(np.asarray(p[key]).T)
    for name, key in f32.items():
        yield name, _f32(p[key])
    for name, key in _SCORES.items():
        yield name, _bf16(p[key])[None]
    if "conv" in p:
        for name, conv in zip(_QKV, np.split(np.asarray(p["conv"]), 3, axis=1), strict=True):
            yield f"self_attn.{name}_conv1d.weight", _f32(conv.T[:, None, :])
        padding = spec.kda_dim - spec.kda_heads  # K3 stores head_dim entries; the rest is zero
        yield "self_attn.A_log", _f32(np.pad(np.asarray(p["a_log"]), (0, padding)))
    if "w1" in p:
        for expert in range(spec.experts):
            for key in ("w1", "w2", "w3"):
                packed, scale = mxfp4.pack(p[key][expert])
                yield f"{_EXPERTS}.{expert}.{key}.weight_packed", packed
                yield f"{_EXPERTS}.{expert}.{key}.weight_scale", scale


# -------------------------------------------------------------------------------------- import


def from_checkpoint(spec: ModelSpec, tensors: dict[str, np.ndarray]) -> Params:
    """Parameters as `model.forward` uses them, every weight upcast exactly to float32."""

    def get(name: str) -> np.ndarray:
        return np.asarray(tensors[name], np.float32)

    return {
        "embed": get(PREFIX + "embed_tokens.weight"),
        "head": get(HEAD),
        "norm": get(PREFIX + "norm.weight"),
        "out_res_norm": get(PREFIX + "output_attn_res_norm.weight"),
        "out_res_proj": get(PREFIX + "output_attn_res_proj.weight")[0],
        "layers": [_read_layer(spec, index, tensors) for index in range(spec.layers)],
    }


def _read_layer(spec: ModelSpec, index: int, tensors: dict[str, np.ndarray]) -> Params:
    prefix = f"{PREFIX}layers.{index}."

    def get(name: str) -> np.ndarray:
        return np.asarray(tensors[prefix + name], np.float32)

    bf16, f32 = _layer_names(spec, index)
    layer = {key: get(name).T for name, key in bf16.items()}
    layer |= {key: get(name) for name, key in f32.items()}
    layer |= {key: get(name)[0] for name, key in _SCORES.items()}
    if index not in spec.mla_layers:
        convs = [get(f"self_attn.{name}_conv1d.weight")[:, 0, :].T for name in _QKV]
        layer["conv"] = np.concatenate(convs, 1)
        layer["a_log"] = get("self_attn.A_log")[: spec.kda_heads]
    if index > 0:
        for key in ("w1", "w2", "w3"):
            names = [f"{prefix}{_EXPERTS}.{e}.{key}.weight" for e in range(spec.experts)]
            pairs = [(tensors[n + "_packed"], tensors[n + "_scale"]) for n in names]
            layer[key] = np.stack([mxfp4.unpack(*pair).T for pair in pairs])
    return layer
