"""Single layers and single formulas against goldens, known answers and a float64 recurrence."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from k3serve.model import attn_res, kda, mla, moe, ops
from k3serve.model.state import KdaState, MlaState
from tests.model.harness import worst

ONE_LAYER, MIX = 5e-5, 1e-5


@pytest.fixture(scope="module")
def k3(model):
    return model("k3_tiny")


@pytest.fixture(scope="module")
def golden(k3):
    return k3.goldens("components")


def on_rank(m, function):
    """The function, jitted, on one rank."""
    mapped = jax.shard_map(function, mesh=m.mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return jax.jit(mapped)


def run(m, function, *args):
    """function(*args) as numpy arrays."""
    return jax.tree.map(np.asarray, on_rank(m, function)(*args))


def empty_kda(m, layer):
    state = m.state().layers[layer]
    return KdaState(s=state.s[:1], conv=state.conv[:1])


def kda_in_pages(m, layer, x, state, start):
    """Rows of any number through pages of 64."""

    def page(x, state, start, length):
        return kda.kda_page(m.config, m.weights.layers[layer].attn, x, state, 0, start, length)

    out, program = [], on_rank(m, page)
    for i in range(0, len(x), 64):
        part = x[i : i + 64]
        padded = np.pad(part, ((0, 64 - len(part)), (0, 0)), constant_values=0.5)
        y, state = program(padded, state, np.int32(start + i), np.int32(len(part)))
        out.append(y[: len(part)])
    return np.concatenate(out), state


def check_kda_state(state, golden, suffix):
    assert worst(state.s[0], golden[f"kda_state{suffix}"]) < ONE_LAYER
    for i, part in enumerate("qkv"):
        key = f"kda_conv{suffix}_{part}"
        if key in golden.files:
            assert worst(state.conv[0, :, i], golden[key]) < ONE_LAYER


def test_kda_layer_by_pages(k3, golden):
    layer = int(golden["kda_layer"])
    y, state = kda_in_pages(k3, layer, golden["kda_x1"], empty_kda(k3, layer), 0)
    assert worst(y, golden["kda_y1"]) < ONE_LAYER
    check_kda_state(state, golden, "1")
    y, state = kda_in_pages(k3, layer, golden["kda_x2"], state, 90)
    assert worst(y, golden["kda_y2"]) < ONE_LAYER
    check_kda_state(state, golden, "2")


def test_kda_layer_by_rows(k3, golden):
    layer = int(golden["kda_layer"])

    def rows(x, state, position):
        w, one = k3.weights.layers[layer].attn, jnp.ones(1, jnp.int32)

        def row(carry, x):
            state, position = carry
            y, state = kda.kda_rows(k3.config, w, x[:, None], state, position, one, None)
            return (state, position + 1), y[:, 0]

        (state, _), y = jax.lax.scan(row, (state, position), x.swapaxes(0, 1))
        return y.swapaxes(0, 1), state

    state = empty_kda(k3, layer)
    y, state = run(k3, rows, golden["kda_x1"][None], state, np.zeros(1, np.int32))
    assert worst(y[0], golden["kda_y1"]) < ONE_LAYER
    check_kda_state(state, golden, "1")
    y, state = run(k3, rows, golden["kda_x2"][None], state, np.full(1, 90, np.int32))
    assert worst(y[0], golden["kda_y2"]) < ONE_LAYER
    check_kda_state(state, golden, "2")


def test_inside_of_kda(k3, golden):
    w = k3.weights.layers[int(golden["kda_layer"])].attn

    def inside(x):
        u = kda.project(w, x)
        window = jnp.concatenate([jnp.zeros((3, *u.shape[1:])), u])
        conv = kda.convolve(window, w.conv)
        inputs = kda.prepare(k3.config, w, x, conv, jnp.ones(len(x), bool))
        _, o = jax.lax.scan(kda.recur, jnp.zeros((4, 32, 32)), inputs)
        return conv.reshape(-1, 3, 4, 32), inputs.g, inputs.beta, o, ops.dot(x, w.gate)

    conv, g, beta, o, gate = run(k3, inside, golden["kda_x1"])
    for i, part in enumerate("qkv"):
        assert worst(conv[:, i], golden[f"kda_{part}1"]) < ONE_LAYER
    assert worst(g, golden["kda_g1"]) < ONE_LAYER
    assert worst(beta, golden["kda_beta1"]) < ONE_LAYER
    assert worst(o, golden["kda_o1"]) < ONE_LAYER
    assert worst(gate, golden["kda_gate1"]) < ONE_LAYER


def test_mla_layer(k3, golden):
    layer = int(golden["mla_layer"])
    w, config = k3.weights.layers[layer].attn, k3.config
    pages = np.zeros((3, 64, config.latent_lanes), np.float32)
    table = np.array([2, 0], np.int32)

    def page(x, pages, start, length):
        y, state = mla.mla_page(config, w, x, MlaState(pages=pages), start, length, table_now())
        return y, state.pages

    def table_now():
        return jnp.asarray(table)

    x = np.concatenate([golden["mla_x1"], golden["mla_x2"]])
    first, pages = run(k3, page, x[:64], pages, np.int32(0), np.int32(64))
    short = np.pad(x[64:90], ((0, 38), (0, 0)))
    second, pages = run(k3, page, short, pages, np.int32(64), np.int32(26))
    y = np.concatenate([first, second[:26]])
    assert worst(y, golden["mla_y1"]) < ONE_LAYER
    kept = np.concatenate([pages[2], pages[0][:26]])
    assert worst(kept[:, :32], golden["mla_latent1"]) < ONE_LAYER
    assert worst(kept[:, 32:48], golden["mla_kpe1"]) < ONE_LAYER
    assert not kept[:, 48:].any() and not pages[0][26:].any()

    def rows(x, pages):
        y, _ = mla.mla_rows(
            config, w, x, MlaState(pages=pages), jnp.array([90]), jnp.array([21]), table_now()[None]
        )
        return y

    assert worst(run(k3, rows, x[None, 90:], pages)[0], golden["mla_y2"]) < ONE_LAYER
    q, q_rope = run(k3, lambda x: mla.queries(config, w, x), golden["mla_x1"])
    assert worst(np.concatenate([q, q_rope], -1), golden["mla_q1"]) < ONE_LAYER


def test_moe_layer(k3, golden):
    w, config = k3.weights.layers[int(golden["moe_layer"])].mlp, k3.config

    def layer(x):
        chosen, weights = moe.route(config, w, x)
        inner = ops.dot(x, w.latent_down)
        live = jnp.ones(len(x), bool)
        routed = moe.run_experts(config, w.experts, inner, chosen, live)
        shared = moe.mlp_partial(config, w.shared, x)
        summed = jnp.sum(weights[..., None] * routed, axis=1)
        return moe.moe(config, w, x, live), chosen, weights, inner, summed, shared

    y, chosen, weights, inner, summed, shared = run(k3, layer, golden["moe_x"])
    order = np.argsort(chosen, axis=1)
    assert (np.take_along_axis(chosen, order, 1) == golden["moe_topk_idx"]).all()
    assert worst(np.take_along_axis(weights, order, 1), golden["moe_topk_weight"]) < ONE_LAYER
    assert worst(inner, golden["moe_latent_in"]) < ONE_LAYER
    assert worst(summed, golden["moe_routed_sum"]) < ONE_LAYER
    assert worst(shared, golden["moe_shared_out"]) < ONE_LAYER
    assert worst(y, golden["moe_y"]) < ONE_LAYER
    dense = k3.weights.layers[0].mlp
    y = run(k3, lambda x: moe.mlp_partial(config, dense, x), golden["dense_x"])
    assert worst(y, golden["dense_y"]) < ONE_LAYER


def test_attn_res_goldens(k3, golden):
    score = k3.weights.layers[int(golden["attnres_layer"])].attn_mix
    h = attn_res.mix(list(golden["attnres_blocks"]), golden["attnres_p"], score, 1e-5)
    assert worst(h, golden["attnres_h"]) < MIX
    blocks, p = golden["attnres_out_blocks"], golden["attnres_out_p"]
    h = attn_res.mix(list(blocks), p, k3.weights.out_mix, 1e-5)
    assert worst(h, golden["attnres_out_h"]) < MIX


def test_attn_res_known_answer():
    blocks = [jnp.array([[1.0, 2, 3, 4]]), jnp.array([[0.0, -1, 1, 0]])]
    score = jnp.array([1, 1, 0.5, 2]) * jnp.array([0.1, -0.2, 0.3, 0.4])
    h = attn_res.mix(blocks, jnp.array([[2.0, 0, -2, 1]]), score, 1e-5)
    assert worst(h, [[0.99309839, 0.77728125, 1.30337729, 2.28957407]]) < 1e-6


def test_situ_known_answers(k3):
    pairs = jnp.array([[1.0, 1], [-1, 2], [8, -30], [0.5, 100]])
    found = ops.gated(k3.config, pairs[..., None])[:, 0]
    expected = np.array([0.7158178281, -0.5258288955, -80.33965239, 7.735277097])
    assert np.allclose(found, expected, rtol=2e-6)


def known_kda_rows(k3):
    """The dossier's three rows: one head, K = 3 channels, V = 2."""
    q = jnp.array([[1.0, 2, -1], [0.5, -1, 2], [3, 0, 1]])[:, None]
    k = jnp.array([[1.0, 0, 1], [-1, 1, 0.5], [2, -1, 1]])[:, None]
    v = jnp.array([[1.0, -1], [0.5, 2], [-2, 1]])[:, None]
    z = jnp.array([[0.0, 1, -1], [0.5, 0, 2], [-1, -2, 0]])[:, None]
    g = kda.log_decay(k3.config, z, jnp.log(jnp.array([2.0])), jnp.array([[-1, 0, 0.5]]))
    beta = jax.nn.sigmoid(jnp.array([[0.0], [1], [-1]]))
    return kda.KdaInputs(q=ops.l2_norm(q) * 3**-0.5, k=ops.l2_norm(k), v=v, g=g, beta=beta)


@pytest.mark.parametrize("form", ["rows", "page"])
def test_kda_known_answer(k3, form):
    rows = known_kda_rows(k3)
    g = [
        [-0.59601461, -4.40398539, -1.34470711],
        [-1.34470711, -2.5, -4.96653575],
        [-0.08993105, -0.08993105, -3.65529289],
    ]
    assert worst(rows.g[:, 0], g) < 1e-6
    start = jnp.zeros((1, 3, 2))
    if form == "rows":
        s, o = jax.lax.scan(kda.recur, start, rows)
    else:
        padded = jax.tree.map(lambda a: jnp.pad(a, [(0, 13)] + [(0, 0)] * (a.ndim - 1)), rows)
        s, o = kda.chunk(start, padded)
    expected = [[0, 0], [-0.02157286, -0.13193496], [-0.33757404, -0.21935187]]
    assert worst(o[:3, 0], expected) < 1e-6
    state = [[-0.5529483, -0.48218852], [0.44344526, 0.63094244], [-0.19012433, 0.24512582]]
    assert worst(s[0], state) < 1e-6


def random_rows(gates, size=192, heads=2, width=32):
    """Random inputs with log decays of the given strength; keys repeat, which is hard on the
    triangular solve.
    """
    rng = np.random.default_rng(3)
    unit = lambda a: a / np.linalg.norm(a, axis=-1, keepdims=True)  # noqa: E731
    base = rng.normal(size=(1, heads, width))
    g = {
        "near_0": -1e-4 * rng.random((size, heads, width)),
        "mixed": -5 * rng.random((size, heads, width)) ** 4,
        "near_bound": -5 + 0.01 * rng.random((size, heads, width)),
        "unbounded": -60 * rng.random((size, heads, width)) ** 3,
    }[gates]
    rows = {
        "q": unit(rng.normal(size=(size, heads, width))) * width**-0.5,
        "k": unit(base + 0.3 * rng.normal(size=(size, heads, width))),
        "v": rng.normal(size=(size, heads, width)),
        "g": g,
        "beta": rng.uniform(0.05, 0.999, (size, heads)),
    }
    return kda.KdaInputs(**rows)


def recurrence_f64(rows):
    heads, k = rows.k.shape[1:]
    s, out = np.zeros((heads, k, rows.v.shape[-1])), []
    for q, key, v, g, beta in zip(rows.q, rows.k, rows.v, rows.g, rows.beta, strict=True):
        s = np.exp(g)[..., None] * s
        u = beta[:, None] * (v - np.einsum("hkv,hk->hv", s, key))
        s = s + key[..., None] * u[:, None]
        out.append(np.einsum("hkv,hk->hv", s, q))
    return s, np.stack(out)


@pytest.mark.parametrize("page", [16, 64, 192])
@pytest.mark.parametrize("gates", ["near_0", "mixed", "near_bound", "unbounded"])
def test_chunked_equals_recurrent(gates, page):
    exact = random_rows(gates)
    s_exact, o_exact = recurrence_f64(exact)
    rows = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), exact)
    s_rows, o_rows = jax.jit(lambda s, r: jax.lax.scan(kda.recur, s, r))(
        jnp.zeros((2, 32, 32)), rows
    )
    s, outs, step = jnp.zeros((2, 32, 32)), [], jax.jit(kda.chunks)
    for i in range(0, 192, page):
        s, o = step(s, jax.tree.map(lambda a: a[i : i + page], rows))  # noqa: B023
        outs.append(o)
    o = np.concatenate(outs)
    for found, expected in ((s, s_exact), (s_rows, s_exact), (o, o_exact), (o_rows, o_exact)):
        assert np.isfinite(found).all()
        assert worst(found, expected) < 2e-5 * max(1.0, np.abs(expected).max())


def test_padding_rows_leave_the_state():
    """Rows with g = 0 and beta = 0 change no bit of the state, whatever else they hold."""
    rows = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32)[:64], random_rows("mixed"))
    live = jnp.arange(64) < 41

    def masked(noise):
        return kda.KdaInputs(
            q=rows.q + noise,
            k=jnp.where(live[:, None, None], rows.k, noise),
            v=jnp.where(live[:, None, None], rows.v, noise),
            g=jnp.where(live[:, None, None], rows.g, 0),
            beta=jnp.where(live[:, None], rows.beta, 0),
        )

    start = jnp.asarray(np.random.default_rng(1).normal(size=(2, 32, 32)), jnp.float32)
    a, _ = kda.chunk(start, masked(0.0))
    b, _ = kda.chunk(start, masked(7.0))
    assert (np.asarray(a) == np.asarray(b)).all()
    short, _ = jax.lax.scan(kda.recur, start, jax.tree.map(lambda x: x[:41], rows))
    assert worst(a, short) < 1e-5
    none = jax.tree.map(lambda x: x, masked(3.0))
    kept, _ = kda.chunk(start, none.replace(g=none.g * 0, beta=none.beta * 0))
    assert (np.asarray(kept) == np.asarray(start)).all()
