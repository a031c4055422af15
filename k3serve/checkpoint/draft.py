"""A DSpark draft's checkpoint: the tensors of the speculators layout, checked and loaded.

Rule: as for the target, every tensor's presence, shape and dtype is checked before any is read, and
a rank reads its slices only. Embedding and head may be missing: then the target's serve.

Try it: `load_draft("tests/data/k3_tiny_dspark", draft_config, mesh, np.float32)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any

import numpy as np
from jax.sharding import Mesh

from k3serve.checkpoint.hf import Checkpoint
from k3serve.checkpoint.load import Progress, Source
from k3serve.checkpoint.names import Tensor
from k3serve.checkpoint.sources import Index, Kinds, Path, Reader
from k3serve.draft_config import DraftConfig
from k3serve.model.collectives import RANK
from k3serve.model.draft_weights import DraftWeights, draft_layout

EMBED, HEAD = "embed_tokens.weight", "lm_head.weight"


def open_draft(path: str | FilePath, config: DraftConfig, ranks: int, dtype: Any) -> Source:
    """The checkpoint of a draft for so many ranks. Raises CheckpointError and ConfigError."""
    checkpoint = Checkpoint.of(path, draft_tensors(config), optional=(EMBED, HEAD))
    own = checkpoint.has
    tree = draft_layout(config, ranks, dtype, own_embed=own(EMBED), own_head=own(HEAD))
    return Source(tree, _Readers(checkpoint, config, ranks).find)


def load_draft(
    path: str | FilePath,
    config: DraftConfig,
    mesh: Mesh,
    dtype: Any,
    progress: Progress | None = None,
) -> DraftWeights:
    """The weights as arrays over the mesh axis "rank". Raises CheckpointError and ConfigError."""
    source = open_draft(path, config, mesh.shape[RANK], dtype)
    weights: DraftWeights = source.load(mesh, progress)
    return weights


def draft_tensors(config: DraftConfig) -> dict[str, Tensor]:
    """All tensors by name, embedding and head included."""
    return dict(_tensors(config))


def _tensors(c: DraftConfig) -> Iterator[tuple[str, Tensor]]:
    d, q_width, kv_width = c.hidden_size, c.heads * c.head_dim, c.kv_heads * c.head_dim
    yield EMBED, Tensor((c.vocab_size, d))
    yield HEAD, Tensor((c.vocab_size, d))
    yield "fc.weight", Tensor((d, c.feature_size))
    yield "hidden_norm.weight", Tensor((d,))
    yield "norm.weight", Tensor((d,))
    for i in range(c.num_layers):
        base = f"layers.{i}."
        yield f"{base}input_layernorm.weight", Tensor((d,))
        yield f"{base}post_attention_layernorm.weight", Tensor((d,))
        yield f"{base}self_attn.q_proj.weight", Tensor((q_width, d))
        yield f"{base}self_attn.k_proj.weight", Tensor((kv_width, d))
        yield f"{base}self_attn.v_proj.weight", Tensor((kv_width, d))
        yield f"{base}self_attn.o_proj.weight", Tensor((d, q_width))
        yield f"{base}self_attn.q_norm.weight", Tensor((c.head_dim,))
        yield f"{base}self_attn.k_norm.weight", Tensor((c.head_dim,))
        yield f"{base}mlp.gate_proj.weight", Tensor((c.mlp_width, d))
        yield f"{base}mlp.up_proj.weight", Tensor((c.mlp_width, d))
        yield f"{base}mlp.down_proj.weight", Tensor((d, c.mlp_width))
    yield "markov_head.markov_w1.weight", Tensor((c.vocab_size, c.markov_rank))
    yield "markov_head.markov_w2.weight", Tensor((c.vocab_size, c.markov_rank))
    if c.confidence:
        yield "confidence_head.proj.weight", Tensor((1, c.confidence_size))
        yield "confidence_head.proj.bias", Tensor((1,))


class _Readers(Kinds):
    """The reader of each weight, by its path in the DraftWeights tree."""

    def __init__(self, checkpoint: Checkpoint, config: DraftConfig, ranks: int) -> None:
        super().__init__(checkpoint, config.vocab_size)
        self.config = config
        self.stored = config.stored_kv_heads(ranks)

    def find(self, path: Path) -> Reader:
        if path[0] == "layers":
            return self._layer(f"layers.{path[1]}.", [str(p) for p in path[2:]])
        return {
            "embed": self.vocabulary(EMBED),
            "head": self.head(HEAD),
            "fc": self.matrix("fc.weight"),
            "hidden_norm": self.vector("hidden_norm.weight"),
            "norm": self.vector("norm.weight"),
            "markov_in": self.vocabulary("markov_head.markov_w1.weight"),
            "markov_out": self.head("markov_head.markov_w2.weight"),
            "confidence_w": self.vector("confidence_head.proj.weight"),
            "confidence_b": self.vector("confidence_head.proj.bias"),
        }[str(path[0])]

    def _layer(self, base: str, path: list[str]) -> Reader:
        if path == ["mlp", "gate_up"]:
            return self.stack([f"{base}mlp.{p}_proj.weight" for p in ("gate", "up")])
        return {
            "attn_norm": self.vector(f"{base}input_layernorm.weight"),
            "mlp_norm": self.vector(f"{base}post_attention_layernorm.weight"),
            "q": self.matrix(f"{base}self_attn.q_proj.weight"),
            "k": self.kv(f"{base}self_attn.k_proj.weight"),
            "v": self.kv(f"{base}self_attn.v_proj.weight"),
            "q_norm": self.vector(f"{base}self_attn.q_norm.weight"),
            "k_norm": self.vector(f"{base}self_attn.k_norm.weight"),
            "out": self.matrix(f"{base}self_attn.o_proj.weight"),
            "mlp": self.matrix(f"{base}mlp.down_proj.weight"),
        }[path[0]]

    def kv(self, name: str) -> Reader:
        """[d, stored kv heads*D] of [kv heads*D, d]: stored head h is the file's head
        h*kv_heads//stored.
        """

        def read(index: Index) -> np.ndarray:
            size = self.config.head_dim
            mine = range(index[1].start // size, index[1].stop // size)
            heads = [h * self.config.kv_heads // self.stored for h in mine]
            rows = slice(heads[0] * size, (heads[-1] + 1) * size)
            part = self.file.read(name, (rows, index[0]))
            by_head = part.reshape(-1, size, part.shape[1])
            return by_head[[h - heads[0] for h in heads]].reshape(-1, part.shape[1]).T

        return read
