"""The tick: one SPMD step that every rank runs on the leader's plan.

1. broadcast: a psum over the mesh gives every rank the plan (rank 0 feeds it; the rest, zeros)
2. check: magic, version, tick number, checksum; the worst fault seen on any rank reaches all
3. apply: release, admit
4. pages: a device loop over the plan's pages, in order, each in one fixed shape
5. first: one sampling step for the slots whose prompt has just ended
6. decode: a device loop of up to decode_steps steps; ends early when no slot has work left
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
from k3serve.model.collectives import RANK
from k3serve.model.scoring import page_scores
from k3serve.model.target import decode_rows, head_logits, prefill_page
from k3serve.runtime.table import SlotTable, advance, apply_plan, next_tokens, note_prompt
from k3serve.types import MAX_TOP_LOGPROBS, Finish, TickShape


@struct.dataclass
class EngineState:
    """Everything that lives on the device between ticks; donated to each."""

    model: Any  # model.state: split over the ranks
    table: SlotTable  # replicated
    tick: jax.Array  # i32: number of the next tick


@struct.dataclass
class Emitted:
    """What the tick has produced so far; becomes the result."""

    counts: jax.Array  # [S] i32
    finish: jax.Array  # [S] i32
    tokens: jax.Array  # [S, E] i32
    logprobs: jax.Array  # [S, E] f32
    top_ids: jax.Array  # [S, E, K] i32
    top_logprobs: jax.Array  # [S, E, K] f32
    slot_steps: jax.Array  # [S] i32
    offered: jax.Array  # [S, R-1] i32
    accepted: jax.Array  # [S, R-1] i32
    score_logprobs: jax.Array  # [P, C] f32
    score_top_ids: jax.Array  # [P, C, K] i32
    score_top_logprobs: jax.Array  # [P, C, K] f32


def build_tick(
    config: TargetConfig, shape: TickShape
) -> Callable[[Any, jax.Array, EngineState, jax.Array], tuple[EngineState, jax.Array]]:
    """The function of one rank, to run inside shard_map over RANK:

    (weights, allowed [V] bool, state, plan_rows [1, plan_len] i32) -> (state, result [len] i32)
    """
    return _Tick(config, shape).run


class _Tick:
    """Holds the static sizes, so that the steps below read as the list in the docstring above."""

    def __init__(self, config: TargetConfig, shape: TickShape) -> None:
        self.config = config
        self.shape = shape
        self.plan_layout = wire.plan_layout(shape)
        self.result_layout = wire.result_layout(shape)

    def run(
        self, weights: Any, allowed: jax.Array, state: EngineState, plan_rows: jax.Array
    ) -> tuple[EngineState, jax.Array]:
        plan = lax.psum(plan_rows[0], RANK)
        fault = self._check(plan, state.tick)
        plan = jnp.where(fault == int(wire.Fault.NONE), plan, 0)  # a refused plan does nothing
        table = apply_plan(state.table, plan, self.plan_layout)
        model, table, emitted = self._pages(weights, allowed, state.model, table, plan)
        model, table, emitted, steps = self._decode(weights, allowed, model, table, emitted, plan)
        result = self._pack(emitted, state.tick, fault, self._int(plan, "stop"), steps)
        return EngineState(model=model, table=table, tick=state.tick + 1), result

    def _int(self, plan: jax.Array, name: str) -> jax.Array:
        return self.plan_layout.view(plan, name)

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
        self, weights: Any, allowed: jax.Array, model: Any, table: SlotTable, plan: jax.Array
    ) -> tuple[Any, SlotTable, Emitted]:
        slots, width = self.shape.max_slots, self.config.hidden_size
        ended = jnp.zeros(slots, bool)
        last_hidden = jnp.zeros((slots, width), weights.embed.dtype)
        carry = (model, table, self._nothing(), ended, last_hidden)

        def page(i: jax.Array, carry: Any) -> Any:
            return self._page(weights, plan, i, carry)

        carry = lax.fori_loop(0, self._int(plan, "num_pages"), page, carry)
        model, table, emitted, ended, last_hidden = carry
        first = ended & (table.max_tokens > 0)
        # a slot that only scores its prompt is done
        finish = jnp.where(ended & ~first, int(Finish.LENGTH), emitted.finish)
        emitted = emitted.replace(finish=finish.astype(jnp.int32))

        def sample_first() -> tuple[SlotTable, Emitted]:
            logits = head_logits(self.config, weights, last_hidden)
            return self._emit(allowed, table, emitted, logits, first)

        table, emitted = lax.cond(jnp.any(first), sample_first, lambda: (table, emitted))
        return model, table, emitted

    def _page(self, weights: Any, plan: jax.Array, i: jax.Array, carry: Any) -> Any:
        model, table, emitted, ended, last_hidden = carry

        def of(name: str) -> jax.Array:
            return self._int(plan, name)[i]

        slot, length, tokens = of("page_slot"), of("page_len"), of("page_tokens")
        hidden, model = prefill_page(
            self.config,
            weights,
            model,
            slot,
            tokens,
            of("page_start"),
            length,
            table.page_table[slot],
        )
        table = note_prompt(table, slot, tokens, length)

        def score() -> Emitted:
            following = jnp.roll(tokens, -1).at[length - 1].set(of("page_next"))
            logits = head_logits(self.config, weights, hidden)
            chosen, ids, best = page_scores(logits, following, MAX_TOP_LOGPROBS)
            return emitted.replace(
                score_logprobs=emitted.score_logprobs.at[i].set(chosen),
                score_top_ids=emitted.score_top_ids.at[i].set(ids),
                score_top_logprobs=emitted.score_top_logprobs.at[i].set(best),
            )

        emitted = lax.cond(of("page_score") != 0, score, lambda: emitted)
        final = of("page_final") != 0
        ended = ended.at[slot].set(ended[slot] | final)
        last = jnp.where(final, hidden[length - 1], last_hidden[slot])
        return model, table, emitted, ended, last_hidden.at[slot].set(last)

    # ------------------------------------------------------------------------------- decode

    def _decode(
        self,
        weights: Any,
        allowed: jax.Array,
        model: Any,
        table: SlotTable,
        emitted: Emitted,
        plan: jax.Array,
    ) -> tuple[Any, SlotTable, Emitted, jax.Array]:
        wanted = self._int(plan, "decode_steps")

        def more(carry: Any) -> jax.Array:
            _, table, _, step = carry
            return (step < wanted) & jnp.any(table.active)

        def one(carry: Any) -> Any:
            model, table, emitted, step = carry
            hidden, model = decode_rows(
                self.config,
                weights,
                model,
                table.anchor[:, None],
                table.positions,
                table.active,
                table.page_table,
            )
            logits = head_logits(self.config, weights, hidden[:, 0])
            steps = emitted.slot_steps + table.active
            table, emitted = self._emit(allowed, table, emitted, logits, table.active)
            emitted = emitted.replace(slot_steps=steps)
            return model, table, emitted, step + 1

        return lax.while_loop(more, one, (model, table, emitted, jnp.int32(0)))

    def _emit(
        self,
        allowed: jax.Array,
        table: SlotTable,
        emitted: Emitted,
        logits: jax.Array,  # [S, V] f32
        mask: jax.Array,  # [S] bool: slots that take a token now
    ) -> tuple[SlotTable, Emitted]:
        slots, k = jnp.arange(self.shape.max_slots), MAX_TOP_LOGPROBS
        tokens = next_tokens(table, logits, allowed)

        def scores() -> tuple[jax.Array, jax.Array, jax.Array]:
            return page_scores(logits, tokens, k)

        def no_scores() -> tuple[jax.Array, jax.Array, jax.Array]:
            n = self.shape.max_slots
            return jnp.zeros(n), jnp.zeros((n, k), jnp.int32), jnp.zeros((n, k))

        chosen, ids, best = lax.cond(jnp.any(mask & table.want_logprobs), scores, no_scores)
        table, finish = advance(table, mask, tokens)
        at = (slots, jnp.where(mask, emitted.counts, self.shape.emit))  # out of range: dropped
        emitted = emitted.replace(  # type: ignore[attr-defined]
            counts=emitted.counts + mask,
            finish=jnp.where(mask, finish, emitted.finish),
            tokens=emitted.tokens.at[at].set(tokens, mode="drop"),
            logprobs=emitted.logprobs.at[at].set(chosen, mode="drop"),
            top_ids=emitted.top_ids.at[at].set(ids, mode="drop"),
            top_logprobs=emitted.top_logprobs.at[at].set(best, mode="drop"),
        )
        return table, emitted

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
