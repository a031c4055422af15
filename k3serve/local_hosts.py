"""The host processes of a run that one process starts on this machine, and ends with.

Rule: no JAX here. The hosts live and die together: when one fails the others get a few seconds to
end by themselves, then are ended. A host also ends when this process is gone (see watch_parent), so
none is ever left over.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time

from k3serve.link import LINK_FD

PARENT_FD = "K3SERVE_PARENT_FD"
GRACE_S = 4.0  # with what a host needs to notice, less than --tick-timeout and 5 s


def free_port() -> int:
    """A port that was free on loopback a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_child() -> bool:
    """Whether another process started this one as a host, and watches it."""
    return PARENT_FD in os.environ


class LocalHosts:
    """The hosts of one run. close() ends what is left of them."""

    def __init__(
        self, processes: list[subprocess.Popen[bytes]], write_end: int | None = None
    ) -> None:
        self.processes = processes
        self._write_end = write_end  # the hosts see its end of file when this process dies
        self._end_by: float | None = None
        self._failure = 0  # the first that was seen

    def poll(self) -> int | None:
        """None while one runs; then 0, or the first failure as a shell would give it.

        After the first failure the others have GRACE_S.
        """
        ended = [host.poll() for host in self.processes]  # asks every one, each time
        if not self._failure and (failed := next((code for code in ended if code), 0)):
            self._failure = failed if failed > 0 else 128 - failed
            self.expect_end(GRACE_S)
        if self._end_by is not None and time.monotonic() > self._end_by:
            self.kill()
        return None if None in ended else self._failure

    def expect_end(self, within_s: float) -> None:
        """From now on they have so long to end by themselves; an earlier limit stays."""
        by = time.monotonic() + within_s
        self._end_by = by if self._end_by is None else min(self._end_by, by)

    def wait(self) -> int:
        while (status := self.poll()) is None:
            time.sleep(0.05)
        return status

    def send_signal(self, signum: int) -> None:
        for host in self.processes:
            if host.poll() is None:
                host.send_signal(signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        for host in self.processes:
            host.wait()
        if self._write_end is not None:
            os.close(self._write_end)
            self._write_end = None


def start_hosts(flags: list[str], count: int | None = None, link: int | None = None) -> LocalHosts:
    """Starts `python -m k3serve FLAGS`: one process as the flags say, or hosts 0..count-1.

    link: a descriptor that the first one inherits, named in its environment as link.LINK_FD.
    """
    read_end, write_end = os.pipe()
    commands = [[sys.executable, "-m", "k3serve", *flags]]
    if count is not None:
        there = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-hosts", str(count)]
        commands = [[*commands[0], *there, "--host-id", str(i)] for i in range(count)]
    processes = []
    for index, command in enumerate(commands):
        environment = os.environ | {PARENT_FD: str(read_end)}
        inherited = [read_end]
        if index == 0 and link is not None:
            environment |= {LINK_FD: str(link)}
            inherited.append(link)
        # a session of their own: Ctrl-C reaches this process alone, which asks host 0 to drain
        processes.append(
            subprocess.Popen(command, env=environment, pass_fds=inherited, start_new_session=True)
        )
    os.close(read_end)
    return LocalHosts(processes, write_end)


def run_hosts(count: int, flags: list[str]) -> int:
    """Runs hosts 0..count-1 to their end; returns 0 or the first failure. Passes signals on."""
    hosts = start_hosts(flags, count)
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: hosts.send_signal(signal.SIGTERM))
    status = hosts.wait()
    hosts.close()
    return status


def watch_parent() -> None:
    """In a host: ends the process when the one that started it is gone."""
    fd = os.environ.get(PARENT_FD)
    if fd is None:
        return

    def wait() -> None:
        os.read(int(fd), 1)  # nothing is ever written: returns at end of file
        os._exit(1)

    threading.Thread(target=wait, name="watch-parent", daemon=True).start()
