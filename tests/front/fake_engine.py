"""An engine without a model behind a real front: `python -m tests.front.fake_engine serve FLAGS`
is `python -m k3serve FLAGS` with this file in place of the hosts.

The next token is a function of the whole sequence, so an answer that lost or doubled a token goes
on differently. What it does wrong, and in which of its lives, the environment says.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from k3serve.errors import HostFailure
from k3serve.local_hosts import LocalHosts
from k3serve.lockstep.for_front import FrontLink, front_link
from k3serve.types import Finish, Request, TickTimes, TokenEvent

# crash, hang, fail: in the first life, after some tokens; start: no life becomes ready
FAULT = "FAKE_ENGINE_FAULT"
LIVES = "FAKE_ENGINE_LIVES"  # a file with one line for each life so far
REQUESTS = 4  # a life with a fault begins to answer when so many have come
FAULT_AFTER = 40  # tokens, of all of them together


def next_token(sequence: tuple[int, ...]) -> int:
    return (31 * sequence[-1] + 7 * sequence[len(sequence) // 2] + len(sequence)) % 90 + 5


class FakeLeader:
    """Gives every open request one token a step, each step when the one before was sent."""

    def __init__(self, link: FrontLink, fault: str | None) -> None:
        self.link = link
        self.fault = fault
        self.given = 0
        self.changed = threading.Condition()
        self.open: dict[int, tuple[Request, tuple[int, ...], Any]] = {}
        self.draining = False

    def submit_to(self, request: Request, sink: Any) -> None:
        with self.changed:
            self.open[request.id] = (request, (), sink)
            self.changed.notify()

    def cancel(self, request_id: int) -> None:
        with self.changed:
            self.open.pop(request_id, None)

    def begin_drain(self, timeout_s: float) -> None:
        with self.changed:
            self.draining = True
            if timeout_s == 0:
                for request_id, (_, _, sink) in self.open.items():
                    sink.put(TokenEvent(request_id, finish=Finish.CANCELLED))
                self.open.clear()
            self.changed.notify()

    def run(self) -> None:
        if self.fault:
            with self.changed:
                self.changed.wait_for(lambda: len(self.open) == REQUESTS)
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.open or self.draining)
                if not self.open:
                    return
                for request_id in list(self.open):
                    self._step(request_id)
            if self.fault and self.given >= FAULT_AFTER:
                self._break()

    def _step(self, request_id: int) -> None:
        request, done, sink = self.open[request_id]
        done = (*done, next_token((*request.prompt, *done)))
        ended = len(done) >= request.sampling.max_tokens
        self.open[request_id] = (request, done, sink)
        if ended:
            del self.open[request_id]
        finish = Finish.LENGTH if ended else Finish.NONE
        self.given += 1
        sink.put(TokenEvent(request_id, (done[-1],), finish=finish))

    def _break(self) -> None:
        if self.fault == "fail":
            self.link.failed(HostFailure("host 1 is gone"))
            self.link.close()
            os._exit(1)
        os.kill(os.getpid(), signal.SIGSTOP if self.fault == "hang" else signal.SIGKILL)


def engine() -> int:
    """One life."""
    from k3serve.__main__ import serve_config

    config = serve_config(sys.argv[2:])
    link = front_link()
    assert link is not None
    lives = Path(os.environ[LIVES])
    with lives.open("a") as file:
        file.write(f"{os.getpid()}\n")
    first = len(lives.read_text().splitlines()) == 1
    fault = os.environ.get(FAULT)
    if fault == "start":
        return 1
    link.joined(leads=True)
    leader = FakeLeader(link, fault if first else None)
    link.ticked(_stats(), 0)
    link.serve(leader, config.tick_shape(512))  # type: ignore[arg-type]
    leader.run()
    link.close()
    return 0


def _stats() -> Any:
    from k3serve.lockstep.leader import TickStats

    return TickStats(0, 0.0, 0, 3, 0, 0, 0, TickTimes())


def front() -> int:
    """The command line, with fake hosts."""
    from k3serve import __main__, local_hosts
    from k3serve.front import run

    def start_hosts(flags: list[str], count: int | None, link: int) -> LocalHosts:
        command = [sys.executable, "-m", "tests.front.fake_engine", "engine", *flags]
        environment = os.environ | {local_hosts.LINK_FD: str(link)}
        return LocalHosts([subprocess.Popen(command, env=environment, pass_fds=(link,))])

    run.start_hosts = start_hosts  # type: ignore[assignment]
    run.LONGEST_PAUSE_S = 0.1
    sys.argv.pop(1)
    return __main__.main()


if __name__ == "__main__":
    sys.exit(engine() if sys.argv[1] == "engine" else front())
