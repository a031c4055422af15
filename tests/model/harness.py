"""A checkpoint of tests/data behind plain numpy calls: run pages, run rows, look at states.

Rule: no numbers of its own; what it returns comes from the two programs, jitted once.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from k3serve.checkpoint.load import load
from k3serve.config import TargetConfig
from k3serve.model import (
    RANK,
    State,
    accept_rows,
    decode_rows,
    head_logits,
    init_state,
    kda,
    prefill_page,
    state_specs,
    weight_specs,
)
from k3serve.model.state import KdaState

DATA = Path(__file__).parents[1] / "data"
SLOTS = 16
MAX_TOKENS = 512


class Model:
    """Programs and weights of one checkpoint on so many ranks, for SLOTS slots of MAX_TOKENS
    tokens.
    """

    def __init__(
        self,
        name: str,
        ranks: int = 1,
        page_tokens: int = 64,
        expert_format: str = "dense",
        dtype: str = "float32",
    ) -> None:
        self.folder = DATA / name
        self.config = TargetConfig.from_dir(self.folder)
        self.page_tokens = page_tokens
        self.dtype = np.dtype(dtype)
        self.mesh = Mesh(np.array(jax.devices()[:ranks]), (RANK,))
        self.weights = load(self.folder, self.config, self.mesh, self.dtype, expert_format)
        self.weight_specs = weight_specs(self.config, ranks, expert_format)
        self.pages_per_slot = -(-MAX_TOKENS // page_tokens)
        pages = np.random.default_rng(5).permutation(SLOTS * self.pages_per_slot)
        self.table = pages.reshape(SLOTS, -1).astype(np.int32)  # pages of a slot lie anywhere
        # compiled once for each number of rows, and gone with this object
        self.page_program = cache(self._page_program)
        self.rows_program = cache(self._rows_program)
        self._settle = cache(self._settle_program)

    def goldens(self, file: str = "goldens") -> Any:
        return np.load(self.folder / f"{file}.npz")

    def state(self, rows: int = 1) -> State:
        return init_state(
            self.config,
            self.mesh,
            slots=SLOTS,
            num_pages=SLOTS * self.pages_per_slot,
            page_tokens=self.page_tokens,
            dtype=self.dtype,
            rows=rows,
        )

    def jit(self, function: Any, inputs: int, donate: bool = True, rows: int = 1) -> Any:
        """function(weights, state, *inputs) -> (outputs, state), with inputs and outputs on every
        rank; the state is one of `state(rows)`.
        """
        specs = state_specs(self.config, rows)
        mapped = jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=(self.weight_specs, specs, *[P()] * inputs),
            out_specs=(P(), specs),
            check_vma=False,
        )
        return jax.jit(mapped, donate_argnums=1 if donate else ())

    def _page_program(self, rows: int) -> Any:
        def page(weights: Any, state: State, *inputs: Any) -> Any:
            taps: dict[tuple[str, int], jax.Array] = {}
            hidden, state = prefill_page(self.config, weights, state, *inputs, taps=taps)
            return {**_named(taps), "logits": head_logits(self.config, weights, hidden)}, state

        return self.jit(page, 5, rows=rows)

    def _rows_program(self, rows: int) -> Any:
        def decode(weights: Any, state: State, *inputs: Any) -> Any:
            hidden, state = decode_rows(self.config, weights, state, *inputs)
            flat = hidden.reshape(-1, hidden.shape[-1])
            logits = head_logits(self.config, weights, flat)
            return logits.reshape(*hidden.shape[:2], -1), state

        return self.jit(decode, 4, rows=rows)

    def _settle_program(self, rows: int) -> Any:
        def settle(weights: Any, state: State) -> Any:
            nothing, none = jnp.zeros(SLOTS, jnp.int32), state.accepted
            layers = []
            for layer in state.layers:
                if not isinstance(layer, KdaState):
                    layers.append(layer)
                    continue
                kept = layer.rows
                empty = kda.KdaInputs(q=kept.k, k=kept.k, v=kept.v, g=kept.g, beta=kept.beta)
                s, _ = kda.replay(layer.s, kept, none, empty, nothing)
                layers.append(KdaState(s=s, conv=kda.history(layer, none), rows=kept))
            return (), State(layers=tuple(layers), accepted=nothing)

        return self.jit(settle, 0, donate=False, rows=rows)

    def settled(self, state: State) -> State:
        """The state with its accepted rows replayed; a copy."""
        if state.accepted is None:
            return state
        return self._settle(rows_of(state))(self.weights, state)[1]

    def accept(self, state: State, accepted: Any, active: Any) -> State:
        """accept_rows of all slots."""

        def accept(weights: Any, state: State, accepted: Any, active: Any) -> Any:
            return (), accept_rows(state, 0, accepted, active)

        program = self.jit(accept, 2, rows=rows_of(state))
        return program(self.weights, state, np.asarray(accepted, np.int32), np.asarray(active))[1]

    def prefill(self, state: State, slot: int, ids: Any) -> tuple[dict[str, np.ndarray], State]:
        """All pages of a prompt; outputs cut to its rows."""
        size, results = self.page_tokens, []
        for start in range(0, len(ids), size):
            part = np.asarray(ids[start : start + size], np.int32)
            tokens = np.pad(part, (0, size - len(part)))
            out, state = self.page_program(rows_of(state))(
                self.weights,
                state,
                np.int32(slot),
                tokens,
                np.int32(start),
                np.int32(len(part)),
                self.table[slot],
            )
            results.append({k: np.asarray(v)[: len(part)] for k, v in out.items()})
        return {k: np.concatenate([r[k] for r in results]) for k in results[0]}, state

    def rows(
        self, state: State, tokens: Any, positions: Any, active: Any
    ) -> tuple[np.ndarray, State]:
        """One row (tokens [S]) or R rows (tokens [S, R]) of every slot -> logits [S, R, vocab]."""
        tokens = np.asarray(tokens, np.int32).reshape(SLOTS, -1)
        logits, state = self.rows_program(tokens.shape[1])(
            self.weights, state, tokens, np.asarray(positions, np.int32), active, self.table
        )
        return np.asarray(logits), state

    def recurrent(self, state: State, prompts: list[Any]) -> tuple[list[np.ndarray], State]:
        """All prompts together, one token at a time, prompt i in slot i -> logits [len, vocab]
        each.
        """
        lengths = np.zeros(SLOTS, int)
        lengths[: len(prompts)] = [len(p) for p in prompts]
        out: list[list[np.ndarray]] = [[] for _ in prompts]
        for t in range(lengths.max()):
            tokens = np.zeros(SLOTS, np.int32)
            for i, p in enumerate(prompts):
                tokens[i] = p[min(t, len(p) - 1)]
            logits, state = self.rows(state, tokens, np.full(SLOTS, t), t < lengths)
            for i, rows in enumerate(out):
                if t < lengths[i]:
                    rows.append(logits[i, 0])
        return [np.stack(rows) for rows in out], state

    def greedy(self, state: State, prompts: list[Any], steps: int) -> np.ndarray:
        """Prompts by pages, then `steps` tokens by rows -> [prompts, steps]."""
        positions, newest = np.zeros(SLOTS, np.int32), np.zeros(SLOTS, np.int32)
        for i, p in enumerate(prompts):
            out, state = self.prefill(state, i, p)
            positions[i], newest[i] = len(p), out["logits"][-1].argmax()
        active = np.arange(SLOTS) < len(prompts)
        chosen = [newest.copy()]
        for _ in range(steps - 1):
            logits, state = self.rows(state, newest, positions, active)
            newest = logits[:, 0].argmax(-1).astype(np.int32)
            positions = positions + active
            chosen.append(newest.copy())
        return np.stack(chosen, 1)[: len(prompts)]


def rows_of(state: State) -> int:
    """R, by the state's own shapes."""
    kept = next(layer.rows for layer in state.layers if isinstance(layer, KdaState))
    return 1 if kept is None else kept.k.shape[1]


def _named(taps: dict[tuple[str, int], jax.Array]) -> dict[str, jax.Array]:
    return {f"{name}_{layer}": jnp.asarray(value) for (name, layer), value in taps.items()}


def sequences(goldens: Any, prefix: str = "ids_") -> list[int]:
    """Numbers of the sequences that a golden file holds."""
    ends = [key[len(prefix) :] for key in goldens.files if key.startswith(prefix)]
    return sorted(int(end) for end in ends if end.isdigit())


def worst(found: Any, expected: Any) -> float:
    """Largest absolute difference."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape, (found.shape, expected.shape)
    return float(np.abs(found - expected).max()) if found.size else 0.0
