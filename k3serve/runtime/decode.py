"""One decode step of a tile of slots: draft, verify, accept, commit.

1. draft: the small model guesses the tokens after each slot's anchor, as many as a block holds
2. verify: the target computes the anchor and the offered drafts as rows of one pass
3. accept: the leading drafts that the target agrees with, and one further token of its own
4. commit: caches, table and result take what was accepted, up to a stop token or the budget

Rule: what is emitted has the distribution of decoding without drafts, and where nothing is drawn,
or by rule "coupled", it has the very same bits. A slot's step depends on its own history alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from k3serve.config import TargetConfig
from k3serve.draft_config import DraftConfig
from k3serve.model import draft as dspark
from k3serve.model.acceptance import Rule, accept_matching, accept_sampled
from k3serve.model.sampling import (
    PURPOSE_DRAFT,
    PURPOSE_RESIDUAL,
    choose,
    draw,
    processed,
    uniforms,
)
from k3serve.model.scoring import page_scores
from k3serve.model.state import accept_rows, tile_of, with_tile
from k3serve.model.target import Taps, decode_rows, head_logits
from k3serve.runtime import row_policy
from k3serve.runtime.table import SlotTable, advance, by_row, masked_logits
from k3serve.types import GREEDY_BELOW, MAX_TOP_LOGPROBS, TickShape


@struct.dataclass
class ModelWeights:
    """Split over the ranks."""

    target: Any  # model.Weights
    draft: Any = None  # model.draft_weights.DraftWeights, or None


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


@struct.dataclass
class Running:
    """What a step changes."""

    model: Any  # model.State of the target
    ring: Any  # the draft's DraftRing, or None
    table: SlotTable
    emitted: Emitted


@struct.dataclass
class Drafts:
    """Guesses for one tile."""

    tokens: jax.Array  # [G, R-1] i32
    offered: jax.Array  # [G] i32: how many of them are verified
    logits: Any  # [G, R-1, V] f32: what they were drawn from, or None where no rule asks


@dataclass(frozen=True, slots=True)
class Speculation:
    """The recipe of drafting. Without a draft model every step verifies the anchor alone."""

    draft: DraftConfig | None = None
    rule: Rule = Rule.COUPLED
    markov_top: int | None = None  # correct only so many best draft logits; None: all

    @property
    def draws_from_draft(self) -> bool:
        return self.rule in (Rule.TOKEN, Rule.BLOCK)


@dataclass(frozen=True, slots=True)
class Decoder:
    """The static part of a step."""

    config: TargetConfig
    shape: TickShape
    speculation: Speculation

    def step(self, weights: ModelWeights, allowed: jax.Array, running: Running) -> Running:
        """One step of every slot that is active, tile by tile; idle tiles cost nothing."""
        return over_tiles(
            running.table.active,
            self.shape.tile,
            lambda running, first: self._tile(weights, allowed, running, first),
            running,
        )

    def _tile(
        self, weights: ModelWeights, allowed: jax.Array, running: Running, first: jax.Array
    ) -> Running:
        slots, rows = self.shape.tile, self.shape.rows
        table: SlotTable = tile_of(running.table, first, slots)
        drafts = self._draft(weights, allowed, running.ring, table, first)
        taps: Taps = {}
        hidden, model = decode_rows(
            self.config,
            weights.target,
            running.model,
            jnp.concatenate([table.anchor[:, None], drafts.tokens], axis=1),
            table.positions,
            jnp.where(table.active, 1 + drafts.offered, 0),
            table.page_table,
            first,
            taps=taps,
        )
        logits = head_logits(self.config, weights.target, hidden.reshape(slots * rows, -1))
        logits = logits.reshape(slots, rows, -1)
        tokens, accepted = self._accept(table, logits, drafts, allowed)
        running = running.replace(  # type: ignore[attr-defined]
            model=accept_rows(model, first, 1 + accepted, table.active),
            ring=self._commit_ring(weights, running.ring, table, taps, first, accepted),
        )
        return self._commit(running, table, logits, drafts, tokens, accepted, first)

    # -------------------------------------------------------------------------------- draft

    def _draft(
        self,
        weights: ModelWeights,
        allowed: jax.Array,
        ring: Any,
        table: SlotTable,
        first: jax.Array,
    ) -> Drafts:
        slots, count = self.shape.tile, self.shape.rows - 1
        nothing = Drafts(
            tokens=jnp.zeros((slots, count), jnp.int32),
            offered=jnp.zeros(slots, jnp.int32),
            logits=self._no_draft_logits(slots, count),
        )
        if self.speculation.draft is None or count == 0:
            return nothing
        left = table.max_tokens - table.produced - 1  # the step's own token needs no draft
        offered = jnp.clip(row_policy.offers(table.level, table.positions, count), 0, left)
        offered = jnp.where(table.active & table.speculate, offered, 0)
        drafts: Drafts = lax.cond(
            jnp.any(offered > 0),
            lambda: self._guess(weights, allowed, tile_of(ring, first, slots), table),
            lambda: nothing,
        )
        return drafts.replace(offered=offered)  # type: ignore[attr-defined]

    def _no_draft_logits(self, slots: int, count: int) -> Any:
        if self.speculation.draft is None or not self.speculation.draws_from_draft:
            return None
        return jnp.zeros((slots, count, self.config.vocab_size))

    def _guess(
        self, weights: ModelWeights, allowed: jax.Array, ring: Any, table: SlotTable
    ) -> Drafts:
        """The block once, then token after token through the Markov head."""
        spec, draft, count = self.speculation, self.speculation.draft, self.shape.rows - 1
        assert draft is not None
        hidden = dspark.block_hidden(
            draft,
            weights.draft,
            weights.target.embed,
            ring,
            table.anchor,
            table.positions,
            count,
        )
        base = dspark.base_logits(draft, weights.draft, weights.target.head, hidden)

        def one(k: jax.Array, carry: tuple[jax.Array, jax.Array, Any]) -> Any:
            previous, tokens, kept = carry
            logits = dspark.corrected(draft, weights.draft, base[:, k], previous, spec.markov_top)
            logits = jnp.where(allowed, logits + table.bias, -jnp.inf)
            at = table.positions + 1 + k
            if spec.draws_from_draft:
                logits = processed(logits, table.rows)
                token = draw(logits, table.rows, at, PURPOSE_DRAFT, k)
                kept = kept.at[:, k].set(logits)
            elif spec.rule is Rule.COUPLED:  # with the noise that the target will draw with
                token = choose(logits, table.rows, at)
            else:
                token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            return token, tokens.at[:, k].set(token), kept

        slots = table.anchor.shape[0]
        start = (
            table.anchor,
            jnp.zeros((slots, count), jnp.int32),
            self._no_draft_logits(slots, count),
        )
        _, tokens, kept = lax.fori_loop(0, count, one, start)
        return Drafts(tokens=tokens, offered=jnp.zeros(slots, jnp.int32), logits=kept)

    # ------------------------------------------------------------------------------- accept

    def _accept(
        self, table: SlotTable, logits: jax.Array, drafts: Drafts, allowed: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Tokens [G, R] of which the first accepted [G] + 1 are decided."""
        slots, rows, vocab = logits.shape
        masked = masked_logits(table, logits, drafts.tokens, allowed)
        flat, settings = masked.reshape(slots * rows, vocab), by_row(table.rows, rows)
        at = table.positions[:, None] + 1 + jnp.arange(rows)

        def matching() -> tuple[jax.Array, jax.Array]:
            chosen = choose(flat, settings, at.reshape(-1)).reshape(slots, rows)
            return chosen, accept_matching(chosen, drafts.tokens, drafts.offered)

        if self.speculation.draft is None or self.speculation.rule is Rule.COUPLED:
            return matching()

        def sampled() -> tuple[jax.Array, jax.Array]:
            target = processed(flat, settings).reshape(slots, rows, vocab)
            chance = uniforms(table.rows.seed, table.rows.choice, at[:, :-1])
            accepted, last = accept_sampled(
                self.speculation.rule, target, drafts.logits, drafts.tokens, drafts.offered, chance
            )
            further = draw(last, table.rows, at[jnp.arange(slots), accepted], PURPOSE_RESIDUAL)
            padded = jnp.pad(drafts.tokens, ((0, 0), (0, 1)))
            return jnp.where(
                jnp.arange(rows) < accepted[:, None], padded, further[:, None]
            ), accepted

        any_drawn = jnp.any(table.active & (table.rows.temperature >= GREEDY_BELOW))
        tokens, accepted = lax.cond(any_drawn, sampled, matching)
        return tokens, accepted

    # ------------------------------------------------------------------------------- commit

    def _commit_ring(
        self,
        weights: ModelWeights,
        ring: Any,
        table: SlotTable,
        taps: Taps,
        first: jax.Array,
        accepted: jax.Array,
    ) -> Any:
        draft, slots, rows = self.speculation.draft, self.shape.tile, self.shape.rows
        if draft is None:
            return ring
        at = (table.positions[:, None] + jnp.arange(rows)).reshape(-1)
        features = dspark.features(draft, taps)
        keys, values = dspark.context_rows(draft, weights.draft, features, at)
        count = jnp.where(table.active, 1 + accepted, 0)
        return dspark.commit_rows(
            ring, first + jnp.arange(slots), keys, values, table.positions, count
        )

    def _commit(
        self,
        running: Running,
        table: SlotTable,
        logits: jax.Array,
        drafts: Drafts,
        tokens: jax.Array,
        accepted: jax.Array,
        first: jax.Array,
    ) -> Running:
        level = row_policy.next_level(
            table.level, drafts.offered, accepted, max(self.shape.rows - 1, 1)
        )
        active, table = table.active, table.replace(level=level)  # type: ignore[attr-defined]
        table, emitted, taken = emit(
            table, running.emitted, logits, tokens, active, accepted + 1, first
        )
        slot, place = first + jnp.arange(self.shape.tile), jnp.arange(self.shape.rows - 1)
        kept = jnp.minimum(accepted, taken)  # after a stop token nothing counts
        emitted = emitted.replace(  # type: ignore[attr-defined]
            slot_steps=emitted.slot_steps.at[slot].add(active.astype(jnp.int32)),
            offered=emitted.offered.at[slot].add(_below(place, drafts.offered)),
            accepted=emitted.accepted.at[slot].add(_below(place, kept)),
        )
        return running.replace(  # type: ignore[attr-defined]
            table=with_tile(running.table, table, first), emitted=emitted
        )


def over_tiles(
    busy: jax.Array,  # [S] bool
    size: int,
    work: Callable[[Running, jax.Array], Running],
    running: Running,
) -> Running:
    """work(running, first slot) for each tile that has a busy slot, in order of slots."""
    tiles = busy.shape[0] // size
    any_busy = jnp.any(busy.reshape(tiles, size), axis=1)
    order = jnp.nonzero(any_busy, size=tiles)[0] * size
    return lax.fori_loop(0, jnp.sum(any_busy), lambda i, r: work(r, order[i]), running)


def _below(place: jax.Array, count: jax.Array) -> jax.Array:
    """[G, R-1] i32: 1 for the first count[g] places."""
    return (place < count[:, None]).astype(jnp.int32)


def emit(
    table: SlotTable,  # of G slots
    emitted: Emitted,  # of all
    logits: jax.Array,  # [G, R, V] f32, the model's own
    tokens: jax.Array,  # [G, R] i32
    mask: jax.Array,  # [G] bool: slots that take tokens now
    count: jax.Array,  # [G] i32: tokens decided
    first: jax.Array | int,  # the tile's first slot
) -> tuple[SlotTable, Emitted, jax.Array]:
    """Takes decided tokens into table and result; also returns how many were taken [G] i32."""
    slots, rows, vocab = logits.shape
    k, size = MAX_TOP_LOGPROBS, slots * rows

    def scores() -> tuple[jax.Array, jax.Array, jax.Array]:
        return page_scores(logits.reshape(size, vocab), tokens.reshape(size), k)

    def no_scores() -> tuple[jax.Array, jax.Array, jax.Array]:
        return jnp.zeros(size), jnp.zeros((size, k), jnp.int32), jnp.zeros((size, k))

    chosen, ids, best = lax.cond(jnp.any(mask & table.want_logprobs), scores, no_scores)
    table, taken, finish = advance(table, mask, tokens, count)
    slot, place = first + jnp.arange(slots), jnp.arange(rows)
    column = emitted.counts[slot][:, None] + place
    column = jnp.where(place < taken[:, None], column, emitted.tokens.shape[1])  # dropped
    at = (slot[:, None], column)
    emitted = emitted.replace(  # type: ignore[attr-defined]
        counts=emitted.counts.at[slot].add(taken),
        finish=emitted.finish.at[slot].set(jnp.where(mask, finish, emitted.finish[slot])),
        tokens=emitted.tokens.at[at].set(tokens, mode="drop"),
        logprobs=emitted.logprobs.at[at].set(chosen.reshape(slots, rows), mode="drop"),
        top_ids=emitted.top_ids.at[at].set(ids.reshape(slots, rows, k), mode="drop"),
        top_logprobs=emitted.top_logprobs.at[at].set(best.reshape(slots, rows, k), mode="drop"),
    )
    return table, emitted, taken
