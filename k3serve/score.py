"""Offline scoring: the model's log-probabilities of given sequences, without a server.

Rule: the same page program and the same page_scores as the engine, so both give the same bits; one
compiled program for sequences of every length.

Try it: `score("tests/data/k3_tiny", [{"tokens": [1, 2, 3]}], top=5)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from k3serve.checkpoint.load import load
from k3serve.config import TargetConfig
from k3serve.errors import RequestError
from k3serve.model import (
    RANK,
    State,
    Weights,
    head_logits,
    init_state,
    page_scores,
    prefill_page,
    state_specs,
    weight_specs,
)

PAGE_TOKENS = 64
Encode = Callable[[str], Sequence[int]]
Progress = Callable[[int, int], object]


def score(
    checkpoint_dir: str | Path,
    lines: Sequence[Mapping[str, Any]],
    *,
    dtype: Any = np.float32,
    want_logits: bool = False,
    top: int = 0,
    ranks: int = 1,
    page_tokens: int = PAGE_TOKENS,
    expert_format: str = "dense",
    encode: Encode | None = None,
    progress: Progress | None = None,
) -> dict[str, np.ndarray]:
    """Arrays by name, for the i-th line `{"tokens": [...]}` or `{"text": "..."}` of len tokens:

    logprobs_i [len] f32: entry t is log p(token t | tokens before it); entry 0 is NaN, for nothing
    comes before it greedy_i [len] i32: the most probable token after position t
    logits_i [len, vocab] f32, with want_logits: row t predicts token t+1
    top_ids_i, top_logprobs_i [len, top], with top > 0: the best tokens after position t, best first

    `encode` turns text into tokens. `progress` gets (lines done, lines in all). Raises RequestError
    for a bad line, ConfigError and CheckpointError for a bad checkpoint.
    """
    config = TargetConfig.from_dir(checkpoint_dir)
    sequences = [_tokens(i, line, config, encode) for i, line in enumerate(lines)]
    if not 0 <= top <= config.vocab_size:
        raise RequestError(f"top={top} must lie in 0..{config.vocab_size}", param="top")
    devices = jax.local_devices()
    if not 1 <= ranks <= len(devices):
        raise RequestError(f"ranks={ranks}, but {len(devices)} devices are here", param="ranks")
    mesh = Mesh(np.array(devices[:ranks]), (RANK,))
    weights = load(checkpoint_dir, config, mesh, dtype, expert_format)
    pages = max((-(-len(s) // page_tokens) for s in sequences), default=1)
    state = init_state(config, mesh, slots=1, num_pages=pages, page_tokens=page_tokens, dtype=dtype)
    program = _program(config, mesh, expert_format, max(top, 1), want_logits, pages)
    arrays: dict[str, np.ndarray] = {}
    for i, sequence in enumerate(sequences):
        rows, state = _run(program, weights, state, sequence, page_tokens, pages)
        logprobs, ids, best, *logits = rows
        arrays[f"logprobs_{i}"] = np.concatenate([[np.float32(np.nan)], logprobs[:-1]])
        arrays[f"greedy_{i}"] = ids[:, 0].copy()
        if top:
            arrays[f"top_ids_{i}"], arrays[f"top_logprobs_{i}"] = ids, best
        if want_logits:
            arrays[f"logits_{i}"] = logits[0]
        if progress is not None:
            progress(i + 1, len(sequences))
    return arrays


def _tokens(
    number: int, line: Mapping[str, Any], config: TargetConfig, encode: Encode | None
) -> list[int]:
    where = f"input line {number + 1}"
    if not isinstance(line, Mapping) or len({"tokens", "text"} & set(line)) != 1:
        raise RequestError(
            f'{where} must be {{"tokens": [...]}} or {{"text": "..."}}', param="line"
        )
    tokens = line.get("tokens")
    if "text" in line:
        if encode is None or not isinstance(line["text"], str):
            raise RequestError(f"{where}: text needs a string, and a tokenizer in the checkpoint")
        tokens = list(encode(line["text"]))
    valid = isinstance(tokens, list) and all(
        type(t) is int and 0 <= t < config.vocab_size for t in tokens
    )
    if not tokens or not valid:
        raise RequestError(
            f"{where}: tokens={str(tokens)[:80]} must be a list of at least one integer in "
            f"0..{config.vocab_size - 1}",
            param="tokens",
        )
    return list(tokens)


def _program(
    config: TargetConfig, mesh: Mesh, expert_format: str, top: int, want_logits: bool, pages: int
) -> Callable[..., tuple[tuple[Array, ...], State]]:
    """One page of slot 0 with its scores."""

    def page(
        weights: Weights, state: State, tokens: Array, after: Array, start: Array, length: Array
    ) -> tuple[tuple[Array, ...], State]:
        hidden, state = prefill_page(
            config, weights, state, jnp.int32(0), tokens, start, length, jnp.arange(pages)
        )
        logits = head_logits(config, weights, hidden)
        scores = page_scores(logits, after, top)
        return (*scores, logits) if want_logits else scores, state

    specs = state_specs(config)
    weights_in = weight_specs(config, mesh.shape[RANK], expert_format)
    mapped = jax.shard_map(
        page,
        mesh=mesh,
        in_specs=(weights_in, specs, P(), P(), P(), P()),
        out_specs=(P(), specs),
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=1)


def _run(
    program: Callable[..., tuple[tuple[Array, ...], State]],
    weights: Weights,
    state: State,
    sequence: list[int],
    page_tokens: int,
    pages: int,
) -> tuple[list[np.ndarray], State]:
    """All pages of one sequence; results cut to its length."""
    padded = np.full(pages * page_tokens + 1, -1, np.int32)
    padded[: len(sequence)] = sequence
    results = []
    for start in range(0, len(sequence), page_tokens):
        end = start + page_tokens
        length = min(end, len(sequence)) - start
        tokens = np.maximum(padded[start:end], 0)
        after = padded[start + 1 : end + 1]
        out, state = program(weights, state, tokens, after, np.int32(start), np.int32(length))
        results.append(out)
    rows = [
        np.concatenate([np.asarray(part) for part in parts])[: len(sequence)]
        for parts in zip(*results, strict=True)
    ]
    return rows, state
