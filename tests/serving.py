"""A real server in processes of its own, for the tests that must see one from outside."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from scripts.bench_serve import COMPILED_LATE

DATA = Path(__file__).parent / "data"
TINY_CHAT = DATA / "k3_tiny_chat"
READY = re.compile(r"is ready: (http://\S+)")


class Server:
    """`python -m k3serve FLAGS --port 0`; use as a context manager, or stop() it.

    Its end is an AssertionError when one of its hosts compiled anything after start-up.

    words: what to run in place of `k3serve`; environment: variables beside ours.
    """

    def __init__(
        self,
        *flags: str,
        timeout_s: float = 240,
        words: tuple[str, ...] = ("k3serve",),
        environment: dict[str, str] | None = None,
    ) -> None:
        self.log: list[str] = []
        self.url = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", *words, *flags, "--port", "0"],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"} | (environment or {}),
            cwd=Path(__file__).parent.parent,
        )
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        if not self._ready.wait(timeout_s) or not self.url:
            self.kill()
            raise AssertionError("the server did not become ready:\n" + "".join(self.log[-40:]))

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            found = READY.search(line)
            if found:
                self.url = found.group(1)
                self._ready.set()
        self._ready.set()  # the end of the log: whoever waits must not wait on

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self, signum: int = signal.SIGTERM, timeout_s: float = 60) -> int:
        """Asks it to end and returns its status."""
        if self.process.poll() is None:
            self.process.send_signal(signum)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = 60) -> int:
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError("it did not end:\n" + "".join(self.log[-40:])) from None
        self._reader.join(timeout_s)  # invariant 4: its log is whole, and no host compiled late
        assert not [line for line in self.log if COMPILED_LATE in line], "".join(self.log[-40:])
        return status

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=60) as response:
            return json.loads(response.read() or b"null")

    def text(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=60) as response:
            return response.read().decode()

    def open(self, path: str, body: Any, timeout_s: float = 120) -> Any:
        """The response to a POST, still open; urllib.error.HTTPError on an error status."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=timeout_s)

    def post(self, path: str, body: Any, timeout_s: float = 120) -> Any:
        """The answer's JSON; urllib.error.HTTPError on an error status."""
        with self.open(path, body, timeout_s) as response:
            return json.load(response)

    def children(self) -> list[int]:
        """Process ids of the hosts that this process started."""
        return [child.pid for child in psutil.Process(self.process.pid).children()]


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
