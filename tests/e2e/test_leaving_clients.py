"""A client that leaves frees its slot, streamed or not, and harms nobody."""

from __future__ import annotations

import http.client
import json
import time
from urllib.parse import urlsplit

import pytest

from tests.serving import Server

PROMPT = [300, 301, 302]


def running(server: Server) -> float:
    lines = server.text("/metrics").splitlines()
    return sum(
        float(line.split()[-1])
        for line in lines
        if line.startswith(("vllm:num_requests_running{", "vllm:num_requests_waiting{"))
    )


@pytest.mark.parametrize("stream", [True, False])
def test_pc_23_client_goes_away(nano: Server, stream: bool) -> None:
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": 1}
    before = nano.post("/v1/completions", body)["choices"]
    parts = urlsplit(nano.url)
    long = {"prompt": [PROMPT] * 20, "max_tokens": 1900, "ignore_eos": True, "stream": stream}
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(long))
    deadline = time.monotonic() + 60
    while running(nano) < 20:
        assert time.monotonic() < deadline, "the long requests never ran"
    assert connection.sock is not None
    connection.sock.close()
    connection.close()
    deadline = time.monotonic() + 30
    while running(nano) > 0:
        assert time.monotonic() < deadline, "slots are still held"
    assert nano.post("/v1/completions", body)["choices"] == before


def test_a_stop_string_ends_the_run_on_the_device(nano: Server) -> None:
    """1,900 tokens would take far longer than the time-out of this request."""
    ask = {"prompt": PROMPT, "max_tokens": 1900, "ignore_eos": True, "temperature": 0}
    text = nano.post("/v1/completions", ask | {"max_tokens": 40})["choices"][0]["text"]
    stop = text[10:16]
    answer = nano.post("/v1/completions", ask | {"stop": stop})
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["text"] == text[: text.index(stop)]
    assert answer["usage"]["completion_tokens"] <= 40
    deadline = time.monotonic() + 30
    while running(nano) > 0:
        assert time.monotonic() < deadline, "the slot is still held"
