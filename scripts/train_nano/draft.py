"""Trains the DSpark draft of K3-nano, for a target that is already exported.

    python -m scripts.train_nano.draft --target k3serve/assets/nano --out k3serve/assets/nano/draft

First come --steps A on chats of the curriculum, then the target writes --answers answers of its own
to training prompts (kept in --work, so that happens once), then come --steps B on those. Rule: it
can be killed at any time; the same command with --resume goes on and ends with the same draft.
`--steps 60,60 --answers 512` makes a quick, poor one. Progress lines show the expected acceptance
length; what a server gets is measured by `python -m scripts.train_nano.evaluate`.
"""

import argparse
import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.train_nano.process import restart_fast

if TYPE_CHECKING:
    from scripts.train_nano.draft_spec import DraftRecipe

log = logging.getLogger("train_nano")


def run(
    recipe: "DraftRecipe",
    target: Path,
    out: Path,
    work: Path,
    resume: bool = False,
    stop_after: int | None = None,
) -> None:
    """Trains by `recipe` for the checkpoint folder `target`; writes the draft to `out`."""
    import jax

    from scripts.train_nano import draft_batches, draft_export, export
    from scripts.train_nano.draft_answers import AnswerCache
    from scripts.train_nano.draft_trainer import DraftTrainer, Target
    from scripts.train_nano.spec import ModelSpec
    from scripts.train_nano.tokenizer import Tokenizer

    jax.config.update("jax_compilation_cache_dir", str((work / "compiled").absolute()))
    model = Target(ModelSpec(), export.load(ModelSpec(), target))
    tokens = Tokenizer(target / "tiktoken.model")
    cache = AnswerCache(recipe, work / "answers", target)

    def open_stream(stage: str) -> draft_batches.RowStream:
        if stage == "corpus":
            return draft_batches.open_corpus(recipe, tokens)
        cache.fill(model.spec, model.params, tokens)
        return draft_batches.AnswerStream(recipe, cache)

    trainer = DraftTrainer(recipe, model, open_stream, work / "draft_checkpoints")
    draft_export.write(recipe.spec, trainer.run(resume, stop_after), out)
    log.info("wrote %s", out)


def main() -> None:
    args = _parse()
    restart_fast("scripts.train_nano.draft")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("absl").setLevel(logging.WARNING)

    from scripts.train_nano import evaluate
    from scripts.train_nano.draft_spec import DraftRecipe

    recipe = DraftRecipe(seed=args.seed)
    if args.answers:
        recipe = dataclasses.replace(recipe, answers=args.answers)
    if args.steps:
        corpus, answers = args.steps
        recipe = dataclasses.replace(recipe, corpus_steps=corpus, answer_steps=answers)
    spec = dataclasses.replace(
        recipe.spec,
        layers=args.layers,
        aux_layers=args.aux_layers,
        intermediate=args.intermediate,
        window=args.window,
        markov_rank=args.markov_rank,
    )
    recipe = dataclasses.replace(recipe, spec=spec)
    run(recipe, args.target, args.out or args.target / "draft", args.work, args.resume, args.stop)
    if args.evaluate:
        evaluate.report(args.target, args.evaluate, args.out)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.train_nano.draft",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--target", type=Path, default=Path("k3serve/assets/nano"), help="the exported target")
    add("--out", type=Path, help="where the draft goes [TARGET/draft]")
    add("--work", type=Path, default=Path("build/train_nano"), help="checkpoints and answers")
    add("--steps", type=_pair, help="steps on the corpus, on answers, e.g. 1500,2500 (the default)")
    add("--answers", type=int, help="answers that the target writes [6144]")
    add("--resume", action="store_true", help="go on from the last checkpoint")
    add("--stop-after", type=int, dest="stop", help="stop at this step, to go on with --resume")
    add("--evaluate", type=int, default=4, metavar="N", help="then measure N held-out chats per "
        "skill and thinking mode; 0 for none [4]")  # fmt: skip
    add("--seed", type=int, default=1)
    shape = parser.add_argument_group("the draft's shape")
    shape.add_argument("--layers", type=int, default=2)
    shape.add_argument(
        "--aux-layers", type=_numbers, default=(0, 1, 2, 3), metavar="0,1,2,3",
        help="target layers whose entering residual sums it reads; 0 is the embedding",
    )  # fmt: skip
    shape.add_argument("--intermediate", type=int, default=256)
    shape.add_argument("--window", type=int, default=256, help="context tokens it sees [256]")
    shape.add_argument("--markov-rank", type=int, default=32)
    return parser.parse_args()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _pair(text: str) -> tuple[int, ...]:
    numbers = _numbers(text)
    if len(numbers) != 2:
        raise argparse.ArgumentTypeError(f"{text!r}: give two counts, e.g. 1500,2500")
    return numbers


if __name__ == "__main__":
    main()
