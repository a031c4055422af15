"""1, 2 and 4 real hosts on CPU: the same tokens, the same bits on every run, and clean ends."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from k3serve.local_hosts import free_port
from tests.serving import TINY_CHAT, Server, is_alive

FLAGS = ("--checkpoint", str(TINY_CHAT), "--context", "512", "--max-slots", "4", "--allow-reserved")
GOLDENS = json.loads((TINY_CHAT / "chat_goldens.json").read_text())


def answers(server: Server) -> list[dict[str, Any]]:
    """Greedy answers with log-probabilities to the golden chats, all at once in slots."""
    body = {
        "prompt": [golden["prompt_ids"] for golden in GOLDENS],
        "max_tokens": 24,
        "temperature": 0,
        "logprobs": 2,
        "echo": True,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return server.post("/v1/completions", body)["choices"]


def answers_and_end(count: int, signum: int, compiled: bool = False) -> list[dict[str, Any]]:
    """One whole run: answers, then a signal that ends all hosts with status 0. compiled: no host
    may have to compile.
    """
    with Server(*FLAGS, "--hosts", str(count)) as server:
        if compiled:
            assert sum("from the persistent cache" in line for line in server.log) == count
        hosts = server.children()
        assert len(hosts) == count
        found = answers(server)
        assert server.stop(signum) == 0, "".join(server.log[-20:])
        assert not any(is_alive(pid) for pid in hosts)
    return found


@pytest.fixture(scope="module")
def runs() -> dict[int, list[dict[str, Any]]]:
    """Per number of hosts, the answers of one run."""
    return {count: answers_and_end(count, signal.SIGTERM) for count in (1, 2, 4)}


@pytest.mark.parametrize("count", [1, 2, 4])
def test_greedy_tokens_equal_the_goldens(runs: dict[int, list[dict[str, Any]]], count: int) -> None:
    for choice, golden in zip(runs[count], GOLDENS, strict=True):
        assert choice["token_ids"] == golden["greedy_ids"]
        scored = choice["logprobs"]["token_logprobs"][1 : len(golden["prompt_ids"])]
        assert scored == pytest.approx(golden["prompt_logprobs"], abs=2e-4)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_second_run_gives_the_same_bits_compiles_nothing_and_ends_with_ctrl_c(
    runs: dict[int, list[dict[str, Any]]], count: int
) -> None:
    again = answers_and_end(count, signal.SIGINT, compiled=True)
    for first, second in zip(runs[count], again, strict=True):
        assert first["logprobs"] == second["logprobs"]
        assert first["token_ids"] == second["token_ids"]


def wait_until(condition: Callable[[], bool], timeout_s: float = 30) -> bool:
    """Polls another process's state, of which there is no event to wait for."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_a_signal_during_the_start_ends_all_hosts() -> None:
    """Once the hosts have met, JAX would keep SIGTERM to itself, and the start go on."""
    command = [sys.executable, "-m", "k3serve", *FLAGS, "--hosts", "2", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as launcher:
        try:
            assert launcher.stderr is not None
            assert any("compiling the tick" in line for line in launcher.stderr)
            hosts = [child.pid for child in psutil.Process(launcher.pid).children()]
            launcher.terminate()
            assert launcher.wait(10) == 0
            assert not any(is_alive(pid) for pid in hosts)
        finally:
            launcher.kill()


@pytest.mark.parametrize("host_id", ["0", "1"])
def test_a_host_that_waits_for_the_others_in_vain_says_where(host_id: str) -> None:
    """Not a core dump, which is how JAX's own time limit ends."""
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "k3serve", "--coordinator", address, "--num-hosts", "2"]
    command += ["--host-id", host_id, "--connect-timeout", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1, ended.stderr
    assert f"host {host_id}: not all 2 hosts met at {address} within 1 s" in ended.stderr


def test_hosts_with_different_flags_refuse_to_run() -> None:
    """They would start, and disagree in silence; both say what differs, and both values."""
    command = [sys.executable, "-m", "k3serve", *FLAGS, "--num-hosts", "2", "--port", "0"]
    command += ["--coordinator", f"127.0.0.1:{free_port()}"]
    own = (["--host-id", "0"], ["--host-id", "1", "--dtype", "bfloat16"])
    hosts = [subprocess.Popen(command + flags, stderr=subprocess.PIPE, text=True) for flags in own]
    try:
        for host in hosts:
            said = host.communicate(timeout=60)[1]
            assert "--dtype is auto on host 0, but bfloat16 on host 1" in said
            assert host.returncode == 2
    finally:
        for host in hosts:
            host.kill()


def test_no_host_outlives_a_killed_launcher() -> None:
    with Server(*FLAGS, "--hosts", "2") as server:
        hosts = server.children()
        server.kill()
        assert wait_until(lambda: not any(is_alive(pid) for pid in hosts))


def test_a_killed_follower_is_an_error_for_open_streams_and_ends_the_run() -> None:
    with Server(*FLAGS, "--hosts", "2") as server:
        follower = server.children()[1]
        seen = threading.Event()
        received: list[bytes] = []

        def stream() -> None:
            parts = urlsplit(server.url)
            connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
            body = {"prompt": [5, 6, 7], "max_tokens": 500, "stream": True, "ignore_eos": True}
            connection.request("POST", "/v1/completions", json.dumps(body))
            try:
                for line in connection.getresponse():
                    received.append(line)
                    seen.set()
            except (OSError, http.client.HTTPException):
                received.append(b"connection broken")

        reader = threading.Thread(target=stream)
        reader.start()
        assert seen.wait(60)
        os.kill(follower, signal.SIGKILL)
        reader.join(60)
        status = server.wait(60)
    assert not reader.is_alive()
    text = b"".join(received)
    assert b'"error"' in text or b"connection broken" in text
    assert b"[DONE]" not in text
    assert status not in (0, None)


def start_two(checkpoints: list[Path], *flags: str) -> tuple[list[int], list[str]]:
    """Exit statuses and logs of two hosts that were started one by one."""
    address = f"127.0.0.1:{free_port()}"
    hosts = []
    for host_id, checkpoint in enumerate(checkpoints):
        command = [sys.executable, "-m", "k3serve", "--checkpoint", str(checkpoint), *flags]
        command += ["--coordinator", address, "--num-hosts", "2", "--host-id", str(host_id)]
        hosts.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    try:
        logs = [host.communicate(timeout=120)[1] for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    return [host.returncode for host in hosts], logs


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    folder = tmp_path / TINY_CHAT.name
    shutil.copytree(TINY_CHAT, folder)
    return folder


def test_another_checkpoint_on_one_host_is_named_by_both(copied: Path) -> None:
    """Same config, same sizes, other weights: they would answer nonsense together."""
    shard = next(copied.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes(data)
    statuses, logs = start_two([TINY_CHAT, copied], "--port", "0")
    assert statuses == [2, 2], logs
    for log in logs:
        assert f"the checkpoint's file {shard.name} (its checksum) is" in log
        assert "weights loaded" not in log


def test_a_damaged_tokenizer_ends_all_hosts_before_they_load(copied: Path) -> None:
    (copied / "tiktoken.model").write_bytes(b"not a vocabulary")
    statuses, logs = start_two([copied, copied], "--port", "0")
    assert statuses == [2, 1], logs
    assert "tiktoken.model" in logs[0]
    assert "host 0 could not start" in logs[1] and "tiktoken.model" in logs[1]
    assert not any("weights loaded" in log for log in logs)


def test_a_taken_port_ends_all_hosts_before_they_load() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        statuses, logs = start_two([TINY_CHAT, TINY_CHAT], "--port", port)
    assert statuses == [2, 1], logs
    assert f"--port {port}: cannot listen there" in logs[0]
    assert "host 0 could not start" in logs[1] and "cannot listen there" in logs[1]
    assert not any("weights loaded" in log for log in logs)


def test_a_damaged_checkpoint_on_all_hosts_is_named_and_ends_them(copied: Path) -> None:
    shard = next(copied.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    statuses, logs = start_two([copied, copied], "--port", "0")
    assert all(status in (1, 2) for status in statuses), logs
    assert all(shard.name in log for log in logs)


def test_drafts_change_no_bit_on_two_hosts() -> None:
    """K3-nano and its draft; scripts/check_drafts.py asks 300 chats on 1, 2 and 4 hosts."""
    from scripts import check_drafts

    result = check_drafts.with_hosts(2, 12)
    assert result["different"] == [] and result["acceptance_length"] > 2
