"""`--hosts N`: starts the N hosts of a run on this machine and ends with them.

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

PARENT_FD = "K3SERVE_PARENT_FD"
GRACE_S = 4.0  # with what a host needs to notice, less than --tick-timeout and 5 s


def free_port() -> int:
    """A port that was free on loopback a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_hosts(count: int, flags: list[str]) -> int:
    """Runs `python -m k3serve FLAGS` as hosts 0..count-1; returns 0 or the first failure."""
    coordinator = f"127.0.0.1:{free_port()}"
    read_end, write_end = os.pipe()  # the hosts see its end of file when this process dies
    hosts = []
    for host_id in range(count):
        command = [sys.executable, "-m", "k3serve", *flags, "--coordinator", coordinator]
        command += ["--num-hosts", str(count), "--host-id", str(host_id)]
        environment = os.environ | {PARENT_FD: str(read_end)}
        # a session of their own: Ctrl-C reaches this process alone, which asks host 0 to drain
        hosts.append(
            subprocess.Popen(command, env=environment, pass_fds=(read_end,), start_new_session=True)
        )
    os.close(read_end)

    def ask_to_stop(signum: int, _frame: object) -> None:
        for host in hosts:
            if host.poll() is None:
                host.send_signal(signal.SIGTERM)

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, ask_to_stop)
    status = _wait(hosts)
    os.close(write_end)
    return status


def _wait(hosts: list[subprocess.Popen[bytes]]) -> int:
    """Until all have ended; after the first failure the rest have GRACE_S."""
    status, deadline = 0, None
    while None in (ended := [host.poll() for host in hosts]):  # asks every one, each time
        failed = next((code for code in ended if code), 0)
        if failed and deadline is None:
            status, deadline = failed, time.monotonic() + GRACE_S
        if deadline is not None and time.monotonic() > deadline:
            for host in hosts:
                if host.poll() is None:
                    host.kill()
        time.sleep(0.05)
    status = status or next((h.returncode for h in hosts if h.returncode), 0)
    return status if status >= 0 else 128 - status


def watch_parent() -> None:
    """In a host: ends the process when the one that started it is gone."""
    fd = os.environ.get(PARENT_FD)
    if fd is None:
        return

    def wait() -> None:
        os.read(int(fd), 1)  # nothing is ever written: returns at end of file
        os._exit(1)

    threading.Thread(target=wait, name="watch-parent", daemon=True).start()
