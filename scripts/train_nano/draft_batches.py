"""Batches for the draft: rows of tokens, anchors in them, and the slots that count for the loss.

Rule: an anchor is a token that the assistant wrote, and a slot counts if everything from the anchor
to the token it predicts was written by the assistant too: what a server drafts, and nothing else.
"""

import dataclasses
from typing import Any, Protocol

import numpy as np

from scripts.train_nano.chat_stream import ChatStream, Row
from scripts.train_nano.draft_answers import AnswerCache
from scripts.train_nano.draft_spec import DraftRecipe
from scripts.train_nano.spec import PAD_ID
from scripts.train_nano.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, slots=True)
class DraftBatch:
    """Fixed shapes for each row length. Slots are given by flat indices, padded with weight 0."""

    ids: np.ndarray  # [rows, length] int32
    anchors: np.ndarray  # [rows, anchors] int32, positions
    blocks: np.ndarray  # [slots] int32 into [rows, anchors, block], all different
    positions: np.ndarray  # [slots] int32 into the flat ids: the token before the predicted one
    slots: np.ndarray  # [slots] int32, 0 .. block-1
    weights: np.ndarray  # [slots] f32, 0 for padding


class RowStream(Protocol):
    """A resumable source of equally long rows: token ids, and which of them were written."""

    def next_rows(self) -> tuple[list[Row], int]: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


def open_corpus(recipe: DraftRecipe, tokens: Tokenizer) -> RowStream:
    """Chats of the curriculum; another seed than any stage of the target's training."""
    seed = recipe.seed + 77_000
    lengths = recipe.row_lengths
    return ChatStream(seed, recipe.mix, tokens, recipe.tokens_per_step, lengths, share=1.0)


class AnswerStream:
    """The target's own answers, epoch after epoch, each time in another order."""

    def __init__(self, recipe: DraftRecipe, cache: AnswerCache):
        self.rows = cache.load()
        self.seed = recipe.seed
        self.per_batch = {n: max(1, recipe.tokens_per_step // n) for n in recipe.row_lengths}
        self.waiting: dict[int, list[int]] = {length: [] for length in recipe.row_lengths}
        self.drawn = 0
        self.order = self._order(0)

    def next_rows(self) -> tuple[list[Row], int]:
        while True:
            epoch, place = divmod(self.drawn, len(self.rows))
            if place == 0:
                self.order = self._order(epoch)
            index = self.order[place]
            self.drawn += 1
            needed = len(self.rows[index][0]) - 1
            length = next((n for n in self.per_batch if n >= needed), None)
            if length is None:
                continue
            waiting = self.waiting[length]
            waiting.append(index)
            if len(waiting) == self.per_batch[length]:
                self.waiting[length] = []
                return [self.rows[i] for i in waiting], length

    def _order(self, epoch: int) -> list[int]:
        return np.random.default_rng((self.seed, epoch)).permutation(len(self.rows)).tolist()

    def state(self) -> dict[str, Any]:
        waiting = {str(length): indices for length, indices in self.waiting.items()}
        return {"drawn": self.drawn, "waiting": waiting}

    def restore(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]
        self.order = self._order(self.drawn // len(self.rows))
        self.waiting = {n: list(state["waiting"][str(n)]) for n in self.waiting}


def make_batch(recipe: DraftRecipe, rows: list[Row], length: int, step: int) -> DraftBatch:
    """Draws anchors in each row and the slots that count; a pure function of its arguments."""
    rng = np.random.default_rng((recipe.seed, step))
    block, count = recipe.spec.block, max(1, recipe.anchors_per_step // len(rows))
    ids = np.full((len(rows), length), PAD_ID, np.int32)
    anchors = np.zeros((len(rows), count), np.int32)
    found: list[tuple[int, int, int]] = []  # index of the slot, flat position, slot
    for index, (tokens, written) in enumerate(rows):
        ids[index, : len(tokens) - 1] = tokens[:-1]
        reach = reachable(written, block)
        able = np.flatnonzero(reach)
        chosen = rng.permutation(able)[:count]
        anchors[index, : len(chosen)] = chosen
        for place, anchor in enumerate(chosen):
            first, position = (index * count + place) * block, index * length + int(anchor)
            found += [(first + k, position + k, k) for k in range(reach[anchor])]
    capacity = min(recipe.slots_per_step, anchors.size * block)
    table = np.asarray(found, np.int32).reshape(-1, 3)
    table = table[rng.permutation(len(table))[:capacity]]
    used = len(table)
    free = np.setdiff1d(np.arange(anchors.size * block, dtype=np.int32), table[:, 0])
    padding = np.zeros((capacity - used, 3), np.int32)
    padding[:, 0] = free[: capacity - used]
    table = np.concatenate([table, padding])
    weights = (np.arange(capacity) < used).astype(np.float32)
    blocks, positions, slots = np.ascontiguousarray(table.T)
    return DraftBatch(ids, anchors, blocks, positions, slots, weights)


def reachable(written: list[bool], block: int) -> np.ndarray:  # [tokens] int
    """For each position, if it is an anchor, how many slots predict tokens of the same answer."""
    reach = np.zeros(len(written), int)
    run = 0  # written tokens in a row from here on
    for position in range(len(written) - 1, -1, -1):
        run = run + 1 if written[position] else 0
        reach[position] = min(block, max(0, run - 1))
    return reach
