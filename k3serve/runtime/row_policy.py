"""How many drafts a slot has verified: by what it accepted lately, and by nothing else.

Rule: a pure function of the slot's own history, in whole numbers, never of the load, so that a
request verifies the same rows whatever runs beside it. Drafts are nearly free where a step waits
for memory, but each verified row fetches experts of its own: a slot whose drafts fail asks for few,
and asks for more again once all that it offered were accepted. One whose drafts fail nearly always
asks only now and then: it spares the draft's own work, too.

A slot's level is a running mean of the drafts that it accepted, in sixteenths.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

ONE = 16  # the level of one draft
AHEAD = 2  # drafts offered beyond the mean: room to see that more would have been accepted
HOPELESS = ONE // 4  # below this mean a slot drafts only at every so many'th position
EVERY = 8


def start_level(drafts: int) -> int:
    """The level of a new slot that may have so many drafts: all are offered."""
    return ONE * drafts


def offers(level: jax.Array, positions: jax.Array, drafts: int) -> jax.Array:  # [S] i32
    """How many of `drafts` drafts to verify at this level [S] i32 and anchor position [S] i32."""
    resting = (level < HOPELESS) & (positions % EVERY != 0)
    return jnp.where(resting, 0, jnp.minimum(level // ONE + AHEAD, drafts))


def next_level(
    level: jax.Array,  # [S] i32
    offered: jax.Array,  # [S] i32
    accepted: jax.Array,  # [S] i32, as the drafts were judged, whatever was emitted of them
    drafts: int,
) -> jax.Array:  # [S] i32
    """The level after a step. A slot that accepted all offered drafts counts AHEAD more; one that
    offered none keeps its level.
    """
    seen = jnp.where(accepted == offered, jnp.minimum(accepted + AHEAD, drafts), accepted)
    return jnp.where(offered > 0, level + (ONE * seen - level) // 4, level)
