"""Whether an answer depends on anything but its request: a mix of 200 requests replayed alone, in
random batches and orders, with a warm and a cold prefix cache, with and without overlap.

    python scripts/check_invariance.py [--requests 200] [--hosts 1 2]   # starts the servers itself
    python scripts/check_invariance.py --base-url http://127.0.0.1:8000  # one that runs

Rule: token ids, texts, log-probabilities and echo arrays are equal bit for bit to those of the
first replay, which asks one request at a time of a cold server with overlap; per number of hosts,
since ranks round in their own way. Exits with status 1 and shows the first differences otherwise,
and also when a warm server reused nothing: then that part was not checked.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.invariance_mix import Item, after, build  # noqa: E402

BATCHES = (1, 2, 5, 8, 16, 24)  # requests under way at once; more than slots: some wait
Said = dict[str, Any]  # what must not change of one answer


@dataclass
class Report:
    requests: int
    tokens: int = 0  # of the first replay
    replays: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    left_early: int = 0  # streams whose client went before the end
    reused: int | None = None  # prompt tokens that a warm replay took from the cache


# --------------------------------------------------------------------------------- the client


class Client:
    """One kept connection a thread; a client that leaves closes its own."""

    def __init__(self, base_url: str) -> None:
        self._parts = urlsplit(base_url)
        self._local = threading.local()

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self._parts.hostname or "", self._parts.port, timeout=600)

    def ask(self, item: Item) -> Said:
        """Raises RuntimeError on an error status."""
        if item.stream:
            return self._read_stream(item)
        if not hasattr(self._local, "connection"):
            self._local.connection = self._connect()
        with _post(self._local.connection, item.path, item.body) as response:
            answer = json.load(response)
        usage = answer["usage"]
        return {
            "choices": answer["choices"],
            "tokens": usage["completion_tokens"],
            "reused": (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        }

    def _read_stream(self, item: Item) -> Said:
        """The choice of a streamed completion, put together again: all of it, or its beginning."""
        connection = self._connect()
        ids: list[int] = []
        logprobs: list[float] = []
        chunks, ended = 0, False
        try:
            with _post(connection, item.path, item.body | {"stream": True}) as response:
                for line in response:
                    if chunks == item.leaves_after:
                        break
                    if not line.startswith(b"data: {"):
                        ended = ended or line.startswith(b"data: [DONE]")
                        continue
                    chunks += 1
                    for choice in json.loads(line[6:])["choices"]:
                        ids += choice.get("token_ids") or []
                        logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or []
        finally:
            connection.close()
        if item.leaves_after is None and not ended:
            raise RuntimeError("a stream ended without [DONE]")
        return {"token_ids": ids, "logprobs": logprobs, "tokens": len(ids), "ended": ended}


def _post(
    connection: http.client.HTTPConnection, path: str, body: dict[str, Any]
) -> http.client.HTTPResponse:
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"status {response.status}: {response.read()[:400]!r}")
    return response


# --------------------------------------------------------------------------------- the replays


def record(client: Client, items: Sequence[Item]) -> tuple[list[Item], list[Said]]:
    """The first replay, one at a time: the items with nothing left open, and their answers."""
    ready: list[Item] = []
    answers: list[Said] = []
    for item in items:
        if item.follows is not None:
            before = ready[item.follows].body
            message = answers[item.follows]["choices"][0]["message"]
            item = replace(item, body=after(item.body, before, message["content"] or ""))
        ready.append(item)
        # streams are recorded whole and not streamed: both forms must say the same
        answers.append(client.ask(replace(item, stream=False, leaves_after=None)))
    return ready, answers


def crowd(client: Client, items: Sequence[Item], seed: int) -> list[Said]:
    """All of them in a random order, in batches of random sizes; the answers in the old order."""
    rng = random.Random(seed)
    places = list(range(len(items)))
    rng.shuffle(places)
    answers: dict[int, Said] = {}
    with ThreadPoolExecutor(max(BATCHES)) as pool:
        while places:
            batch = [places.pop() for _ in range(min(rng.choice(BATCHES), len(places)))]
            asked = pool.map(lambda place: client.ask(items[place]), batch)
            answers |= zip(batch, asked, strict=True)
    return [answers[place] for place in range(len(items))]


def difference(item: Item, said: Said, expected: Said) -> str | None:
    """What differs, in words; None for nothing."""
    if not item.stream:
        pairs = {key: (said[key], expected[key]) for key in ("choices", "tokens")}
    else:
        choice, count = expected["choices"][0], said["tokens"]
        ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        if item.leaves_after is not None and not said["ended"]:
            ids, logprobs = ids[:count], logprobs[:count]
        pairs = {"token_ids": (said["token_ids"], ids), "logprobs": (said["logprobs"], logprobs)}
    for key, (now, then) in pairs.items():
        a, b = json.dumps(now, sort_keys=True), json.dumps(then, sort_keys=True)
        if a != b:  # equal numbers have equal digits
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), 0)
            start = max(0, at - 60)
            return f"{key} at {at}:\n    {a[start : at + 60]}\n    {b[start : at + 60]}"
    return None


class Check:
    """Replays of one mix, compared with its first."""

    def __init__(self, client: Client, items: Sequence[Item]) -> None:
        self.items, self.expected = record(client, items)
        self.report = Report(len(items), sum(said["tokens"] for said in self.expected))

    def compare(self, way: str, answers: Sequence[Said]) -> None:
        self.report.replays.append(way)
        for number, said in enumerate(answers):
            item = self.items[number]
            self.report.left_early += item.leaves_after is not None and not said["ended"]
            found = difference(item, said, self.expected[number])
            if found is not None:
                self.report.different.append(f"{way}: request {number} ({item.kind}), {found}")

    def alone(self, way: str, client: Client) -> None:
        self.compare(f"{way}, alone", [client.ask(item) for item in self.items])

    def crowds(self, way: str, client: Client, orders: int) -> None:
        for order in range(orders):
            answers = crowd(client, self.items, seed=order)
            self.compare(f"{way}, in batches, order {order}", answers)

    def warm(self, way: str, client: Client, orders: int) -> None:
        """A server with a prefix cache: filled by the first replay, used by the others."""
        self.crowds(f"{way}, filling the cache", client, 1)
        answers = [client.ask(item) for item in self.items]
        self.compare(f"{way}, warm, alone", answers)
        self.crowds(f"{way}, warm", client, orders)
        self.report.reused = sum(said.get("reused", 0) for said in answers)


def check(base_url: str, count: int, orders: int, seed: int = 0) -> Report:
    """On one server as it is: recorded alone, then in batches and alone again."""
    client = Client(base_url)
    run = Check(client, build(count, seed))
    run.crowds("as it runs", client, orders)
    run.alone("as it runs", client)
    return run.report


def check_hosts(hosts: int, count: int, orders: int, seed: int = 0) -> Report:
    """On servers of its own with so many hosts: cold and warm, with and without overlap."""
    base = ["--hosts", str(hosts)] if hosts > 1 else []
    cold = [*base, "--prefix-cache-mib", "0"]
    with server(cold) as url:
        client = Client(url)
        run = Check(client, build(count, seed))
        run.crowds("cold, overlap", client, orders)
    with server([*cold, "--sync"]) as url:
        run.alone("cold, --sync", Client(url))
        run.crowds("cold, --sync", Client(url), 1)
    for flags, way in (([], "overlap"), (["--sync"], "--sync")):
        with server([*base, *flags]) as url:
            run.warm(way, Client(url), orders)
    return run.report


@contextmanager
def server(flags: Sequence[str]) -> Iterator[str]:
    """The address of a server with these flags."""
    from scripts.bench_serve import running_server

    with running_server(*flags) as url:
        yield url


# ------------------------------------------------------------------------------------ the run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--base-url", help="a running server, e.g. http://127.0.0.1:8000")
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 2], metavar="N",
                        help="else: start servers of so many hosts, in turn [1 2]")  # fmt: skip
    parser.add_argument("--requests", type=int, default=200, metavar="N", help="[200]")
    parser.add_argument("--orders", type=int, default=2, metavar="N",
                        help="random orders of each way [2]")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the mix [0]")
    options = parser.parse_args()
    mix = (options.requests, options.orders, options.seed)
    bad = 0
    if options.base_url:
        bad += show(options.base_url, check(options.base_url, *mix))
    else:
        for hosts in options.hosts:
            bad += show(f"{hosts} host(s)", check_hosts(hosts, *mix))
    return 1 if bad else 0


def show(where: str, report: Report) -> int:
    """Prints a report; how many faults it has."""
    reused = "" if report.reused is None else f", {report.reused} prompt tokens reused"
    print(f"{where}: {report.requests} requests, {report.tokens} tokens, {len(report.replays)} "
          f"replays, {report.left_early} streams left early, {len(report.different)} differences"
          f"{reused}")  # fmt: skip
    print("  " + "; ".join(report.replays))
    for text in report.different[:5]:
        print(" ", text)
    if report.reused == 0:
        print("  the warm server reused nothing, so reuse was not checked")
    return len(report.different) + (report.reused == 0)


if __name__ == "__main__":
    sys.exit(main())
