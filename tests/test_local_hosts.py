"""The launcher of `--hosts N`, with small programs in place of hosts."""

from __future__ import annotations

import subprocess
import sys

import pytest

from k3serve import local_hosts

STUCK = "import signal; signal.pause()"


@pytest.mark.parametrize("programs", [(STUCK, "exit(3)"), ("exit(3)", STUCK), ("", "exit(3)")])
def test_a_failed_host_ends_the_others_wherever_it_stands(
    programs: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_hosts, "GRACE_S", 0.1)
    hosts = [subprocess.Popen([sys.executable, "-c", program]) for program in programs]
    run = local_hosts.LocalHosts(hosts)
    try:
        assert run.wait() == 3
        assert all(host.returncode is not None for host in hosts)
    finally:
        run.close()


def test_a_host_that_a_signal_ended_counts_as_a_shell_would() -> None:
    program = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    hosts = [subprocess.Popen([sys.executable, "-c", program])]
    assert local_hosts.LocalHosts(hosts).wait() == 137
