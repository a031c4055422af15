"""From checkpoint files to the weights on the devices, slice by slice.

Rule: a host reads only the slices of its own ranks, and one array at a time: it never holds more
than its share plus one tensor. What a weight is comes from model/weights.py; this file says from
which tensors it is put together.

Try it: `load("tests/data/k3_tiny", TargetConfig.from_dir("tests/data/k3_tiny"), mesh, np.float32)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from k3serve.checkpoint import sources
from k3serve.checkpoint.hf import Checkpoint
from k3serve.config import TargetConfig
from k3serve.model.collectives import RANK
from k3serve.model.weights import Leaf, Weights, layout

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) of this host's share, after each array."""


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint whose headers were read and checked: what its weights will be, before any is
    read, so that a program for them can be compiled meanwhile.
    """

    layout: Any  # a tree of Leafs
    readers: Callable[[sources.Path], sources.Reader]

    def load(self, mesh: Mesh, progress: Progress | None = None) -> Any:
        """The tree as arrays, each put together by the reader of its path."""
        leaves, treedef = jax.tree_util.tree_flatten_with_path(self.layout, is_leaf=is_leaf)
        total = sum(_share(leaf, mesh) for _, leaf in leaves)
        done, arrays = 0, []
        for key, leaf in leaves:
            arrays.append(_fill(leaf, self.readers(_name(key)), mesh))
            done += _share(leaf, mesh)
            if progress is not None:
                progress(done, total)
        return jax.tree_util.tree_unflatten(treedef, arrays)


def open_target(
    path: str | Path, config: TargetConfig, ranks: int, dtype: Any, expert_format: str = "dense"
) -> Source:
    """The checkpoint of the target for so many ranks. Raises CheckpointError and ConfigError."""
    checkpoint = Checkpoint.open(path, config)
    tree = layout(config, ranks, dtype, expert_format)
    return Source(tree, sources.readers(checkpoint, config))


def load(
    path: str | Path,
    config: TargetConfig,
    mesh: Mesh,
    dtype: Any,
    expert_format: str = "dense",
    progress: Progress | None = None,
) -> Weights:
    """The weights as arrays over the mesh axis "rank". Raises CheckpointError and ConfigError."""
    source = open_target(path, config, mesh.shape[RANK], dtype, expert_format)
    weights: Weights = source.load(mesh, progress)
    return weights


def shapes(tree: Any, mesh: Mesh) -> Any:
    """The arrays that will take the places of a tree's Leafs: all that a compiler needs."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, leaf.spec)
        ),
        tree,
        is_leaf=is_leaf,
    )


def is_leaf(node: Any) -> bool:
    return isinstance(node, Leaf)


def _name(key: tuple[Any, ...]) -> tuple[str | int, ...]:
    """A tree path as names and numbers: ("layers", 3, "attn", "qkv")."""
    return tuple(part.idx if hasattr(part, "idx") else part.name for part in key)


def _share(leaf: Leaf, mesh: Mesh) -> int:
    """Bytes of the leaf on this host's devices."""
    shard = NamedSharding(mesh, leaf.spec).shard_shape(leaf.shape)
    return prod(shard) * leaf.dtype.itemsize * len(mesh.local_devices)


def _fill(leaf: Leaf, read: sources.Reader, mesh: Mesh) -> jax.Array:
    """One array, one rank's slice after the other; what all ranks hold is read once."""
    sharding = NamedSharding(mesh, leaf.spec)
    shards = []
    held, part = None, np.empty(0)
    for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
        bounds = [s.indices(size)[:2] for s, size in zip(index or (), leaf.shape, strict=True)]
        if bounds != held:
            part = read(tuple(slice(*b) for b in bounds))
            part = np.ascontiguousarray(part, dtype=leaf.dtype)
            held = bounds
        shards.append(jax.device_put(part, device))
    jax.block_until_ready(shards)  # else slices on their way to the devices would pile up
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)
