"""Which token ids a server may sample: those that mean something.

Rule: a plain reading of the tokenizer's files, without the tokenizer, so that followers need none.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from k3serve.errors import CheckpointError


def sampling_mask(directory: Path, vocab_size: int) -> np.ndarray:  # [vocab_size] bool
    """False for reserved ids without a name and for ids the tokenizer does not know.

    A checkpoint without a tokenizer allows every id.
    """
    ranks_file, config_file = directory / "tiktoken.model", directory / "tokenizer_config.json"
    if not ranks_file.exists() or not config_file.exists():
        return np.ones(vocab_size, bool)
    ranks = sum(1 for line in ranks_file.read_bytes().splitlines() if line.strip())
    try:
        named = json.loads(config_file.read_text(encoding="utf-8"))["added_tokens_decoder"]
        ids = np.array([int(i) for i in named], int)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{config_file}: added_tokens_decoder must map token ids to their names ({error!r})"
        ) from error
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size or ranks > vocab_size:
        raise CheckpointError(
            f"{directory}: the tokenizer has {ranks} ranks and names ids up to {ids.max()}, but "
            f"the model's vocab_size is {vocab_size}: the files are of different models"
        )
    mask = np.arange(vocab_size) < ranks
    mask[ids] = True
    return mask
