"""The component goldens with the layer's weights and states split over 2 and 4 ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from k3serve.model import kda, mla, moe, state_specs, weight_specs
from k3serve.model.state import KdaState, MlaState
from tests.model.harness import Model, worst

ONE_LAYER = 5e-5
pytestmark = pytest.mark.parametrize("ranks", [2, 4])


def split(m: Model, function: Callable[..., Any], specs: Any, out: Any, *args: Any) -> Any:
    mapped = jax.shard_map(function, mesh=m.mesh, in_specs=specs, out_specs=out, check_vma=False)
    return jax.jit(mapped)(*args)


def padded(x: np.ndarray) -> np.ndarray:
    return np.pad(x, ((0, 64 - len(x)), (0, 0)))


@pytest.mark.parametrize("form", ["pages", "rows"])
def test_kda_layer(model: Callable[..., Model], ranks: int, form: str) -> None:
    m = model("k3_tiny", ranks)
    golden = m.goldens("components")
    layer = int(golden["kda_layer"])
    specs = weight_specs(m.config, ranks).layers[layer].attn
    state_spec = state_specs(m.config).layers[layer]
    w, whole = m.weights.layers[layer].attn, m.state().layers[layer]
    state = KdaState(s=whole.s[:1], conv=whole.conv[:1])

    def page(w: Any, x: Any, state: Any, start: Any, length: Any) -> Any:
        return kda.kda_page(m.config, w, x, state, 0, start, length)

    def rows(w: Any, x: Any, state: Any, start: Any, length: Any) -> Any:
        def row(carry: Any, x: Any) -> Any:
            state, at = carry
            one = jnp.ones(1, jnp.int32)
            y, state = kda.kda_rows(m.config, w, x[None, None], state, at, one, None)
            return (state, at + 1), y[0, 0]

        (state, _), y = jax.lax.scan(row, (state, start[None]), x)
        return y, state

    x, expected, made = golden["kda_x1"], golden["kda_y1"], []
    step = 64 if form == "pages" else len(x)
    for start in range(0, len(x), step):
        part = x[start : start + step]
        args = (part if form == "rows" else padded(part), state, np.int32(start), len(part))
        y, state = split(
            m, rows if form == "rows" else page, (specs, P(), state_spec, P(), P()),
            (P(), state_spec), w, *args,
        )  # fmt: skip
        made.append(y[: len(part)])
    assert worst(np.concatenate(made), expected) < ONE_LAYER
    assert worst(state.s[0], golden["kda_state1"]) < ONE_LAYER
    for i, name in enumerate("qkv"):
        assert worst(state.conv[0, :, i], golden[f"kda_conv1_{name}"]) < ONE_LAYER


def test_mla_layer(model: Callable[..., Model], ranks: int) -> None:
    m = model("k3_tiny", ranks)
    golden = m.goldens("components")
    layer = int(golden["mla_layer"])
    specs, w = weight_specs(m.config, ranks).layers[layer].attn, m.weights.layers[layer].attn
    table = jnp.array([2, 0], jnp.int32)

    def page(w: Any, x: Any, pages: Any, start: Any, length: Any) -> Any:
        y, state = mla.mla_page(m.config, w, x, MlaState(pages=pages), start, length, table)
        return y, state.pages

    def rows(w: Any, x: Any, pages: Any) -> Any:
        at, count = jnp.array([90]), jnp.array([x.shape[0]])
        return mla.mla_rows(m.config, w, x[None], MlaState(pages=pages), at, count, table[None])[0]

    x = np.concatenate([golden["mla_x1"], golden["mla_x2"]])
    pages = np.zeros((3, 64, m.config.latent_lanes), np.float32)
    made = []
    for start, length in ((0, 64), (64, 26)):
        part = padded(x[start : start + length])
        y, pages = split(
            m, page, (specs, P(), P(), P(), P()), P(), w, part, pages, np.int32(start), length
        )
        made.append(y[:length])
    assert worst(np.concatenate(made), golden["mla_y1"]) < ONE_LAYER
    y = split(m, rows, (specs, P(), P()), P(), w, golden["mla_x2"], pages)
    assert worst(y[0], golden["mla_y2"]) < ONE_LAYER


def test_moe_layer(model: Callable[..., Model], ranks: int) -> None:
    m = model("k3_tiny", ranks)
    golden = m.goldens("components")
    layer = int(golden["moe_layer"])
    specs, w = weight_specs(m.config, ranks).layers[layer].mlp, m.weights.layers[layer].mlp

    def whole(w: Any, x: Any) -> Any:
        return moe.moe(m.config, w, x, jnp.ones(len(x), bool))

    y = split(m, whole, (specs, P()), P(), w, golden["moe_x"])
    assert worst(y, golden["moe_y"]) < ONE_LAYER
