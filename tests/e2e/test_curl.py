"""The README's own commands, run as printed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.serving import Server

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_readmes_curl_streams_the_answer(nano: Server) -> None:
    found = re.search(r"```sh\n(curl -N .*?)```", README, re.S)
    assert found, "the README has no curl -N command"
    command = found.group(1).strip().replace("http://127.0.0.1:8000", nano.url)
    done = subprocess.run(
        ["sh", "-c", command + " -sS"], capture_output=True, text=True, timeout=60, check=True
    )
    events = [line[6:] for line in done.stdout.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]" and len(events) > 3
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]
    assert (
        "".join(delta.get("content") or "" for delta in deltas) == "The capital of France is Paris."
    )
