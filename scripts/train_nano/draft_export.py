"""Writes a draft as a checkpoint folder of the `speculators` library, and reads one back.

Rule: names, shapes and config fields are those of the published K3 draft (k3-architecture.md
section 6.1). Embedding and head are the target's, so the file leaves them out.
"""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from scripts.train_nano import spec as target_spec
from scripts.train_nano.draft_spec import DraftSpec
from scripts.train_nano.export import WEIGHTS
from scripts.train_nano.model import Params

# checkpoint name -> training name; matrices are transposed except the two Markov tables.
_TOP = {"fc.weight": "fc", "hidden_norm.weight": "hidden_norm", "norm.weight": "norm"}
_MARKOV = {f"markov_head.markov_{name}.weight": f"markov_{name}" for name in ("w1", "w2")}
_LAYER = {
    "input_layernorm.weight": "input_norm",
    "post_attention_layernorm.weight": "post_norm",
    "self_attn.q_norm.weight": "q_norm",
    "self_attn.k_norm.weight": "k_norm",
    **{f"self_attn.{name}_proj.weight": name for name in ("q", "k", "v", "o")},
    **{f"mlp.{name}_proj.weight": name for name in ("gate", "up", "down")},
}


def write(spec: DraftSpec, params: Params, folder: Path) -> None:
    """Writes `config.json` and `model.safetensors`, in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = to_checkpoint(params)
    save_file(dict(sorted(tensors.items())), folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)  # the library makes it private
    (folder / "config.json").write_text(json.dumps(config(spec), indent=2) + "\n")


def to_checkpoint(params: Params) -> dict[str, np.ndarray]:
    tensors = {name: _bf16(params[key].T) for name, key in _TOP.items()}
    tensors |= {name: _bf16(params[key]) for name, key in _MARKOV.items()}
    tensors["confidence_head.proj.weight"] = _bf16(params["confidence"])[None]
    tensors["confidence_head.proj.bias"] = _bf16(params["confidence_bias"]).reshape(1)
    for index, layer in enumerate(params["layers"]):
        for name, key in _LAYER.items():
            tensors[f"layers.{index}.{name}"] = _bf16(layer[key].T)
    return tensors


def _bf16(x: jax.Array) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(x, np.float32)).astype(ml_dtypes.bfloat16)


def load(folder: Path) -> tuple[DraftSpec, Params]:
    """Reads a draft in this layout as float32 parameters; its own embedding and head, if it has
    any, are ignored."""
    spec = read_spec(json.loads((folder / "config.json").read_text()))
    tensors = {n: jnp.asarray(t, jnp.float32) for n, t in load_file(folder / WEIGHTS).items()}
    params: Params = {key: tensors[name].T for name, key in _TOP.items()}
    params |= {key: tensors[name] for name, key in _MARKOV.items()}
    params["confidence"] = tensors["confidence_head.proj.weight"][0]
    params["confidence_bias"] = tensors["confidence_head.proj.bias"][0]
    params["layers"] = [
        {key: tensors[f"layers.{index}.{name}"].T for name, key in _LAYER.items()}
        for index in range(spec.layers)
    ]
    return spec, params


def read_spec(config: dict[str, Any]) -> DraftSpec:
    layer = config["transformer_layer_config"]
    return DraftSpec(
        aux_layers=tuple(config["aux_hidden_state_layer_ids"]),
        vocab=layer["vocab_size"],
        hidden=layer["hidden_size"],
        layers=layer["num_hidden_layers"],
        heads=layer["num_attention_heads"],
        kv_heads=layer["num_key_value_heads"],
        head_dim=layer["head_dim"],
        intermediate=layer["intermediate_size"],
        window=layer["sliding_window"],
        block=config["block_size"],
        markov_rank=config["markov_rank"],
        mask_id=config["mask_token_id"],
        rope_theta=layer["rope_parameters"]["rope_theta"],
        eps=layer["rms_norm_eps"],
    )


def config(spec: DraftSpec, target: str = "K3-nano") -> dict[str, Any]:
    """`config.json` as the library writes it."""
    return {
        "architectures": ["DSparkSpeculator"],
        "auto_map": {"": "config.DSparkSpeculatorConfig"},
        "aux_hidden_state_layer_ids": list(spec.aux_layers),
        "block_size": spec.block,
        "confidence_head_with_markov": True,
        "draft_vocab_size": spec.vocab,
        "dtype": "bfloat16",
        "enable_confidence_head": True,
        "markov_head_type": "vanilla",
        "markov_rank": spec.markov_rank,
        "mask_token_id": spec.mask_id,
        "sample_from_anchor": True,
        "sliding_window_non_causal": False,
        "speculators_config": _proposal_config(spec, target),
        "speculators_model_type": "dspark",
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": _layer_config(spec),
        "transformers_version": "5.24.0",
    }


def _proposal_config(spec: DraftSpec, target: str) -> dict[str, Any]:
    method = {
        "accept_tolerance": 0.0,
        "proposal_type": "greedy",
        "speculative_tokens": spec.block,
        "verifier_accept_k": 1,
    }
    return {
        "algorithm": "dspark",
        "default_proposal_method": "greedy",
        "proposal_methods": [method],
        "verifier": {
            "architectures": ["KimiK3ForConditionalGeneration"],
            "name_or_path": target,
        },
    }


def _layer_config(spec: DraftSpec) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.hidden,
        "initializer_range": 0.02,
        "intermediate_size": spec.intermediate,
        "layer_types": ["sliding_attention"] * spec.layers,
        "max_position_embeddings": target_spec.MAX_POSITIONS,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": spec.heads,
        "num_hidden_layers": spec.layers,
        "num_key_value_heads": spec.kv_heads,
        "pad_token_id": None,
        "rms_norm_eps": spec.eps,
        "rope_parameters": {"rope_theta": spec.rope_theta, "rope_type": "default"},
        "sliding_window": spec.window,
        "tie_word_embeddings": False,
        "transformers_version": "5.24.0",
        "use_cache": True,
        "use_sliding_window": True,
        "vocab_size": spec.vocab,
    }
