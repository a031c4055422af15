"""Which drafts of a block stay, and what the one further token is drawn from.

Rule: what a slot emits has exactly the distribution of decoding without drafts, whatever the drafts
are; a slot's result depends on its own rows alone, and on none beyond the drafts it was offered.

N slots of a tile verify m drafts each in R = m + 1 rows; row i of the target stands before draft i,
so it says what the token in that place may be, and row m what follows them all. Of m drafts a slot
is offered the first `offered`; its other rows may hold anything.

Try it: python -m pytest tests/model/test_acceptance.py tests/model/test_acceptance_statistics.py
"""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp


class Rule(enum.Enum):
    """How sampled drafts are accepted; greedy ones always are by `accept_matching`'s comparison.

    Under every rule the output has the target's distribution. COUPLED also gives the very tokens
    of decoding without drafts; BLOCK accepts the most of the rules that draw from the draft.
    """

    COUPLED = "coupled"  # the target chooses with the noise of the position; equal drafts stay
    TOKEN = "token"  # one by one, by the ratio of the two probabilities
    BLOCK = "block"  # the longest prefix, by the ratios of whole prefixes
    ONEHOT = "onehot"  # any draft that uses no random number, by the target's probability


def accept_matching(
    chosen: jax.Array,  # [N, m+1] i32: the target's choice in each place
    drafts: jax.Array,  # [N, m] i32
    offered: jax.Array,  # [N] i32: 0..m
) -> jax.Array:  # [N] i32
    """How many leading drafts are the target's choice; chosen[n, accepted[n]] is the next token."""
    return _leading(chosen[:, : drafts.shape[1]] == drafts, offered)


def accept_sampled(
    rule: Rule,
    target_logits: jax.Array,  # [N, m+1, V] f32, as sampling.processed gives them
    draft_logits: jax.Array | None,  # [N, m, V] f32, the same of what the drafts were drawn from
    drafts: jax.Array,  # [N, m] i32
    offered: jax.Array,  # [N] i32: 0..m
    uniforms: jax.Array,  # [N, m] f32 in [0, 1)
) -> tuple[jax.Array, jax.Array]:
    """How many drafts each slot accepts [N] i32, and logits [N, V] f32 to draw the next token from.

    The next token comes from what the target has beyond the draft (the residual) after a
    rejection, and from the target's row after the last offered draft. The row is also what is left
    where rounding leaves no residual. Greedy rows (one finite logit) give what accept_matching
    gives. ONEHOT ignores draft_logits. Leviathan et al. 2023 (TOKEN, ONEHOT), Sun et al. 2024
    (BLOCK, "Block verification accelerates speculative decoding").
    """
    slots, count = drafts.shape
    if rule is Rule.COUPLED:
        raise ValueError("rule coupled compares tokens: use accept_matching")
    if count == 0:
        return jnp.zeros(slots, jnp.int32), target_logits[:, 0]
    if rule is Rule.ONEHOT:
        return _accept_onehot(target_logits, drafts, offered, uniforms)
    if draft_logits is None:
        raise ValueError(f"rule {rule.value} needs draft_logits, which the drafts were drawn from")
    accept = _accept_block if rule is Rule.BLOCK else _accept_token
    return accept(target_logits, draft_logits, drafts, offered, uniforms)


def _accept_onehot(
    target_logits: jax.Array, drafts: jax.Array, offered: jax.Array, uniforms: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Accepts d while u < p(d); the residual is p without d."""
    log_p = _log_prob_of(target_logits[:, :-1], drafts)
    accepted = _leading(uniforms < jnp.exp(log_p), offered)
    row = _row(target_logits, accepted)
    rejected = _row(drafts, jnp.minimum(accepted, drafts.shape[1] - 1))
    residual = jnp.where(jnp.arange(row.shape[-1]) == rejected[:, None], -jnp.inf, row)
    return accepted, _last_logits(row, residual, accepted == offered)


def _accept_token(
    target_logits: jax.Array,
    draft_logits: jax.Array,
    drafts: jax.Array,
    offered: jax.Array,
    uniforms: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Accepts d while u < p(d) / q(d); the residual is max(p - q, 0)."""
    ratio = jnp.exp(_log_ratio(target_logits, draft_logits, drafts))
    accepted = _leading(uniforms < ratio, offered)
    row = _row(target_logits, accepted)
    draft_row = _row(draft_logits, jnp.minimum(accepted, drafts.shape[1] - 1))
    residual = _log_excess(_log_softmax(row), _log_softmax(draft_row))
    return accepted, _last_logits(row, residual, accepted == offered)


def _accept_block(
    target_logits: jax.Array,
    draft_logits: jax.Array,
    drafts: jax.Array,
    offered: jax.Array,
    uniforms: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Accepts the longest prefix i with u_i < h_i; the residual is max(r_i p - q, 0).

    r_i = min(r_{i-1} p(d_i) / q(d_i), 1) with r_0 = 1; h_i = R_i / (R_i + 1 - r_i) where R_i is the
    residual's mass; h_i = r_i at the last offered draft.
    """
    count = drafts.shape[1]
    log_r = _prefix_ratios(_log_ratio(target_logits, draft_logits, drafts))  # [N, m+1]
    log_p, log_q = _log_softmax(target_logits[:, :-1]), _log_softmax(draft_logits)
    mass = jnp.sum(jnp.exp(_log_excess(log_r[:, :-1, None] + log_p, log_q)), axis=-1)  # [N, m]

    length = jnp.arange(1, count + 1)
    missing = -jnp.expm1(log_r)  # 1 - r
    inner_mass = jnp.pad(mass[:, 1:], ((0, 0), (0, 1)))  # of prefixes 1..m; the last is not used
    total = inner_mass + missing[:, 1:]
    # nothing missing and no residual: draft and target agree, the limit of R / (R + 1 - r) is 1
    inner = jnp.where(total > 0, inner_mass / jnp.where(total > 0, total, 1.0), 1.0)
    last = length == offered[:, None]
    bound = jnp.where(last, jnp.exp(log_r[:, 1:]), inner)
    taken = (uniforms < bound) & (length <= offered[:, None])
    accepted = jnp.max(jnp.where(taken, length, 0), axis=1).astype(jnp.int32)

    row = _row(target_logits, accepted)
    at = jnp.minimum(accepted, count - 1)
    prefix = _row(log_r, accepted)[:, None]
    residual = _log_excess(prefix + _log_softmax(row), _log_softmax(_row(draft_logits, at)))
    return accepted, _last_logits(row, residual, accepted == offered)


def _prefix_ratios(log_ratio: jax.Array) -> jax.Array:  # [N, m+1] f32
    """Logs of r_0 .. r_m from [N, m] logs of p(d_i) / q(d_i)."""
    log_r = [jnp.zeros(log_ratio.shape[0], jnp.float32)]
    for i in range(log_ratio.shape[1]):
        following = jnp.minimum(log_r[-1] + log_ratio[:, i], 0.0)
        log_r.append(jnp.where(log_r[-1] == -jnp.inf, -jnp.inf, following))
    return jnp.stack(log_r, axis=1)


def _leading(good: jax.Array, offered: jax.Array) -> jax.Array:  # [N] i32
    """Length of the leading run of true entries of good [N, m] among the offered ones."""
    real = jnp.arange(good.shape[1]) < offered[:, None]
    return jnp.sum(jnp.cumprod((good & real).astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def _log_ratio(
    target_logits: jax.Array, draft_logits: jax.Array, drafts: jax.Array
) -> jax.Array:  # [N, m] f32
    """log p(d) - log q(d); -inf where the target excludes d, even if the draft does too."""
    log_p = _log_prob_of(target_logits[:, :-1], drafts)
    log_q = _log_prob_of(draft_logits, drafts)
    return jnp.where(log_p == -jnp.inf, -jnp.inf, log_p - log_q)


def _log_prob_of(logits: jax.Array, tokens: jax.Array) -> jax.Array:  # [N, m] f32
    """Takes the tokens' logits first: no array of vocabulary size is written."""
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)
    return _normalised(chosen, _log_total(logits))[..., 0]


def _log_softmax(logits: jax.Array) -> jax.Array:
    return _normalised(logits, _log_total(logits))


def _normalised(logits: jax.Array, log_total: jax.Array) -> jax.Array:
    """Excluded tokens stay -inf, also where all tokens of a row are."""
    return jnp.where(logits == -jnp.inf, -jnp.inf, logits - log_total)


def _log_total(logits: jax.Array) -> jax.Array:  # [..., 1] f32
    top = jnp.max(logits, axis=-1, keepdims=True)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    return top + jnp.log(jnp.sum(jnp.exp(logits - top), axis=-1, keepdims=True))


def _log_excess(log_a: jax.Array, log_b: jax.Array) -> jax.Array:
    """log max(a - b, 0), with as much relative precision as the arguments have."""
    above = log_a > log_b
    gap = jnp.where(above, log_b - log_a, 0.0)  # no -inf minus -inf in what is kept
    return jnp.where(above, log_a + jnp.log(-jnp.expm1(gap)), -jnp.inf)


def _row(rows: jax.Array, index: jax.Array) -> jax.Array:
    """rows[n, index[n]] for each slot n."""
    return rows[jnp.arange(rows.shape[0]), index]


def _last_logits(row: jax.Array, residual: jax.Array, all_taken: jax.Array) -> jax.Array:
    """[N, V]: the target's row where every offered draft was taken or no residual is left."""
    empty = jnp.all(residual == -jnp.inf, axis=-1)
    return jnp.where((all_taken | empty)[:, None], row, residual)
