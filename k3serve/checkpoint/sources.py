"""Which checkpoint tensors make a weight, and how a slice of it is put together.

Rule: one small reader per kind of weight; it gets the slice of the finished weight and reads no
more of the file than that. Files hold matrices [out, in], weights are [in, out].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from k3serve.checkpoint.hf import Checkpoint
from k3serve.checkpoint.mxfp4 import check_scales, dequantise
from k3serve.checkpoint.names import layer_prefix, prefix
from k3serve.config import TargetConfig
from k3serve.errors import CheckpointError

Index = tuple[slice, ...]
Reader = Callable[[Index], np.ndarray]
Path = tuple[str | int, ...]
T = TypeVar("T")


def readers(checkpoint: Checkpoint, config: TargetConfig) -> Callable[[Path], Reader]:
    """The reader of each weight, by its path in the Weights tree, e.g. ("layers", 3, "attn",
    "qkv").
    """
    return _Readers(checkpoint, config).find


class Kinds:
    """Makes readers of the kinds of weights that any model has."""

    def __init__(self, checkpoint: Checkpoint, vocab_size: int) -> None:
        self.file = checkpoint
        self.vocab_size = vocab_size

    def vector(self, name: str) -> Reader:
        """[n]; the file may have further axes of its own (dt_bias by head)."""
        return lambda index: self.file.read(name).reshape(-1)[index[0]]

    def matrix(self, name: str) -> Reader:
        return lambda index: self.file.read(name, (index[1], index[0])).T

    def stack(self, names: list[str]) -> Reader:
        """[in, parts, out]; the parts are whole in every slice."""

        def read(index: Index) -> np.ndarray:
            return _stack(names, 1, lambda name: self.file.read(name, (index[2], index[0])).T)

        return read

    def vocabulary(self, name: str) -> Reader:
        """[padded vocab, d]; rows past the vocabulary are zeros."""

        def read(index: Index) -> np.ndarray:
            rows = index[0]
            end = min(rows.stop, self.vocab_size)
            part = self.file.read(name, (slice(min(rows.start, end), end), index[1]))
            missing = rows.stop - rows.start - part.shape[0]
            return np.pad(part, [(0, missing), (0, 0)]) if missing else part

        return read

    def head(self, name: str) -> Reader:
        rows = self.vocabulary(name)
        return lambda index: rows((index[1], index[0])).T


class _Readers(Kinds):
    """Makes readers; methods are kinds of weights."""

    def __init__(self, checkpoint: Checkpoint, config: TargetConfig) -> None:
        super().__init__(checkpoint, config.vocab_size)
        self.config = config

    def find(self, path: Path) -> Reader:
        if path[0] != "layers":
            return self._outer(str(path[0]))
        layer = int(path[1])
        base, part = layer_prefix(self.config, layer), str(path[2])
        if part == "attn":
            attention = self._kda if self.config.is_kda(layer) else self._mla
            return attention(f"{base}self_attn.", str(path[3]))
        if part == "mlp":
            if layer < self.config.dense_layers:
                return self._mlp(f"{base}mlp.", str(path[3]))
            return self._moe(f"{base}block_sparse_moe.", [str(p) for p in path[3:]])
        return {
            "attn_norm": self.vector(f"{base}input_layernorm.weight"),
            "mlp_norm": self.vector(f"{base}post_attention_layernorm.weight"),
            "attn_mix": self.score(f"{base}self_attention_res"),
            "mlp_mix": self.score(f"{base}mlp_res"),
        }[part]

    def _outer(self, part: str) -> Reader:
        base = prefix(self.config)
        return {
            "embed": self.vocabulary(f"{base}model.embed_tokens.weight"),
            "out_mix": self.score(f"{base}model.output_attn_res"),
            "norm": self.vector(f"{base}model.norm.weight"),
            "head": self.head(f"{base}lm_head.weight"),
        }[part]

    def _kda(self, base: str, part: str) -> Reader:
        if part == "qkv":
            return self.stack([f"{base}{p}_proj.weight" for p in "qkv"])
        if part == "conv":
            return self.conv([f"{base}{p}_conv1d.weight" for p in "qkv"])
        if part == "a_log":
            return self.a_log(f"{base}A_log")
        if part in ("dt_bias", "out_norm"):
            return self.vector(base + {"dt_bias": "dt_bias", "out_norm": "o_norm.weight"}[part])
        short = {"decay_a": "f_a", "decay_b": "f_b", "beta": "b", "gate": "g"}
        short |= {"gate_a": "g_a", "gate_b": "g_b", "out": "o"}
        return self.matrix(f"{base}{short[part]}_proj.weight")

    def _mla(self, base: str, part: str) -> Reader:
        if part in ("k_up", "v_up"):
            return self.kv_up(f"{base}kv_b_proj.weight", part == "v_up")
        if part in ("q_norm", "kv_norm"):
            return self.vector(f"{base}{part[:-5]}_a_layernorm.weight")
        short = {"q": "q_proj", "q_a": "q_a_proj", "q_b": "q_b_proj", "gate": "g_proj"}
        short |= {"kv_a": "kv_a_proj_with_mqa", "out": "o_proj"}
        return self.matrix(f"{base}{short[part]}.weight")

    def _mlp(self, base: str, part: str) -> Reader:
        if part == "down":
            return self.matrix(f"{base}down_proj.weight")
        return self.stack([f"{base}{p}_proj.weight" for p in ("gate", "up")])

    def _moe(self, base: str, path: list[str]) -> Reader:
        part = path[0]
        if part == "shared":
            return self._mlp(f"{base}shared_experts.", path[1])
        if part == "experts":
            return self._experts(f"{base}experts.", path[1])
        if part == "router_bias":
            return self.vector(f"{base}gate.e_score_correction_bias")
        if part == "latent_norm":
            return self.vector(f"{base}routed_expert_norm.weight")
        short = {"router": "gate", "latent_down": "routed_expert_down_proj"}
        short |= {"latent_up": "routed_expert_up_proj"}
        return self.matrix(f"{base}{short[part]}.weight")

    def _experts(self, base: str, part: str) -> Reader:
        parts = ("w2",) if part.startswith("down") else ("w1", "w3")
        if part.endswith(("_codes", "_scales")):
            suffix = "_packed" if part.endswith("_codes") else "_scale"
            return self.packed_experts(base, parts, suffix)
        return self.dense_experts(base, parts)

    # -------------------------------------------------------------------------- kinds of weights

    def score(self, base: str) -> Reader:
        """[d]: an AttnRes norm weight times its score vector, exact in float32 from bfloat16."""

        def read(index: Index) -> np.ndarray:
            norm = self.file.read(f"{base}_norm.weight").astype(np.float32)
            return (norm * self.file.read(f"{base}_proj.weight").reshape(-1).astype(np.float32))[
                index[0]
            ]

        return read

    def conv(self, names: list[str]) -> Reader:
        """[taps, parts, width] from [width, 1, taps] or [width, taps]."""

        def read(index: Index) -> np.ndarray:
            taps = self.config.conv_width
            return _stack(
                names, 1, lambda name: self.file.read(name, (index[2],)).reshape(-1, taps).T
            )

        return read

    def a_log(self, name: str) -> Reader:
        """[heads] from [heads], [1, 1, heads, 1], or a longer vector with zeros at its end."""

        def read(index: Index) -> np.ndarray:
            stored = self.file.read(name).reshape(-1)
            heads = self.config.kda_heads
            if stored[heads:].any():
                raise CheckpointError(
                    f"{name}: {stored.size} numbers in {self.file.file_of(name)}, expected zeros "
                    f"after the first {heads} (the heads), found others"
                )
            return stored[index[0]]

        return read

    def kv_up(self, name: str, value: bool) -> Reader:
        """k_up [heads, nope, latent] or v_up [heads, latent, v]: each head's rows hold its key
        part, then its value.
        """

        def read(index: Index) -> np.ndarray:
            c = self.config
            per_head = c.nope_dim + c.v_head_dim
            rows = slice(index[0].start * per_head, index[0].stop * per_head)
            both = self.file.read(name, (rows,)).reshape(-1, per_head, c.kv_lora_rank)
            return both[:, c.nope_dim :].swapaxes(1, 2) if value else both[:, : c.nope_dim]

        return read

    def dense_experts(self, base: str, parts: tuple[str, ...]) -> Reader:
        """[E, in, parts, out], or [E, in, out] of a single part; MXFP4 is unpacked."""

        def one(name: str) -> np.ndarray:
            if not self.config.packed_experts:
                return self.file.read(name).T
            scales = self.file.read(f"{name}_scale")
            check_scales(f"{name}_scale", scales)
            return dequantise(self.file.read(f"{name}_packed"), scales, _bf16()).T

        def read(index: Index) -> np.ndarray:
            experts = range(index[0].start, index[0].stop)
            if len(parts) == 1:
                return _stack(experts, 0, lambda e: one(f"{base}{e}.{parts[0]}.weight"))
            return _stack(
                experts, 0, lambda e: _stack(parts, 1, lambda p: one(f"{base}{e}.{p}.weight"))
            )

        return read

    def packed_experts(self, base: str, parts: tuple[str, ...], suffix: str) -> Reader:
        """[E, parts, out, in/2 or in/32], or without the parts axis; bytes as stored."""

        def one(expert: int, part: str) -> np.ndarray:
            name = f"{base}{expert}.{part}.weight{suffix}"
            data = self.file.read(name)
            if suffix == "_scale":
                check_scales(name, data)
            return data

        def read(index: Index) -> np.ndarray:
            experts = range(index[0].start, index[0].stop)
            if len(parts) == 1:
                return _stack(experts, 0, lambda e: one(e, parts[0]))
            return _stack(experts, 0, lambda e: _stack(parts, 0, lambda p: one(e, p)))

        return read


def _stack(items: Sequence[T], axis: int, read: Callable[[T], np.ndarray]) -> np.ndarray:
    """np.stack of read(item) that holds the result and one item, never all items beside it."""
    first = read(items[0])
    shape = (*first.shape[:axis], len(items), *first.shape[axis:])
    out = np.empty(shape, first.dtype)
    for i, item in enumerate(items):
        part = first if i == 0 else read(item)
        if (wider := np.promote_types(out.dtype, part.dtype)) != out.dtype:
            out = out.astype(wider)  # a file may mix BF16 and F32
        out[(slice(None),) * axis + (i,)] = part
    return out


def _bf16() -> np.dtype:
    """MXFP4 values are exact in bfloat16: half the memory of float32 on the way."""
    return np.dtype("bfloat16")
