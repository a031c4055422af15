"""The whole run: tokenizer, training, export, draft, evaluation.

Rule: each part leaves files that the next one reads, so a run that stopped goes on where it was.
"""

import itertools
import logging
from pathlib import Path

import jax

from scripts.train_nano import draft, evaluate, export, sampling, tokenizer, xtml
from scripts.train_nano.batches import RecallStream, Stream
from scripts.train_nano.chat_stream import ChatStream
from scripts.train_nano.draft_spec import DraftRecipe
from scripts.train_nano.recipe import Recipe, Stage
from scripts.train_nano.spec import N_RANKS
from scripts.train_nano.trainer import Trainer

log = logging.getLogger("train_nano")
TOKENIZER_SEED = 99


def run(
    recipe: Recipe,
    draft_recipe: DraftRecipe,
    out: Path,
    work: Path,
    resume: bool = False,
    stop_after: int | None = None,
    export_only: bool = False,
) -> None:
    """Trains by the recipes with checkpoints in `work`; writes the model to `out` and its draft
    to `out/draft`.

    `export_only` writes the newest checkpoint of the target without training.
    """
    jax.config.update("jax_compilation_cache_dir", str((work / "compiled").absolute()))
    tokens = prepare_tokenizer(recipe, work / "tokenizer")

    def open_stream(stage: Stage) -> Stream:
        index = recipe.stages.index(stage)
        return _open_stream(recipe, stage, recipe.seed + 1000 * index, tokens)

    trainer = Trainer(recipe, open_stream, work / "checkpoints")
    params = trainer.latest() if export_only else trainer.run(resume, stop_after)
    export.write(recipe.model, params, work / "tokenizer", out)
    log.info("wrote %s", out)
    if not export_only and not stop_after:
        draft.run(draft_recipe, out, out / "draft", work, resume)
    evaluate.report(out)


def prepare_tokenizer(recipe: Recipe, folder: Path) -> tokenizer.Tokenizer:
    """Trains the tokenizer on its own samples of the full mix, unless it is already there."""
    path = folder / "tiktoken.model"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        stream = sampling.SampleStream(TOKENIZER_SEED, sampling.MIXES["full"])
        samples = itertools.islice(iter(stream), recipe.tokenizer_samples)
        fragments = itertools.chain.from_iterable(xtml.render(sample) for sample in samples)
        texts = (fragment.text for fragment in fragments if not fragment.special)
        tokenizer.save(tokenizer.train_ranks(texts, N_RANKS), folder)
        log.info("tokenizer trained on %s samples", f"{recipe.tokenizer_samples:,}")
    return tokenizer.Tokenizer(path)


def _open_stream(recipe: Recipe, stage: Stage, seed: int, tokens: tokenizer.Tokenizer) -> Stream:
    per_step, share = recipe.tokens_per_step, stage.target_share
    if stage.name == "recall":
        return RecallStream(seed, per_step, stage.row_lengths[0], share)
    return ChatStream(seed, stage.name, tokens, per_step, stage.row_lengths, share)
