"""Decoding in recurrent form, batched: the model as a server runs it, one token at a time.

Rule: same parameters and same equations as `model.forward`, but MLA in its absorbed form and KDA
step by step, so that it checks the training form as well as it answers prompts.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scripts.train_nano import model
from scripts.train_nano.model import Params
from scripts.train_nano.spec import END_OF_MSG_ID, PAD_ID, ModelSpec

State = list[dict[str, jax.Array]]


def empty_state(spec: ModelSpec, batch: int, length: int) -> State:
    """KDA: state matrix and the last rows before the convolution. MLA: a cache of `length` rows."""
    kda = {
        "s": (batch, spec.kda_heads, spec.kda_dim, spec.kda_dim),
        "conv": (batch, spec.conv_width - 1, 3 * spec.kda_width),
    }
    mla = {"cache": (batch, length, spec.kv_lora + spec.rope_dim)}
    shapes = [mla if index in spec.mla_layers else kda for index in range(spec.layers)]
    return [{name: jnp.zeros(shape) for name, shape in layer.items()} for layer in shapes]


def step(
    spec: ModelSpec,
    params: Params,
    state: State,
    position: jax.Array,  # [] int32
    ids: jax.Array,  # [batch] int32
) -> tuple[jax.Array, State]:
    """Feeds one token per row. Returns logits `[batch, vocab]` and the new state."""
    new: State = list(state)

    def attention(index: int, p: Params, x: jax.Array) -> jax.Array:
        if index in spec.mla_layers:
            out, new[index] = _mla_step(spec, p, state[index], position, x)
        else:
            out, new[index] = _kda_step(spec, p, state[index], x)
        return out

    hidden, _, _ = model.trunk(spec, params, params["embed"][ids], attention)
    return hidden @ model.head(params), new


def _kda_step(spec: ModelSpec, p: Params, state: dict, x: jax.Array) -> tuple[jax.Array, dict]:
    qkv, gate, log_decay, beta = model.kda_inputs(spec, p, x)
    window = jnp.concatenate([state["conv"], qkv[:, None]], 1)
    q, k, v = model.kda_heads(spec, jax.nn.silu((window * p["conv"]).sum(1)))
    s = jnp.exp(log_decay)[..., None] * state["s"]
    u = beta[..., None] * (v - jnp.einsum("bhk,bhkv->bhv", k, s))
    s = s + k[..., None] * u[..., None, :]
    out = model.kda_output(p, jnp.einsum("bhk,bhkv->bhv", q, s), gate)
    return out, {"s": s, "conv": window[:, 1:]}


def _mla_step(
    spec: ModelSpec, p: Params, state: dict, position: jax.Array, x: jax.Array
) -> tuple[jax.Array, dict]:
    cache = state["cache"].at[:, position].set(model.mla_cache_row(spec, p, x))
    kv_b = p["kv_b"].reshape(spec.kv_lora, spec.mla_heads, -1)
    to_key, to_value = kv_b[..., : spec.nope_dim], kv_b[..., spec.nope_dim :]
    q = model.mla_queries(spec, p, x)
    absorbed = jnp.einsum("bhn,rhn->bhr", q[..., : spec.nope_dim], to_key)
    query = jnp.concatenate([absorbed, q[..., spec.nope_dim :]], -1)
    scores = jnp.einsum("bhr,btr->bht", query, cache) * (spec.nope_dim + spec.rope_dim) ** -0.5
    scores = jnp.where(jnp.arange(cache.shape[1]) <= position, scores, -1e30)
    latent = jnp.einsum("bht,btr->bhr", jax.nn.softmax(scores, -1), cache[..., : spec.kv_lora])
    out = jnp.einsum("bhr,rhv->bhv", latent, to_value).reshape(x.shape[0], -1)
    return (out * jax.nn.sigmoid(x @ p["g"])) @ p["o"], {"cache": cache}


@functools.partial(jax.jit, static_argnums=(0, 4))
def _generate(
    spec: ModelSpec,
    params: Params,
    tokens: jax.Array,  # [batch, time] int32
    lengths: jax.Array,  # [batch] int32
    temperature: float,
    key: jax.Array,
) -> jax.Array:  # [batch, time] int32
    """Fills each row of `tokens` from its prompt length on."""
    batch, time = tokens.shape

    def body(carry: Any) -> Any:
        position, state, tokens, done = carry
        logits, state = step(spec, params, state, position, tokens[:, position])
        if temperature > 0:
            noise = jax.random.gumbel(jax.random.fold_in(key, position), logits.shape)
            logits = logits / temperature + noise
        best = jnp.where(done, END_OF_MSG_ID, logits.argmax(-1).astype(tokens.dtype))
        in_prompt = position + 1 < lengths
        following = jnp.where(in_prompt, tokens[:, position + 1], best)
        done = done | (~in_prompt & (best == END_OF_MSG_ID))
        return position + 1, state, tokens.at[:, position + 1].set(following), done

    start = (0, empty_state(spec, batch, time), tokens, jnp.zeros(batch, bool))
    running = jax.lax.while_loop(lambda c: (c[0] < time - 1) & ~c[3].all(), body, start)
    return running[2]


def generate(
    spec: ModelSpec,
    params: Params,
    prompts: list[list[int]],
    max_new: int,
    batch: int = 192,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[list[int]]:
    """Continuations of each prompt, without the end-of-message token: greedy, or drawn at a
    temperature. One that has `max_new` tokens did not end by itself."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    results: list[list[int]] = [[] for _ in prompts]
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        longest = len(prompts[chosen[-1]]) + max_new
        tokens = np.full((batch, -(-longest // 128) * 128), PAD_ID, np.int32)
        lengths = np.ones(batch, np.int32)
        for row, index in enumerate(chosen):
            lengths[row] = len(prompts[index])
            tokens[row, : lengths[row]] = prompts[index]
        key = jax.random.fold_in(jax.random.key(seed), start)
        filled = np.asarray(_generate(spec, params, tokens, lengths, temperature, key))
        for row, index in enumerate(chosen):
            written = filled[row, lengths[row] : lengths[row] + max_new].tolist()
            end = written.index(END_OF_MSG_ID) if END_OF_MSG_ID in written else len(written)
            results[index] = written[:end]
    return results
