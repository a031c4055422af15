"""The hosts of one trial of scripts/check_faults.py: start them, make one fail, see how they end.

Rule: what is started here is ended here, whatever happens. Hosts are started one by one, as on a
cluster, or by `--hosts N`; a network of namespaces gives each an address of its own, so that one
can be cut off.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from k3serve.local_hosts import free_port

ROOT = Path(__file__).resolve().parent.parent
READY = re.compile(r"is ready: (http://\S+)")
POLL_S = 0.02


class Loopback:
    """All hosts at 127.0.0.1."""

    client_address = "127.0.0.1"  # where clients reach the leader

    def address(self, host: int) -> str:
        return "127.0.0.1"

    def prefix(self, host: int) -> list[str]:
        """What stands before a host's command."""
        return []

    def port(self) -> int:
        return free_port()

    def cut(self, host: int) -> None:
        raise AssertionError("a host at loopback cannot be cut off: use namespaces")


class Namespaces:
    """A network namespace for each host, joined by a bridge in one of its own; the leader has a
    second link, to this process."""

    _numbers = itertools.count(os.getpid())

    def __init__(self, hosts: int) -> None:
        number = next(self._numbers) % 250
        self._name = f"k3f{number}"
        self._own_address = f"10.78.{number}.1"
        self.client_address = f"10.78.{number}.2"
        self._hosts = hosts

    def address(self, host: int) -> str:
        return f"10.77.1.{host + 1}"

    def prefix(self, host: int) -> list[str]:
        return ["ip", "netns", "exec", self._space(host)]

    def port(self) -> int:
        return 9000  # nobody else lives there

    def cut(self, host: int) -> None:
        _ip("-n", self._hub, "link", "set", f"to{host}", "down")

    @property
    def _hub(self) -> str:
        return f"{self._name}-hub"

    def _space(self, host: int) -> str:
        return f"{self._name}-{host}"

    def build(self) -> None:
        _ip("netns", "add", self._hub)
        _ip("-n", self._hub, "link", "add", "name", "hub0", "type", "bridge")
        _ip("-n", self._hub, "link", "set", "dev", "hub0", "up")
        for host in range(self._hosts):
            space, end = self._space(host), f"to{host}"
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
            _ip("link", "add", "name", end, "netns", self._hub, "type", "veth",
                "peer", "name", "eth0", "netns", space)  # fmt: skip
            _ip("-n", self._hub, "link", "set", end, "master", "hub0", "up")
            _ip("-n", space, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            # collectives listen at the address of the host's name
            names = Path("/etc/netns") / space / "hosts"
            names.parent.mkdir(parents=True)
            names.write_text(f"127.0.0.1 localhost\n{self.address(host)} {socket.gethostname()}\n")
        space = self._space(0)
        _ip(
            "link",
            "add",
            "name",
            self._name,
            "type",
            "veth",
            "peer",
            "name",
            "eth1",
            "netns",
            space,
        )
        _ip("address", "add", f"{self._own_address}/24", "dev", self._name)
        _ip("link", "set", self._name, "up")
        _ip("-n", space, "address", "add", f"{self.client_address}/24", "dev", "eth1")
        _ip("-n", space, "link", "set", "eth1", "up")

    def remove(self) -> None:
        for space in [self._hub, *map(self._space, range(self._hosts))]:
            subprocess.run(["ip", "netns", "del", space], stderr=subprocess.DEVNULL, check=False)
            folder = Path("/etc/netns") / space
            (folder / "hosts").unlink(missing_ok=True)
            if folder.is_dir():
                folder.rmdir()
        subprocess.run(["ip", "link", "del", self._name], stderr=subprocess.DEVNULL, check=False)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@contextmanager
def namespaces(hosts: int) -> Iterator[Namespaces]:
    """Raises OSError where they are not permitted."""
    network = Namespaces(hosts)
    try:
        network.build()
        yield network
    finally:
        network.remove()


def why_no_namespaces() -> str | None:
    """None where hosts can be cut off."""
    try:
        with namespaces(1):
            return None
    except OSError as error:
        return str(error)


class Pod:
    """The hosts of a run. Use as a context manager: none is left over."""

    def __init__(
        self, hosts: int, flags: list[str], network: Loopback | Namespaces, *, launcher: bool
    ) -> None:
        """launcher: one process starts the hosts and ends with them, `--hosts N`."""
        self.url = ""
        self.ended: dict[int, float] = {}  # host -> when the last of its processes did
        self._network, self._launcher, self._count = network, launcher, hosts
        self._logs = [tempfile.TemporaryFile("w+") for _ in range(1 if launcher else hosts)]
        command = [sys.executable, "-m", "k3serve", *flags]
        command += ["--host", network.client_address, "--port", str(free_port())]
        if launcher:
            commands = [[*command, "--hosts", str(hosts)]]
        else:
            meet = f"{network.address(0)}:{network.port()}"
            command += ["--coordinator", meet, "--num-hosts", str(hosts), "--host-id"]
            commands = [[*network.prefix(i), *command, str(i)] for i in range(hosts)]
        self._started = [
            subprocess.Popen(each, stdout=subprocess.DEVNULL, stderr=log, cwd=ROOT)
            for each, log in zip(commands, self._logs, strict=True)
        ]
        self._seen: dict[int, set[psutil.Process]] = {host: set() for host in range(hosts)}
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._watch_ends, daemon=True)
        self._watch.start()

    def __enter__(self) -> Pod:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watch.join()
        left = set().union(*self._seen.values(), *map(_family, self._started))
        for started in self._started:
            started.kill()
        for process in left:  # the stopped ones, and what the others left behind
            _quietly(process.kill)
        for started in self._started:
            started.wait()
        for log in self._logs:
            log.close()

    def wait_ready(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.look():
            if self.ended or time.monotonic() > deadline:
                raise RuntimeError(f"the hosts did not get ready:\n{self.log()[-3000:]}")
            time.sleep(POLL_S)

    def look(self) -> str:
        """The leader's address, once it is ready."""
        found = READY.search(self.log(0))
        self.url = found.group(1) if found else ""
        return self.url

    def log(self, host: int | None = None) -> str:
        """A host's log, or all of them; with a launcher there is but one."""
        chosen = self._logs if host is None else [self._logs[0 if self._launcher else host]]
        return "".join(os.pread(log.fileno(), 1 << 20, 0).decode() for log in chosen)

    def fail(self, host: int, fault: str, *, engine_only: bool) -> None:
        """kill, stop or cut; engine_only: spares the host's front."""
        if fault == "cut":
            self._network.cut(host)
            return
        signum = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[fault]
        for process in self._processes(host):
            if not engine_only or process.pid != self._started[0 if self._launcher else host].pid:
                _quietly(partial(process.send_signal, signum))

    def end(self, host: int) -> None:
        """Ends a host that was stopped."""
        for process in self._processes(host):
            _quietly(process.kill)

    def wait_ended(self, hosts: set[int], deadline: float) -> bool:
        while not hosts <= self.ended.keys():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def status(self, host: int, timeout_s: float) -> int | None:
        """Exit status of a host, with a launcher that of the launcher; None where it still runs."""
        try:
            return self._started[0 if self._launcher else host].wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            return None

    def _processes(self, host: int) -> set[psutil.Process]:
        """Of a host: its engine and its front, unless that is the launcher."""
        if not self._launcher:
            return _family(self._started[host])
        return {p for p in _family(self._started[0]) if _host_id(p) == host}

    def _watch_ends(self) -> None:
        while not self._over.wait(POLL_S):
            for host, seen in self._seen.items():
                if host in self.ended:
                    continue
                seen |= self._processes(host)
                alive = {process for process in seen if _runs(process)}
                begun = seen if self._launcher else True
                if begun and not alive:
                    self.ended[host] = time.monotonic()


def _family(started: subprocess.Popen[bytes]) -> set[psutil.Process]:
    try:
        parent = psutil.Process(started.pid)
        return {parent, *parent.children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()


def _host_id(process: psutil.Process) -> int | None:
    try:
        words = process.cmdline()
        return int(words[words.index("--host-id") + 1])
    except (psutil.Error, ValueError, IndexError):
        return None


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _quietly(action: Callable[[], Any]) -> None:
    try:
        action()
    except psutil.NoSuchProcess:
        pass
