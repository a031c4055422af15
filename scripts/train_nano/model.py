"""K3-nano in plain JAX, in the form that trains: whole rows of tokens, no cache.

Rule: the equations are those of the Kimi K3 release, in float32 throughout. A parameter
matrix is stored `[in, out]` and used as `x @ w`. The output head is the transposed embedding while
training; an exported checkpoint has its own copy under "head".

Sequences start from an empty state; one conversation per row, never packed.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scripts.train_nano import mxfp4
from scripts.train_nano.kernels import conv_silu, kda
from scripts.train_nano.spec import ModelSpec

Params = dict[str, Any]
EXPERT_WEIGHTS = ("w1", "w3", "w2")

# --------------------------------------------------------------------------------- parameters


def init_params(spec: ModelSpec, key: jax.Array) -> Params:
    """Fresh parameters; output projections start small, residual scores at zero."""
    keys = iter(jax.random.split(key, 64 * (spec.layers + 1)))

    def normal(*shape: int, scale: float | None = None) -> jax.Array:
        return jax.random.normal(next(keys), shape) * (scale or shape[-2] ** -0.5)

    layers = []
    for index in range(spec.layers):
        attention = _init_mla if index in spec.mla_layers else _init_kda
        mlp = _init_dense if index == 0 else _init_moe
        layers.append(_init_norms(spec) | attention(spec, normal, index) | mlp(spec, normal))
    return {
        "embed": normal(spec.vocab, spec.hidden, scale=0.1),
        "layers": layers,
        "norm": jnp.ones(spec.hidden),
        "out_res_norm": jnp.ones(spec.hidden),
        "out_res_proj": jnp.zeros(spec.hidden),
    }


def _init_norms(spec: ModelSpec) -> Params:
    norms = ("input_norm", "post_norm", "attn_res_norm", "mlp_res_norm")
    scores = ("attn_res_proj", "mlp_res_proj")
    return {name: jnp.ones(spec.hidden) for name in norms} | {
        name: jnp.zeros(spec.hidden) for name in scores
    }


def _output_scale(spec: ModelSpec, width: int) -> float:
    return (width * 2 * spec.layers) ** -0.5


def _init_kda(spec: ModelSpec, normal: Any, index: int) -> Params:
    hidden, width, dim = spec.hidden, spec.kda_width, spec.kda_dim
    # Log decays start spread between -0.001 and -0.1: invert lb * sigmoid(bias).
    spread = np.random.default_rng(index).uniform(math.log(0.001), math.log(0.1), width)
    share = np.exp(spread) / -spec.gate_lower_bound
    conv = normal(spec.conv_width, 3 * width, scale=0.3).at[-1].add(0.7)
    return {name: normal(hidden, width) for name in ("q", "k", "v", "g")} | {
        "conv": conv,
        "f_a": normal(hidden, dim),
        "f_b": normal(dim, width, scale=0.3),
        "dt_bias": jnp.asarray(np.log(share / (1 - share)), jnp.float32),
        "a_log": jnp.zeros(spec.kda_heads),
        "b": normal(hidden, spec.kda_heads),
        "o_norm": jnp.ones(dim),
        "o": normal(width, hidden, scale=_output_scale(spec, width)),
    }


def _init_mla(spec: ModelSpec, normal: Any, index: int) -> Params:
    hidden, width = spec.hidden, spec.mla_heads * spec.v_dim
    return {
        "q_a": normal(hidden, spec.q_lora),
        "q_a_norm": jnp.ones(spec.q_lora),
        "q_b": normal(spec.q_lora, spec.mla_heads * (spec.nope_dim + spec.rope_dim)),
        "kv_a": normal(hidden, spec.kv_lora + spec.rope_dim),
        "kv_a_norm": jnp.ones(spec.kv_lora),
        "kv_b": normal(spec.kv_lora, spec.mla_heads * (spec.nope_dim + spec.v_dim)),
        "g": normal(hidden, width),
        "o": normal(width, hidden, scale=_output_scale(spec, width)),
    }


def _init_dense(spec: ModelSpec, normal: Any) -> Params:
    return {
        "gate": normal(spec.hidden, spec.dense),
        "up": normal(spec.hidden, spec.dense),
        "down": normal(spec.dense, spec.hidden, scale=_output_scale(spec, spec.dense)),
    }


def _init_moe(spec: ModelSpec, normal: Any) -> Params:
    hidden, latent, dim, shared = spec.hidden, spec.latent, spec.expert_dim, spec.shared_dim
    return {
        "router": normal(hidden, spec.experts),
        "router_bias": jnp.zeros(spec.experts),
        "latent_down": normal(hidden, latent),
        "latent_norm": jnp.ones(latent),
        "latent_up": normal(latent, hidden, scale=_output_scale(spec, latent)),
        "w1": normal(spec.experts, latent, dim),
        "w3": normal(spec.experts, latent, dim),
        "w2": normal(spec.experts, dim, latent),
        "shared_gate": normal(hidden, shared),
        "shared_up": normal(hidden, shared),
        "shared_down": normal(shared, hidden, scale=_output_scale(spec, shared)),
    }


def count_params(params: Params) -> int:
    return sum(x.size for x in jax.tree.leaves(params))


def with_quantized_experts(params: Params) -> Params:
    """Experts as MXFP4 would store them, differentiable by the straight-through estimate."""
    layers = [
        layer | {name: mxfp4.straight_through(layer[name]) for name in EXPERT_WEIGHTS}
        if "w1" in layer
        else layer
        for layer in params["layers"]
    ]
    return params | {"layers": layers}


# --------------------------------------------------------------------------------- primitives


def rms_norm(x: jax.Array, weight: jax.Array, eps: float = 1e-5) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * weight


def l2_norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)


def situ(spec: ModelSpec, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Tanh-bounded SwiGLU (section 2.5)."""
    bounded = spec.situ_beta * jnp.tanh(gate / spec.situ_beta) * jax.nn.sigmoid(gate)
    return bounded * spec.situ_linear_beta * jnp.tanh(up / spec.situ_linear_beta)


def residual_mix(sources: list[jax.Array], norm: jax.Array, proj: jax.Array) -> jax.Array:
    """Attention residuals (section 2.2): a per-token softmax mix of block sums and running sum."""
    if len(sources) == 1:
        return sources[0]
    weight = norm * proj
    scores = [(x * weight).sum(-1) * jax.lax.rsqrt((x * x).mean(-1) + 1e-5) for x in sources]
    share = jax.nn.softmax(jnp.stack(scores, -1), -1)
    mixed = share[..., :1] * sources[0]
    for i, x in enumerate(sources[1:], 1):
        mixed = mixed + share[..., i : i + 1] * x
    return mixed


# ------------------------------------------------------------------------------------- layers


def kda_inputs(spec: ModelSpec, p: Params, x: jax.Array) -> tuple[jax.Array, ...]:
    """All projections of `x` in one matmul: q|k|v before the convolution, gate, decay, beta."""
    width, dim = spec.kda_width, spec.kda_dim
    fused = jnp.concatenate([p[name] for name in ("q", "k", "v", "g", "f_a", "b")], 1)
    qkv, gate, f_a, beta = jnp.split(x @ fused, [3 * width, 4 * width, 4 * width + dim], -1)
    z = (f_a @ p["f_b"] + p["dt_bias"]).reshape(*x.shape[:-1], spec.kda_heads, dim)
    log_decay = spec.gate_lower_bound * jax.nn.sigmoid(jnp.exp(p["a_log"])[:, None] * z)
    return qkv, gate.reshape(z.shape), log_decay, jax.nn.sigmoid(beta)


def kda_heads(spec: ModelSpec, convolved: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Splits q|k|v after the convolution into heads; normalises q and k, scales q."""
    shape = (*convolved.shape[:-1], spec.kda_heads, spec.kda_dim)
    q, k, v = (x.reshape(shape) for x in jnp.split(convolved, 3, -1))
    return l2_norm(q) * spec.kda_dim**-0.5, l2_norm(k), v


def kda_output(p: Params, out: jax.Array, gate: jax.Array) -> jax.Array:
    gated = rms_norm(out, p["o_norm"]) * jax.nn.sigmoid(gate)
    return gated.reshape(*out.shape[:-2], -1) @ p["o"]


def kda_layer(spec: ModelSpec, p: Params, x: jax.Array) -> jax.Array:
    qkv, gate, log_decay, beta = kda_inputs(spec, p, x)
    q, k, v = kda_heads(spec, conv_silu(qkv, p["conv"]))
    return kda_output(p, kda(q, k, v, log_decay, beta), gate)


def mla_queries(spec: ModelSpec, p: Params, x: jax.Array) -> jax.Array:
    q = rms_norm(x @ p["q_a"], p["q_a_norm"]) @ p["q_b"]
    return q.reshape(*x.shape[:-1], spec.mla_heads, -1)


def mla_cache_row(spec: ModelSpec, p: Params, x: jax.Array) -> jax.Array:
    """What MLA keeps of a token: the normed latent, then the shared key part."""
    row = x @ p["kv_a"]
    latent = rms_norm(row[..., : spec.kv_lora], p["kv_a_norm"])
    return jnp.concatenate([latent, row[..., spec.kv_lora :]], -1)


def mla_keys_values(spec: ModelSpec, p: Params, row: jax.Array) -> tuple[jax.Array, jax.Array]:
    kv = (row[..., : spec.kv_lora] @ p["kv_b"]).reshape(*row.shape[:-1], spec.mla_heads, -1)
    shared = row[..., None, spec.kv_lora :]
    shared = jnp.broadcast_to(shared, (*kv.shape[:-1], spec.rope_dim))
    return jnp.concatenate([kv[..., : spec.nope_dim], shared], -1), kv[..., spec.nope_dim :]


def mla_layer(spec: ModelSpec, p: Params, x: jax.Array) -> jax.Array:
    time = x.shape[1]
    q = mla_queries(spec, p, x) * (spec.nope_dim + spec.rope_dim) ** -0.5
    k, v = mla_keys_values(spec, p, mla_cache_row(spec, p, x))
    scores = jnp.einsum("bihd,bjhd->bhij", q, k)
    scores = jnp.where(jnp.tril(jnp.ones((time, time), bool)), scores, -1e30)
    out = jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(scores, -1), v)
    return (out.reshape(*x.shape[:-1], -1) * jax.nn.sigmoid(x @ p["g"])) @ p["o"]


def gated_mlp(
    spec: ModelSpec, x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array
) -> jax.Array:
    branches = jnp.split(x @ jnp.concatenate([gate, up], 1), 2, -1)
    return situ(spec, *branches) @ down


def moe_layer(spec: ModelSpec, p: Params, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Latent MoE (section 2.6), every expert computed. Also returns the choice `[.., experts]`."""
    scores = jax.nn.sigmoid(x @ p["router"])
    _, chosen = jax.lax.top_k(scores + jax.lax.stop_gradient(p["router_bias"]), spec.top_k)
    mask = jax.nn.one_hot(chosen, spec.experts).sum(-2)
    weight = scores * mask
    weight = weight / (weight.sum(-1, keepdims=True) + 1e-20)
    fused = jnp.concatenate([p["w1"], p["w3"]], -1).transpose(1, 0, 2).reshape(spec.latent, -1)
    branches = ((x @ p["latent_down"]) @ fused).reshape(*x.shape[:-1], spec.experts, -1)
    hidden = situ(spec, *jnp.split(branches, 2, -1)) * weight[..., None]
    routed = hidden.reshape(*x.shape[:-1], -1) @ p["w2"].reshape(-1, spec.latent)
    routed = rms_norm(routed, p["latent_norm"]) @ p["latent_up"]
    shared = gated_mlp(spec, x, p["shared_gate"], p["shared_up"], p["shared_down"])
    return routed + shared, mask


# -------------------------------------------------------------------------------------- trunk


def trunk(
    spec: ModelSpec, params: Params, x: jax.Array, attention: Any
) -> tuple[jax.Array, list[jax.Array], list[jax.Array]]:
    """Runs all layers. `attention(layer_index, layer_params, normed)` is the token mixer.

    Returns the normed hidden rows for the head, the expert choices of each MoE layer, and the
    running sum of the residual stream as it enters each layer (a draft's features, section 6.2).
    """
    running = x
    blocks: list[jax.Array] = []
    choices: list[jax.Array] = []
    entering: list[jax.Array] = []
    for index, p in enumerate(params["layers"]):
        entering.append(running)
        mixed = residual_mix([*blocks, running], p["attn_res_norm"], p["attn_res_proj"])
        starts_block = index % spec.block_size == 0
        if starts_block:
            blocks = [*blocks, running]
        out = attention(index, p, rms_norm(mixed, p["input_norm"]))
        running = out if starts_block else running + out
        mixed = residual_mix([*blocks, running], p["mlp_res_norm"], p["mlp_res_proj"])
        normed = rms_norm(mixed, p["post_norm"])
        if "router" in p:
            out, choice = moe_layer(spec, p, normed)
            choices.append(choice)
        else:
            out = gated_mlp(spec, normed, p["gate"], p["up"], p["down"])
        running = running + out
    mixed = residual_mix([*blocks, running], params["out_res_norm"], params["out_res_proj"])
    return rms_norm(mixed, params["norm"]), choices, entering


def head(params: Params) -> jax.Array:  # [hidden, vocab]
    return params["head"].T if "head" in params else params["embed"].T


def forward(
    spec: ModelSpec,
    params: Params,
    ids: jax.Array,  # [batch, time] int32
) -> tuple[jax.Array, list[jax.Array]]:
    """Hidden rows `[batch, time, hidden]` before the head, and the expert choices."""
    hidden, choices, _ = _run_rows(spec, params, ids)
    return hidden, choices


def features(
    spec: ModelSpec,
    params: Params,
    ids: jax.Array,  # [batch, time] int32
    layers: tuple[int, ...],
) -> tuple[jax.Array, jax.Array]:
    """Hidden rows as of `forward`, and the running sums `[batch, time, len(layers), hidden]` as
    they enter these layers."""
    hidden, _, entering = _run_rows(spec, params, ids)
    return hidden, jnp.stack([entering[layer] for layer in layers], 2)


def _run_rows(
    spec: ModelSpec, params: Params, ids: jax.Array
) -> tuple[jax.Array, list[jax.Array], list[jax.Array]]:
    def attention(index: int, p: Params, x: jax.Array) -> jax.Array:
        layer = mla_layer if index in spec.mla_layers else kda_layer
        return layer(spec, p, x)

    return trunk(spec, params, params["embed"][ids], attention)
