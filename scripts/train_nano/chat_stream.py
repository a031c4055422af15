"""Training batches of rendered conversations: one per row, grouped by length.

Rule: a conversation is never cut and never shares a row with another (the recurrent state has no
reset); one that is longer than the longest row is left out.
"""

from typing import Any

from scripts.train_nano import xtml
from scripts.train_nano.batches import Batch, make_batch
from scripts.train_nano.sampling import MIXES, SampleStream
from scripts.train_nano.spec import PAD_ID
from scripts.train_nano.tokenizer import Tokenizer

Row = tuple[list[int], list[bool]]


class ChatStream:
    """Samples of one mix in rows of a few fixed lengths; a batch comes when a length is full."""

    def __init__(
        self,
        seed: int,
        mix: str,
        tokenizer: Tokenizer,
        tokens_per_step: int,
        lengths: tuple[int, ...],
        share: float,
    ):
        self.samples = SampleStream(seed, MIXES[mix])
        self.tokenizer, self.share = tokenizer, share
        self.rows = {length: tokens_per_step // length for length in lengths}
        self.waiting: dict[int, list[Row]] = {length: [] for length in lengths}

    def next_batch(self) -> Batch:
        rows, length = self.next_rows()
        return make_batch(rows, length, PAD_ID, self.share)

    def next_rows(self) -> tuple[list[Row], int]:
        """The rows of the next batch, and the length that they are to be padded to."""
        while True:
            fragments = xtml.render(next(self.samples))
            row = self.tokenizer.encode_fragments(fragments)
            length = next((n for n in self.rows if n >= len(row[0]) - 1), None)
            if length is None:
                continue
            rows = self.waiting[length]
            rows.append(row)
            if len(rows) == self.rows[length]:
                self.waiting[length] = []
                return rows, length

    def state(self) -> dict[str, Any]:
        return {
            "samples": self.samples.state(),
            "waiting": {str(length): rows for length, rows in self.waiting.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.samples.restore(state["samples"])
        for length in self.waiting:
            rows = state["waiting"][str(length)]
            self.waiting[length] = [(ids, counts) for ids, counts in rows]
