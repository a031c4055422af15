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

from tests.serving import TINY_CHAT, Server

STREAMS = 8  # in four slots: some wait for one when the host dies
TOKENS = 400  # long enough that no stream ends before the host does
FLAGS = (
    "--checkpoint", str(TINY_CHAT), "--context", "512", "--max-slots", "4", "--allow-reserved",
    "--hosts", "2", "--restart", "--resume",
)  # fmt: skip


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


def stream(server: Server, index: int, begun: threading.Semaphore | None = None) -> list[Any]:
    """All chunks of one stream; says at `begun` that the first has come."""
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
                begun.release()
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
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(STREAMS) as pool:
        runs = [pool.submit(stream, server, index, begun) for index in range(STREAMS)]
        for _ in range(4):
            assert begun.acquire(timeout=60)
        os.kill(engine_hosts(server)[victim], signal.SIGKILL)
        ended = [run.result(120) for run in runs]
    for before, after in zip(undisturbed, ended, strict=True):
        assert after[-1] == "[DONE]"
        assert after[-2]["usage"]["completion_tokens"] == TOKENS
        assert after[-2]["usage"]["prompt_tokens"] == before[-2]["usage"]["prompt_tokens"]
        assert ids(after) == ids(before)
    restarts = [line for line in server.text("/metrics").splitlines()
                if line.startswith("k3serve_engine_restarts_total")]  # fmt: skip
    assert float(restarts[0].split()[-1]) >= 1
