"""The training loop: stages by steps, checkpoints with orbax, progress lines.

Rule: a run is a function of its recipe. Everything that decides the next step (parameters,
optimizer state, step number, position in the data) is in the checkpoint, so a resumed run gives
bit for bit what an uninterrupted one gives on the same machine.
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

from scripts.train_nano import model, optimizer
from scripts.train_nano.batches import Batch, Stream
from scripts.train_nano.recipe import Recipe, Stage
from scripts.train_nano.spec import ModelSpec

log = logging.getLogger("train_nano")


def loss_fn(
    params: model.Params, spec: ModelSpec, quantized: bool, batch: tuple[jax.Array, ...]
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Mean cross entropy at the batch's positions; also token accuracy and expert loads."""
    ids, positions, targets, weights = batch
    if quantized:
        params = model.with_quantized_experts(params)
    hidden, choices = model.forward(spec, params, ids)
    logits = gather_rows(hidden.reshape(-1, spec.hidden), positions) @ model.head(params)
    wanted = jax.nn.one_hot(targets, spec.vocab)
    losses = jax.nn.logsumexp(logits, -1) - (logits * wanted).sum(-1)
    right = logits.argmax(-1) == targets
    loads = jnp.stack([choice.mean((0, 1)) / spec.top_k for choice in choices])
    return (losses * weights).sum() / weights.sum(), (
        (right * weights).sum() / weights.sum(),
        loads,
    )


@jax.custom_vjp
def gather_rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """`x[index]` for distinct indices; says so in the backward scatter, which is then fast."""
    return x[index]


def _gather_bwd(saved: tuple[jax.Array, int], grad: jax.Array) -> tuple[jax.Array, None]:
    index, rows = saved
    empty = jnp.zeros((rows, grad.shape[1]), grad.dtype)
    return empty.at[index].set(grad, unique_indices=True, mode="drop"), None


gather_rows.defvjp(lambda x, index: (x[index], (index, x.shape[0])), _gather_bwd)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3))
def train_step(
    recipe: Recipe,
    quantized: bool,
    params: model.Params,
    opt_state: dict[str, model.Params],
    batch: tuple[jax.Array, ...],
    lr: jax.Array,
    step: jax.Array,
) -> tuple[model.Params, dict[str, model.Params], jax.Array]:
    """One update. The third result is `[loss, accuracy, largest expert load, gradient norm]`."""
    spec = recipe.model
    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, (accuracy, loads)), grads = grad_fn(params, spec, quantized, batch)
    params, opt_state, norm = optimizer.apply(recipe.optimizer, params, opt_state, grads, lr, step)
    moe_layers = [p for p in params["layers"] if "router_bias" in p]
    for p, load in zip(moe_layers, loads, strict=True):  # balance without a loss term
        p["router_bias"] += recipe.router_bias_rate * jnp.sign(1 / spec.experts - load)
    return params, opt_state, jnp.stack([loss, accuracy, loads.max(), norm])


@dataclasses.dataclass(slots=True)
class Trainer:
    """Runs a recipe. `open_stream(stage)` gives the data of a stage from its start."""

    recipe: Recipe
    open_stream: Callable[[Stage], Stream]
    folder: Path  # checkpoints

    def run(self, resume: bool = False, stop_after: int | None = None) -> model.Params:
        """Trains to the end of the recipe, or until step `stop_after`; returns the parameters."""
        manager = self._manager()
        state = self._initial_state()
        step, position = 0, None
        if resume and manager.latest_step() is not None:
            step, state, position = restore_checkpoint(manager, state)
            log.info("resumed at step %d", step)
        else:
            log.info("%s parameters", f"{model.count_params(state['params']):,}")
        last = min(self.recipe.total_steps, stop_after or self.recipe.total_steps)
        state = self._loop(manager, state, step, position, last)
        manager.wait_until_finished()
        manager.close()
        return state["params"]

    def latest(self) -> model.Params:
        """The parameters of the newest checkpoint, also while another process is training."""
        with self._manager() as manager:
            step, state, _ = restore_checkpoint(manager, self._initial_state())
        log.info("read the checkpoint of step %d", step)
        return state["params"]

    def _manager(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
        return ocp.CheckpointManager(self.folder.absolute(), options=options)

    def _initial_state(self) -> dict:
        params = model.init_params(self.recipe.model, jax.random.key(self.recipe.seed))
        return {"params": params, "opt": optimizer.init_state(params)}

    def _loop(
        self, manager: ocp.CheckpointManager, state: dict, step: int, position: Any, last: int
    ) -> dict:
        progress = Progress(self.recipe)
        opened: Stage | None = None
        while step < last:
            stage = self.recipe.stage_at(step)
            if stage is not opened:
                opened, stream = stage, self.open_stream(stage)
                log.info("stage %s: %d steps", stage.name, stage.steps)
                if position and position["stage"] == stage.name:
                    stream.restore(position["stream"])
                position = None
            batch = stream.next_batch()
            state, metrics = self._step(state, batch, step)
            step += 1
            progress.add(step, batch, metrics)
            if step % self.recipe.checkpoint_every == 0 or step == last:
                jax.block_until_ready(state)
                save_checkpoint(
                    manager, step, state, {"stage": stage.name, "stream": stream.state()}
                )
        return state

    def _step(self, state: dict, batch: Batch, step: int) -> tuple[dict, jax.Array]:
        params, opt, metrics = train_step(
            self.recipe,
            step >= self.recipe.quantize_from,
            state["params"],
            state["opt"],
            (batch.ids, batch.positions, batch.targets, batch.weights),
            np.float32(self.recipe.learning_rate(step)),
            np.float32(step + 1),
        )
        return {"params": params, "opt": opt}, metrics


def save_checkpoint(manager: ocp.CheckpointManager, step: int, state: dict, position: dict) -> None:
    args = ocp.args.Composite(state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(position))
    manager.save(step, args=args, force=True)


def restore_checkpoint(manager: ocp.CheckpointManager, like: dict) -> tuple[int, dict, dict]:
    step = manager.latest_step()
    args = ocp.args.Composite(state=ocp.args.StandardRestore(like), data=ocp.args.JsonRestore())
    restored = manager.restore(step, args=args)
    return step, restored["state"], restored["data"]


class Progress:
    """Prints a line every `log_every` steps; reads results late so the device never waits."""

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        self.pending: list[jax.Array] = []
        self.tokens = 0
        self.since = time.monotonic()

    def add(self, step: int, batch: Batch, metrics: jax.Array) -> None:
        self.pending.append(metrics)
        self.tokens += batch.ids.size
        if len(self.pending) < self.recipe.log_every:
            return
        loss, accuracy, load, norm = np.mean([np.asarray(m) for m in self.pending], 0)
        elapsed = time.monotonic() - self.since
        left = (self.recipe.total_steps - step) * elapsed / len(self.pending)
        log.info(
            "step %d/%d  %.0f tokens/s  loss %.4f  accuracy %.4f  load %.2f  grad %.2f  "
            "lr %.1e  %.0f min left",
            step, self.recipe.total_steps, self.tokens / elapsed, loss, accuracy, load, norm,
            self.recipe.learning_rate(step - 1), left / 60,
        )  # fmt: skip
        self.pending, self.tokens, self.since = [], 0, time.monotonic()
