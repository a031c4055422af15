"""Mixed load, good and bad, for minutes or hours: does the server stay as it was?

    python scripts/soak.py --minutes 60 [--clients 16] [-- FLAGS OF THE SERVER]
    python scripts/soak.py --minutes 5 --streams 256 --base-url http://HOST:8000

Prints memory, threads, file descriptors and load over time. Exits with 1 when a known answer came
otherwise, a promise was broken, memory grew over the second half of the run, or threads and
descriptors are not back at the end where they were before the load. What is measured comes from
the server's /metrics, so it may run on another machine (Linux; elsewhere only answers are checked).
Rule: growth is judged between medians of two quarters, since a first quarter warms up.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.error import URLError

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.bench_serve import counters, running_server  # noqa: E402
from scripts.soak_load import MIX, Busy, Failed, Kind, Target, learn, stream  # noqa: E402

MAX_GROWTH_MIB = 16.0  # between the second and the last quarter of a run
SETTLE_S = 45.0  # longest until a server without load is at rest; half-open peers take 30
SPARE = 3  # threads and descriptors that a look at the server may itself hold
MAX_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Sample:
    """The server at one moment."""

    at_s: float
    rss_mib: float
    threads: float
    fds: float
    running: float
    waiting: float
    late_compilations: float

    def line(self) -> str:
        return (
            f"{self.at_s:8.1f} s  {self.rss_mib:8.1f} MiB  {self.threads:4.0f} threads  "
            f"{self.fds:4.0f} fds  {self.running:3.0f} running  {self.waiting:4.0f} waiting"
        )


def look(url: str, started: float) -> Sample:
    by_name: dict[str, float] = {}
    for name, value in counters(url).items():
        by_name[name.partition("{")[0]] = value
    return Sample(
        at_s=time.monotonic() - started,
        rss_mib=sum(by_name.get(name, 0.0) for name in _MEMORY) / 2**20,
        threads=by_name["k3serve_threads"],
        fds=by_name.get("process_open_fds", 0.0),
        running=by_name["vllm:num_requests_running"],
        waiting=by_name["vllm:num_requests_waiting"],
        late_compilations=by_name["k3serve_compilations_after_ready_total"],
    )


# of the front and of the engine, which may be one process
_MEMORY = ("process_resident_memory_bytes", "k3serve_engine_resident_memory_bytes")


@dataclass
class Run:
    """What happened so far. Thread-safe where clients write."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    before: Sample | None = None
    after: Sample | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, kind: str, failure: str = "") -> None:
        with self.lock:
            self.counts[kind] += 1
            if failure:
                self.counts["failed"] += 1
                self.failures.append(f"{kind}: {failure}"[:500])

    def verdict(self) -> list[str]:
        """Why the run failed; empty when it did not."""
        assert self.before is not None and self.after is not None
        return self.failures[:MAX_SHOWN] + grown(self.samples) + left(self.before, self.after)


def grown(samples: Sequence[Sample]) -> list[str]:
    quarter = len(samples) // 4
    if not quarter:
        return []
    early = statistics.median(s.rss_mib for s in samples[quarter : 2 * quarter])
    late = statistics.median(s.rss_mib for s in samples[-quarter:])
    if late - early <= MAX_GROWTH_MIB:
        return []
    return [f"memory grew from {early:.1f} to {late:.1f} MiB"]


def left(before: Sample, after: Sample) -> list[str]:
    """What the load left behind."""
    found = []
    for name in ("threads", "fds", "running", "waiting", "late_compilations"):
        was, now = getattr(before, name), getattr(after, name)
        if now > was + (SPARE if name in ("threads", "fds") else 0):
            found.append(f"{name}: {now:.0f} after the load, {was:.0f} before")
    return found


# ------------------------------------------------------------------------------------ the load


def client(
    target: Target, choose: Callable[[], Kind], seed: int, run: Run, stop: threading.Event
) -> None:
    rng = random.Random(seed)
    while not stop.is_set():
        kind = choose()
        name = kind.__name__
        try:
            kind(target, rng)
            run.note(name)
        except Busy:
            run.note("refused")
            stop.wait(0.2)
        except Failed as failure:
            run.note(name, str(failure))
        except Exception as error:  # a connection that breaks is the server's fault, too
            run.note(name, repr(error))


def soak(url: str, seconds: float, clients: int, streams: int = 0, every_s: float = 5.0) -> Run:
    """Loads the server, then waits until it is at rest."""
    target = learn(url)
    run = Run()
    started = time.monotonic()
    run.before = at_rest(url, started, None)
    stop = threading.Event()
    rng = random.Random(0)
    kinds, weights = zip(*MIX, strict=True)

    def mixed() -> Kind:
        return rng.choices(kinds, weights)[0]

    threads = [
        threading.Thread(
            target=client,
            args=(target, (lambda: stream) if streams else mixed, seed, run, stop),
            daemon=True,
        )
        for seed in range(streams or clients)
    ]
    for thread in threads:
        thread.start()
    while not stop.wait(min(every_s, max(0.0, started + seconds - time.monotonic()))):
        if time.monotonic() >= started + seconds:
            stop.set()
        run.samples.append(look(url, started))
        print(run.samples[-1].line(), flush=True)
    for thread in threads:
        thread.join(120)
        if thread.is_alive():
            run.note("client", "it was never answered")
    run.after = at_rest(url, started, run.before)
    print(run.after.line() + "  at rest", flush=True)
    return run


def at_rest(url: str, started: float, before: Sample | None) -> Sample:
    """The server without load: as before, or after SETTLE_S."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        now = look(url, started)
        busy = now.running + now.waiting if before is None else left(before, now)
        if not busy or time.monotonic() > deadline:
            return now
        time.sleep(0.2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--clients", type=int, default=16, help="of the mixed load")
    parser.add_argument("--streams", type=int, default=0, help="so many clients that only stream")
    parser.add_argument("--base-url", help="a running server, instead of one of its own")
    parser.add_argument("flags", nargs="*", help="flags of the server, such as --max-slots 16")
    options = parser.parse_args()
    seconds = 60 * options.minutes
    every_s = max(0.5, seconds / 40)

    def run(url: str) -> Run:
        return soak(url.rstrip("/"), seconds, options.clients, options.streams, every_s)

    try:
        if options.base_url:
            done = run(options.base_url)
        else:
            with running_server(*options.flags) as url:
                done = run(url)
    except URLError as error:
        print(f"the server does not answer: {error}", file=sys.stderr)
        return 1
    print(", ".join(f"{count} {kind}" for kind, count in sorted(done.counts.items())))
    problems = done.verdict()
    for problem in problems:
        print(f"FAILED {problem}")
    print("the server stayed as it was" if not problems else f"{len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
