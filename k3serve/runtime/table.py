"""The slot table: what the device knows of each running sequence beside the model's own state.

Rule: every rank holds the same table and changes it by the same pure functions of the plan, so the
device alone knows the truth about progress (position, budget, end tokens) and the leader may plan
the next tick before it has read this one.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from k3serve.model.sampling import BANNED_BIAS, SamplingRows, penalise
from k3serve.runtime import row_policy
from k3serve.types import MAX_STOP_IDS, Finish, TickShape
from k3serve.wire import Layout


@struct.dataclass
class SlotTable:
    """One row per slot. A slot decodes while `active`; the rest is kept until re-admission."""

    rows: SamplingRows
    max_tokens: jax.Array  # [S] i32
    min_tokens: jax.Array  # [S] i32
    want_logprobs: jax.Array  # [S] bool
    speculate: jax.Array  # [S] bool
    stop_ids: jax.Array  # [S, MAX_STOP_IDS] i32, -1 = none
    bias: jax.Array  # [S, V] f32
    page_table: jax.Array  # [S, pages_per_slot] i32
    prompt_len: jax.Array  # [S] i32
    active: jax.Array  # [S] bool: has an anchor to decode from
    anchor: jax.Array  # [S] i32: newest token, not yet seen by the target
    produced: jax.Array  # [S] i32: tokens emitted so far
    counts: jax.Array  # [S, V] i32: of generated tokens
    seen: jax.Array  # [S, V] bool: of prompt tokens
    level: jax.Array  # [S] i32: see row_policy

    @property
    def positions(self) -> jax.Array:  # [S] i32: absolute position of the anchor
        return self.prompt_len + self.produced - 1


def empty_table(shape: TickShape, vocab: int) -> SlotTable:
    s = shape.max_slots
    ints, floats = jnp.zeros(s, jnp.int32), jnp.zeros(s, jnp.float32)
    rows = SamplingRows(
        seed=jnp.zeros((s, 2), jnp.uint32),
        choice=ints,
        temperature=floats,
        top_p=jnp.ones(s, jnp.float32),
        top_k=ints,
        min_p=floats,
        presence_penalty=floats,
        frequency_penalty=floats,
        repetition_penalty=jnp.ones(s, jnp.float32),
    )
    return SlotTable(
        rows=rows,
        max_tokens=ints,
        min_tokens=ints,
        want_logprobs=jnp.zeros(s, bool),
        speculate=jnp.zeros(s, bool),
        stop_ids=jnp.full((s, MAX_STOP_IDS), -1, jnp.int32),
        bias=jnp.zeros((s, vocab), jnp.float32),
        page_table=jnp.zeros((s, shape.pages_per_slot), jnp.int32),
        prompt_len=ints,
        active=jnp.zeros(s, bool),
        anchor=ints,
        produced=ints,
        counts=jnp.zeros((s, vocab), jnp.int32),
        seen=jnp.zeros((s, vocab), bool),
        level=ints,
    )


def apply_plan(table: SlotTable, plan: jax.Array, layout: Layout, rows: int) -> SlotTable:
    """Releases, then admits. `plan` is the broadcast vector, `rows` those of a decode step."""

    def ints(name: str) -> jax.Array:
        return layout.view(plan, name)

    def floats(name: str) -> jax.Array:
        return lax.bitcast_convert_type(layout.view(plan, name), jnp.float32)

    active = table.active & (ints("release") == 0)
    admit = ints("admit") != 0

    def admitted() -> SlotTable:
        fresh = SlotTable(
            rows=SamplingRows(
                seed=lax.bitcast_convert_type(ints("seed"), jnp.uint32),
                choice=ints("choice"),
                temperature=floats("temperature"),
                top_p=floats("top_p"),
                top_k=ints("top_k"),
                min_p=floats("min_p"),
                presence_penalty=floats("presence_penalty"),
                frequency_penalty=floats("frequency_penalty"),
                repetition_penalty=floats("repetition_penalty"),
            ),
            max_tokens=ints("max_tokens"),
            min_tokens=ints("min_tokens"),
            want_logprobs=ints("want_logprobs") != 0,
            speculate=ints("speculate") != 0,
            stop_ids=ints("stop_token_ids"),
            bias=_dense_bias(ints("bias_ids"), floats("bias_values"), table.bias.shape),
            page_table=ints("page_table"),
            prompt_len=ints("prompt_len"),
            active=jnp.zeros_like(table.active),
            anchor=jnp.zeros_like(table.anchor),
            produced=jnp.zeros_like(table.produced),
            counts=jnp.zeros_like(table.counts),
            seen=jnp.zeros_like(table.seen),
            level=jnp.full_like(table.level, row_policy.start_level(rows - 1)),
        )
        return jax.tree.map(lambda new, old: _by_slot(admit, new, old), fresh, table)

    table = lax.cond(jnp.any(admit), admitted, lambda: table)
    return table.replace(active=active & ~admit)  # type: ignore[attr-defined]


def _by_slot(mask: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    return jnp.where(mask.reshape(-1, *[1] * (old.ndim - 1)), new, old)


def _dense_bias(ids: jax.Array, values: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """[S, V] f32 from pairs padded with id -1; a value that bans becomes -inf."""
    slots, vocab = shape
    column = jnp.where(ids < 0, vocab, ids)  # out of range: dropped
    values = jnp.where(values <= BANNED_BIAS, -jnp.inf, values)
    dense = jnp.zeros(shape, jnp.float32)
    return dense.at[jnp.arange(slots)[:, None], column].add(values, mode="drop")


def note_prompt(table: SlotTable, slot: jax.Array, tokens: jax.Array, length: Any) -> SlotTable:
    """Marks a page's tokens [C] i32 as seen in the slot's prompt."""
    vocab = table.seen.shape[-1]
    column = jnp.where(jnp.arange(tokens.shape[0]) < length, tokens, vocab)
    seen = table.seen.at[slot, column].set(True, mode="drop")
    return table.replace(seen=seen)  # type: ignore[attr-defined]


def masked_logits(
    table: SlotTable,  # of G slots
    logits: jax.Array,  # [G, R, V] f32, the model's own
    drafts: jax.Array,  # [G, R-1] i32: row i stands after the first i of them
    allowed: jax.Array,  # [V] bool: tokens that may ever be sampled
) -> jax.Array:  # [G, R, V] f32
    """What each row's next token is chosen by, before temperature and cuts."""
    logits = logits + table.bias[:, None]
    penalties = jnp.any(_penalised(table.rows))
    logits = lax.cond(penalties, lambda: _with_penalties(table, logits, drafts), lambda: logits)
    logits = jnp.where(allowed, logits, -jnp.inf)
    early = table.produced[:, None] + jnp.arange(logits.shape[1]) < table.min_tokens[:, None]
    return lax.cond(jnp.any(early), lambda: _without_stops(table, logits, early), lambda: logits)


def _penalised(rows: SamplingRows) -> jax.Array:  # [G] bool
    penalties = (rows.presence_penalty != 0.0) | (rows.frequency_penalty != 0.0)
    return penalties | (rows.repetition_penalty != 1.0)


def _with_penalties(table: SlotTable, logits: jax.Array, drafts: jax.Array) -> jax.Array:
    slots, rows, vocab = logits.shape
    drafted = jax.nn.one_hot(drafts, vocab, dtype=jnp.int32).cumsum(axis=1)  # [G, R-1, V]
    counts = table.counts[:, None] + jnp.pad(drafted, ((0, 0), (1, 0), (0, 0)))
    seen = jnp.broadcast_to(table.seen[:, None], logits.shape)
    flat = (x.reshape(slots * rows, vocab) for x in (logits, counts, seen))
    logits, counts, seen = flat
    return penalise(logits, by_row(table.rows, rows), counts, seen).reshape(slots, rows, vocab)


def _without_stops(table: SlotTable, logits: jax.Array, early: jax.Array) -> jax.Array:
    slots, rows, vocab = logits.shape
    stops = table.stop_ids[:, None]
    column = jnp.where((stops < 0) | ~early[..., None], vocab, stops)  # out of range: dropped
    at = (jnp.arange(slots)[:, None, None], jnp.arange(rows)[None, :, None], column)
    return logits.at[at].set(-jnp.inf, mode="drop")


def by_row(settings: SamplingRows, rows: int) -> SamplingRows:
    """Each slot's settings for each of its rows: [G] -> [G*R]."""
    repeated: SamplingRows = jax.tree.map(lambda a: jnp.repeat(a, rows, axis=0), settings)
    return repeated


def advance(
    table: SlotTable,  # of G slots
    mask: jax.Array,  # [G] bool: slots that take tokens now
    tokens: jax.Array,  # [G, R] i32
    count: jax.Array,  # [G] i32: how many of them were decided, at least 1
) -> tuple[SlotTable, jax.Array, jax.Array]:
    """Takes tokens as emitted, up to a stop token or the end of the budget.

    Returns the table, how many were taken [G] i32, and Finish codes [G] i32; a slot that finishes
    is no longer active.
    """
    slots, rows = tokens.shape
    place = jnp.arange(rows)
    stops = jnp.any(tokens[..., None] == table.stop_ids[:, None], axis=-1)
    spent = table.produced[:, None] + place + 1 >= table.max_tokens[:, None]
    ends = (stops | spent) & (place < count[:, None])
    ended, end = jnp.any(ends, axis=1), jnp.argmax(ends, axis=1)
    taken = jnp.where(mask, jnp.where(ended, end + 1, count), 0)
    last = jnp.maximum(taken - 1, 0)
    slot = jnp.arange(slots)
    reason = jnp.where(stops[slot, last], int(Finish.STOP), int(Finish.LENGTH))
    finish = jnp.where(mask & ended, reason, int(Finish.NONE)).astype(jnp.int32)
    emitted = (place < taken[:, None]).astype(jnp.int32)
    table = table.replace(  # type: ignore[attr-defined]
        produced=table.produced + taken,
        anchor=jnp.where(mask, tokens[slot, last], table.anchor),
        active=jnp.where(mask, ~ended, table.active),
        counts=table.counts.at[slot[:, None], tokens].add(emitted),
    )
    return table, taken, finish
