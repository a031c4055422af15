"""One command from nothing to the checkpoint that k3serve ships.

    python -m scripts.train_nano --out k3serve/assets/nano

Rule: it can be killed at any time; the same command with --resume goes on from the last checkpoint
and ends with the same weights. `--steps 200,300,100` makes a quick, poor model.
"""

import argparse
import dataclasses
import logging
import os
import sys
from pathlib import Path

# Must be set before the process starts: without huge pages a quarter of the time goes into page
# faults, because XLA's buffers are given back to the system after every step (13.6k tokens/s
# without, 19.4k with, on two cores).
_ENVIRONMENT = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "OMP_WAIT_POLICY": "passive",
    "JAX_PLATFORMS": "cpu",
}


def main() -> None:
    args = _parse()
    if os.environ.get("GLIBC_TUNABLES") is None:
        command = [sys.executable, "-m", "scripts.train_nano", *sys.argv[1:]]
        os.execve(sys.executable, command, _ENVIRONMENT | dict(os.environ))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("absl").setLevel(logging.WARNING)

    from scripts.train_nano.recipe import Recipe
    from scripts.train_nano.run import run

    recipe = Recipe(seed=args.seed)
    if args.steps:
        pairs = zip(recipe.stages, args.steps, strict=True)
        stages = tuple(dataclasses.replace(stage, steps=steps) for stage, steps in pairs)
        recipe = dataclasses.replace(recipe, stages=stages)
    run(recipe, args.out, args.work, args.resume, args.stop_after, args.export_only)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.train_nano", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, default=Path("k3serve/assets/nano"), help="where the model goes")
    add("--work", type=Path, default=Path("build/train_nano"), help="checkpoints and caches")
    add("--steps", type=_counts, help="steps of the four stages, e.g. 2500,4000,6000,12000")
    add("--stop-after", type=int, help="stop at this step, to go on later with --resume")
    add("--resume", action="store_true", help="go on from the last checkpoint")
    add("--export-only", action="store_true", help="write the newest checkpoint, train nothing")
    add("--seed", type=int, default=1)
    return parser.parse_args()


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    main()
