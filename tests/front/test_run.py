"""A front and its engine, each a process; the engine has no model and fails on demand."""

from __future__ import annotations

import http.client
import json
import os
import signal
import urllib.error
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from tests.front import fake_engine
from tests.serving import TINY_CHAT, Server, is_alive

TOKENS = 25
STREAMS = fake_engine.REQUESTS
Start = Callable[..., Server]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    servers: list[Server] = []

    def make(*flags: str, fault: str = "") -> Server:
        environment = {fake_engine.FAULT: fault, fake_engine.LIVES: str(tmp_path / "lives")}
        server = Server(
            "--checkpoint", str(TINY_CHAT), "--context", "512", *flags,
            words=("tests.front.fake_engine", "front"), environment=environment, timeout_s=60,
        )  # fmt: skip
        servers.append(server)
        return server

    yield make
    for server in servers:
        server.kill()


def pids(tmp_path: Path) -> list[int]:
    return [int(line) for line in (tmp_path / "lives").read_text().split()]


def body(index: int, **more: Any) -> dict[str, Any]:
    return {
        "prompt": [40 + index, 50],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    } | more


def right(index: int) -> list[int]:
    sequence = (40 + index, 50)
    for _ in range(TOKENS):
        sequence = (*sequence, fake_engine.next_token(sequence))
    return list(sequence[2:])


def stream(server: Server, index: int, **more: Any) -> list[Any]:
    """The chunks of one stream as JSON; "[DONE]" stays a word. Status 503 gives the error alone."""
    parts = urlsplit(server.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(body(index, **more)))
    response = connection.getresponse()
    if response.status != 200:
        return [json.loads(response.read())]
    data = [line[6:].strip() for line in response if line.startswith(b"data: ")]
    return ["[DONE]" if part == b"[DONE]" else json.loads(part) for part in data]


def streams(server: Server, **more: Any) -> list[list[Any]]:
    with ThreadPoolExecutor(STREAMS) as pool:
        return list(pool.map(lambda index: stream(server, index, **more), range(STREAMS)))


def ids(chunks: list[Any]) -> list[int]:
    choices = [c for chunk in chunks if "choices" in chunk for c in chunk["choices"]]
    return [token for choice in choices for token in choice["token_ids"]]


def check_whole(chunks: list[Any], index: int) -> None:
    assert chunks[-1] == "[DONE]"
    assert ids(chunks) == right(index)
    assert chunks[-2]["usage"]["prompt_tokens"] == 2
    assert chunks[-2]["usage"]["completion_tokens"] == TOKENS


def check_error(chunks: list[Any]) -> None:
    assert "error" in chunks[-1] and "[DONE]" not in chunks


def test_answers_are_whole_and_a_signal_ends_both_processes(start: Start, tmp_path: Path) -> None:
    server = start()
    for index, chunks in enumerate(streams(server)):
        check_whole(chunks, index)
    assert "vllm:iteration_tokens_total_count" in server.text("/metrics")
    assert server.stop(signal.SIGTERM) == 0
    assert not any(is_alive(pid) for pid in pids(tmp_path))


@pytest.mark.parametrize("fault", ["crash", "hang", "fail"])
def test_streams_go_on_in_the_next_engine(start: Start, tmp_path: Path, fault: str) -> None:
    server = start("--restart", "--resume", "--tick-timeout", "1", fault=fault)
    for index, chunks in enumerate(streams(server)):
        check_whole(chunks, index)
    metrics = server.text("/metrics")
    assert "k3serve_engine_restarts_total 1.0" in metrics
    resumed = [line for line in metrics.splitlines() if "resumed_requests_total" in line][-1]
    assert float(resumed.split()[-1]) == STREAMS
    assert server.stop() == 0
    assert len(pids(tmp_path)) == 2 and not any(is_alive(pid) for pid in pids(tmp_path))


def test_a_penalty_that_counts_the_answers_tokens_is_not_resumed(start: Start) -> None:
    server = start("--restart", "--resume", fault="fail")
    for chunks in streams(server, presence_penalty=0.5):
        check_error(chunks)
        assert "presence_penalty" in chunks[-1]["error"]["message"]


def test_without_resume_open_streams_get_an_error_and_the_next_ones_an_answer(
    start: Start,
) -> None:
    server = start("--restart", fault="fail")
    for chunks in streams(server):
        check_error(chunks)
    while True:  # 503 with Retry-After while it restarts
        try:
            found = server.post("/v1/completions", body(0, stream=False, stream_options=None))
            break
        except urllib.error.HTTPError as error:
            assert error.code == 503 and float(error.headers["Retry-After"]) > 0
    assert found["choices"][0]["token_ids"] == right(0)


@pytest.mark.parametrize("fault", ["crash", "hang", "fail"])
def test_without_restart_open_streams_get_an_error_and_the_run_ends(
    start: Start, tmp_path: Path, fault: str
) -> None:
    server = start("--tick-timeout", "1", fault=fault)
    for chunks in streams(server):
        check_error(chunks)
    assert server.wait(30) not in (0, None)
    assert not any(is_alive(pid) for pid in pids(tmp_path))


def test_a_start_that_always_fails_is_given_up(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match="giving up"):
        start("--restart", fault="start")
    assert len(pids(tmp_path)) == 5


def test_no_engine_outlives_a_killed_front(start: Start, tmp_path: Path) -> None:
    server = start()
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait(10)
    (pid,) = pids(tmp_path)
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=10)
    assert not is_alive(pid)
