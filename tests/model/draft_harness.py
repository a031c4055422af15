"""The draft of tests/data/k3_tiny_dspark behind plain numpy calls, on so many ranks.

Rule: no numbers of its own; each program is jitted once for SLOTS slots, which are the tile.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from k3serve.checkpoint.draft import load_draft
from k3serve.draft_config import DraftConfig
from k3serve.model import RANK
from k3serve.model import draft as d
from k3serve.model.draft_weights import draft_weight_specs
from tests.model.harness import DATA, SLOTS, Model

ROWS = 9  # an anchor and eight drafts
PAGE = 64


class Draft:
    """Programs and weights; `target` supplies embedding and head where the folder has none."""

    def __init__(self, target: Model, folder: Path | None = None, dtype: str = "float32") -> None:
        folder = DATA / "k3_tiny_dspark" if folder is None else folder
        self.target, self.dtype = target, np.dtype(dtype)
        self.config = DraftConfig.from_dir(folder, target.config)
        self.mesh: Mesh = target.mesh
        self.ranks = self.mesh.shape[RANK]
        self.weights = load_draft(folder, self.config, self.mesh, self.dtype)
        self.specs = draft_weight_specs(
            self.config,
            self.ranks,
            own_embed=self.weights.embed is not None,
            own_head=self.weights.head is not None,
        )
        self.ring_specs = d.ring_specs(self.config)
        self.row_specs = [P(None, RANK)] * self.config.num_layers

    def ring(self) -> d.DraftRing:
        return d.init_ring(
            self.config, self.mesh, slots=SLOTS, rows=ROWS, context=512, dtype=self.dtype
        )

    def map(self, function: Any, in_specs: Any, out_specs: Any) -> Any:
        """function(draft weights, target weights, ...) under shard_map, jitted."""
        specs = (self.specs, self.target.weight_specs, *in_specs)
        mapped = jax.shard_map(
            function, mesh=self.mesh, in_specs=specs, out_specs=out_specs, check_vma=False
        )
        jitted = jax.jit(mapped)
        return lambda *inputs: jitted(self.weights, self.target.weights, *inputs)

    @cached_property
    def context(self) -> Any:
        """feats [N, aux*d], positions [N] -> c [N, d], keys and values by layer."""

        def context(w: Any, _: Any, feats: Any, positions: Any) -> Any:
            keys, values = d.context_rows(self.config, w, feats, positions)
            return d.context_stream(self.config, w, feats), keys, values

        return self.map(context, (P(), P()), (P(), self.row_specs, self.row_specs))

    @cached_property
    def page(self) -> Any:
        """ring, slot, feats [C, aux*d], start, length -> ring."""

        def page(w: Any, _: Any, ring: Any, slot: Any, feats: Any, start: Any, length: Any) -> Any:
            where = start + np.arange(feats.shape[0], dtype=np.int32)
            keys, values = d.context_rows(self.config, w, feats, where)
            return d.commit_page(ring, slot, keys, values, start, length)

        return self.map(page, (self.ring_specs, P(), P(), P(), P()), self.ring_specs)

    @cached_property
    def rows(self) -> Any:
        """ring, slots [G], feats [G, R, aux*d], positions [G], accepted [G] -> ring."""

        def rows(
            w: Any, _: Any, ring: Any, slots: Any, feats: Any, positions: Any, accepted: Any
        ) -> Any:
            where = positions[:, None] + np.arange(feats.shape[1], dtype=np.int32)
            flat = feats.reshape(-1, feats.shape[-1])
            keys, values = d.context_rows(self.config, w, flat, where.reshape(-1))
            return d.commit_rows(ring, slots, keys, values, positions, accepted)

        return self.map(rows, (self.ring_specs, P(), P(), P(), P()), self.ring_specs)

    @cached_property
    def block(self) -> Any:
        """ring, slots [G], anchors [G], positions [G] -> hidden, base logits [G, 8, .], block k and
        v by layer.
        """

        def block(w: Any, t: Any, ring: Any, slots: Any, anchors: Any, positions: Any) -> Any:
            taps: Any = {}
            tile = jax.tree.map(lambda x: x[slots], ring)
            hidden = d.block_hidden(self.config, w, t.embed, tile, anchors, positions, 8, taps=taps)
            layers = range(self.config.num_layers)
            keys = [taps["block_k", i] for i in layers]
            values = [taps["block_v", i] for i in layers]
            return hidden, d.base_logits(self.config, w, t.head, hidden), keys, values

        heads = [P(None, RANK, None)] * self.config.num_layers
        return self.map(block, (self.ring_specs, P(), P(), P()), (P(), P(), heads, heads))

    def head(self, top: int | None = None) -> Any:
        """base [N, vocab], hidden [N, d], previous [N] -> logits [N, vocab], confidence [N]."""

        def head(w: Any, _: Any, base: Any, hidden: Any, previous: Any) -> Any:
            logits = d.corrected(self.config, w, base, previous, top)
            return logits, d.confidence(self.config, w, hidden, previous)

        return self.map(head, (P(), P(), P()), (P(), P()))

    @cached_property
    def exact_head(self) -> Any:
        return self.head()

    def fill(self, ring: d.DraftRing, slot: int, feats: Any) -> d.DraftRing:
        """Context rows 0.. by pages."""
        for start in range(0, len(feats), PAGE):
            part = np.asarray(feats[start : start + PAGE])
            padded = np.pad(part, [(0, PAGE - len(part)), (0, 0)], constant_values=9.0)
            ring = self.page(ring, np.int32(slot), padded, np.int32(start), np.int32(len(part)))
        return ring

    def draft(self, ring: d.DraftRing, anchors: Any, positions: Any) -> tuple[np.ndarray, ...]:
        """Eight greedy drafts of every slot [S, 8], their logits and confidences."""
        slots = np.arange(SLOTS, dtype=np.int32)
        hidden, base, *_ = self.block(ring, slots, ints(anchors), ints(positions))
        previous, out = ints(anchors), []
        for k in range(8):
            logits, sure = self.exact_head(base[:, k], hidden[:, k], previous)
            previous = ints(np.asarray(logits).argmax(-1))
            out.append((previous, np.asarray(logits), np.asarray(sure)))
        return tuple(np.stack(column, 1) for column in zip(*out, strict=True))


def ints(values: Any) -> np.ndarray:
    return np.asarray(values, np.int32)
