"""TargetConfig: the two real configs, the tiny ones, and refusals that name key, value and what is
supported.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from k3serve.config import TargetConfig, check_ranks
from k3serve.errors import ConfigError

DATA = Path(__file__).parent / "data"


def raw(name):
    return json.loads((DATA / "configs" / f"{name}.json").read_text())


def test_kimi_k3():
    c = TargetConfig.from_dict(raw("kimi_k3"))
    assert c.family == "kimi_k3" and c.num_layers == 93 and c.hidden_size == 7168
    assert c.mla_layers == (*range(3, 92, 4), 92) and len(c.kda_layers) == 69
    assert (c.kda_heads, c.kda_head_dim, c.kda_size, c.gate_lower_bound) == (96, 128, 12288, -5.0)
    assert (c.q_lora_rank, c.kv_lora_rank, c.nope_dim, c.rope_dim) == (1536, 512, 128, 64)
    assert c.latent_lanes == 640 and c.mla_norm_eps == 1e-5 and c.mla_output_gate
    assert (c.num_experts, c.experts_per_token) == (896, 16)
    assert (c.latent_size, c.expert_width, c.shared_width) == (3584, 3072, 6144)
    assert (c.activation, c.situ_beta, c.situ_linear_beta) == ("situ", 4.0, 25.0)
    assert c.attn_res_block == 12 and c.packed_experts and c.full_rank_gate and c.latent_norm
    assert (c.bos_token_id, c.eos_token_id, c.pad_token_id) == (163584, 163586, 163839)
    assert c.max_position == 1048576 and c.vision is not None and c.vision.num_layers == 27
    check_ranks(c, 32)


def test_kimi_linear_48b():
    c = TargetConfig.from_dict(raw("kimi_linear_48b"))
    assert c.family == "kimi_linear" and c.mla_layers == (3, 7, 11, 15, 19, 23, 26)
    assert c.q_lora_rank is None and c.latent_size is None and c.attn_res_block == 0
    assert c.gate_lower_bound is None and not c.full_rank_gate and not c.mla_output_gate
    assert c.mla_norm_eps == 1e-6 and c.norm_eps == 1e-5 and c.routed_scale == 2.446
    assert c.activation == "silu" and not c.packed_experts and c.vision is None
    assert c.expert_size == 2304 and c.shared_width == 1024 and c.max_position == 1048576


@pytest.mark.parametrize("name", ["k3_tiny", "k3_tiny_chat", "kimi_linear_tiny"])
def test_tiny_configs_and_hashing(name):
    a, b = TargetConfig.from_dir(DATA / name), TargetConfig.from_dir(DATA / name)
    assert a == b and hash(a) == hash(b)


@pytest.mark.parametrize(
    ("path", "value", "supported"),
    [
        ("model_type", "llama", "'kimi_k3', 'kimi_linear'"),
        ("tie_word_embeddings", True, "False"),
        ("surprise", 3, "unknown key"),
        ("text_config", 7, "object"),
        ("text_config.hidden_act", "gelu", "'situ', 'silu'"),
        ("text_config.rope_scaling", {"type": "yarn"}, "None"),
        ("text_config.num_nextn_predict_layers", 1, "0"),
        ("text_config.topk_method", "greedy", "'noaux_tc'"),
        ("text_config.num_expert_group", 8, "1"),
        ("text_config.topk_group", 4, "1"),
        ("text_config.moe_router_activation_func", "softmax", "'sigmoid'"),
        ("text_config.moe_layer_freq", 2, "1"),
        ("text_config.mla_use_nope", False, "True"),
        ("text_config.num_key_value_heads", 8, "96"),
        ("text_config.num_attention_heads", 0, "at least 1"),
        ("text_config.hidden_size", "7168", "integer"),
        ("text_config.hidden_size", True, "integer"),
        ("text_config.rms_norm_eps", -1.0, "above 0"),
        ("text_config.moe_renormalize", 1, "true, false"),
        ("text_config.num_experts_per_token", 1000, "1..896"),
        ("text_config.moe_intermediate_size", 3000, "multiples of 32"),
        ("text_config.eos_token_id", 163840, "below 163840"),
        ("text_config.sliding_window", 4096, "unknown key"),
        ("text_config.model_type", "llama", "'kimi_linear'"),
        ("text_config.linear_attn_config.short_conv_kernel_size", 3, "4"),
        ("text_config.linear_attn_config.gate_lower_bound", 5.0, "negative"),
        ("text_config.linear_attn_config.chunk", 64, "unknown key"),
        ("text_config.linear_attn_config.kda_layers", [1, 2], "exactly once"),
        ("text_config.linear_attn_config.kda_layers", "all", "list"),
        ("text_config.quantization_config.quant_method", "gptq", "'compressed-tensors'"),
        ("text_config.quantization_config.format", "nvfp4", "'mxfp4-pack-quantized'"),
        ("text_config.quantization_config.kv_cache_scheme", "fp8", "None"),
        ("text_config.quantization_config.config_groups.group_0.weights.group_size", 16, "32"),
        ("vision_config.vt_hidden_size", 0, "at least 1"),
    ],
)
def test_refusals_name_key_value_and_remedy(path, value, supported):
    config = raw("kimi_k3")
    *parents, key = path.split(".")
    node = config
    for name in parents:
        node = node[name]
    node[key] = value
    with pytest.raises(ConfigError) as error:
        TargetConfig.from_dict(config)
    message = str(error.value)
    assert path in message and supported in message
    assert repr(value) in message


@pytest.mark.parametrize(
    "key", ["hidden_size", "linear_attn_config", "kv_lora_rank", "num_experts"]
)
def test_missing_keys(key):
    config = raw("kimi_linear_48b")
    del config[key]
    with pytest.raises(ConfigError, match=f"{key} is missing"):
        TargetConfig.from_dict(config)


def test_absent_switches_take_the_implemented_value():
    config = raw("kimi_linear_48b")
    switches = ["use_grouped_topk", "topk_group", "moe_layer_freq", "rope_scaling"]
    for key in [*switches, "num_key_value_heads"]:
        config.pop(key, None)
    assert TargetConfig.from_dict(config) == TargetConfig.from_dict(raw("kimi_linear_48b"))


def test_mla_norm_eps_can_be_set():
    config = raw("kimi_k3")
    config["text_config"]["mla_norm_eps"] = 1e-6
    assert TargetConfig.from_dict(config).mla_norm_eps == 1e-6


@pytest.mark.parametrize(
    ("content", "words"), [(None, "no such file"), ("{", "not valid JSON"), ("[1]", "an object")]
)
def test_unreadable_config_files(tmp_path, content, words):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=words):
        TargetConfig.from_dir(tmp_path)


def test_a_file_in_place_of_the_folder_is_named(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"model.safetensors.*cannot be read.*folder"):
        TargetConfig.from_dir(file)


def test_rank_counts():
    c = TargetConfig.from_dir(DATA / "k3_tiny")
    for ranks in (1, 2, 4):
        check_ranks(c, ranks)
    for ranks in (0, 3, 8):
        with pytest.raises(ConfigError, match=f"{ranks} ranks do not divide"):
            check_ranks(c, ranks)


def test_parsing_leaves_its_input_alone():
    config = raw("kimi_k3")
    kept = copy.deepcopy(config)
    TargetConfig.from_dict(config)
    assert config == kept
