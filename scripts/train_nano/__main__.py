"""One command from nothing to what k3serve ships: K3-nano, then its draft in OUT/draft.

    python -m scripts.train_nano --out k3serve/assets/nano

Rule: it can be killed at any time; the same command with --resume goes on from the last checkpoint
and ends with the same weights. `--steps 200,300,100,100 --draft-steps 60,60` makes a quick, poor
model. With --stop-after or --export-only the target alone is written;
`python -m scripts.train_nano.draft` makes a draft for one that is already there.
"""

import argparse
import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

from scripts.train_nano.process import restart_fast


def main() -> None:
    args = _parse()
    restart_fast("scripts.train_nano")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("absl").setLevel(logging.WARNING)

    from scripts.train_nano.draft_spec import DraftRecipe
    from scripts.train_nano.recipe import Recipe
    from scripts.train_nano.run import run

    recipe = Recipe(seed=args.seed)
    if args.steps:
        pairs = zip(recipe.stages, args.steps, strict=True)
        stages = tuple(dataclasses.replace(stage, steps=steps) for stage, steps in pairs)
        recipe = dataclasses.replace(recipe, stages=stages)
    draft = DraftRecipe(seed=args.seed)
    if args.draft_steps:
        corpus, answers = args.draft_steps
        draft = dataclasses.replace(draft, corpus_steps=corpus, answer_steps=answers)
    run(recipe, draft, args.out, args.work, args.resume, args.stop_after, args.export_only)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.train_nano",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--out",
        type=Path,
        default=Path("k3serve/assets/nano"),
        help="where the model goes [%(default)s]",
    )
    add(
        "--work",
        type=Path,
        default=Path("build/train_nano"),
        help="checkpoints and caches [%(default)s]",
    )
    add(
        "--steps",
        type=_counts(4),
        metavar="N,N,N,N",
        help="of the four stages [2500,4000,5500,12000]",
    )
    add(
        "--draft-steps",
        type=_counts(2),
        metavar="N,N",
        help="of the draft's two stages [1500,2500]",
    )
    add("--stop-after", type=int, help="stop the target at this step, to go on later with --resume")
    add("--resume", action="store_true", help="go on from the last checkpoint")
    add("--export-only", action="store_true", help="write the newest checkpoint, train nothing")
    add("--seed", type=int, default=1)
    return parser.parse_args()


def _counts(wanted: int) -> Callable[[str], tuple[int, ...]]:
    def read(text: str) -> tuple[int, ...]:
        parts = text.split(",")
        if len(parts) != wanted or not all(part.strip().isdecimal() for part in parts):
            raise argparse.ArgumentTypeError(f"{text!r}: give {wanted} counts, with commas")
        return tuple(map(int, parts))

    return read


if __name__ == "__main__":
    main()
