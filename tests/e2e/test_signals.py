"""Stopping a server that works: every signal is noticed, every answer is whole."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.serving import TINY_CHAT, Server

FLAGS = ("--checkpoint", str(TINY_CHAT), "--context", "512", "--max-slots", "4")


@pytest.mark.skipif(sys.platform != "linux", reason="threads cannot be addressed elsewhere")
def test_a_signal_that_another_thread_takes_ends_the_server() -> None:
    """Python runs handlers in the main thread only, once something wakes that."""
    with Server(*FLAGS) as server:
        threads = sorted(int(t.name) for t in Path(f"/proc/{server.process.pid}/task").iterdir())
        os.kill(threads[-1], signal.SIGTERM)
        assert server.wait(30) == 0, "".join(server.log[-20:])
