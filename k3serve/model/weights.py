"""The model's weights: what each array is, and how it is split over ranks, declared once.

Rule: `layout` is the only place that knows a weight's shape, dtype and sharding; the loader fills
exactly this tree. Matrices are stored [in, out], so that rows multiply from the left. What is split
over ranks is split by heads, experts, MLP columns or vocabulary rows; low-rank and latent parts are
on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import struct
from jax.sharding import PartitionSpec as P

from k3serve.config import TargetConfig, check_ranks
from k3serve.errors import ConfigError
from k3serve.model.collectives import RANK


@struct.dataclass
class KdaWeights:
    qkv: Any  # [d, 3, heads*K]
    conv: Any  # [4, 3, heads*K] f32; tap 3 is the current token
    decay_a: Any  # [d, K]
    decay_b: Any  # [K, heads*K]
    a_log: Any  # [heads] f32
    dt_bias: Any  # [heads*K] f32
    beta: Any  # [d, heads]
    gate: Any  # [d, heads*K], or None
    gate_a: Any  # [d, K], or None
    gate_b: Any  # [K, heads*K], or None
    out_norm: Any  # [K] f32
    out: Any  # [heads*K, d]


@struct.dataclass
class MlaWeights:
    q: Any  # [d, heads*(nope+rope)], or None
    q_a: Any  # [d, q_rank], or None
    q_norm: Any  # [q_rank] f32, or None
    q_b: Any  # [q_rank, heads*(nope+rope)], or None
    kv_a: Any  # [d, latent+rope]
    kv_norm: Any  # [latent] f32
    k_up: Any  # [heads, nope, latent]
    v_up: Any  # [heads, latent, v]
    gate: Any  # [d, heads*v], or None
    out: Any  # [heads*v, d]


@struct.dataclass
class MlpWeights:
    gate_up: Any  # [d, 2, width]
    down: Any  # [width, d]


@struct.dataclass
class ExpertWeights:
    """Dense arrays, or packed codes and scales; the other fields are None."""

    gate_up: Any  # [E, in, 2, width]
    down: Any  # [E, width, in]
    gate_up_codes: Any  # [E, 2, width, in/2] u8
    gate_up_scales: Any  # [E, 2, width, in/32] u8
    down_codes: Any  # [E, in, width/2] u8
    down_scales: Any  # [E, in, width/32] u8


@struct.dataclass
class MoeWeights:
    router: Any  # [d, E] f32
    router_bias: Any  # [E] f32, for the choice only
    latent_down: Any  # [d, latent], or None
    latent_norm: Any  # [latent] f32, or None
    latent_up: Any  # [latent, d], or None
    experts: ExpertWeights
    shared: Any  # MlpWeights, or None


@struct.dataclass
class LayerWeights:
    attn_norm: Any  # [d] f32
    mlp_norm: Any  # [d] f32
    attn_mix: Any  # [d] f32: AttnRes norm weight times score vector, or None
    mlp_mix: Any  # [d] f32, or None
    attn: Any  # KdaWeights or MlaWeights
    mlp: Any  # MlpWeights or MoeWeights


@struct.dataclass
class Weights:
    embed: Any  # [padded vocab, d], split by rows
    layers: tuple[LayerWeights, ...]
    out_mix: Any  # [d] f32, or None
    norm: Any  # [d] f32
    head: Any  # [d, padded vocab], split by columns


@dataclass(frozen=True, slots=True)
class Leaf:
    """A weight to be: shape over all ranks, dtype, and how it is split."""

    shape: tuple[int, ...]
    dtype: np.dtype
    spec: P


def padded_vocab(config: TargetConfig, ranks: int) -> int:
    return -(-config.vocab_size // ranks) * ranks


def layout(config: TargetConfig, ranks: int, dtype: Any, expert_format: str) -> Weights:
    """The tree of Leafs. expert_format: "dense" (compute dtype) or "packed" (MXFP4 as stored).
    Raises ConfigError.
    """
    check_ranks(config, ranks)
    if expert_format not in ("dense", "packed"):
        raise ConfigError(f"expert_format={expert_format!r} is not supported; use dense or packed")
    if expert_format == "packed" and not config.packed_experts:
        raise ConfigError("expert_format='packed' needs a checkpoint with MXFP4 experts; use dense")
    make = _Maker(config, np.dtype(dtype), expert_format == "packed")
    vocab = padded_vocab(config, ranks)
    return Weights(
        embed=make.matrix((vocab, config.hidden_size), P(RANK, None)),
        layers=tuple(make.layer(i) for i in range(config.num_layers)),
        out_mix=make.mix(),
        norm=make.f32(config.hidden_size),
        head=make.matrix((config.hidden_size, vocab), P(None, RANK)),
    )


class _Maker:
    """Leafs of one config; methods are named after the part they describe."""

    def __init__(self, config: TargetConfig, dtype: np.dtype, packed: bool) -> None:
        self.config = config
        self.dtype = dtype
        self.packed = packed

    def matrix(self, shape: tuple[int, ...], spec: P | None = None) -> Leaf:
        return Leaf(shape, self.dtype, P() if spec is None else spec)

    def f32(self, *shape: int, spec: P | None = None) -> Leaf:
        return Leaf(shape, np.dtype(np.float32), P() if spec is None else spec)

    def mix(self) -> Leaf | None:
        return self.f32(self.config.hidden_size) if self.config.attn_res_block else None

    def layer(self, index: int) -> LayerWeights:
        c = self.config
        dense = index < c.dense_layers
        return LayerWeights(
            attn_norm=self.f32(c.hidden_size),
            mlp_norm=self.f32(c.hidden_size),
            attn_mix=self.mix() if index else None,  # layer 0 has nothing to mix yet
            mlp_mix=self.mix(),
            attn=self.kda() if c.is_kda(index) else self.mla(),
            mlp=self.mlp(c.dense_width) if dense else self.moe(),
        )

    def kda(self) -> KdaWeights:
        c = self.config
        d, k, width = c.hidden_size, c.kda_head_dim, c.kda_size
        columns = P(None, RANK)
        low_rank = not c.full_rank_gate
        return KdaWeights(
            qkv=self.matrix((d, 3, width), P(None, None, RANK)),
            conv=self.f32(c.conv_width, 3, width, spec=P(None, None, RANK)),
            decay_a=self.matrix((d, k)),
            decay_b=self.matrix((k, width), columns),
            a_log=self.f32(c.kda_heads, spec=P(RANK)),
            dt_bias=self.f32(width, spec=P(RANK)),
            beta=self.matrix((d, c.kda_heads), columns),
            gate=None if low_rank else self.matrix((d, width), columns),
            gate_a=self.matrix((d, k)) if low_rank else None,
            gate_b=self.matrix((k, width), columns) if low_rank else None,
            out_norm=self.f32(k),
            out=self.matrix((width, d), P(RANK, None)),
        )

    def mla(self) -> MlaWeights:
        c, d, rank = self.config, self.config.hidden_size, self.config.q_lora_rank
        q_width = c.mla_heads * (c.nope_dim + c.rope_dim)
        v_width = c.mla_heads * c.v_head_dim
        columns, heads = P(None, RANK), P(RANK, None, None)
        return MlaWeights(
            q=self.matrix((d, q_width), columns) if rank is None else None,
            q_a=None if rank is None else self.matrix((d, rank)),
            q_norm=None if rank is None else self.f32(rank),
            q_b=None if rank is None else self.matrix((rank, q_width), columns),
            kv_a=self.matrix((d, c.kv_lora_rank + c.rope_dim)),
            kv_norm=self.f32(c.kv_lora_rank),
            k_up=self.matrix((c.mla_heads, c.nope_dim, c.kv_lora_rank), heads),
            v_up=self.matrix((c.mla_heads, c.kv_lora_rank, c.v_head_dim), heads),
            gate=self.matrix((d, v_width), columns) if c.mla_output_gate else None,
            out=self.matrix((v_width, d), P(RANK, None)),
        )

    def mlp(self, width: int) -> MlpWeights:
        d = self.config.hidden_size
        return MlpWeights(
            gate_up=self.matrix((d, 2, width), P(None, None, RANK)),
            down=self.matrix((width, d), P(RANK, None)),
        )

    def moe(self) -> MoeWeights:
        c, d, latent = self.config, self.config.hidden_size, self.config.latent_size
        return MoeWeights(
            router=self.f32(d, c.num_experts),
            router_bias=self.f32(c.num_experts),
            latent_down=None if latent is None else self.matrix((d, latent)),
            latent_norm=self.f32(latent) if latent and c.latent_norm else None,
            latent_up=None if latent is None else self.matrix((latent, d)),
            experts=self.experts(),
            shared=self.mlp(c.shared_width) if c.shared_width else None,
        )

    def experts(self) -> ExpertWeights:
        c, size, width = self.config, self.config.expert_size, self.config.expert_width
        n = c.num_experts

        def by_expert(rank: int) -> P:
            return P(RANK, *(None,) * (rank - 1))

        def dense(*shape: int) -> Leaf | None:
            return None if self.packed else self.matrix(shape, by_expert(len(shape)))

        def bytes_(*shape: int) -> Leaf | None:
            return Leaf(shape, np.dtype(np.uint8), by_expert(len(shape))) if self.packed else None

        return ExpertWeights(
            gate_up=dense(n, size, 2, width),
            down=dense(n, width, size),
            gate_up_codes=bytes_(n, 2, width, size // 2),
            gate_up_scales=bytes_(n, 2, width, size // 32),
            down_codes=bytes_(n, size, width // 2),
            down_scales=bytes_(n, size, width // 32),
        )


def weight_specs(config: TargetConfig, ranks: int, expert_format: str = "dense") -> Weights:
    """The same tree with PartitionSpecs: in_specs of a shard_map."""
    tree = layout(config, ranks, np.float32, expert_format)
    return jax.tree.map(lambda leaf: leaf.spec, tree, is_leaf=lambda x: isinstance(x, Leaf))
