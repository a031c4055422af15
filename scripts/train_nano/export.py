"""Writes a trained model as a Kimi K3 checkpoint folder, and reads one back.

Rule: what is evaluated is what was written: `load` undoes `write` from the files alone.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from safetensors.numpy import load_file, save_file

from scripts.train_nano import layout, spec
from scripts.train_nano.model import Params
from scripts.train_nano.spec import ModelSpec

WEIGHTS = "model.safetensors"


def write(model: ModelSpec, params: Params, tokenizer: Path, folder: Path) -> None:
    """Writes weights, configs and tokenizer files (copied from the folder `tokenizer`)."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = layout.to_checkpoint(model, params)
    save_file(dict(sorted(tensors.items())), folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)  # the library makes it private
    _write_json(folder / "config.json", config(model))
    generation = {"max_length": spec.MAX_POSITIONS, "eos_token_id": spec.END_OF_MSG_ID}
    _write_json(folder / "generation_config.json", generation)
    for name in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, folder / name)


def load(model: ModelSpec, folder: Path) -> Params:
    """Reads the weights of `write` as float32 parameters."""
    params = layout.from_checkpoint(model, load_file(folder / WEIGHTS))
    return jax.tree.map(jnp.asarray, params)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def config(model: ModelSpec) -> dict[str, Any]:
    """`config.json` with the keys of the K3 release, without the vision part."""
    ids = {
        "bos_token_id": spec.BOS_ID,
        "eos_token_id": spec.END_OF_MSG_ID,
        "pad_token_id": spec.PAD_ID,
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        **ids,
        "media_placeholder_token_id": spec.MEDIA_PAD_ID,
        "image_placeholder": "<|kimi_image_placeholder|>",
        "ignore_index": -100,
        "tie_word_embeddings": False,
        "text_config": _text_config(model) | ids,
    }


def _text_config(model: ModelSpec) -> dict[str, Any]:
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "vocab_size": model.vocab,
        "hidden_size": model.hidden,
        "intermediate_size": model.dense,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.mla_heads,
        "num_key_value_heads": model.mla_heads,
        "max_position_embeddings": spec.MAX_POSITIONS,
        "initializer_range": 0.02,
        "rms_norm_eps": model.eps,
        "tie_word_embeddings": False,
        "use_cache": True,
        "num_nextn_predict_layers": 0,
        "attn_res_block_size": model.block_size,
        "hidden_act": "situ",
        "activation_situ_beta": model.situ_beta,
        "activation_situ_linear_beta": model.situ_linear_beta,
        "q_lora_rank": model.q_lora,
        "kv_lora_rank": model.kv_lora,
        "qk_nope_head_dim": model.nope_dim,
        "qk_rope_head_dim": model.rope_dim,
        "v_head_dim": model.v_dim,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "linear_attn_config": _linear_attention_config(model),
        **_moe_config(model),
        "quantization_config": _quantization_config(),
        "temperature": 1.0,
        "top_k": 50,
        "top_p": 1.0,
        "transformers_version": "4.56.2",
    }


def _linear_attention_config(model: ModelSpec) -> dict[str, Any]:
    numbers = range(1, model.layers + 1)  # this block counts layers from 1
    return {
        "full_attn_layers": [n for n in numbers if n - 1 in model.mla_layers],
        "kda_layers": [n for n in numbers if n - 1 not in model.mla_layers],
        "gate_lower_bound": model.gate_lower_bound,
        "head_dim": model.kda_dim,
        "num_heads": model.kda_heads,
        "short_conv_kernel_size": model.conv_width,
        "use_full_rank_gate": True,
    }


def _moe_config(model: ModelSpec) -> dict[str, Any]:
    return {
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_experts": model.experts,
        "num_experts_per_token": model.top_k,
        "num_shared_experts": model.shared_experts,
        "moe_intermediate_size": model.expert_dim,
        "routed_expert_hidden_size": model.latent,
        "latent_moe_use_norm": True,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
    }


def _quantization_config() -> dict[str, Any]:
    weights: dict[str, Any] = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": 32,
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "scale_dtype": "torch.uint8",
        "strategy": "group",
        "symmetric": True,
        "type": "float",
        "zp_dtype": None,
    }
    group = {
        "format": "mxfp4-pack-quantized",
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    return {
        "config_groups": {"group_0": group},
        "format": "mxfp4-pack-quantized",
        "global_compression_ratio": None,
        "ignore": [
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            "re:.*lm_head.*",
            "re:.*vision_tower.*",
            "re:.*mm_projector.*",
        ],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }
