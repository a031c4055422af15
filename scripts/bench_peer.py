"""This server's engine against `transformers` on torch: one random Kimi-Linear checkpoint, float32,
the same CPU cores; prefill and decode tokens/s at batch 1 and 8, memory, and whether the greedy
tokens are equal.

    python scripts/bench_peer.py [--peer-python PYTHON] [--tokens 1024] [--answer 64] [--rounds 3]

Needs torch and transformers (`pip install -e .[peer]`), here or in the interpreter that
--peer-python names. Each side runs in a process of its own for each batch size, with its first
round as a warm-up; medians of the others are compared. Prefill is the time from the arrival of all
prompts to the last one's first token, decode the tokens after that moment. Memory is the process's
peak, the loading of the checkpoint included, and the engine's compilation too.
Rule: both sides get the same prompts, cores and weights, and the peer its fastest plain loop: no
sampling code, logits of the last position only. Exit status 1 where greedy tokens differ at a place
where the peer's two best logits are further apart than NEAR; closer ones change places with the
order of additions, and what follows is another text.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NEAR = 1e-3
ORDINARY_IDS = 8000  # of the random model's vocabulary; above them are special tokens
REMEDY = "pip install torch transformers, or name an interpreter that has them with --peer-python"

Timed = tuple[list[list[int]], float, float, int]
"""(answers, seconds to the last first token, seconds after it, tokens decided in these)"""

Run = Callable[[list[list[float]] | None], Timed]
"""Takes a list, which the peer fills with the gaps between its two best logits [token][sequence];
None while time is measured.
"""


def prompts(batch: int, length: int) -> list[list[int]]:
    return [random.Random(i).choices(range(ORDINARY_IDS), k=length) for i in range(batch)]


# -------------------------------------------------------------------------------- the two sides


def here(checkpoint: Path, batch: int, options: argparse.Namespace) -> Run:
    """The engine behind scheduler, plan and tick, without HTTP. Nothing is reused between runs."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path.insert(0, str(ROOT))  # not for the peer: our folder `kernels` would hide a package
    from k3serve.lockstep.bare import BareLoop
    from k3serve.settings import ServeConfig
    from k3serve.startup import build_engine
    from k3serve.types import Request, Sampling

    context = -(-(options.tokens + options.answer) // 1024) * 1024
    changes = {"page_tokens": options.page_tokens} if options.page_tokens else {}
    config = ServeConfig(checkpoint=checkpoint, rows=1, draft="none", max_slots=batch,
                         dtype="float32", context=context, prefix_cache_mib=0,
                         allow_reserved=True, **changes)  # fmt: skip
    engine = build_engine(config)
    loop = BareLoop(engine, engine.shape)
    settings = Sampling(max_tokens=options.answer, temperature=0.0)

    def run(gaps: list[list[float]] | None) -> Timed:
        requests = [
            Request(i, tuple(p), settings) for i, p in enumerate(prompts(batch, options.tokens))
        ]
        answers: list[list[int]] = [[] for _ in requests]
        after, prefilled = 0, 0.0
        started = time.perf_counter()
        for event in loop.run(requests):
            after += len(event.tokens) if prefilled else 0
            answers[event.request_id] += event.tokens
            if not prefilled and all(answers):
                prefilled = time.perf_counter()
        return answers, prefilled - started, time.perf_counter() - prefilled, after

    return run


def peer(checkpoint: Path, batch: int, options: argparse.Namespace) -> Run:
    """The public implementation: one forward pass for the prompts, then token after token."""
    import torch
    import transformers

    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    more = {"experts_implementation": options.peer_experts} if options.peer_experts else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, **more
    ).eval()

    def best(logits: Any, gaps: list[list[float]] | None) -> Any:
        if gaps is not None:
            first, second = torch.topk(logits, 2, dim=-1).values.unbind(-1)
            gaps.append((first - second).tolist())
        return logits.argmax(-1)

    @torch.inference_mode()
    def run(gaps: list[list[float]] | None) -> Timed:
        given = torch.tensor(prompts(batch, options.tokens))
        started = time.perf_counter()
        out = model(given, use_cache=True, logits_to_keep=1)
        chosen = [best(out.logits[:, -1], gaps)]
        prefilled = time.perf_counter()
        for _ in range(options.answer - 1):
            out = model(chosen[-1][:, None], past_key_values=out.past_key_values, use_cache=True)
            chosen.append(best(out.logits[:, -1], gaps))
        ended = time.perf_counter()
        answers = torch.stack(chosen, dim=1).tolist()
        return answers, prefilled - started, ended - prefilled, batch * (options.answer - 1)

    return run


# -------------------------------------------------------------------------------------- the run


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One side at one batch size, in this process."""
    cores = sorted(os.sched_getaffinity(0))[: options.threads]
    os.sched_setaffinity(0, cores)  # before either library counts them
    build = here if options.part == "here" else peer
    run = build(options.checkpoint, options.batch, options)
    prefill, decode = [], []
    gaps: list[list[float]] = []
    answers = run(gaps)[0]  # warms up
    for _ in range(options.rounds):
        again, to_first, after, tokens = run(None)
        assert again == answers, "a side disagrees with itself"
        prefill.append(options.batch * options.tokens / to_first)
        decode.append(tokens / after)
    return {
        "prefill": statistics.median(prefill),
        "decode": statistics.median(decode),
        "peak_mib": peak_mib(),
        "answers": answers,
        "gaps": list(zip(*gaps, strict=True)),
    }


def peak_mib() -> int:
    """This process's peak resident memory. Not getrusage, which remembers the parent's too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024


def side(name: str, batch: int, checkpoint: Path, options: argparse.Namespace) -> dict[str, Any]:
    python = options.peer_python if name == "peer" else sys.executable
    command = [python, __file__, "--part", name, "--batch", str(batch), "--checkpoint",
               str(checkpoint), "--threads", str(options.threads), "--tokens", str(options.tokens),
               "--answer", str(options.answer), "--rounds", str(options.rounds)]  # fmt: skip
    if options.page_tokens:
        command += ["--page-tokens", str(options.page_tokens)]
    if options.peer_experts:
        command += ["--peer-experts", options.peer_experts]
    env = dict(os.environ)
    if name == "peer":
        env.pop("PYTHONPATH", None)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{name}, batch {batch}: {found['prefill']:.0f} and {found['decode']:.1f} tokens/s, "
          f"{found['peak_mib']} MiB", file=sys.stderr)  # fmt: skip
    return found


def require_peer(python: str) -> str:
    """What is compared with; leaves with the remedy where the interpreter lacks it."""
    code = "import torch, transformers as t; print('torch', torch.__version__, "
    code += "'transformers', t.__version__); t.KimiLinearForCausalLM"
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, env=env,
                              cwd=tempfile.gettempdir())  # fmt: skip
    except OSError as error:
        raise SystemExit(f"--peer-python {python}: {error.strerror}; {REMEDY}") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise SystemExit(f"{python} cannot run Kimi-Linear in transformers ({reason}); {REMEDY}")
    return done.stdout.strip()


def report(found: dict[tuple[str, int], dict[str, Any]], options: argparse.Namespace) -> bool:
    """Prints the table; true where greedy tokens are equal but for near ties."""
    print(f"| {options.tokens} prompt and {options.answer} answer tokens, {options.threads} cores "
          "| here | peer | times |\n|---|---|---|---|")  # fmt: skip
    notes = []
    for batch in options.batches:
        ours, theirs = found["here", batch], found["peer", batch]
        for key, name in (("prefill", "prefill, tokens/s"), ("decode", "decode, tokens/s"),
                          ("peak_mib", "peak memory, MiB")):  # fmt: skip
            a, b = ours[key], theirs[key]
            print(f"| batch {batch}: {name} | {a:.1f} | {b:.1f} | {a / b:.2f} |")
        notes += differences(ours["answers"], theirs)
    total = sum(options.batches)
    print(f"\ngreedy answers equal: {total - len(notes)} of {total}")
    for at, gap in notes:
        print(f"one parts at token {at}, where the peer's two best logits are {gap:.1e} apart")
    return all(gap < NEAR for _, gap in notes)


def differences(ours: list[list[int]], theirs: dict[str, Any]) -> list[tuple[int, float]]:
    """(first place that differs, the peer's gap there) of each answer that is not equal."""
    found = []
    for mine, other, gaps in zip(ours, theirs["answers"], theirs["gaps"], strict=True):
        if mine != other:
            at = next(i for i, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b)
            found.append((at, gaps[at]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--peer-python", default=sys.executable, metavar="PYTHON",
                        help="an interpreter with torch and transformers [this one]")  # fmt: skip
    parser.add_argument("--peer-experts", metavar="NAME", help="experts_implementation of the peer")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="[a random one]")
    parser.add_argument("--tokens", type=int, default=1024, metavar="N", help="of a prompt [1024]")
    parser.add_argument("--answer", type=int, default=64, metavar="N", help="tokens of it [64]")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="[3]")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="[2]")
    parser.add_argument("--page-tokens", type=int, metavar="C", help="[the server's default]")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], metavar="N")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--part", choices=["here", "peer"], help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        print(json.dumps(measure(options)))
        return
    print(f"peer: {require_peer(options.peer_python)}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = options.checkpoint
        if checkpoint is None:
            sys.path.insert(0, str(ROOT))
            from scripts.random_model import write

            checkpoint = write(Path(folder))
        found = {
            (name, batch): side(name, batch, checkpoint, options)
            for batch in options.batches
            for name in ("here", "peer")
        }
    equal = report(found, options)
    if options.json:
        figures = {f"{name}_{batch}": x for (name, batch), x in found.items()}
        options.json.write_text(json.dumps(figures, indent=1))
    raise SystemExit(0 if equal else 1)


if __name__ == "__main__":
    main()
