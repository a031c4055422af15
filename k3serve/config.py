"""What a checkpoint's config.json says about the model, validated once.

Rule: standard library only, and nothing is guessed. A value that this server cannot honour is a
ConfigError which names the key, the value and what is supported; layer kinds come from the explicit
lists.

Try it: `TargetConfig.from_dir("tests/data/k3_tiny")`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3serve.errors import ConfigError
from k3serve.sections import Section, read_config, refuse_unknown

# Keys of text_config (or of a flat config) that do not change what the model computes.
HARMLESS_KEYS = frozenset(
    """
    _attn_implementation _name_or_path add_cross_attention architectures attn_implementation
    auto_map bad_words_ids begin_suppress_tokens chunk_size_feed_forward cross_attention_hidden_size
    decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id id2label initializer_range is_decoder is_encoder_decoder
    label2id length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_scores prefix problem_type
    pruned_heads remove_invalid_values repetition_penalty return_dict return_dict_in_generate
    sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder
    tokenizer_class top_k top_p torch_dtype torchscript transformers_version typical_p use_bfloat16
    use_cache head_dim rope_theta
    """.split()
)  # head_dim and rope_theta: named by Kimi-Linear, used by none of its layers
TOP_KEYS = frozenset(
    """
    architectures auto_map bos_token_id dtype eos_token_id ignore_index image_placeholder
    media_placeholder_token_id model_type pad_token_id text_config tie_word_embeddings torch_dtype
    transformers_version use_unified_vision_chunk video_placeholder vision_config
    """.split()
)
# Switches for which exactly these values are implemented; an absent key takes the first.
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "attention_dropout": (0.0, 0),
    "mla_use_nope": (True,),
    "moe_layer_freq": (1,),
    "moe_router_activation_func": ("sigmoid",),
    "num_expert_group": (1,),
    "num_nextn_predict_layers": (0,),
    "rope_scaling": (None,),
    "tie_word_embeddings": (False,),
    "topk_group": (1,),
    "topk_method": ("noaux_tc",),
    "use_grouped_topk": (True, False),
}


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """Sizes of the vision tower: the loader skips its tensors but knows their names."""

    patch_size: int
    hidden_size: int
    num_layers: int
    intermediate_size: int
    qkv_hidden_size: int
    pos_emb_height: int
    pos_emb_width: int
    merged_size: int  # input width of the projector: hidden size times the merged patches
    text_hidden_size: int


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """The target model: Kimi K3 or Kimi-Linear. Layer numbers are 0-based."""

    family: str  # "kimi_k3" or "kimi_linear"
    vocab_size: int
    hidden_size: int
    num_layers: int
    kda_layers: tuple[int, ...]
    mla_layers: tuple[int, ...]
    dense_layers: int  # the first so many layers have a dense MLP, the others experts
    attn_res_block: int  # layers of one AttnRes block; 0: ordinary residual stream
    norm_eps: float

    kda_heads: int
    kda_head_dim: int
    conv_width: int
    gate_lower_bound: float | None  # bounded decay lb*sigmoid; None: -exp(A)*softplus
    full_rank_gate: bool

    mla_heads: int
    q_lora_rank: int | None  # None: plain q_proj
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int  # a shared extra key, never rotated
    v_head_dim: int
    mla_output_gate: bool
    mla_norm_eps: float  # of q_a_layernorm and kv_a_layernorm

    activation: str  # "situ" or "silu"
    situ_beta: float
    situ_linear_beta: float
    dense_width: int
    num_experts: int
    experts_per_token: int
    expert_width: int
    shared_width: int  # all shared experts, fused
    latent_size: int | None  # None: experts work at full width
    latent_norm: bool
    renormalize: bool
    routed_scale: float
    packed_experts: bool  # the checkpoint holds MXFP4 experts

    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    max_position: int
    vision: VisionConfig | None = None

    @property
    def expert_size(self) -> int:
        """Width at which the routed experts read and write."""
        return self.latent_size or self.hidden_size

    @property
    def kda_size(self) -> int:
        return self.kda_heads * self.kda_head_dim

    @property
    def latent_lanes(self) -> int:
        """Length of a cached MLA row: latent and shared key, padded to whole 128-lane tiles."""
        return -(-(self.kv_lora_rank + self.rope_dim) // 128) * 128

    def is_kda(self, layer: int) -> bool:
        return layer in self.kda_layers

    @staticmethod
    def from_dir(path: str | Path) -> TargetConfig:
        """Reads config.json of a checkpoint folder. Raises ConfigError."""
        return TargetConfig.from_dict(read_config(path))

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> TargetConfig:
        """From the parsed config.json, nested (Kimi K3) or flat (Kimi-Linear). Raises
        ConfigError.
        """
        if not isinstance(raw, Mapping):
            raise ConfigError(f"config.json must hold an object, not {type(raw).__name__}")
        model_type = raw.get("model_type")
        if model_type == "kimi_k3":
            refuse_unknown(raw, TOP_KEYS, "")
            text = Section(raw.get("text_config"), "text_config.")
            text.one_of("model_type", ("kimi_linear",), default="kimi_linear")
            top = Section(raw, "")
            top.one_of("tie_word_embeddings", (False,), default=False)
            return _target(text, "kimi_k3", _vision(raw.get("vision_config")))
        if model_type == "kimi_linear":
            text = Section(raw, "")
            text.get("model_type")
            return _target(text, "kimi_linear", None)
        if "speculators_model_type" in raw:
            raise ConfigError(
                "this folder holds a draft, not a model: give it as --draft, and the model that it "
                "belongs to as --checkpoint"
            )
        raise ConfigError(
            f"model_type={model_type!r} is not supported; supported: 'kimi_k3', 'kimi_linear'"
        )


def _target(text: Section, family: str, vision: VisionConfig | None) -> TargetConfig:
    for key, supported in SUPPORTED.items():
        text.one_of(key, supported, default=supported[0])
    layers = text.whole("num_hidden_layers")
    linear = Section(text.get("linear_attn_config"), f"{text.prefix}linear_attn_config.")
    kda_layers, mla_layers = _layer_lists(linear, layers)
    norm_eps = text.real("rms_norm_eps")
    # transformers builds kimi_linear's kv_a_layernorm with its class default; K3's port uses
    # rms_norm_eps
    mla_eps = norm_eps if family == "kimi_k3" else 1e-6
    activation = text.one_of("hidden_act", ("situ", "silu"), default=None)
    expert_width = text.whole("moe_intermediate_size")
    latent = "routed_expert_hidden_size"
    config = TargetConfig(
        family=family,
        vocab_size=text.whole("vocab_size"),
        hidden_size=text.whole("hidden_size"),
        num_layers=layers,
        kda_layers=kda_layers,
        mla_layers=mla_layers,
        dense_layers=text.whole("first_k_dense_replace", least=0),
        attn_res_block=text.whole("attn_res_block_size", 0, least=0),
        norm_eps=norm_eps,
        kda_heads=linear.whole("num_heads"),
        kda_head_dim=linear.whole("head_dim"),
        conv_width=linear.one_of("short_conv_kernel_size", (4,), default=4),
        gate_lower_bound=_lower_bound(linear),
        full_rank_gate=linear.flag("use_full_rank_gate", False),
        mla_heads=text.whole("num_attention_heads"),
        q_lora_rank=text.whole("q_lora_rank") if text.has("q_lora_rank") else None,
        kv_lora_rank=text.whole("kv_lora_rank"),
        nope_dim=text.whole("qk_nope_head_dim"),
        rope_dim=text.whole("qk_rope_head_dim"),
        v_head_dim=text.whole("v_head_dim"),
        mla_output_gate=text.flag("mla_use_output_gate", False),
        mla_norm_eps=text.real("mla_norm_eps", mla_eps),
        activation=activation,
        situ_beta=text.real("activation_situ_beta", 4.0),
        situ_linear_beta=text.real("activation_situ_linear_beta", 25.0),
        dense_width=text.whole("intermediate_size"),
        num_experts=text.whole("num_experts"),
        experts_per_token=_per_token(text),
        expert_width=expert_width,
        shared_width=text.whole("num_shared_experts", least=0) * expert_width,
        latent_size=text.whole(latent) if text.has(latent) else None,
        latent_norm=text.flag("latent_moe_use_norm", False),
        renormalize=text.flag("moe_renormalize", True),
        routed_scale=text.real("routed_scaling_factor", 1.0),
        packed_experts=_is_packed(text),
        bos_token_id=text.whole("bos_token_id", least=0),
        eos_token_id=text.whole("eos_token_id", least=0),
        pad_token_id=text.whole("pad_token_id", least=0),
        max_position=_max_position(text),
        vision=vision,
    )
    _check_rest(text, linear, config)
    _check_sizes(text, config)
    return config


def _check_rest(text: Section, linear: Section, config: TargetConfig) -> None:
    """Refuses whatever key has not been read by now."""
    for absent_or_null in ("q_lora_rank", "routed_expert_hidden_size", "model_type"):
        text.get(absent_or_null, None)
    heads = config.mla_heads  # MLA has no grouped heads
    text.one_of("num_key_value_heads", (heads,), default=heads)
    linear.refuse_rest()
    text.refuse_rest(HARMLESS_KEYS)


def _per_token(text: Section) -> int:
    """K3 and Kimi-Linear write num_experts_per_token; some exports num_experts_per_tok."""
    other = "num_experts_per_tok"
    return text.whole(other if other in text.values else "num_experts_per_token")


def _max_position(text: Section) -> int:
    other = "max_position_embeddings"
    text.get("model_max_length", None)
    return text.whole(other if other in text.values else "model_max_length")


def _lower_bound(linear: Section) -> float | None:
    bound = linear.get("gate_lower_bound", None)
    if bound is None:
        return None
    if not isinstance(bound, int | float) or isinstance(bound, bool) or not bound < 0:
        raise linear.failure("gate_lower_bound", bound, "a negative number, or null for softplus")
    return float(bound)


def _layer_lists(linear: Section, layers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The 1-based lists as 0-based tuples; together they must name every layer once."""
    lists = []
    for key in ("kda_layers", "full_attn_layers"):
        value = linear.get(key)
        if not isinstance(value, list) or not all(type(n) is int for n in value):
            raise linear.failure(key, value, "a list of 1-based layer numbers")
        lists.append(tuple(sorted(n - 1 for n in value)))
    if sorted(lists[0] + lists[1]) != list(range(layers)):
        raise ConfigError(
            f"{linear.prefix}kda_layers={linear.values['kda_layers']!r} and full_attn_layers="
            f"{linear.values['full_attn_layers']!r} must name each of the layers 1..{layers} "
            "exactly once"
        )
    return lists[0], lists[1]


def _is_packed(text: Section) -> bool:
    """True for MXFP4 experts. Which tensors are packed is decided by their names, not by the ignore
    list.
    """
    quant = text.get("quantization_config", None)
    if quant is None:
        return False
    section = Section(quant, f"{text.prefix}quantization_config.")
    section.one_of("quant_method", ("compressed-tensors",), default=None)
    section.one_of("format", ("mxfp4-pack-quantized",), default=None)
    section.one_of("kv_cache_scheme", (None,), default=None)
    groups = section.get("config_groups", {})
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        prefix = f"{section.prefix}config_groups.{name}."
        member = Section(group, prefix)
        member.one_of("input_activations", (None,), default=None)
        weights = Section(member.get("weights"), f"{prefix}weights.")
        weights.one_of("num_bits", (4,), default=4)
        weights.one_of("type", ("float",), default="float")
        weights.one_of("group_size", (32,), default=32)
        weights.one_of("symmetric", (True,), default=True)
    return True


def _vision(raw: Any) -> VisionConfig | None:
    if raw is None:
        return None
    v = Section(raw, "vision_config.")
    merge = v.get("merge_kernel_size", [2, 2])
    if not isinstance(merge, list) or not all(type(n) is int and n > 0 for n in merge):
        raise v.failure("merge_kernel_size", merge, "a list of two positive integers")
    cells = 1
    for n in merge:
        cells *= n
    return VisionConfig(
        patch_size=v.whole("patch_size"),
        hidden_size=v.whole("vt_hidden_size"),
        num_layers=v.whole("vt_num_hidden_layers"),
        intermediate_size=v.whole("vt_intermediate_size"),
        qkv_hidden_size=v.whole("qkv_hidden_size"),
        pos_emb_height=v.whole("init_pos_emb_height"),
        pos_emb_width=v.whole("init_pos_emb_width"),
        merged_size=v.whole("mm_hidden_size") * cells,
        text_hidden_size=v.whole("text_hidden_size"),
    )


def _check_sizes(text: Section, config: TargetConfig) -> None:
    """Values that are well-formed alone but not together."""
    if config.experts_per_token > config.num_experts:
        raise text.failure(
            "num_experts_per_token", config.experts_per_token, f"1..{config.num_experts}"
        )
    if config.packed_experts:
        for key, size in (
            ("routed_expert_hidden_size", config.expert_size),
            ("moe_intermediate_size", config.expert_width),
        ):
            if size % 32:
                raise text.failure(key, size, "multiples of 32, for MXFP4 groups are 32 columns")
    if config.latent_norm and config.latent_size is None:
        raise text.failure("latent_moe_use_norm", True, "true only with routed_expert_hidden_size")
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(config, key) >= config.vocab_size:
            raise text.failure(key, getattr(config, key), f"ids below {config.vocab_size}")


def check_ranks(config: TargetConfig, ranks: int) -> None:
    """Raises ConfigError unless heads, experts and MLP columns divide evenly over so many ranks."""
    sizes = {
        "linear_attn_config.num_heads": config.kda_heads,
        "num_attention_heads": config.mla_heads,
        "num_experts": config.num_experts,
        "intermediate_size": config.dense_width,
        "shared experts' width": config.shared_width,
    }
    for key, size in sizes.items():
        if ranks < 1 or size % ranks:
            raise ConfigError(
                f"{ranks} ranks do not divide {key}={size}; use a number that divides all of "
                + ", ".join(f"{k}={v}" for k, v in sizes.items())
            )
