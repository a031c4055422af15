"""HTTP in a process of its own against HTTP in the engine's threads (--front process | thread):
tokens/s, time to the first token and time between tokens of 1, 8 and 64 streams, in one run.

    python scripts/bench_front.py [--rounds 3] [--streams 1 8 64] [-- FLAGS OF THE SERVER]

Each round starts a server of each form and a client process for each number of streams; medians of
the rounds are compared. Run it when nothing else runs.
Rule: both forms get the same requests from the same client, and the order of forms alternates.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import threading
import time
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

from bench_serve import ROOT, prompt, running_server

FORMS = ("process", "thread")
PROMPT_TOKENS, ANSWER_TOKENS = 24, 256


def stream(base_url: str, number: int, times: list[float]) -> int:
    """Runs one stream; appends the arrival of each of its chunks. Its tokens."""
    parts = urlsplit(base_url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=600)
    body = {
        "prompt": prompt(number, PROMPT_TOKENS),
        "max_tokens": ANSWER_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    connection.request("POST", "/v1/completions", json.dumps(body))
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(response.read().decode())
    for line in response:
        if line.startswith(b"data: {"):
            times.append(time.monotonic())
    return ANSWER_TOKENS


def client(base_url: str, streams: int) -> dict[str, float]:
    """All streams at once; the first time warms up what is lazy."""
    stream(base_url, 9999, [])
    arrivals: list[list[float]] = [[] for _ in range(streams)]
    threads = [
        threading.Thread(target=stream, args=(base_url, number, times))
        for number, times in enumerate(arrivals)
    ]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took_s = time.monotonic() - started
    firsts = sorted(times[0] - started for times in arrivals)
    gaps = sorted(b - a for times in arrivals for a, b in pairwise(times))
    return {
        "tokens_per_s": streams * ANSWER_TOKENS / took_s,
        "first_ms_p50": 1e3 * firsts[len(firsts) // 2],
        "gap_ms_p50": 1e3 * gaps[len(gaps) // 2],
        "gap_ms_p99": 1e3 * gaps[len(gaps) * 99 // 100],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--client", nargs=2, metavar=("URL", "STREAMS"), help=argparse.SUPPRESS)
    parser.add_argument("flags", nargs="*", help="flags of the server, such as --max-slots 64")
    options = parser.parse_args()
    if options.client:
        print(json.dumps(client(options.client[0], int(options.client[1]))))
        return
    found: dict[tuple[int, str], list[dict[str, float]]] = {}
    for number in range(options.rounds):
        for form in FORMS if number % 2 else FORMS[::-1]:
            with running_server(*options.flags, "--front", form) as url:
                for streams in options.streams:
                    command = [sys.executable, __file__, "--client", url, str(streams)]
                    done = subprocess.run(
                        command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT
                    )
                    figures = json.loads(done.stdout)
                    found.setdefault((streams, form), []).append(figures)
                    print(f"round {number + 1}: {streams} {form}: {figures}", file=sys.stderr)
    report(options.streams, found)


def report(streams: list[int], found: dict[tuple[int, str], list[dict[str, Any]]]) -> None:
    names = list(next(iter(found.values()))[0])
    print("streams " + "".join(f"{name:>32}" for name in names))
    print("        " + "".join(f"{form:>11}" for _ in names for form in (*FORMS, "ratio")))
    for count in streams:
        cells = []
        for name in names:
            a, b = (statistics.median(f[name] for f in found[count, form]) for form in FORMS)
            cells += [f"{a:11.1f}", f"{b:11.1f}", f"{a / b:11.2f}"]
        print(f"{count:7d} " + "".join(cells))


if __name__ == "__main__":
    main()
