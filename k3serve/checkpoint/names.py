"""Every tensor that a config's checkpoint holds: name, shape, dtype.

Rule: generated from the config alone, text and vision, so that missing and extra tensors are found
before any is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from k3serve.config import TargetConfig, VisionConfig

ITEM_BYTES = {"BF16": 2, "F32": 4, "U8": 1}
VISION_PREFIXES = ("vision_tower.", "mm_projector.")


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as the release stores it, and the other shapes that are the same thing."""

    shape: tuple[int, ...]
    dtype: str = "BF16"  # float tensors may be BF16 or F32 in a file, U8 ones only U8
    also: tuple[tuple[int, ...], ...] = ()
    padded: bool = False  # one dimension, and a longer one (zeros at the end) is accepted

    @property
    def bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    def accepts(self, shape: tuple[int, ...]) -> bool:
        if self.padded and len(shape) == 1 and shape[0] >= self.also[0][0]:
            return True
        return shape == self.shape or shape in self.also

    def accepts_dtype(self, dtype: str) -> bool:
        return dtype == "U8" if self.dtype == "U8" else dtype in ("BF16", "F32")


def prefix(config: TargetConfig) -> str:
    """What stands before `model.` and `lm_head.`."""
    return "language_model." if config.family == "kimi_k3" else ""


def layer_prefix(config: TargetConfig, layer: int) -> str:
    return f"{prefix(config)}model.layers.{layer}."


def tensor_table(config: TargetConfig) -> dict[str, Tensor]:
    """All tensors by full name; vision ones only if the config has a vision tower."""
    table = dict(_outer(config))
    for layer in range(config.num_layers):
        base = layer_prefix(config, layer)
        table.update((base + name, tensor) for name, tensor in _layer(config, layer))
    if config.vision is not None:
        table.update(_vision(config.vision))
    return table


Named = Iterator[tuple[str, Tensor]]


def _outer(c: TargetConfig) -> Named:
    base = prefix(c)
    yield f"{base}lm_head.weight", Tensor((c.vocab_size, c.hidden_size))
    yield f"{base}model.embed_tokens.weight", Tensor((c.vocab_size, c.hidden_size))
    yield f"{base}model.norm.weight", Tensor((c.hidden_size,))
    if c.attn_res_block:
        yield from _attn_res(f"{base}model.output_attn_res", c.hidden_size)


def _attn_res(base: str, size: int) -> Named:
    yield f"{base}_norm.weight", Tensor((size,))
    yield f"{base}_proj.weight", Tensor((1, size), also=((size,),))


def _layer(c: TargetConfig, layer: int) -> Named:
    yield "input_layernorm.weight", Tensor((c.hidden_size,))
    yield "post_attention_layernorm.weight", Tensor((c.hidden_size,))
    if c.attn_res_block:
        yield from _attn_res("self_attention_res", c.hidden_size)
        yield from _attn_res("mlp_res", c.hidden_size)
    for name, tensor in _kda(c) if c.is_kda(layer) else _mla(c):
        yield f"self_attn.{name}", tensor
    if layer < c.dense_layers:
        yield from _mlp("mlp.", c.hidden_size, c.dense_width)
    else:
        for name, tensor in _moe(c):
            yield f"block_sparse_moe.{name}", tensor


def _kda(c: TargetConfig) -> Named:
    d, k, heads, width = c.hidden_size, c.kda_head_dim, c.kda_heads, c.kda_size
    island = "F32" if c.family == "kimi_k3" else "BF16"
    for part in "qkv":
        yield f"{part}_proj.weight", Tensor((width, d))
        conv = Tensor((width, 1, c.conv_width), island, also=((width, c.conv_width),))
        yield f"{part}_conv1d.weight", conv
    yield "f_a_proj.weight", Tensor((k, d))
    yield "f_b_proj.weight", Tensor((width, k))
    yield "dt_bias", Tensor((width,), "F32", also=((heads, k),))
    if c.family == "kimi_k3":  # one number a head, padded to a multiple of 128
        a_log = Tensor((-(-heads // 128) * 128,), "F32", ((heads,), (1, 1, heads, 1)), True)
    else:
        a_log = Tensor((1, 1, heads, 1), "F32", ((heads,),), True)
    yield "A_log", a_log
    yield "b_proj.weight", Tensor((heads, d))
    if c.full_rank_gate:
        yield "g_proj.weight", Tensor((width, d))
    else:
        yield "g_a_proj.weight", Tensor((k, d))
        yield "g_b_proj.weight", Tensor((width, k))
    yield "o_norm.weight", Tensor((k,), island)
    yield "o_proj.weight", Tensor((d, width))


def _mla(c: TargetConfig) -> Named:
    d, heads = c.hidden_size, c.mla_heads
    q_width, v_width = heads * (c.nope_dim + c.rope_dim), heads * c.v_head_dim
    if c.q_lora_rank is None:
        yield "q_proj.weight", Tensor((q_width, d))
    else:
        yield "q_a_proj.weight", Tensor((c.q_lora_rank, d))
        yield "q_a_layernorm.weight", Tensor((c.q_lora_rank,))
        yield "q_b_proj.weight", Tensor((q_width, c.q_lora_rank))
    yield "kv_a_proj_with_mqa.weight", Tensor((c.kv_lora_rank + c.rope_dim, d))
    yield "kv_a_layernorm.weight", Tensor((c.kv_lora_rank,))
    yield "kv_b_proj.weight", Tensor((heads * (c.nope_dim + c.v_head_dim), c.kv_lora_rank))
    if c.mla_output_gate:
        yield "g_proj.weight", Tensor((v_width, d))
    yield "o_proj.weight", Tensor((d, v_width))


def _mlp(base: str, size: int, width: int) -> Named:
    yield f"{base}gate_proj.weight", Tensor((width, size))
    yield f"{base}up_proj.weight", Tensor((width, size))
    yield f"{base}down_proj.weight", Tensor((size, width))


def _moe(c: TargetConfig) -> Named:
    d, size, width = c.hidden_size, c.expert_size, c.expert_width
    yield "gate.weight", Tensor((c.num_experts, d))
    yield "gate.e_score_correction_bias", Tensor((c.num_experts,), "F32")
    if c.latent_size is not None:
        yield "routed_expert_down_proj.weight", Tensor((size, d))
        yield "routed_expert_up_proj.weight", Tensor((d, size))
        if c.latent_norm:
            yield "routed_expert_norm.weight", Tensor((size,))
    if c.shared_width:
        yield from _mlp("shared_experts.", d, c.shared_width)
    for expert in range(c.num_experts):
        for part, rows, cols in (("w1", width, size), ("w3", width, size), ("w2", size, width)):
            base = f"experts.{expert}.{part}.weight"
            if c.packed_experts:
                yield f"{base}_packed", Tensor((rows, cols // 2), "U8")
                yield f"{base}_scale", Tensor((rows, cols // 32), "U8")
            else:
                yield base, Tensor((rows, cols))


def _vision(v: VisionConfig) -> Named:
    size, patch = v.hidden_size, v.patch_size
    yield "vision_tower.patch_embed.proj.weight", Tensor((size, 3, patch, patch))
    table = (v.pos_emb_height, v.pos_emb_width, size)
    yield "vision_tower.patch_embed.pos_emb.weight", Tensor(table)
    for i in range(v.num_layers):
        base = f"vision_tower.encoder.blocks.{i}."
        yield f"{base}norm0.weight", Tensor((size,))
        yield f"{base}norm1.weight", Tensor((size,))
        yield f"{base}wqkv.weight", Tensor((3 * v.qkv_hidden_size, size))
        yield f"{base}wo.weight", Tensor((size, v.qkv_hidden_size))
        yield f"{base}mlp.fc0.weight", Tensor((v.intermediate_size, size))
        yield f"{base}mlp.fc1.weight", Tensor((size, v.intermediate_size))
    yield "vision_tower.encoder.final_layernorm.weight", Tensor((size,))
    yield "mm_projector.proj.0.weight", Tensor((v.merged_size, v.merged_size))
    yield "mm_projector.proj.2.weight", Tensor((v.text_hidden_size, v.merged_size))
    yield "mm_projector.post_norm.weight", Tensor((v.text_hidden_size,))
