"""How much of the bare engine's speed reaches a client: tokens/s of 1 and 8 streams, time to first
token and scoring tokens/s, through HTTP and in the bare tick loop, as ratios taken in one run.

    python scripts/bench_serve.py [--rounds 3] [--json FILE] [-- FLAGS OF THE SERVER]

Each round starts a fresh process for the bare loop, then a server and a client process, once with
overlap and once with --sync, so that all forms see the same machine; the medians of the rounds are
compared. The server's own counters say which share of a tick the host took, and for which share the
device had no tick to run. Run it when nothing else runs.
Rule: all forms do the same work on the same prompts, and HTTP speaks to the server as clients do.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

ROOT = Path(__file__).resolve().parent.parent
PROMPT_TOKENS, ANSWER_TOKENS, STREAMS = 24, 512, 8
SCORE_PROMPTS, SCORE_TOKENS = 24, 512
FIRST_TOKEN_TRIES = 15


def prompt(number: int, length: int) -> list[int]:
    """A fixed pseudo-random prompt of ordinary token ids."""
    return [(number * 7919 + i * 104729) % 1500 + 50 for i in range(length)]


# ------------------------------------------------------------------------------- the bare loop


class Bare:
    """The engine behind the leader's loop without threads, mailboxes and HTTP."""

    def __init__(self, flags: list[str]) -> None:
        from k3serve.__main__ import serve_config
        from k3serve.lockstep.bare import BareLoop
        from k3serve.startup import build_engine

        engine = build_engine(serve_config(flags))
        self.loop = BareLoop(engine, engine.shape)
        self.requests = 0

    def run(self, prompts: list[list[int]], **sampling: Any) -> tuple[int, float]:
        """Runs all to their end; (tokens emitted, seconds to the first token)."""
        from k3serve.types import Request, Sampling

        requests = []
        for tokens in prompts:
            self.requests += 1
            settings = Sampling(temperature=0.0, **sampling)
            requests.append(Request(self.requests, tuple(tokens), settings))
        started, first, emitted = time.perf_counter(), 0.0, 0
        for event in self.loop.run(requests):
            emitted += len(event.tokens)
            if event.tokens and not first:
                first = time.perf_counter() - started
        return emitted, first


def bare(flags: list[str]) -> dict[str, float]:
    loop = Bare(flags)
    loop.run([prompt(0, PROMPT_TOKENS)], max_tokens=32)

    def stream(count: int) -> float:
        prompts = [prompt(i, PROMPT_TOKENS) for i in range(count)]
        return rate(lambda: loop.run(prompts, max_tokens=ANSWER_TOKENS)[0])

    first = [
        loop.run([prompt(i, PROMPT_TOKENS)], max_tokens=1)[1] for i in range(FIRST_TOKEN_TRIES)
    ]
    scored = [prompt(i, SCORE_TOKENS) for i in range(SCORE_PROMPTS)]

    def score() -> int:
        loop.run(scored, max_tokens=1, prompt_logprobs=1, top_logprobs=1)
        return SCORE_PROMPTS * SCORE_TOKENS

    return {
        "stream_1": stream(1),
        "stream_8": stream(STREAMS),
        "first_token_s": statistics.median(first),
        "score": rate(score),
    }


def rate(work: Callable[[], int]) -> float:
    """Tokens a second of work(), which returns how many it did."""
    started = time.perf_counter()
    return work() / (time.perf_counter() - started)


# --------------------------------------------------------------------------------- the client


class Client:
    """Speaks HTTP as SDKs do: one kept connection a thread."""

    def __init__(self, base_url: str) -> None:
        parts = urlsplit(base_url)
        self.connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=600)

    def post(self, body: dict[str, Any]) -> http.client.HTTPResponse:
        self.connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        response = self.connection.getresponse()
        assert response.status == 200, response.read()
        return response

    def stream(self, tokens: list[int], max_tokens: int) -> tuple[int, float]:
        """(tokens the server counted, seconds to the first text)."""
        body = {"prompt": tokens, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
                "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
        started, first, count = time.perf_counter(), 0.0, 0
        with self.post(body) as response:
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                first = first or time.perf_counter() - started
                usage = json.loads(line[6:]).get("usage")
                count = usage["completion_tokens"] if usage else count
        return count, first

    def score(self, prompts: list[list[int]]) -> int:
        body = {"prompt": prompts, "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
        with self.post(body) as response:
            choices = json.loads(response.read())["choices"]
        return sum(len(choice["logprobs"]["token_logprobs"]) - 1 for choice in choices)


def over_http(base_url: str) -> dict[str, float]:
    Client(base_url).stream(prompt(0, PROMPT_TOKENS), 32)

    def streams(count: int) -> int:
        counts: list[int] = []

        def one(number: int) -> None:
            counts.append(Client(base_url).stream(prompt(number, PROMPT_TOKENS), ANSWER_TOKENS)[0])

        threads = [threading.Thread(target=one, args=(i,)) for i in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(counts) == count, "a stream failed"
        return sum(counts)

    client = Client(base_url)
    first = [client.stream(prompt(i, PROMPT_TOKENS), 1)[1] for i in range(FIRST_TOKEN_TRIES)]
    scored = [prompt(i, SCORE_TOKENS) for i in range(SCORE_PROMPTS)]
    figures = {"first_token_s": statistics.median(first)}
    for name, work in (
        ("stream_1", lambda: streams(1)),
        ("stream_8", lambda: streams(STREAMS)),
        ("score", lambda: client.score(scored)),
    ):
        before = counters(base_url)
        figures[name] = rate(work)
        figures |= {f"{name}_{key}": x for key, x in shares(before, counters(base_url)).items()}
    return figures


def counters(base_url: str) -> dict[str, float]:
    """The server's numbers by name and labels."""
    with urlopen(f"{base_url}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    return {name: float(value) for name, value in (x.split() for x in lines if x[0] != "#")}


def shares(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Of the engine thread's time with work: the host's share, by phase too, and the share in which
    the device had no tick to run."""
    spent = {name: after[name] - before.get(name, 0.0) for name in after}
    phase = 'k3serve_tick_seconds_total{phase="'
    phases = {name[len(phase) : -2]: x for name, x in spent.items() if name.startswith(phase)}
    total = sum(phases.values())
    found = {name: seconds / total for name, seconds in phases.items()}
    found["host"] = 1 - found["wait"]
    found["device_idle"] = spent["k3serve_device_idle_seconds_total"] / total
    return found


# ------------------------------------------------------------------------------------ the run


def part(name: str, *flags: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--part", name, *flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    return json.loads(done.stdout)


def with_server(*flags: str) -> dict[str, float]:
    with running_server(*flags) as url:
        return part("client", "--base-url", url)


COMPILED_LATE = "compiled after start-up"  # as any host's log says it


@contextmanager
def running_server(*flags: str) -> Iterator[str]:
    """The address of a server of its own, ready; it ends with the block. Raises RuntimeError when
    one of its hosts compiled something meanwhile: then the figures are wrong.
    """
    from k3serve.local_hosts import free_port

    port = free_port()
    command = [sys.executable, "-m", "k3serve", *flags, "--port", str(port)]
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, stderr=log, cwd=ROOT)
        try:
            wait_until_ready(server, port)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(60)
        log.seek(0)
        if late := [line for line in log if COMPILED_LATE in line]:
            raise RuntimeError(f"the server compiled while it served: {late}")


def wait_until_ready(server: subprocess.Popen[bytes], port: int, timeout_s: float = 300) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and server.poll() is None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.2)
    raise RuntimeError("the server did not become ready")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--part", choices=["bare", "client"], help=argparse.SUPPRESS)
    parser.add_argument("--base-url", help=argparse.SUPPRESS)
    parser.add_argument(
        "flags", nargs="*", help="flags of the server, such as --rows 1 or --checkpoint DIR"
    )
    options = parser.parse_args()
    if options.part == "bare":
        print(json.dumps(bare(options.flags)))
        return
    if options.part == "client":
        print(json.dumps(over_http(options.base_url)))
        return
    rounds = []
    for number in range(options.rounds):
        forms = {
            "bare": part("bare", "--", *options.flags),
            "http": with_server(*options.flags),
            "sync": with_server(*options.flags, "--sync"),
        }
        rounds.append(forms)
        print(f"round {number + 1}: {json.dumps(rounds[-1])}", file=sys.stderr)
    report(rounds)
    if options.json:
        options.json.write_text(json.dumps(rounds, indent=1))


def report(rounds: list[dict[str, dict[str, float]]]) -> None:
    names = {
        "stream_1": "1 stream, tokens/s",
        "stream_8": f"{STREAMS} streams, tokens/s",
        "first_token_s": "time to first token, ms",
        "score": "scoring, prompt tokens/s",
    }

    def median(form: str, key: str) -> float:
        return statistics.median(r[form][key] for r in rounds)

    print(f"| {len(rounds)} rounds, medians, {os.cpu_count()} cores | bare | HTTP | HTTP / bare "
          "| HTTP, --sync | --sync / overlap |\n|---|---|---|---|---|---|")  # fmt: skip
    for key, name in names.items():
        scale = 1000 if key == "first_token_s" else 1
        plain, http_, sync = (median(form, key) for form in ("bare", "http", "sync"))
        print(f"| {name} | {plain * scale:.1f} | {http_ * scale:.1f} | {http_ / plain:.2f} "
              f"| {sync * scale:.1f} | {sync / http_:.2f} |")  # fmt: skip
    print("\n| of a tick | host's share | device idle | host's, --sync | device idle, --sync |"
          "\n|---|---|---|---|---|")  # fmt: skip
    for key in ("stream_1", "stream_8", "score"):
        cells = [median(form, f"{key}_{share}") for form in ("http", "sync")
                 for share in ("host", "device_idle")]  # fmt: skip
        print(f"| {names[key].split(',')[0]} |", " | ".join(f"{x:.1%}" for x in cells), "|")


if __name__ == "__main__":
    main()
