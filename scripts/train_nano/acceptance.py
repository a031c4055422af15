"""How many tokens a target step brings with a draft: counts, and an exact simulation.

Rule: the simulation runs no speculative decoding, it reads off what it would do. Along a text that
the target wrote, a step at anchor p accepts slot after slot: greedily while the draft's best token
is the text's; for sampled text with probability min(1, q(x) / p(x)), which is the chance that an
emitted token x is an accepted draft under rejection sampling. Either way the tokens before a slot
are those of the text, so one teacher-forced pass over all anchors gives all that is needed.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scripts.train_nano import draft_model, model
from scripts.train_nano.draft_spec import DraftSpec
from scripts.train_nano.model import Params
from scripts.train_nano.spec import PAD_ID, ModelSpec
from scripts.train_nano.tally import Tally

_ROWS, _ANCHORS = 16, 16  # of one compiled pass


@dataclasses.dataclass(frozen=True, slots=True)
class Simulator:
    """A target with its draft. `drafts` slots of each block are used."""

    spec: ModelSpec
    target: Params
    draft_spec: DraftSpec
    draft: Params
    drafts: int = 7

    def measure(
        self, texts: Sequence[tuple[list[int], int]], greedy: bool, seed: int = 0
    ) -> list[Tally]:
        """Tallies of `(tokens, prompt length)`. The first token written comes from the prompt pass,
        so it belongs to no step."""
        tallies = [Tally.empty(self.drafts)] * len(texts)
        order = sorted(range(len(texts)), key=lambda i: len(texts[i][0]))
        for start in range(0, len(order), _ROWS):
            chosen = order[start : start + _ROWS]
            chances = self._chances([texts[i] for i in chosen])
            for index, (agree, ratio) in zip(chosen, chances, strict=True):
                rng = np.random.default_rng((seed, index))
                accepts = agree if greedy else rng.random(ratio.shape) < ratio
                tallies[index] = walk(accepts)
        return tallies

    def _chances(self, texts: list[tuple[list[int], int]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Per text and anchor `[anchors, drafts]`: agreement, and the ratio q(x) / p(x)."""
        length = -(-max(len(ids) for ids, _ in texts) // 128) * 128
        ids = np.full((_ROWS, length), PAD_ID, np.int32)
        for row, (tokens, _) in enumerate(texts):
            ids[row, : len(tokens)] = tokens
        counts = [max(0, len(tokens) - 1 - prompt) for tokens, prompt in texts]
        hidden, context = _read(self.spec, self.draft_spec, self.target, self.draft, ids)
        parts = []
        for first in range(0, max(max(counts), 1), _ANCHORS):
            anchors = np.zeros((_ROWS, _ANCHORS), np.int32)
            for row, (_, prompt) in enumerate(texts):
                anchors[row] = np.minimum(prompt + first + np.arange(_ANCHORS), length - 1)
            parts.append(
                _compare(
                    self.draft_spec, self.drafts, self.target, self.draft, hidden, context, ids,
                    anchors,
                )
            )  # fmt: skip
        agree, ratio = (np.concatenate([np.asarray(p[i]) for p in parts], 1) for i in (0, 1))
        found = []
        for row, count in enumerate(counts):
            # Anchor i of n has n - i tokens after it; slots beyond predict nothing of the text.
            inside = np.arange(self.drafts) < (count - np.arange(count))[:, None]
            found.append((agree[row, :count] & inside, ratio[row, :count] * inside))
        return found


@functools.partial(jax.jit, static_argnums=(0, 1))
def _read(
    spec: ModelSpec, draft_spec: DraftSpec, target: Params, draft: Params, ids: Any
) -> tuple[jax.Array, jax.Array]:
    hidden, aux = model.features(spec, target, ids, draft_spec.aux_layers)
    return hidden, draft_model.context_rows(draft_spec, draft, aux)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _compare(
    spec: DraftSpec,
    drafts: int,
    target: Params,
    draft: Params,
    hidden: jax.Array,  # [B, T, hidden] of the target
    context: jax.Array,
    ids: jax.Array,  # [B, T]
    anchors: jax.Array,  # [B, A]
) -> tuple[jax.Array, jax.Array]:  # [B, A, drafts] bool, f32
    head = model.head(target)
    rows = draft_model.block_rows(spec, draft, target["embed"], context, ids, anchors)
    places = jnp.minimum(anchors[..., None] + jnp.arange(drafts + 1), ids.shape[1] - 1)
    flat = places.reshape(ids.shape[0], -1)
    tokens = jnp.take_along_axis(ids, flat, 1).reshape(places.shape)
    before, wanted = tokens[..., :-1], tokens[..., 1:, None]
    logits = draft_model.slot_logits(draft, head, rows[:, :, :drafts], before)
    teacher = jnp.take_along_axis(hidden, flat[..., None], 1).reshape(*places.shape, -1) @ head
    q = jnp.take_along_axis(jax.nn.log_softmax(logits, -1), wanted, -1)[..., 0]
    p = jnp.take_along_axis(jax.nn.log_softmax(teacher[:, :, :-1], -1), wanted, -1)[..., 0]
    return logits.argmax(-1) == wanted[..., 0], jnp.exp(jnp.minimum(q - p, 0.0))


def walk(accepts: np.ndarray) -> Tally:  # [anchors, drafts] bool
    """Counts the steps of a text: each emits its leading accepted drafts and one more token."""
    anchors, drafts = accepts.shape
    steps, accepted = 0, np.zeros(drafts, int)
    anchor = 0
    while anchor < anchors:
        run = int(np.cumprod(accepts[anchor]).sum())
        run = min(run, anchors - anchor - 1)  # the last token of a text is no draft's gain
        accepted[:run] += 1
        steps += 1
        anchor += run + 1
    return Tally(steps, tuple(accepted.tolist()))
