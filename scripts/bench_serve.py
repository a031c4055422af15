"""How much of the bare engine's speed reaches a client: tokens/s of 1 and 8 streams, time to first
token and scoring tokens/s, through HTTP and in the bare tick loop, as ratios taken in one run.

    python scripts/bench_serve.py [--checkpoint DIR] [--rounds 3] [--json FILE]

Each round starts a fresh process for the bare loop, then a server and a client process, so that
both forms see the same machine; the medians of the rounds are compared. Run it when nothing else
runs.
Rule: both forms do the same work on the same prompts, and HTTP speaks to the server as clients do.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

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

    def __init__(self, checkpoint: Path | None) -> None:
        from k3serve.lockstep.bare import BareLoop
        from k3serve.settings import ServeConfig
        from k3serve.startup import build_engine

        settings = {} if checkpoint is None else {"checkpoint": checkpoint}
        engine = build_engine(ServeConfig(**settings))
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


def bare(checkpoint: Path | None) -> dict[str, float]:
    loop = Bare(checkpoint)
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
    return {
        "stream_1": rate(lambda: streams(1)),
        "stream_8": rate(lambda: streams(STREAMS)),
        "first_token_s": statistics.median(first),
        "score": rate(lambda: client.score(scored)),
    }


# ------------------------------------------------------------------------------------ the run


def part(name: str, *flags: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--part", name, *flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    return json.loads(done.stdout)


def with_server(checkpoint: list[str]) -> dict[str, float]:
    from k3serve.local_hosts import free_port

    port = free_port()
    command = [sys.executable, "-m", "k3serve", *checkpoint, "--port", str(port)]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=ROOT)
    try:
        wait_until_ready(server, port)
        return part("client", "--base-url", f"http://127.0.0.1:{port}")
    finally:
        server.terminate()
        server.wait(60)


def wait_until_ready(server: subprocess.Popen[bytes], port: int, timeout_s: float = 300) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and server.poll() is None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError("the server did not become ready")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--checkpoint", type=Path, help="[the built-in K3-nano]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--part", choices=["bare", "client"], help=argparse.SUPPRESS)
    parser.add_argument("--base-url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part == "bare":
        print(json.dumps(bare(options.checkpoint)))
        return
    if options.part == "client":
        print(json.dumps(over_http(options.base_url)))
        return
    flags = ["--checkpoint", str(options.checkpoint)] if options.checkpoint else []
    rounds = []
    for number in range(options.rounds):
        rounds.append({"bare": part("bare", *flags), "http": with_server(flags)})
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
    print(f"| {len(rounds)} rounds, medians, {os.cpu_count()} cores | bare | HTTP | HTTP / bare |")
    print("|---|---|---|---|")
    for key, name in names.items():
        scale = 1000 if key == "first_token_s" else 1
        bare_value = statistics.median(r["bare"][key] for r in rounds) * scale
        http_value = statistics.median(r["http"][key] for r in rounds) * scale
        ratio = http_value / bare_value
        print(f"| {name} | {bare_value:.1f} | {http_value:.1f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
