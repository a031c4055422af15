"""Does scoring leave anything behind? Scores thousands of prompts of mixed length over HTTP and
watches the server's memory.

    python scripts/check_scoring_memory.py [--prompts 10000] [-- FLAGS OF THE SERVER]

Lengths are drawn evenly on a log scale between 8 and --longest tokens, and no prompt is sent twice,
so that the prefix cache fills and turns over. Prints the resident memory of the server ten times on
the way. Exit status 1 where it grew by more than 5 % between the third tenth and the end: before
that, caches fill.
Rule: the client keeps no answer; it checks that each has a score for every token but the first.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import Request, urlopen

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.bench_serve import running_server

CLIENTS, BATCH, PARTS, WARM = 2, 20, 10, 3


def family(pid: int) -> list[int]:
    """The process and all that it started."""
    children = " ".join(f.read_text() for f in Path(f"/proc/{pid}/task").glob("*/children"))
    return [pid, *(p for child in children.split() for p in family(int(child)))]


def resident_mib() -> float:
    """Of the server's processes, front and engine: all that this one has started."""
    total = 0
    for pid in family(os.getpid())[1:]:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        total += sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
    return total / 1024


def score(url: str, seed: int, longest: int) -> int:
    """One request of BATCH prompts; how many tokens were scored."""
    rng = random.Random(seed)
    prompts = [
        rng.choices(range(50, 1500), k=round(8 * (longest / 8) ** rng.random()))
        for _ in range(BATCH)
    ]
    body = {"prompt": prompts, "max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    with urlopen(Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)) as response:
        choices = json.loads(response.read())["choices"]
    for prompt, choice in zip(prompts, choices, strict=True):
        first, *scores = choice["logprobs"]["token_logprobs"]
        if first is not None or len(scores) != len(prompt) - 1 or None in scores:
            raise SystemExit(f"a prompt of {len(prompt)} tokens got {len(scores)} scores")
    return sum(map(len, prompts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--prompts", type=int, default=10_000, metavar="N", help="[10000]")
    parser.add_argument("--longest", type=int, default=1024, metavar="N", help="tokens [1024]")
    parser.add_argument("flags", nargs="*", help="flags of the server, such as --rows 1")
    options = parser.parse_args()
    requests, memory, tokens = options.prompts // BATCH, [], 0
    if requests < PARTS:
        parser.error(f"--prompts {options.prompts}: give at least {PARTS * BATCH}")
    with running_server(*options.flags) as url, ThreadPoolExecutor(CLIENTS) as clients:
        started = time.monotonic()
        print(f"before: {resident_mib():.0f} MiB", flush=True)
        for part in range(PARTS):
            seeds = range(part * requests // PARTS, (part + 1) * requests // PARTS)
            tokens += sum(clients.map(lambda seed: score(url, seed, options.longest), seeds))
            memory.append(resident_mib())
            passed = f"{seeds.stop * BATCH} prompts, {tokens} tokens"
            seconds = time.monotonic() - started
            print(f"{passed}, {seconds:.0f} s: {memory[-1]:.0f} MiB", flush=True)
    growth = memory[-1] / memory[WARM - 1] - 1
    print(f"grew by {growth:.1%} since the third tenth")
    raise SystemExit(1 if growth > 0.05 else 0)


if __name__ == "__main__":
    main()
