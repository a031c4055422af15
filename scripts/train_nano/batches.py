"""Fixed-shape training batches, and the recall rows of stage 0.

Rule: a stream's position is plain JSON (`state()`), and a stream restored from it continues with
exactly the batches it would have given.
"""

import dataclasses
from typing import Any, Protocol

import numpy as np

from scripts.train_nano.spec import N_RANKS


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """Rows of tokens and the positions whose next token counts for the loss."""

    ids: np.ndarray  # [rows, length] int32
    positions: np.ndarray  # [targets] int32, into the flattened rows
    targets: np.ndarray  # [targets] int32
    weights: np.ndarray  # [targets] f32, 0 for padding


class Stream(Protocol):
    """A resumable source of batches."""

    def next_batch(self) -> Batch: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


def make_batch(
    rows: list[tuple[list[int], list[bool]]], length: int, pad_id: int, share: float
) -> Batch:
    """Pads `(tokens, counts)` rows to `length`. At most `share` of all positions become targets.

    `counts[i]` says whether token i is one the model should predict. Which targets are dropped
    when there are too many is a fixed pseudo-random choice.
    """
    ids = np.full((len(rows), length), pad_id, np.int32)
    wanted: list[tuple[int, int]] = []
    for index, (tokens, counts) in enumerate(rows):
        ids[index, : len(tokens) - 1] = tokens[:-1]
        start = index * length - 1
        wanted += [(start + i, tokens[i]) for i in range(1, len(tokens)) if counts[i]]
    capacity = int(len(rows) * length * share) // 64 * 64
    found = np.asarray(wanted, np.int32).reshape(-1, 2)
    if len(found) > capacity:
        found = found[np.random.default_rng(len(found)).permutation(len(found))[:capacity]]
    used = len(found)
    free = np.setdiff1d(np.arange(ids.size, dtype=np.int32), found[:, 0])[: capacity - used]
    return Batch(
        ids,
        np.concatenate([found[:, 0], free]),
        np.concatenate([found[:, 1], np.zeros(len(free), np.int32)]),
        (np.arange(capacity) < used).astype(np.float32),
    )


class RecallStream:
    """Stage 0: random rows that can only be predicted by copying from earlier in the row.

    Half of the rows repeat a random sequence, half are key-value pairs that are asked for later.
    Tokens follow a Zipf law: with equal frequencies the copying circuit did not form in the time
    we had, with these it does after some hundred steps.
    """

    def __init__(self, seed: int, tokens_per_step: int, length: int, share: float):
        self.seed, self.length, self.share = seed, length, share
        self.rows = tokens_per_step // length
        self.count = 0
        law = 1 / (np.arange(N_RANKS) + 4.0)
        self.cumulative = np.cumsum(law / law.sum())
        self.order = np.random.default_rng(seed + 7).permutation(N_RANKS)

    def next_batch(self) -> Batch:
        rng = np.random.default_rng((self.seed, self.count))
        self.count += 1
        rows = [
            (self._repeat if rng.random() < 0.5 else self._pairs)(rng) for _ in range(self.rows)
        ]
        return make_batch(rows, self.length, 0, self.share)

    def state(self) -> dict[str, Any]:
        return {"count": self.count}

    def restore(self, state: dict[str, Any]) -> None:
        self.count = state["count"]

    def _tokens(self, rng: np.random.Generator, count: int) -> np.ndarray:
        ranks = np.searchsorted(self.cumulative, rng.random(count))
        return self.order[np.minimum(ranks, N_RANKS - 1)]

    def _repeat(self, rng: np.random.Generator) -> tuple[list[int], list[bool]]:
        period = int(rng.integers(3, 60))
        row = np.resize(self._tokens(rng, period), self.length + 1)
        return row.tolist(), (np.arange(self.length + 1) > period).tolist()

    def _pairs(self, rng: np.random.Generator) -> tuple[list[int], list[bool]]:
        keys = np.unique(self._tokens(rng, int(rng.integers(4, 30))))
        rng.shuffle(keys)
        values = self._tokens(rng, len(keys))
        asked = rng.integers(0, len(keys), self.length // 2 + 1)
        table = np.stack([keys, values], 1)
        row = np.concatenate([table, table[asked]]).ravel()[: self.length + 1]
        at = np.arange(self.length + 1)
        return row.tolist(), ((at >= 2 * len(keys)) & (at % 2 == 1)).tolist()
