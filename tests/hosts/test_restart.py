"""A front that outlives its engine: streams go on without a lost or doubled character."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from tests.serving import Server

STREAMS = 8
TOKENS = 300
FLAGS = ("--hosts", "2", "--restart", "--resume", "--context", "512", "--steps-per-tick", "2")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(*FLAGS) as server:
        yield server
        assert server.stop() == 0, "".join(server.log[-20:])


def body(index: int) -> dict[str, Any]:
    return {
        "prompt": [40 + index, 50, 60 + index],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "temperature": 0.0 if index % 2 else 1.0,
        "seed": index,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def stream(server: Server, index: int, begun: threading.Barrier | None = None) -> list[Any]:
    """All chunks of one stream; waits at `begun` once the first has come."""
    parts = urlsplit(server.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=120)
    connection.request("POST", "/v1/completions", json.dumps(body(index)))
    response = connection.getresponse()
    assert response.status == 200
    chunks: list[Any] = []
    for line in response:
        if line.startswith(b"data: "):
            data = line[6:].strip()
            chunks.append("[DONE]" if data == b"[DONE]" else json.loads(data))
            if len(chunks) == 1 and begun is not None:
                begun.wait(60)
    return chunks


def ids(chunks: list[Any]) -> list[int]:
    return [token for c in chunks[:-1] for choice in c["choices"] for token in choice["token_ids"]]


def engine_hosts(server: Server) -> list[int]:
    """Process ids of hosts 0 and 1."""
    children = psutil.Process(server.process.pid).children()
    by_id = {command[command.index("--host-id") + 1]: c.pid for c in children
             if "--host-id" in (command := c.cmdline())}  # fmt: skip
    return [by_id["0"], by_id["1"]]


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[list[Any]]:
    with ThreadPoolExecutor(STREAMS) as pool:
        return list(pool.map(lambda index: stream(server, index), range(STREAMS)))


@pytest.mark.parametrize("victim", [0, 1])
def test_eight_streams_go_on_when_a_host_dies(
    server: Server, undisturbed: list[list[Any]], victim: int
) -> None:
    begun = threading.Barrier(STREAMS + 1)
    with ThreadPoolExecutor(STREAMS) as pool:
        runs = [pool.submit(stream, server, index, begun) for index in range(STREAMS)]
        begun.wait(60)
        os.kill(engine_hosts(server)[victim], signal.SIGKILL)
        ended = [run.result(120) for run in runs]
    for index, (before, after) in enumerate(zip(undisturbed, ended, strict=True)):
        assert after[-1] == "[DONE]"
        same = sum(a == b for a, b in zip(ids(before), ids(after), strict=True))
        print(index, same, len(ids(after)))
        assert after[-2]["usage"]["completion_tokens"] == TOKENS
        assert after[-2]["usage"]["prompt_tokens"] == before[-2]["usage"]["prompt_tokens"]
        assert ids(after) == ids(before)
