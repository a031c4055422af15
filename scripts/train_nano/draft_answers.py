"""What the target itself answers to training prompts, greedily and at temperature 1, on disk.

Rule: shard i is a function of the target's weights, the recipe and i, so shards are written one
after the other and a run that stopped goes on with the next one. No held-out prompt is among them.
"""

import dataclasses
import hashlib
import itertools
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from scripts.train_nano import decode, export, xtml
from scripts.train_nano.chat_stream import Row
from scripts.train_nano.draft_spec import DraftRecipe
from scripts.train_nano.model import Params
from scripts.train_nano.sampling import MIXES, SampleStream
from scripts.train_nano.spec import END_OF_MSG_ID, ModelSpec
from scripts.train_nano.tokenizer import Tokenizer

log = logging.getLogger("train_nano")
_BATCH = 256  # a shard's 512 sampled and 1,024 greedy answers fill it


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerCache:
    """Shards of prompts and answers in a folder."""

    recipe: DraftRecipe
    folder: Path
    target: Path  # the checkpoint folder that answers

    @property
    def shards(self) -> int:
        return -(-self.recipe.answers // self.recipe.answers_per_shard)

    def fill(self, spec: ModelSpec, params: Params, tokens: Tokenizer) -> None:
        """Writes the shards that are missing."""
        self._check_origin()
        for index in range(self.shards):
            if self._path(index).exists():
                continue
            start = time.monotonic()
            rows = list(self._write_rows(spec, params, tokens, index))
            _save_rows(self._path(index), rows)
            written = sum(sum(learned) for _, learned in rows)
            log.info(
                "answers %d/%d  %.0f tokens/s written", index + 1, self.shards,
                written / (time.monotonic() - start),
            )  # fmt: skip

    def load(self) -> list[Row]:
        return [row for index in range(self.shards) for row in _load_rows(self._path(index))]

    def _path(self, index: int) -> Path:
        return self.folder / f"{index:05d}.npz"

    def _check_origin(self) -> None:
        """Notes who wrote the answers; refuses a folder that another target or recipe filled."""
        weights = (self.target / export.WEIGHTS).read_bytes()
        recipe = self.recipe
        origin: dict[str, Any] = {"target": hashlib.sha256(weights).hexdigest()} | {
            name: getattr(recipe, name)
            for name in (
                "seed", "mix", "answers_per_shard", "sampled_share", "longest_prompt",
                "longest_answer",
            )
        }  # fmt: skip
        path = self.folder / "origin.json"
        self.folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(json.dumps(origin, indent=1) + "\n")
        known = json.loads(path.read_text())
        different = [name for name in origin if known.get(name) != origin[name]]
        if different:
            raise SystemExit(
                f"{self.folder}: these answers come from another {', '.join(different)}; delete "
                "the folder, or give another --work"
            )

    def _write_rows(
        self, spec: ModelSpec, params: Params, tokens: Tokenizer, index: int
    ) -> Iterator[Row]:
        recipe = self.recipe
        seed = recipe.seed + 88_000 + 1000 * index
        prompts = list(itertools.islice(self._prompts(seed, tokens), recipe.answers_per_shard))
        sampled = round(len(prompts) * recipe.sampled_share)
        for temperature, part in ((1.0, prompts[:sampled]), (0.0, prompts[sampled:])):
            answers = decode.generate(
                spec, params, part, recipe.longest_answer, min(_BATCH, len(part)), temperature, seed
            )
            for prompt, answer in zip(part, answers, strict=True):
                ended = len(answer) < recipe.longest_answer
                written = [*answer, END_OF_MSG_ID] if ended else answer
                yield prompt + written, [False] * len(prompt) + [True] * len(written)

    def _prompts(self, seed: int, tokens: Tokenizer) -> Iterator[list[int]]:
        for sample in SampleStream(seed, MIXES[self.recipe.mix]):
            if sample.messages:
                prompt, _ = tokens.encode_fragments(xtml.render(sample, prompt_only=True))
                if len(prompt) <= self.recipe.longest_prompt:
                    yield prompt


def _save_rows(path: Path, rows: list[Row]) -> None:
    partial = path.with_suffix(".partial.npz")
    np.savez_compressed(
        partial,
        ids=np.concatenate([np.asarray(ids, np.int16) for ids, _ in rows]),
        lengths=np.asarray([len(ids) for ids, _ in rows], np.int32),
        prompts=np.asarray([written.index(True) for _, written in rows], np.int32),
    )
    partial.replace(path)


def _load_rows(path: Path) -> list[Row]:
    with np.load(path) as data:
        pieces = np.split(data["ids"].astype(int), np.cumsum(data["lengths"])[:-1])
        pairs = zip(pieces, data["prompts"].tolist(), strict=True)
        return [(ids.tolist(), [i >= prompt for i in range(len(ids))]) for ids, prompt in pairs]
