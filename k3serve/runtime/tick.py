"""The tick: one SPMD step that every rank runs on the leader's plan.

1. broadcast: a psum over the mesh gives every rank the plan (rank 0 feeds it; the rest, zeros)
2. check: magic, version, tick number, checksum; the worst fault seen on any rank reaches all
3. apply: release, admit, restore snapshots
4. pages: a device loop over the plan's pages, in order, each in one fixed shape; saves snapshots
5. first: one sampling step for the slots whose prompt has just ended
6. decode: a device loop of up to decode_steps steps (decode.py); ends when no slot has work left
7. result: one packed vector, the same on every rank

Rule: no shape and no order of operations depends on the load, so a request's bits do not either.
Idle work costs nothing: a loop with no trip runs nothing, and the donated state stays in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from k3serve import wire
from k3serve.config import TargetConfig
from k3serve.model import draft as dspark
from k3serve.model.collectives import RANK
from k3serve.model.sampling import choose
from k3serve.model.scoring import page_scores
from k3serve.model.state import tile_of, with_tile
from k3serve.model.target import Taps, head_logits, prefill_page
from k3serve.runtime import snapshots
from k3serve.runtime.decode import (
    Decoder,
    Emitted,
    ModelWeights,
    Running,
    Speculation,
    emit,
    over_tiles,
)
from k3serve.runtime.table import SlotTable, apply_plan, masked_logits, note_prompt
from k3serve.types import MAX_TOP_LOGPROBS, Finish, TickShape


@struct.dataclass
class EngineState:
    """Everything that lives on the device between ticks; donated to each."""

    model: Any  # model.State: split over the ranks
    ring: Any  # the draft's DraftRing, or None: split over the ranks
    table: SlotTable  # replicated
    snapshots: Any  # snapshots.SlotArrays by snapshot, or None: split over the ranks
    tick: jax.Array  # i32: number of the next tick


def build_tick(
    config: TargetConfig, shape: TickShape, speculation: Speculation
) -> Callable[[ModelWeights, jax.Array, EngineState, jax.Array], tuple[EngineState, jax.Array]]:
    """The function of one rank, to run inside shard_map over RANK:

    (weights, allowed [V] bool, state, plan_rows [1, plan_len] i32) -> (state, result [len] i32)
    """
    return _Tick(config, shape, speculation).run


class _Tick:
    """Holds the static sizes, so that the steps below read as the list in the docstring above."""

    def __init__(self, config: TargetConfig, shape: TickShape, speculation: Speculation) -> None:
        self.config = config
        self.shape = shape
        self.draft = speculation.draft
        self.decoder = Decoder(config, shape, speculation)
        self.plan_layout = wire.plan_layout(shape)
        self.result_layout = wire.result_layout(shape)

    def run(
        self, weights: ModelWeights, allowed: jax.Array, state: EngineState, plan_rows: jax.Array
    ) -> tuple[EngineState, jax.Array]:
        plan = lax.psum(plan_rows[0], RANK)
        fault = self._check(plan, state.tick)
        plan = jnp.where(fault == int(wire.Fault.NONE), plan, 0)  # a refused plan does nothing
        table = apply_plan(state.table, plan, self.plan_layout, self.shape.rows)
        model, ring = state.model, state.ring
        if state.snapshots is not None:
            wanted = self._restores(plan)
            model, ring, table = snapshots.restore(state.snapshots, model, ring, table, wanted)
        running = Running(model=model, ring=ring, table=table, emitted=self._nothing())
        running, pool = self._pages(weights, allowed, running, state.snapshots, plan)
        running, steps = self._decode(weights, allowed, running, plan)
        result = self._pack(running.emitted, state.tick, fault, self._int(plan, "stop"), steps)
        state = EngineState(
            model=running.model,
            ring=running.ring,
            table=running.table,
            snapshots=pool,
            tick=state.tick + 1,
        )
        return state, result

    def _int(self, plan: jax.Array, name: str) -> jax.Array:
        return self.plan_layout.view(plan, name)

    def _restores(self, plan: jax.Array) -> jax.Array:  # [S] i32, -1: none
        """A refused plan is all zeros, so only an admit's own field counts."""
        return jnp.where(self._int(plan, "admit") != 0, self._int(plan, "restore"), -1)

    def _check(self, plan: jax.Array, tick: jax.Array) -> jax.Array:
        fault = jnp.int32(int(wire.Fault.NONE))
        tests = (
            (wire.Fault.CHECKSUM, self._int(plan, "checksum") == wire.checksum(plan, jnp)),
            (wire.Fault.TICK, self._int(plan, "tick") == tick),
            (wire.Fault.VERSION, self._int(plan, "version") == wire.VERSION),
            (wire.Fault.MAGIC, self._int(plan, "magic") == wire.MAGIC),
        )
        for code, passed in tests:  # the last that fails names the fault: the most telling one
            fault = jnp.where(passed, fault, int(code))
        return lax.pmax(fault, RANK)

    # ------------------------------------------------------------------------------ prefill

    def _pages(
        self,
        weights: ModelWeights,
        allowed: jax.Array,
        running: Running,
        pool: Any,
        plan: jax.Array,
    ) -> tuple[Running, Any]:
        slots, width = self.shape.max_slots, self.config.hidden_size
        ended = jnp.zeros(slots, bool)
        last_hidden = jnp.zeros((slots, width), weights.target.embed.dtype)

        def page(i: jax.Array, carry: Any) -> Any:
            running, pool, *rest = carry
            running, *rest = self._page(weights, plan, i, (running, *rest))
            return running, self._save(pool, running, plan, i), *rest

        carry = (running, pool, ended, last_hidden)
        count = self._int(plan, "num_pages")
        running, pool, ended, last_hidden = lax.fori_loop(0, count, page, carry)
        table, emitted = running.table, running.emitted
        first = ended & (table.max_tokens > 0)
        # a slot that only scores its prompt is done
        finish = jnp.where(ended & ~first, int(Finish.LENGTH), emitted.finish)
        emitted = emitted.replace(finish=finish.astype(jnp.int32))  # type: ignore[attr-defined]

        running = running.replace(table=table, emitted=emitted)  # type: ignore[attr-defined]
        running = over_tiles(
            first,
            self.shape.tile,
            lambda running, at: self._first(weights, allowed, running, last_hidden, first, at),
            running,
        )
        return running, pool

    def _save(self, pool: Any, running: Running, plan: jax.Array, i: jax.Array) -> Any:
        if pool is None:
            return None
        live = snapshots.slot_arrays(running.model, running.ring, running.table.seen)
        slot, index = self._int(plan, "page_slot")[i], self._int(plan, "page_save")[i]
        return snapshots.save(pool, live, slot, index)

    def _first(
        self,
        weights: ModelWeights,
        allowed: jax.Array,
        running: Running,
        last_hidden: jax.Array,  # [S, d]: of prompts that have ended
        ended: jax.Array,  # [S] bool
        at: jax.Array,
    ) -> Running:
        """The first token of the slots of one tile whose prompts have just ended."""
        slots = self.shape.tile
        table, hidden, ended = tile_of((running.table, last_hidden, ended), at, slots)
        logits = head_logits(self.config, weights.target, hidden)[:, None]
        masked = masked_logits(table, logits, jnp.zeros((slots, 0), jnp.int32), allowed)[:, 0]
        tokens = choose(masked, table.rows, table.positions + 1)[:, None]
        one = jnp.ones(slots, jnp.int32)
        table, emitted, _ = emit(table, running.emitted, logits, tokens, ended, one, at)
        return running.replace(  # type: ignore[attr-defined]
            table=with_tile(running.table, table, at), emitted=emitted
        )

    def _page(self, weights: ModelWeights, plan: jax.Array, i: jax.Array, carry: Any) -> Any:
        running, ended, last_hidden = carry

        def of(name: str) -> jax.Array:
            return self._int(plan, name)[i]

        slot, start, length, tokens = (
            of("page_slot"),
            of("page_start"),
            of("page_len"),
            of("page_tokens"),
        )
        taps: Taps = {}
        hidden, model = prefill_page(
            self.config,
            weights.target,
            running.model,
            slot,
            tokens,
            start,
            length,
            running.table.page_table[slot],
            taps=taps,
        )
        running = running.replace(
            model=model,
            ring=self._context(weights, running.ring, taps, slot, start, length),
            table=note_prompt(running.table, slot, tokens, length),
            emitted=self._scores(weights, running.emitted, plan, i, hidden),
        )
        final = of("page_final") != 0
        ended = ended.at[slot].set(ended[slot] | final)
        last = jnp.where(final, hidden[length - 1], last_hidden[slot])
        return running, ended, last_hidden.at[slot].set(last)

    def _context(
        self,
        weights: ModelWeights,
        ring: Any,
        taps: Taps,
        slot: jax.Array,
        start: jax.Array,
        length: jax.Array,
    ) -> Any:
        """The draft's context rows of a page; its block is for decoding only."""
        if self.draft is None:
            return ring
        at = start + jnp.arange(self.shape.page_tokens)
        features = dspark.features(self.draft, taps)
        keys, values = dspark.context_rows(self.draft, weights.draft, features, at)
        return dspark.commit_page(ring, slot, keys, values, start, length)

    def _scores(
        self,
        weights: ModelWeights,
        emitted: Emitted,
        plan: jax.Array,
        i: jax.Array,
        hidden: jax.Array,
    ) -> Emitted:
        def of(name: str) -> jax.Array:
            return self._int(plan, name)[i]

        def score() -> Emitted:
            following = jnp.roll(of("page_tokens"), -1).at[of("page_len") - 1].set(of("page_next"))
            logits = head_logits(self.config, weights.target, hidden)
            chosen, ids, best = page_scores(logits, following, MAX_TOP_LOGPROBS)
            scored: Emitted = emitted.replace(  # type: ignore[attr-defined]
                score_logprobs=emitted.score_logprobs.at[i].set(chosen),
                score_top_ids=emitted.score_top_ids.at[i].set(ids),
                score_top_logprobs=emitted.score_top_logprobs.at[i].set(best),
            )
            return scored

        return lax.cond(of("page_score") != 0, score, lambda: emitted)

    # ------------------------------------------------------------------------------- decode

    def _decode(
        self, weights: ModelWeights, allowed: jax.Array, running: Running, plan: jax.Array
    ) -> tuple[Running, jax.Array]:
        wanted = self._int(plan, "decode_steps")

        def more(carry: tuple[Running, jax.Array]) -> jax.Array:
            running, step = carry
            return (step < wanted) & jnp.any(running.table.active)

        def one(carry: tuple[Running, jax.Array]) -> tuple[Running, jax.Array]:
            running, step = carry
            return self.decoder.step(weights, allowed, running), step + 1

        return lax.while_loop(more, one, (running, jnp.int32(0)))

    # ------------------------------------------------------------------------------- result

    def _nothing(self) -> Emitted:
        def zeros(name: str) -> jax.Array:
            field = self.result_layout.fields[name]
            return jnp.zeros(field.shape, jnp.float32 if field.is_float else jnp.int32)

        return Emitted(**{name: zeros(name) for name in Emitted.__dataclass_fields__})

    def _pack(
        self,
        emitted: Emitted,
        tick: jax.Array,
        fault: jax.Array,
        stop: jax.Array,
        steps: jax.Array,
    ) -> jax.Array:
        named: dict[str, jax.Array] = {"tick": tick, "fault": fault, "stop": stop, "steps": steps}
        named |= {name: getattr(emitted, name) for name in Emitted.__dataclass_fields__}
        parts = []
        for name, field in self.result_layout.fields.items():
            value = named[name]
            if field.is_float:
                value = lax.bitcast_convert_type(value, jnp.int32)
            parts.append(value.reshape(field.size))
        return jnp.concatenate(parts)
