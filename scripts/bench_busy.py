"""How many decode steps a tick should have while prompts wait (scheduler/policy.py, BUSY_STEPS):
tokens/s, time to first token and inter-token waits under one mixed load, for several numbers.

    python scripts/bench_busy.py [--steps 1 2 4 8] [--rate 6] [--requests 40] [--rounds 2]
                                 [-- FLAGS OF THE SERVER]

Requests with prompts of 32 to 1,024 tokens and answers of 32 to 256 arrive at random times, the
same ones for each number. An inter-token wait is the time between two events of one request: what a
reader sees. Without --rate all arrive at once, which gives the most tokens/s.
Rule: one engine, in one process, behind the server's own scheduler with two ticks in flight; the
numbers take turns in every round. Run it when nothing else runs.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

Arrivals = list[tuple[float, Any]]
"""(seconds from the start, Request), by rising time."""


def mixed_load(seed: int, count: int, rate: float) -> Arrivals:
    from k3serve.types import Request, Sampling

    rng, at, load = random.Random(seed), 0.0, []
    for number in range(count):
        at += rng.expovariate(rate) if rate else 0.0
        prompt = rng.choices(range(50, 1500), k=rng.choice([32, 128, 512, 1024]))
        settings = Sampling(max_tokens=rng.choice([32, 64, 128, 256]), temperature=0.0)
        load.append((at, Request(number, tuple(prompt), settings)))
    return load


def events(engine: Any, ticks: Iterator[int], load: Arrivals) -> Iterator[tuple[float, Any]]:
    """(seconds from the start, event), with an empty prefix cache to begin with."""
    from k3serve.lockstep.plan import check_result, pack, unpack_result
    from k3serve.scheduler.scheduler import Scheduler

    shape = engine.shape
    scheduler, flights = Scheduler(shape, max_queue=len(load)), deque[tuple[Any, Any]]()
    coming, started = deque(load), time.perf_counter()
    while coming or flights or not scheduler.idle:
        now = time.perf_counter() - started
        while coming and coming[0][0] <= now:
            scheduler.add(coming.popleft()[1])
        if scheduler.idle and not flights and coming:
            time.sleep(max(0.0, coming[0][0] - now))
            continue
        if not scheduler.idle:
            plan = scheduler.plan(next(ticks))
            flights.append((plan, engine.dispatch(pack(plan, shape))))
            if len(flights) < 2:
                continue
        plan, handle = flights.popleft()
        vector = engine.read(handle)
        check_result(vector, shape, plan.tick)
        now = time.perf_counter() - started
        for event in scheduler.commit(plan, unpack_result(vector, shape)):
            yield now, event


def measure(engine: Any, ticks: Iterator[int], load: Arrivals) -> dict[str, float]:
    arrived = {request.id: at for at, request in load}
    seen: dict[int, float] = {}
    firsts, waits, tokens, now = [], [], 0, 0.0
    for now, event in events(engine, ticks, load):
        if not event.tokens:
            continue
        tokens += len(event.tokens)
        if event.request_id in seen:
            waits.append(now - seen[event.request_id])
        else:
            firsts.append(now - arrived[event.request_id])
        seen[event.request_id] = now
    return {
        "tokens_per_s": tokens / now,
        "first_median_ms": 1000 * statistics.median(firsts),
        "first_p90_ms": 1000 * statistics.quantiles(firsts, n=10)[-1],
        "wait_median_ms": 1000 * statistics.median(waits),
        "wait_p99_ms": 1000 * statistics.quantiles(waits, n=100)[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rate", type=float, default=0.0, help="requests/s [all at once]")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("flags", nargs="*", help="flags of the server, such as --rows 1")
    options = parser.parse_args()
    from k3serve.__main__ import serve_config
    from k3serve.scheduler import policy
    from k3serve.startup import build_engine

    engine, ticks = build_engine(serve_config(options.flags)), itertools.count()
    measure(engine, ticks, mixed_load(0, 4, 0.0))  # warms up
    found: dict[int, list[dict[str, float]]] = {steps: [] for steps in options.steps}
    for number in range(options.rounds):
        load = mixed_load(1 + number, options.requests, options.rate)
        for steps in options.steps:
            policy.BUSY_STEPS = steps
            found[steps].append(measure(engine, ticks, load))
    names = list(next(iter(found.values()))[0])
    print(f"| steps, {options.requests} requests at {options.rate or 'any'}/s |",
          " | ".join(names), "|\n|" + "---|" * (len(names) + 1))  # fmt: skip
    for steps, rounds in found.items():
        cells = [f"{statistics.median(r[name] for r in rounds):.1f}" for name in names]
        print(f"| {steps} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
