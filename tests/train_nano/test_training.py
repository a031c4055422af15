"""Training steps, resuming, decoding, and the exported files."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from scripts.train_nano import decode, export, layout, model, mxfp4, optimizer
from scripts.train_nano.batches import RecallStream, Stream, make_batch
from scripts.train_nano.recipe import Recipe, Stage
from scripts.train_nano.spec import END_OF_MSG_ID, N_RANKS, VOCAB_SIZE, ModelSpec
from scripts.train_nano.trainer import Trainer

TINY = ModelSpec(
    layers=2, mla_layers=(1,), block_size=1, hidden=32, kda_heads=2, kda_dim=16, mla_heads=2,
    q_lora=16, kv_lora=16, nope_dim=8, rope_dim=8, v_dim=16, dense=32, experts=4, latent=32,
    expert_dim=32, shared_experts=1,
)  # fmt: skip


def _tiny_recipe(steps: int = 4) -> Recipe:
    stages = (Stage("recall", steps, (24,), 0.5),)
    quick = optimizer.OptimizerSpec(newton_schulz_steps=1)  # compiles faster
    return Recipe(stages, TINY, quick, tokens_per_step=96, warmup_steps=2, checkpoint_every=2)


def _trainer(folder: Path, recipe: Recipe) -> Trainer:
    def open_stream(stage: Stage) -> Stream:
        return RecallStream(1, recipe.tokens_per_step, stage.row_lengths[0], stage.target_share)

    return Trainer(recipe, open_stream, folder)


@pytest.fixture(scope="module")
def tiny_params() -> model.Params:
    """Parameters in which nothing is zero or one by construction."""
    params = model.init_params(TINY, jax.random.key(0))
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [x + 0.1 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, noisy)


# ------------------------------------------------------------------------------------ training


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    """Six steps at once, or three and then three; the last ones see quantised experts."""
    recipe = dataclasses.replace(_tiny_recipe(6), quantize_share=0.34)
    whole = _trainer(tmp_path / "whole", recipe).run()
    _trainer(tmp_path / "parts", recipe).run(stop_after=3)
    parts = _trainer(tmp_path / "parts", recipe).run(resume=True)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_array_equal(a, b)
    start = model.init_params(TINY, jax.random.key(recipe.seed))
    assert not np.array_equal(start["embed"], whole["embed"])


def test_learning_rate_warms_up_and_falls_to_zero() -> None:
    stages = (Stage("recall", 50, (24,), 0.5), Stage("full", 50, (24,), 0.5))
    recipe = dataclasses.replace(_tiny_recipe(), stages=stages)
    rates = [recipe.learning_rate(step) for step in range(100)]
    peak = recipe.optimizer.adam_lr
    assert rates[0] == peak / 2 and rates[1] == rates[50] == peak
    assert rates[75] == pytest.approx(peak / 2) and 0 < rates[99] < peak / 25


def test_stages_follow_each_other_by_steps() -> None:
    stages = (Stage("recall", 3, (8,), 0.5), Stage("chat", 2, (8,), 0.5))
    recipe = Recipe(stages)
    assert [recipe.stage_at(step).name for step in range(5)] == ["recall"] * 3 + ["chat"] * 2
    with pytest.raises(ValueError, match="beyond the last stage"):
        recipe.stage_at(5)


def test_muon_takes_matrices_and_leaves_tables_to_adam(tiny_params: model.Params) -> None:
    flat = jax.tree_util.tree_flatten_with_path(tiny_params)[0]
    muon = {path[-1].key for path, leaf in flat if optimizer.uses_muon(path, leaf)}
    assert {"q", "o", "w1", "kv_b", "shared_up", "f_b"} <= muon
    assert not muon & {"embed", "router", "conv", "b", "a_log", "norm"}


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    x = jax.random.normal(jax.random.key(0), (3, 24, 48))
    values = np.linalg.svd(np.asarray(optimizer.orthogonalize(x, 5)), compute_uv=False)
    assert values.min() > 0.5 and values.max() < 1.4


def test_batches_hold_targets_beside_their_positions() -> None:
    rows = [([5, 6, 7, 8], [False, False, True, True]), ([9, 10], [False, True])]
    batch = make_batch(rows * 8, 8, 99, share=0.5)
    used = int(batch.weights.sum())
    assert used == 24 and len(batch.positions) == 64
    assert len(set(batch.positions.tolist())) == 64, "positions must be distinct"
    inputs = batch.ids.ravel()[batch.positions[:used]]
    assert set(zip(inputs.tolist(), batch.targets[:used].tolist(), strict=True)) == {
        (6, 7), (7, 8), (9, 10),
    }  # fmt: skip
    assert batch.ids[0].tolist() == [5, 6, 7] + [99] * 5


def test_recall_targets_can_be_copied_from_before() -> None:
    batch = RecallStream(3, 1024, 64, 0.5).next_batch()
    for position, target in zip(batch.positions, batch.targets, strict=True):
        row, column = divmod(int(position), 64)
        if batch.weights.any():
            assert target in batch.ids[row, : column + 1] or target == 0


# ------------------------------------------------------------------------------------ decoding


def test_decoding_step_by_step_equals_the_training_form(tiny_params: model.Params) -> None:
    ids = np.random.default_rng(0).integers(0, N_RANKS, (2, 21)).astype(np.int32)
    hidden, _ = model.forward(TINY, tiny_params, ids)
    whole = np.asarray(hidden @ model.head(tiny_params))
    state = decode.empty_state(TINY, 2, 21)
    one = jax.jit(lambda state, t, x: decode.step(TINY, tiny_params, state, t, x))
    for t in range(21):
        logits, state = one(state, t, jnp.asarray(ids[:, t]))
        np.testing.assert_allclose(logits, whole[:, t], atol=2e-4)


def test_generation_does_not_depend_on_the_batch(tiny_params: model.Params) -> None:
    prompts = [[5, 6, 7], [8] * 10, [1]]
    together = decode.generate(TINY, tiny_params, prompts, 8, batch=4)
    alone = [decode.generate(TINY, tiny_params, [p], 8, batch=4)[0] for p in prompts]
    assert together == alone
    assert all(len(ids) <= 8 and END_OF_MSG_ID not in ids for ids in together)


# -------------------------------------------------------------------------------------- export


@pytest.fixture(scope="module")
def exported(tiny_params: model.Params, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    source = tmp_path_factory.mktemp("tokenizer")
    for name in ("tiktoken.model", "tokenizer_config.json"):
        (source / name).write_text("{}")
    export.write(TINY, tiny_params, source, folder)
    return folder


def test_what_is_read_back_is_what_was_trained(tiny_params: model.Params, exported: Path) -> None:
    """Exactly: experts as MXFP4 rounds them, float32 islands as they are, the rest as bfloat16."""
    back = export.load(TINY, exported)
    islands = ("conv", "dt_bias", "a_log", "o_norm", "router_bias")

    def expected(path: tuple, x: jax.Array) -> np.ndarray:
        name = path[-1].key
        if name in model.EXPERT_WEIGHTS:
            return np.asarray(mxfp4.round_trip(x))
        if name in islands:
            return np.asarray(x)
        return np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float32)

    wanted = jax.tree_util.tree_map_with_path(expected, tiny_params)
    rows = back.pop("head")
    jax.tree.map(np.testing.assert_array_equal, back, wanted)
    np.testing.assert_array_equal(rows[:N_RANKS], wanted["embed"][:N_RANKS])
    assert rows[N_RANKS + 2].any() and rows[VOCAB_SIZE - 1].any(), "named specials stay"
    assert not rows[N_RANKS + 8].any() and not rows[N_RANKS + 100].any(), "reserved ids are zero"


def test_tensors_have_the_dtypes_and_shapes_of_k3(exported: Path) -> None:
    tensors = load_file(exported / export.WEIGHTS)
    kda = layout.PREFIX + "layers.0.self_attn."
    moe = layout.PREFIX + "layers.1.block_sparse_moe."
    expected = {
        layout.HEAD: ((VOCAB_SIZE, 32), "bfloat16"),
        "language_model.model.output_attn_res_proj.weight": ((1, 32), "bfloat16"),
        "language_model.model.layers.0.mlp.down_proj.weight": ((32, 32), "bfloat16"),
        kda + "A_log": ((16,), "float32"),
        kda + "q_conv1d.weight": ((32, 1, 4), "float32"),
        kda + "o_norm.weight": ((16,), "float32"),
        kda + "dt_bias": ((32,), "float32"),
        moe + "gate.weight": ((4, 32), "bfloat16"),
        moe + "gate.e_score_correction_bias": ((4,), "float32"),
        moe + "experts.3.w2.weight_packed": ((32, 16), "uint8"),
        moe + "experts.3.w2.weight_scale": ((32, 1), "uint8"),
    }
    for name, (shape, dtype) in expected.items():
        assert (tensors[name].shape, str(tensors[name].dtype)) == (shape, dtype), name
    assert not tensors[kda + "A_log"][2:].any(), "entries beyond the heads are zero"


def test_config_counts_layers_from_one(exported: Path) -> None:
    text = json.loads((exported / "config.json").read_text())["text_config"]
    assert text["linear_attn_config"]["full_attn_layers"] == [2]
    assert text["linear_attn_config"]["kda_layers"] == [1]
    assert text["quantization_config"]["format"] == "mxfp4-pack-quantized"
    assert text["eos_token_id"] == END_OF_MSG_ID


def test_shipped_model_is_complete_and_small(request: pytest.FixtureRequest) -> None:
    folder = Path(request.config.rootpath) / "k3serve/assets/nano"
    assert (folder / "draft/model.safetensors").is_file()
    assert sum(f.stat().st_size for f in folder.rglob("*")) < 24e6
    assert json.loads((folder / "config.json").read_text()) == export.config(ModelSpec())
    params = export.load(ModelSpec(), folder)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))
    names = set(load_file(folder / export.WEIGHTS))
    fresh = model.init_params(ModelSpec(), jax.random.key(0))
    assert names == set(layout.to_checkpoint(ModelSpec(), fresh))
