"""Whether drafts change anything: held-out chats asked with and without, alone and eight at a time.

    python scripts/check_drafts.py --base-url http://127.0.0.1:8000 [--prompts 300]
    python scripts/check_drafts.py --hosts 1 2 4        # starts the servers itself, in turn

Rule: text, reasoning, token bytes and every log-probability must be equal bit for bit, on one
server (so: per number of hosts); exits with status 1 and shows the first differences otherwise,
and also when no draft was accepted at all: then nothing was checked.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

STREAMS = 8


class Client:
    """One kept connection a thread."""

    def __init__(self, base_url: str) -> None:
        parts = urlsplit(base_url)
        self.host, self.port = parts.hostname or "", parts.port
        self.local = threading.local()

    def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        if not hasattr(self.local, "connection"):
            self.local.connection = http.client.HTTPConnection(self.host, self.port, timeout=600)
        connection = self.local.connection
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        answer = json.loads(response.read())
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {answer}")
        return answer


def bodies(count: int) -> list[dict[str, Any]]:
    """Requests of `count` held-out chats, from every skill and thinking mode in turn."""
    from scripts.train_nano import evaluate

    cases = evaluate.build_cases(max(1, -(-count // 100)), ("off", "max"))
    cases = evaluate.spread(cases, count)
    more = {"logprobs": True, "top_logprobs": 2, "max_tokens": 160}
    made = [evaluate.request_body(case, None) | more for case in cases]
    return [{k: v for k, v in body.items() if v is not None} for body in made]


def ask(client: Client, requests: list[dict[str, Any]], streams: int) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(streams) as pool:
        return list(pool.map(client.chat, requests))


def said(answer: dict[str, Any]) -> str:
    """All of an answer that must not change, as text: equal numbers have equal digits."""
    return json.dumps(answer["choices"], sort_keys=True)


def check(base_url: str, count: int, sampled: bool = False) -> dict[str, Any]:
    """Compares all ways of asking; gives the number of differences and the acceptance length."""
    client, requests = Client(base_url), bodies(count)
    if sampled:
        requests = [r | {"temperature": 1.0, "seed": i} for i, r in enumerate(requests)]
    plain = [request | {"speculate": False} for request in requests]
    expected = ask(client, plain, 1)
    ways = {
        "drafts, alone": ask(client, requests, 1),
        f"drafts, {STREAMS} streams": ask(client, requests, STREAMS),
        f"no drafts, {STREAMS} streams": ask(client, plain, STREAMS),
    }
    different = [
        f"{way}: {request['messages'][-1]['content']!r}\n  {said(a)[:400]}\n  {said(b)[:400]}"
        for way, answers in ways.items()
        for request, a, b in zip(requests, answers, expected, strict=True)
        if said(a) != said(b)
    ]
    counted = [a["usage"].get("speculation") for a in ways["drafts, alone"]]
    counted = [c for c in counted if c]
    steps, accepted = (sum(c[key] for c in counted) for key in ("steps", "accepted"))
    return {
        "chats": len(requests),
        "different": different,
        "tokens": sum(a["usage"]["completion_tokens"] for a in expected),
        "accepted": accepted,
        "acceptance_length": 1 + accepted / steps if accepted else None,
    }


def with_hosts(hosts: int, count: int) -> dict[str, Any]:
    from scripts.bench_serve import running_server

    flags = ["--hosts", str(hosts)] if hosts > 1 else []
    with running_server(*flags) as url:
        return check(url, count)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--base-url", help="a running server, e.g. http://127.0.0.1:8000")
    parser.add_argument("--hosts", type=int, nargs="+", default=[1], metavar="N",
                        help="else: start servers of so many hosts, in turn [1]")  # fmt: skip
    parser.add_argument("--prompts", type=int, default=300, metavar="N", help="[300]")
    options = parser.parse_args()
    bad = 0
    for hosts in [0] if options.base_url else options.hosts:
        if options.base_url:
            try:
                result = check(options.base_url, options.prompts)
            except OSError as error:
                parser.exit(2, f"no answer from {options.base_url} ({error})\n")
        else:
            result = with_hosts(hosts, options.prompts)
        bad += len(result["different"])
        where = options.base_url or f"{hosts} host(s)"
        length = result["acceptance_length"]
        drafts = (
            f"acceptance length {length:.2f}" if length else "no drafts, so nothing was checked"
        )
        bad += length is None
        print(f"{where}: {result['chats']} chats, {result['tokens']} tokens, {drafts}, "
              f"{len(result['different'])} differences")  # fmt: skip
        for text in result["different"][:5]:
            print(" ", text)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
