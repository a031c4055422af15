"""The draft's weights: what each array is, and how it is split over ranks, declared once.

Rule: as model/weights.py: `draft_layout` is the only place that knows a weight's shape, dtype and
sharding, and matrices are [in, out]. Split by heads, MLP columns and vocabulary; the context
projection and the Markov embedding are on every rank, so that the drafting loop, which runs token
after token, exchanges once a token.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from flax import struct
from jax.sharding import PartitionSpec as P

from k3serve.draft_config import DraftConfig
from k3serve.errors import ConfigError
from k3serve.model.collectives import RANK
from k3serve.model.weights import Leaf, MlpWeights


@struct.dataclass
class DraftLayerWeights:
    attn_norm: Any  # [d] f32
    mlp_norm: Any  # [d] f32
    q: Any  # [d, heads*D]
    k: Any  # [d, stored kv heads*D]
    v: Any  # [d, stored kv heads*D]
    q_norm: Any  # [D] f32
    k_norm: Any  # [D] f32
    out: Any  # [heads*D, d]
    mlp: MlpWeights


@struct.dataclass
class DraftWeights:
    embed: Any  # [padded vocab, d], split by rows; None: the target's
    head: Any  # [d, padded vocab], split by columns; None: the target's
    fc: Any  # [aux*d, d]
    hidden_norm: Any  # [d] f32
    layers: tuple[DraftLayerWeights, ...]
    norm: Any  # [d] f32
    markov_in: Any  # W1 [vocab, markov rank]
    markov_out: Any  # W2 [markov rank, padded vocab], split by columns
    confidence_w: Any  # [d or d + markov rank] f32, or None
    confidence_b: Any  # [1] f32, or None


def draft_layout(
    config: DraftConfig, ranks: int, dtype: Any, *, own_embed: bool, own_head: bool
) -> DraftWeights:
    """The tree of Leafs. own_embed and own_head: the draft has these tensors itself. Raises
    ConfigError.
    """
    check_draft_ranks(config, ranks)
    d, vocab = config.hidden_size, -(-config.vocab_size // ranks) * ranks
    rows, columns = P(RANK, None), P(None, RANK)

    def matrix(shape: tuple[int, ...], spec: P | None = None) -> Leaf:
        return Leaf(shape, np.dtype(dtype), P() if spec is None else spec)

    def f32(size: int) -> Leaf:
        return Leaf((size,), np.dtype(np.float32), P())

    def layer() -> DraftLayerWeights:
        q_width = config.heads * config.head_dim
        kv_width = config.stored_kv_heads(ranks) * config.head_dim
        return DraftLayerWeights(
            attn_norm=f32(d),
            mlp_norm=f32(d),
            q=matrix((d, q_width), columns),
            k=matrix((d, kv_width), columns),
            v=matrix((d, kv_width), columns),
            q_norm=f32(config.head_dim),
            k_norm=f32(config.head_dim),
            out=matrix((q_width, d), rows),
            mlp=MlpWeights(
                gate_up=matrix((d, 2, config.mlp_width), P(None, None, RANK)),
                down=matrix((config.mlp_width, d), rows),
            ),
        )

    return DraftWeights(
        embed=matrix((vocab, d), rows) if own_embed else None,
        head=matrix((d, vocab), columns) if own_head else None,
        fc=matrix((config.feature_size, d)),
        hidden_norm=f32(d),
        layers=tuple(layer() for _ in range(config.num_layers)),
        norm=f32(d),
        markov_in=matrix((config.vocab_size, config.markov_rank)),
        markov_out=matrix((config.markov_rank, vocab), columns),
        confidence_w=f32(config.confidence_size) if config.confidence else None,
        confidence_b=f32(1) if config.confidence else None,
    )


def draft_weight_specs(
    config: DraftConfig, ranks: int, *, own_embed: bool, own_head: bool
) -> DraftWeights:
    """The same tree with PartitionSpecs: in_specs of a shard_map."""
    tree = draft_layout(config, ranks, np.float32, own_embed=own_embed, own_head=own_head)
    return jax.tree.map(lambda leaf: leaf.spec, tree, is_leaf=lambda x: isinstance(x, Leaf))


def check_draft_ranks(config: DraftConfig, ranks: int) -> None:
    """Raises ConfigError unless heads and MLP columns divide evenly over so many ranks, and each
    rank's query heads read KV heads of that rank only.
    """
    sizes = {"num_attention_heads": config.heads, "intermediate_size": config.mlp_width}
    for key, size in sizes.items():
        if ranks < 1 or size % ranks:
            raise ConfigError(
                f"{ranks} ranks do not divide the draft's {key}={size}; use a number that divides "
                + " and ".join(f"{k}={v}" for k, v in sizes.items())
            )
    if config.stored_kv_heads(ranks) % min(config.kv_heads, ranks):
        raise ConfigError(
            f"{ranks} ranks and the draft's num_key_value_heads={config.kv_heads}: neither divides "
            "the other; use a number of ranks that divides it or is a multiple of it"
        )
