"""The draft's data, training, files and acceptance report."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from scripts.train_nano import __main__ as train_nano_main
from scripts.train_nano import (
    acceptance,
    draft,
    draft_batches,
    draft_export,
    draft_model,
    evaluate,
    model,
)
from scripts.train_nano.draft_answers import AnswerCache
from scripts.train_nano.draft_batches import AnswerStream, make_batch, reachable
from scripts.train_nano.draft_spec import MASK_ID, DraftRecipe, DraftSpec
from scripts.train_nano.draft_trainer import DraftTrainer, Target, fold_scale
from scripts.train_nano.optimizer import OptimizerSpec
from scripts.train_nano.recipe import Recipe
from scripts.train_nano.samples import is_held_out
from scripts.train_nano.spec import END_OF_MSG_ID, N_RANKS, NAMED_SPECIALS, ModelSpec
from scripts.train_nano.tally import Tally
from scripts.train_nano.tokenizer import Tokenizer

ASSETS = Path(__file__).parents[2] / "k3serve/assets/nano"
GOLDENS = Path(__file__).parents[1] / "data/k3_tiny_dspark"
TINY = ModelSpec(
    layers=2, mla_layers=(1,), block_size=1, hidden=32, kda_heads=2, kda_dim=16, mla_heads=2,
    q_lora=16, kv_lora=16, nope_dim=8, rope_dim=8, v_dim=16, dense=32, experts=4, latent=32,
    expert_dim=32, shared_experts=1,
)  # fmt: skip
RECIPE = DraftRecipe(
    spec=DraftSpec(
        aux_layers=(0, 1), hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate=32,
        window=16, block=4, markov_rank=8,
    ),
    optimizer=OptimizerSpec(newton_schulz_steps=1),  # compiles faster
    corpus_steps=3, answer_steps=3, row_lengths=(32, 96), tokens_per_step=96, anchors_per_step=6,
    slots_per_step=16, answers=6, answers_per_shard=3, longest_prompt=80, longest_answer=12,
    warmup_steps=2, checkpoint_every=2,
)  # fmt: skip


_init = jax.jit(draft_model.init_params, static_argnums=0)  # else each operation compiles alone
_features = jax.jit(model.features, static_argnums=(0, 3))
_block_rows = jax.jit(draft_model.block_rows, static_argnums=0)


class FixedRows:
    """Always the same rows."""

    def next_rows(self) -> tuple[list, int]:
        rng = np.random.default_rng(0)
        rows = [(rng.integers(0, N_RANKS, 33).tolist(), [False] * 5 + [True] * 28)] * 3
        return rows, 32

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        assert state == {}


@pytest.fixture(scope="module")
def target() -> Target:
    """Random, with a large head: so that its distributions are worth learning."""
    params = model.init_params(TINY, jax.random.key(0))
    return Target(TINY, params | {"head": params["embed"] * 10})


@pytest.fixture(scope="module")
def cache(target: Target, tmp_path_factory: pytest.TempPathFactory) -> AnswerCache:
    folder = tmp_path_factory.mktemp("answers")
    origin = tmp_path_factory.mktemp("target")
    (origin / "model.safetensors").write_bytes(b"tiny")
    cache = AnswerCache(RECIPE, folder, origin)
    cache.fill(TINY, target.params, Tokenizer(ASSETS / "tiktoken.model"))
    return cache


def _opener(cache: AnswerCache) -> Callable[[str], draft_batches.RowStream]:
    def open_stream(stage: str) -> draft_batches.RowStream:
        return AnswerStream(RECIPE, cache) if stage == "answers" else FixedRows()

    return open_stream


# ---------------------------------------------------------------------------------------- data


def test_slots_count_only_inside_one_answer() -> None:
    written = [False, True, True, True, True, False, True, True, False, True]
    assert reachable(written, 3).tolist() == [0, 3, 2, 1, 0, 0, 1, 0, 0, 0]


def test_a_batch_holds_what_a_server_would_draft() -> None:
    recipe = dataclasses.replace(RECIPE, anchors_per_step=20, slots_per_step=60)
    rows = [
        ([50, 51, 52, 53, 54, 55], [False, False, True, True, True, True]),
        ([60, 61, 62], [False, True, True]),
    ]
    batch = make_batch(recipe, rows, 8, step=0)
    assert batch.ids[0].tolist()[:5] == [50, 51, 52, 53, 54], "the last token is never fed"
    used = batch.weights > 0
    assert len(set(batch.blocks.tolist())) == len(batch.blocks), "indices must be distinct"
    row, rest = np.divmod(batch.blocks[used], 10 * recipe.spec.block)
    place, slot = np.divmod(rest, recipe.spec.block)
    anchor = batch.anchors[row, place]
    np.testing.assert_array_equal(slot, batch.slots[used])
    np.testing.assert_array_equal(batch.positions[used], row * 8 + anchor + slot)
    found = sorted(zip(row.tolist(), anchor.tolist(), slot.tolist(), strict=True))
    assert found == [(0, 2, 0), (0, 2, 1), (0, 2, 2), (0, 3, 0), (0, 3, 1), (0, 4, 0), (1, 1, 0)]


def test_more_slots_than_room_are_left_out_at_random() -> None:
    rows, length = FixedRows().next_rows()
    batches = [make_batch(RECIPE, rows, length, step) for step in (0, 0, 1)]
    assert all(batch.weights.sum() == RECIPE.slots_per_step for batch in batches)
    np.testing.assert_array_equal(batches[0].blocks, batches[1].blocks)
    assert not np.array_equal(batches[0].anchors, batches[2].anchors)


def test_answers_are_the_targets_own(target: Target, cache: AnswerCache) -> None:
    """Two thirds greedy: each written token is the target's best one after all before it."""
    rows = cache.load()
    assert len(rows) == 6
    greedy = 0
    for ids, written in rows:
        prompt = written.index(True)
        answer = ids[prompt:]
        assert all(written[prompt:]) and len(answer) <= RECIPE.longest_answer
        assert len(answer) == RECIPE.longest_answer or answer[-1] == END_OF_MSG_ID
        row = np.zeros((1, 96), np.int32)
        row[0, : len(ids)] = ids
        hidden, _ = jax.jit(lambda ids: model.forward(TINY, target.params, ids))(row)
        best = np.asarray(hidden[0] @ model.head(target.params)).argmax(-1)
        greedy += best[prompt - 1 : len(ids) - 1].tolist() == answer
    assert greedy == 4


def test_answers_are_kept_and_never_mixed(target: Target, cache: AnswerCache) -> None:
    before = [path.stat().st_mtime_ns for path in sorted(cache.folder.glob("*.npz"))]
    cache.fill(TINY, target.params, Tokenizer(ASSETS / "tiktoken.model"))
    assert before == [path.stat().st_mtime_ns for path in sorted(cache.folder.glob("*.npz"))]
    other = dataclasses.replace(cache, recipe=dataclasses.replace(RECIPE, longest_answer=13))
    with pytest.raises(SystemExit, match="another longest_answer"):
        other.fill(TINY, target.params, Tokenizer(ASSETS / "tiktoken.model"))


def test_no_held_out_prompt_is_answered(cache: AnswerCache, monkeypatch: Any) -> None:
    """The cache draws from the stream that leaves held-out samples out."""
    seen: list[bool] = []
    from scripts.train_nano import draft_answers

    class Spy(draft_answers.SampleStream):
        def __next__(self) -> Any:
            sample = super().__next__()
            seen.append(is_held_out(sample))
            return sample

    monkeypatch.setattr(draft_answers, "SampleStream", Spy)
    prompts = cache._prompts(5, Tokenizer(ASSETS / "tiktoken.model"))
    assert len([next(prompts) for _ in range(40)]) == 40
    assert len(seen) >= 40 and not any(seen)


# ------------------------------------------------------------------------------------ training


def test_loss_falls_and_agreement_rises(target: Target, tmp_path: Path) -> None:
    recipe = dataclasses.replace(RECIPE, corpus_steps=60, answer_steps=0, checkpoint_every=1000)
    trainer = DraftTrainer(recipe, target, lambda _: FixedRows(), tmp_path)
    state = trainer._initial_state()
    found = []
    for step in range(recipe.total_steps):
        batch = make_batch(recipe, *FixedRows().next_rows(), step)
        if step == 0:
            state["scale"] = trainer._measure_scale(batch)
        state, ((loss, _), counts) = trainer._step(state, batch, step)
        count, agree, overlap = np.asarray(counts).sum(1)
        assert count == batch.weights.sum()
        found.append((float(loss), agree / count, overlap / count))
    first, last = np.mean(found[:5], 0), np.mean(found[-5:], 0)
    assert last[0] < 0.5 * first[0], "loss"
    assert last[1] > first[1] + 0.5 and last[2] > first[2] + 0.2, "agreement, overlap"


def test_a_resumed_run_gives_the_same_draft(
    target: Target, cache: AnswerCache, tmp_path: Path
) -> None:
    """Through both stages, stopped inside the second one."""
    whole = DraftTrainer(RECIPE, target, _opener(cache), tmp_path / "whole").run()
    DraftTrainer(RECIPE, target, _opener(cache), tmp_path / "parts").run(stop_after=4)
    parts = DraftTrainer(RECIPE, target, _opener(cache), tmp_path / "parts").run(resume=True)
    jax.tree.map(np.testing.assert_array_equal, whole, parts)
    start = _init(RECIPE.spec, jax.random.key(RECIPE.seed))
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), start, whole)
    assert all(jax.tree.leaves(moved)), "every parameter is trained"


def test_answers_come_in_another_order_each_epoch(cache: AnswerCache) -> None:
    stream = AnswerStream(dataclasses.replace(RECIPE, tokens_per_step=96), cache)
    stream.per_batch = {96: 6}
    stream.waiting = {96: []}
    epochs = [stream.next_rows()[0] for _ in range(2)]
    assert epochs[0] != epochs[1] and sorted(epochs[0]) == sorted(epochs[1])


def test_folded_scale_is_the_scaled_features() -> None:
    params = _init(RECIPE.spec, jax.random.key(0))
    state = {"params": params, "scale": np.array([2.0, 0.25], np.float32)}
    aux = np.random.default_rng(0).normal(size=(1, 5, 2, 32)).astype(np.float32)
    scaled = draft_model.context_rows(RECIPE.spec, params, aux * state["scale"][:, None])
    folded = draft_model.context_rows(RECIPE.spec, fold_scale(state), aux)
    np.testing.assert_allclose(folded, scaled, atol=1e-5)


# ---------------------------------------------------------------------------------- files


def test_exported_draft_has_the_published_layout(tmp_path: Path) -> None:
    spec = draft_export.load(GOLDENS)[0]
    params = _init(spec, jax.random.key(3))
    draft_export.write(spec, params, tmp_path)
    wanted, got = (load_file(f / "model.safetensors") for f in (GOLDENS, tmp_path))
    shared = {"embed_tokens.weight", "lm_head.weight"}  # the target's
    assert {n: (t.shape, t.dtype) for n, t in got.items()} == {
        n: (t.shape, t.dtype) for n, t in wanted.items() if n not in shared
    }
    back_spec, back = draft_export.load(tmp_path)
    assert back_spec == spec

    def same(a: jax.Array, b: jax.Array) -> None:
        np.testing.assert_array_equal(np.asarray(a.astype("bfloat16"), np.float32), b)

    jax.tree.map(same, params, back)


def test_the_mask_is_an_id_that_no_text_contains() -> None:
    assert MASK_ID - N_RANKS not in NAMED_SPECIALS
    assert json.loads((GOLDENS / "config.json").read_text())["mask_token_id"] == 640 - 3
    assert MASK_ID == ModelSpec().vocab - 3, "counted from the end, as in K3"


# ------------------------------------------------------------------------------------ acceptance


def test_a_step_emits_its_accepted_drafts_and_one_more() -> None:
    accepts = np.array([[1, 1, 0], [0, 0, 0], [1, 1, 1], [1, 0, 1], [0, 1, 1], [1, 1, 1]], bool)
    # Anchor 0 takes two drafts and lands on 3, which takes one and lands on 5, the last token.
    tally = acceptance.walk(accepts)
    assert tally == Tally(3, (2, 1, 0))
    assert tally.length == 2.0, "six tokens in three steps"
    assert tally.rates == (2 / 3, 1 / 3, 0)
    assert acceptance.walk(np.zeros((0, 3), bool)) == Tally.empty(3)


def test_tallies_add_up_and_come_from_usage() -> None:
    usage = {"speculation": {"steps": 4, "drafted": 9, "accepted": 3,
                             "accepted_per_position": [2, 1]}}  # fmt: skip
    total = Tally.total([Tally(1, (1, 1, 1)), Tally.of_usage(usage) or Tally.empty(0)])
    assert total == Tally(5, (3, 2, 1))
    assert Tally.of_usage({"prompt_tokens": 3}) is None
    assert Tally.of_usage({"speculation": None}) is None


@pytest.mark.parametrize("greedy", [True, False])
def test_simulation_equals_drafting_step_by_step(
    target: Target, cache: AnswerCache, greedy: bool
) -> None:
    """Greedy: a loop that drafts token by token from each anchor. Sampled: the same uniform
    numbers against q / p of each block."""
    spec = RECIPE.spec
    leaves, tree = jax.tree.flatten(_init(spec, jax.random.key(5)))
    noise = jax.random.split(jax.random.key(6), len(leaves))
    draft = jax.tree.unflatten(
        tree, [x + 0.3 * jax.random.normal(k, x.shape) for x, k in zip(leaves, noise, strict=True)]
    )
    texts = [(ids, written.index(True)) for ids, written in cache.load()]
    simulator = acceptance.Simulator(TINY, target.params, spec, draft, drafts=3)
    got = simulator.measure(texts, greedy, seed=9)
    assert sum(tally.steps for tally in got) > 10
    head = np.asarray(model.head(target.params))
    for index, (ids, prompt) in enumerate(texts):
        row = np.asarray([ids], np.int32)
        row = np.pad(row, ((0, 0), (0, 96 - len(ids))))  # one shape for all
        hidden, aux = _features(TINY, target.params, row, spec.aux_layers)
        context = draft_model.context_rows(spec, draft, aux)
        draws = np.random.default_rng((9, index)).random((len(ids) - 1 - prompt, 3))
        anchor, steps, accepted = prompt, 0, [0, 0, 0]
        while anchor < len(ids) - 1:
            block = _block_rows(
                spec, draft, target.params["embed"], context, row, np.array([[anchor]], np.int32)
            )[0, 0]
            previous, run = ids[anchor], 0
            while run < 3 and anchor + run + 1 < len(ids):
                wanted = ids[anchor + run + 1]
                logits = draft_model.slot_logits(draft, head, block[run], np.int32(previous))
                if greedy:
                    taken = int(logits.argmax()) == wanted
                else:
                    q = jax.nn.softmax(logits)[wanted]
                    p = jax.nn.softmax(hidden[0, anchor + run] @ head)[wanted]
                    taken = draws[anchor - prompt, run] < q / p
                if not taken or anchor + run + 2 == len(ids):
                    break
                accepted[run] += 1
                previous, run = wanted, run + 1
            steps, anchor = steps + 1, anchor + run + 1
        assert got[index] == Tally(steps, tuple(accepted))


def test_report_counts_drafts_per_skill_and_group(capsys: pytest.CaptureFixture[str]) -> None:
    cases = evaluate.build_cases(1, ("off",), ("chat",))

    class Backend:
        def answer(self, cases: Any, temperature: float) -> list[evaluate.Answer]:
            reply = evaluate.xtml.Reply("nothing")
            return [evaluate.Answer(reply, Tally(2, (1, int(temperature == 0)))) for _ in cases]

    result = evaluate.evaluate(Backend(), cases, (0.0, 1.0))
    everything = [result["acceptance"][f"temperature {t}"]["groups"]["ALL"] for t in (0, 1)]
    assert [row["length"] for row in everything] == [2.0, 1.5]
    assert everything[0]["steps"] == 2 * len(cases) and result["groups"]["ALL"]["right"] == 0
    printed = capsys.readouterr().out
    assert "tokens per target step at temperature 1" in printed and cases[0].skill in printed


@pytest.mark.parametrize(
    ("module", "flags", "said"),
    [
        (train_nano_main, ["--steps", "1,2,3"], "give 4 counts"),
        (train_nano_main, ["--draft-steps", "1,x"], "give 2 counts"),
        (draft, ["--steps", "5"], "give two counts"),
        (evaluate, ["--thinking", "medium"], "'medium': use off, on, low, high, max"),
        (evaluate, ["--groups", "bogus"], "invalid choice: 'bogus'"),
    ],
)
def test_a_flag_that_cannot_be_is_refused_at_once(
    module: Any, flags: list[str], said: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("sys.argv", ["command", *flags])
    with pytest.raises(SystemExit):
        module._parse()
    assert said in capsys.readouterr().err


def test_help_names_the_recipes_own_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, spec = DraftRecipe(), Recipe()
    steps = f"[{recipe.corpus_steps},{recipe.answer_steps}]"
    for module, numbers in (
        (draft, [f"[{recipe.answers}]"]),
        (train_nano_main, [steps, f"[{','.join(str(s.steps) for s in spec.stages)}]"]),
    ):
        monkeypatch.setattr("sys.argv", ["command", "--help"])
        with pytest.raises(SystemExit):
            module._parse()
        shown = capsys.readouterr().out
        assert all(number in shown for number in numbers)
    monkeypatch.setattr("sys.argv", ["command"])
    assert draft._parse().answers is None  # the recipe decides


def test_totals_come_last(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"share": 1.0, "right": 1, "cases": 1}
    table = {key: row for key in ("arith", "ALL (off)", "ALL", "ALL (max)", "chat")}
    evaluate.print_table({"skills": {}, "groups": table})
    shown = [
        line.split("  ")[1] for line in capsys.readouterr().out.splitlines() if "1.000" in line
    ]
    assert shown == ["arith", "chat", "ALL (off)", "ALL (max)", "ALL"]
