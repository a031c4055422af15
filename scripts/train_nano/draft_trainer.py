"""Trains the draft on a frozen target: corpus chats, then the target's own answers.

Rule: as in trainer.py, a run is a function of its recipe and its target; everything that decides
the next step is in the checkpoint, so a resumed run gives the same bits.

Losses of k3-architecture.md section 6.6, with the true token before each predicted one (teacher
forcing): 0.1 cross entropy against the target's best token + 0.9 total variation between the two
distributions at temperature 1, and binary cross entropy of the confidence against 1 - TV.
"""

import dataclasses
import functools
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from scripts.train_nano import draft_model, model, optimizer
from scripts.train_nano.draft_batches import DraftBatch, RowStream, make_batch
from scripts.train_nano.draft_spec import DraftRecipe
from scripts.train_nano.model import Params
from scripts.train_nano.spec import ModelSpec
from scripts.train_nano.trainer import gather_rows, restore_checkpoint, save_checkpoint

log = logging.getLogger("train_nano")


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """The frozen model whose tokens are drafted."""

    spec: ModelSpec
    params: Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
    """The supervised slots of a batch and what the target says there."""

    blocks: jax.Array  # [slots] int32 into [rows, anchors, block]
    previous: jax.Array  # [slots] int32, tokens
    slots: jax.Array  # [slots] int32
    weights: jax.Array  # [slots] f32
    teacher: jax.Array  # [slots, vocab] f32, log-probabilities


def loss_fn(
    draft: Params,
    recipe: DraftRecipe,
    target: Params,
    aux: jax.Array,  # [rows, length, streams, hidden]
    ids: jax.Array,
    anchors: jax.Array,
    slots: Slots,
) -> tuple[jax.Array, jax.Array]:
    """The loss, and per slot `[3, block]`: how many count, how many agree greedily, overlap."""
    spec, head = recipe.spec, model.head(target)
    context = draft_model.context_rows(spec, draft, aux)
    rows = draft_model.block_rows(spec, draft, target["embed"], context, ids, anchors)
    hidden = gather_rows(rows.reshape(-1, spec.hidden), slots.blocks)
    logits = draft_model.slot_logits(draft, head, hidden, slots.previous)
    log_q = jax.nn.log_softmax(logits, -1)
    best = slots.teacher.argmax(-1)
    ce = -(log_q * jax.nn.one_hot(best, spec.vocab)).sum(-1)
    overlap = jnp.minimum(jnp.exp(log_q), jnp.exp(slots.teacher)).sum(-1)

    # The confidence learns from the draft, never the other way round.
    frozen = jax.lax.stop_gradient((hidden, draft["markov_w1"], overlap))
    parts = draft | {"markov_w1": frozen[1]}
    confidence = draft_model.confidence_logits(parts, frozen[0], slots.previous)
    bce = jnp.logaddexp(0.0, confidence) - frozen[2] * confidence

    weights = slots.weights * jnp.exp(-slots.slots / recipe.decay_slots)
    losses = recipe.ce_weight * ce + recipe.tv_weight * (1 - overlap) + bce
    table = jax.nn.one_hot(slots.slots, spec.block, axis=0) * slots.weights  # [block, slots]
    marks = jnp.stack([jnp.ones_like(ce), logits.argmax(-1) == best, overlap])
    return (losses * weights).sum() / weights.sum(), marks @ table.T


@functools.partial(jax.jit, static_argnums=(0, 1))
def read_target(
    spec: ModelSpec, layers: tuple[int, ...], params: Params, ids: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Features of all tokens, and log-probabilities `[slots, vocab]` at flat positions."""
    hidden, aux = model.features(spec, params, ids, layers)
    logits = hidden.reshape(-1, spec.hidden)[positions] @ model.head(params)
    return aux, jax.nn.log_softmax(logits, -1)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def train_step(
    recipe: DraftRecipe,
    spec: ModelSpec,
    target: Params,
    state: dict[str, Any],
    batch: tuple[jax.Array, ...],  # the fields of DraftBatch
    lr: jax.Array,
    step: jax.Array,
) -> tuple[dict[str, Any], tuple[jax.Array, jax.Array]]:
    """One update. Also returns `[loss, gradient norm]` and the counts per slot."""
    ids, anchors, blocks, positions, numbers, weights = batch
    aux, teacher = read_target(spec, recipe.spec.aux_layers, target, ids, positions)
    slots = Slots(blocks, ids.reshape(-1)[positions], numbers, weights, teacher)
    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    scaled = aux * state["scale"][:, None]
    (loss, counts), grads = grad_fn(state["params"], recipe, target, scaled, ids, anchors, slots)
    params, opt, norm = optimizer.apply(
        recipe.optimizer, state["params"], state["opt"], grads, lr, step
    )
    state = {"params": params, "opt": opt, "scale": state["scale"]}
    return state, (jnp.stack([loss, norm]), counts)


def fold_scale(state: dict[str, Any]) -> Params:
    """The draft for features as the target has them: the training's scale goes into `fc`."""
    params, scale = state["params"], state["scale"]
    fc = params["fc"].reshape(len(scale), -1, params["fc"].shape[1]) * scale[:, None, None]
    return params | {"fc": fc.reshape(params["fc"].shape)}


@dataclasses.dataclass(slots=True)
class DraftTrainer:
    """Runs a recipe. `open_stream(stage)` gives the rows of "corpus" or "answers"."""

    recipe: DraftRecipe
    target: Target
    open_stream: Callable[[str], RowStream]
    folder: Path  # checkpoints

    def run(self, resume: bool = False, stop_after: int | None = None) -> Params:
        """Trains to the end of the recipe, or until step `stop_after`; returns the draft."""
        options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
        manager = ocp.CheckpointManager(self.folder.absolute(), options=options)
        state = self._initial_state()
        step, position = 0, None
        if resume and manager.latest_step() is not None:
            step, state, position = restore_checkpoint(manager, state)
            log.info("draft resumed at step %d", step)
        else:
            log.info("draft of %s parameters", f"{model.count_params(state['params']):,}")
        last = min(self.recipe.total_steps, stop_after or self.recipe.total_steps)
        state = self._loop(manager, state, step, position, last)
        manager.wait_until_finished()
        manager.close()
        return fold_scale(state)

    def _initial_state(self) -> dict[str, Any]:
        init = jax.jit(draft_model.init_params, static_argnums=0)
        params = init(self.recipe.spec, jax.random.key(self.recipe.seed))
        streams = len(self.recipe.spec.aux_layers)
        opt = optimizer.init_state(params)
        return {"params": params, "opt": opt, "scale": jnp.zeros(streams)}

    def _loop(
        self, manager: ocp.CheckpointManager, state: dict, step: int, position: Any, last: int
    ) -> dict:
        progress = DraftProgress(self.recipe)
        opened = ""
        while step < last:
            stage = self.recipe.stage_at(step)
            if stage != opened:
                opened, stream = stage, self.open_stream(stage)
                log.info("draft stage %s", stage)
                if position and position["stage"] == stage:
                    stream.restore(position["stream"])
                position = None
            batch = make_batch(self.recipe, *stream.next_rows(), step)
            if step == 0:
                state["scale"] = self._measure_scale(batch)
            state, metrics = self._step(state, batch, step)
            step += 1
            progress.add(step, batch, metrics)
            if step % self.recipe.checkpoint_every == 0 or step == last:
                jax.block_until_ready(state)
                save_checkpoint(manager, step, state, {"stage": stage, "stream": stream.state()})
        return state

    def _measure_scale(self, batch: DraftBatch) -> jax.Array:  # [streams]
        """Brings all streams to size 1: else the largest one alone decides what `fc` learns."""
        layers = self.recipe.spec.aux_layers
        spec, params = self.target.spec, self.target.params
        aux, _ = read_target(spec, layers, params, batch.ids, batch.positions)
        return jax.lax.rsqrt((aux * aux).mean((0, 1, 3)))

    def _step(self, state: dict, batch: DraftBatch, step: int) -> tuple[dict, Any]:
        return train_step(
            self.recipe,
            self.target.spec,
            self.target.params,
            state,
            tuple(getattr(batch, field.name) for field in dataclasses.fields(batch)),
            np.float32(self.recipe.learning_rate(step)),
            np.float32(step + 1),
        )


class DraftProgress:
    """Prints a line every `log_every` steps. The expected lengths are for seven drafts, from the
    mean agreement of each slot, and with the true tokens before it."""

    def __init__(self, recipe: DraftRecipe):
        self.recipe = recipe
        self.pending: list[tuple[jax.Array, jax.Array]] = []
        self.tokens = 0
        self.since = time.monotonic()

    def add(self, step: int, batch: DraftBatch, metrics: tuple[jax.Array, jax.Array]) -> None:
        self.pending.append(metrics)
        self.tokens += batch.ids.size
        if len(self.pending) < self.recipe.log_every:
            return
        loss, norm = np.mean([np.asarray(m) for m, _ in self.pending], 0)
        count, agree, overlap = np.sum([np.asarray(c) for _, c in self.pending], 0)[:, :-1]
        greedy, sampled = (1 + np.cumprod(x / np.maximum(count, 1)).sum() for x in (agree, overlap))
        elapsed = time.monotonic() - self.since
        left = (self.recipe.total_steps - step) * elapsed / len(self.pending)
        log.info(
            "draft step %d/%d  %.0f tokens/s  loss %.4f  grad %.2f  lr %.1e  first slot %.3f  "
            "expected length greedy %.2f sampled %.2f  %.0f min left",
            step, self.recipe.total_steps, self.tokens / elapsed, loss, norm,
            self.recipe.learning_rate(step - 1), agree[0] / max(count[0], 1), greedy, sampled,
            left / 60,
        )  # fmt: skip
        self.pending, self.tokens, self.since = [], 0, time.monotonic()
