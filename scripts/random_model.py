"""A checkpoint with random weights in the shape of Kimi-Linear, small enough for a CPU: hidden size
512, 8 layers, 64 experts. For benchmarks; its text means nothing.

    python scripts/random_model.py FOLDER

Rule: the config names every size, the loader's own table names every tensor, one seed fixes every
number. Projections are drawn so that each layer changes the residual stream by about its own size.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

CONFIG: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "vocab_size": 8192,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3, 5, 6, 7],
        "full_attn_layers": [4, 8],
        "num_heads": 8,
        "head_dim": 64,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "q_lora_rank": None,
    "kv_lora_rank": 192,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "first_k_dense_replace": 1,
    "intermediate_size": 2048,
    "num_experts": 64,
    "num_experts_per_token": 8,
    "moe_intermediate_size": 256,
    "num_shared_experts": 1,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "topk_group": 1,
    "use_grouped_topk": True,
    "routed_scaling_factor": 2.446,
    "num_nextn_predict_layers": 0,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "model_max_length": 8192,
    "bos_token_id": 8100,
    "eos_token_id": 8101,
    "pad_token_id": 8102,
    "dtype": "bfloat16",
}


def write(folder: Path, config: dict[str, Any] = CONFIG, seed: int = 0) -> Path:
    """Writes config.json and model.safetensors; returns the folder."""
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file

    from k3serve.checkpoint.names import Tensor, tensor_table
    from k3serve.config import TargetConfig

    random = np.random.default_rng(seed)

    def numbers(name: str, tensor: Tensor) -> np.ndarray:
        shape = tensor.shape
        if name.endswith("norm.weight"):
            return np.ones(shape)
        if name.endswith("A_log"):
            return np.log(random.uniform(1, 16, shape))
        if name.endswith("dt_bias"):
            return random.uniform(-5, -1, shape)
        if name.endswith("e_score_correction_bias"):
            return random.normal(0, 0.05, shape)
        return random.normal(0, 1, shape) * shape[-1] ** -0.5

    tensors = {
        name: numbers(name, tensor).astype(
            np.float32 if tensor.dtype == "F32" else ml_dtypes.bfloat16
        )
        for name, tensor in tensor_table(TargetConfig.from_dict(config)).items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python scripts/random_model.py FOLDER")
    print(write(Path(sys.argv[1])))
