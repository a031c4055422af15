"""Random hosts fail at random moments: does everybody learn of it in time?

    python scripts/check_faults.py [--trials 40] [--seed 0] [--together N] [-- FLAGS OF THE SERVER]

Each trial starts 2 or 4 hosts, has several requests open, and then kills a host (SIGKILL), stops it
(SIGSTOP) or cuts it off the other hosts' network, while they start, idle, compute pages or decode.
Within the time limit of a tick and 5 s
  - every open request has ended, and no client can take its end for success; where the process
    that speaks HTTP lives, it says so itself: a 503, or an error event without [DONE];
  - /health has said so, where that process lives;
  - every other process has ended, with a status that is not 0.
Where the leader's front is stopped too nobody can tell: its clients learn of it when a launcher
ends it (this script does, in its place). Hosts that start have as long as a whole start takes here,
which is measured first, and --connect-timeout.
Rule: a trial depends on the seed and its number alone, so that it can be repeated: --first N
--trials 1. Cutting off needs network namespaces; where those are not permitted, hosts are stopped.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts import fault_clients, fault_hosts
from scripts.fault_clients import Client, HealthWatch, Outcome
from scripts.fault_hosts import Loopback, Namespaces, Pod

TICK_TIMEOUT_S, CONNECT_TIMEOUT_S, MARGIN_S = 4, 15, 5.0
READY_S = 240.0  # a start may compile
MOMENTS = ("start", "idle", "prefill", "decode")
SIZE = ("--context", "512", "--max-slots", "4", "--steps-per-tick", "2")
NANO = (*SIZE, "--rows", "1", "--draft", "none")


@dataclass(frozen=True, slots=True)
class Trial:
    number: int
    hosts: int
    moment: str
    fault: str  # kill, stop or cut
    victim: int
    after_s: float  # how long after the moment began
    launcher: bool  # --hosts N; else hosts are started one by one
    front: bool  # HTTP in a process of its own
    engine_only: bool  # the host's front is spared; a launcher's always is

    @property
    def http_lives(self) -> bool:
        """Whether the process that speaks HTTP can answer after the fault."""
        spared = self.front and (self.engine_only or self.launcher)
        return self.victim != 0 or self.fault == "cut" or spared

    @property
    def survivors(self) -> set[int]:
        """Hosts with a process that goes on; one that was cut off must end by itself, too."""
        lost = self.fault != "cut" and not (self.engine_only or self.launcher)
        return set(range(self.hosts)) - ({self.victim} if lost else set())

    def __str__(self) -> str:
        who = "leader" if self.victim == 0 else f"follower {self.victim}"
        who += "'s engine" if self.engine_only else ""
        started = "--hosts" if self.launcher else "one by one"
        started += "" if self.front else ", front in the engine"
        return f"{self.hosts} hosts ({started}), {self.moment} + {self.after_s:.2f} s: " \
               f"{self.fault} the {who}"  # fmt: skip


@dataclass(frozen=True, slots=True)
class Report:
    trial: Trial
    wrong: tuple[str, ...]  # empty: all as promised
    hosts_s: float  # from the fault to the end of the last surviving host
    clients_s: float | None  # to the end of the last request that was open
    outcomes: Counter[str]


def draw(number: int, seed: int, can_cut: bool) -> Trial:
    """The trial of that number."""
    rng = random.Random(seed * 100_003 + number)
    hosts = rng.choice([2, 2, 2, 4])
    moment = rng.choice(MOMENTS)
    trial = Trial(
        number,
        hosts,
        moment,
        fault=rng.choice(["kill", "stop", "cut"]),
        victim=rng.choice([0, rng.randrange(1, hosts)]),
        after_s=rng.uniform(0.0, 6.0 if moment == "start" else 1.5),
        launcher=rng.random() < 0.5,
        front=rng.random() < 0.7,
        engine_only=False,
    )
    if trial.front and not trial.launcher and trial.fault != "cut" and trial.victim == 0:
        trial = replace(trial, engine_only=rng.random() < 0.5)
    if trial.fault == "cut":  # each host in a namespace: no launcher starts them there
        return replace(trial, launcher=False, fault="cut" if can_cut else "stop")
    return trial


# ------------------------------------------------------------------------------------- one trial


def run(trial: Trial, flags: list[str], start_s: float) -> Report:
    """start_s: how long a start may take here."""
    connect_s = CONNECT_TIMEOUT_S if trial.moment == "start" else READY_S
    limits = ["--tick-timeout", str(TICK_TIMEOUT_S), "--connect-timeout", str(int(connect_s))]
    limits += ["--front", "process" if trial.front else "thread"]
    with (
        _network(trial) as network,
        Pod(trial.hosts, [*flags, *limits], network, launcher=trial.launcher) as pod,
    ):
        if trial.moment == "start":
            return _fail_start(trial, pod, start_s)
        pod.wait_ready(READY_S)
        return _fail_run(trial, pod)


@contextmanager
def _network(trial: Trial) -> Iterator[Loopback | Namespaces]:
    if trial.fault != "cut":
        yield Loopback()
        return
    with fault_hosts.namespaces(trial.hosts) as network:
        yield network


def _fail_start(trial: Trial, pod: Pod, start_s: float) -> Report:
    time.sleep(trial.after_s)
    late = pod.look() != ""  # it has started meanwhile: a run that idles
    failed_at = time.monotonic()
    pod.fail(trial.victim, trial.fault, engine_only=trial.engine_only)
    limit_s = TICK_TIMEOUT_S if late else start_s + CONNECT_TIMEOUT_S
    wrong = _hosts_end(trial, pod, failed_at + limit_s + MARGIN_S)
    return Report(trial, tuple(wrong), _hosts_s(trial, pod, failed_at), None, Counter())


def measure_start(hosts: int, flags: list[str]) -> float:
    """Seconds until so many hosts are ready, with compiled programs from the cache."""
    for _ in range(2):
        started = time.monotonic()
        with Pod(hosts, flags, Loopback(), launcher=False) as pod:
            pod.wait_ready(READY_S)
            taken_s = time.monotonic() - started
    return taken_s


def _fail_run(trial: Trial, pod: Pod) -> Report:
    whats = {"idle": (), "prefill": fault_clients.PREFILLING, "decode": fault_clients.DECODING}
    clients = [
        Client(pod.url, what, trial.number * 100 + i) for i, what in enumerate(whats[trial.moment])
    ]
    for client in clients:
        client.start()
    time.sleep(trial.after_s)  # the moment is random on purpose
    health = HealthWatch(pod.url)
    failed_at = time.monotonic()
    pod.fail(trial.victim, trial.fault, engine_only=trial.engine_only)
    health.start()
    late = Client(pod.url, "stream", trial.number)  # sent to a run that has lost a host
    late.start()
    deadline = failed_at + TICK_TIMEOUT_S + MARGIN_S
    wrong = _hosts_end(trial, pod, deadline)
    hosts_s = _hosts_s(trial, pod, failed_at)
    if trial.fault == "stop" and not trial.http_lives:
        pod.end(0)  # as a launcher would
    for client in [*clients, late]:
        client.join(max(0.0, deadline - time.monotonic()) + 0.5)
    health.finish()
    if trial.http_lives and health.unhealthy_at is None:
        wrong.append("/health never said that the run had failed")
    opened = {client.what: _open_at(client, failed_at) for client in clients}
    for client in clients:
        wrong += _judge(client, failed_at, deadline, trial.http_lives)
    if late.is_alive() or late.outcomes[-1].kind in ("done", "wrong"):
        wrong.append(f"the request after the fault: {late.outcomes[-1:] or 'no answer'}")
    ends = [found for client in clients if (found := _open_at(client, failed_at))]
    return Report(
        trial, tuple(wrong), hosts_s,
        max((end.ended_at for end in ends), default=failed_at) - failed_at if opened else None,
        Counter(end.kind for end in ends),
    )  # fmt: skip


def _open_at(client: Client, failed_at: float) -> Outcome | None:
    return next((o for o in client.outcomes if o.sent_at <= failed_at < o.ended_at), None)


def _judge(client: Client, failed_at: float, deadline: float, http_lives: bool) -> list[str]:
    if client.is_alive():
        return [f"{client.what}: no end in time"]
    found, last = _open_at(client, failed_at), client.outcomes[-1]
    wrong = [f"{client.what}: {o.kind}, {o.detail}" for o in client.outcomes if o.kind == "wrong"]
    if last.ended_at < failed_at:
        wrong.append(f"{client.what}: failed before the fault: {last.kind}, {last.detail}")
    elif last.ended_at > deadline:
        wrong.append(f"{client.what}: ended {last.ended_at - deadline:.1f} s too late")
    if http_lives and found is not None and found.kind == "broken":
        wrong.append(f"{client.what}: HTTP lived, but only broke off: {found.detail}")
    return wrong


def _hosts_end(trial: Trial, pod: Pod, deadline: float) -> list[str]:
    """What is wrong with how the other hosts ended."""
    others = set(range(trial.hosts)) if trial.launcher else trial.survivors
    if not pod.wait_ended(others, deadline):
        return [f"host {host} still runs" for host in sorted(others - pod.ended.keys())]
    statuses = {
        f"host {host}": pod.status(host, deadline - time.monotonic())
        for host in ([0] if trial.launcher else sorted(others))
    }
    wrong = [f"{name} still runs" for name, status in statuses.items() if status is None]
    return wrong + [f"{name} ended with 0" for name, status in statuses.items() if status == 0]


def _hosts_s(trial: Trial, pod: Pod, failed_at: float) -> float:
    ends = [at for host, at in pod.ended.items() if host in trial.survivors]
    return max(ends, default=failed_at) - failed_at


# ------------------------------------------------------------------------------------ the series


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=1, help="the number of the first trial")
    parser.add_argument("--start-s", type=float, help="how long a start may take [measured]")
    parser.add_argument("--together", type=int, default=1, help="so many trials at a time")
    parser.add_argument("flags", nargs="*", help="flags of the server [K3-nano in a small shape]")
    options = parser.parse_args()
    why_not = fault_hosts.why_no_namespaces()
    if why_not:
        print(f"no host can be cut off here ({why_not}): those are stopped instead")
    flags = options.flags or list(NANO)
    numbers = range(options.first, options.first + options.trials)
    trials = [draw(number, options.seed, can_cut=why_not is None) for number in numbers]
    starts_s = {}
    for hosts in sorted({trial.hosts for trial in trials if trial.moment == "start"}):
        starts_s[hosts] = options.start_s or measure_start(hosts, flags) * options.together
        print(f"{hosts} hosts start within {starts_s[hosts]:.1f} s")
    reports = []
    with ThreadPoolExecutor(options.together) as pool:
        for report in pool.map(lambda t: run(t, flags, starts_s.get(t.hosts, READY_S)), trials):
            reports.append(report)
            show(report)
    table(reports)
    return 1 if any(report.wrong for report in reports) else 0


def show(report: Report) -> None:
    clients = "" if report.clients_s is None else f", clients {report.clients_s:.1f} s"
    told = ", ".join(f"{kind} {count}" for kind, count in sorted(report.outcomes.items()))
    print(f"{report.trial.number:3} {report.trial}: hosts {report.hosts_s:.1f} s{clients}"
          f"{f' ({told})' if told else ''}{' WRONG' if report.wrong else ''}")  # fmt: skip
    for line in report.wrong:
        print(f"      {line}")
    sys.stdout.flush()


def table(reports: list[Report]) -> None:
    print("\n| moment | trials | as promised | hosts ended after, s (most) | clients, s (most) |"
          "\n|---|---|---|---|---|")  # fmt: skip
    for moment in MOMENTS:
        some = [report for report in reports if report.trial.moment == moment]
        if not some:
            continue
        clients = [r.clients_s for r in some if r.clients_s is not None]
        print(f"| {moment} | {len(some)} | {sum(not r.wrong for r in some)} | "
              f"{max(r.hosts_s for r in some):.1f} | "
              f"{f'{max(clients):.1f}' if clients else '-'} |")  # fmt: skip
    faults = Counter(f"{r.trial.fault} {'leader' if r.trial.victim == 0 else 'follower'}"
                     for r in reports)  # fmt: skip
    print("faults:", ", ".join(f"{name} {count}" for name, count in sorted(faults.items())))
    ends = sum((r.outcomes for r in reports), Counter())
    print("open requests:", ", ".join(f"{kind} {count}" for kind, count in sorted(ends.items())))


if __name__ == "__main__":
    raise SystemExit(main())
