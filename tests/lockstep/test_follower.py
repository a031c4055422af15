"""Followers in step with a leader, and what ends them."""

import subprocess
import sys
import threading

import pytest

from k3serve.errors import HostFailure
from k3serve.lockstep.follower import follow
from k3serve.lockstep.plan import plan_layout
from k3serve.types import Finish, Request, Sampling
from tests.lockstep.conftest import SHAPE
from tests.lockstep.fake_pod import WAIT_S, in_background
from tests.lockstep.test_leader import events_of, tokens_of
from tests.scheduler.fake_device import expected

REQUESTS = [Request(i, tuple(range(i + 1)), Sampling(max_tokens=9, seed=i)) for i in range(8)]


@pytest.mark.parametrize("leader_sync", [False, True])
def test_all_hosts_run_the_same_ticks_and_end_together(make_pod, make_leader, leader_sync):
    pod = make_pod(hosts=3)
    followers = [
        in_background(follow, pod.device(1), SHAPE),
        in_background(follow, pod.device(2), SHAPE, sync=True),
    ]
    leader = make_leader(pod, sync=leader_sync, max_queue=8, idle_interval_s=0.001)
    outboxes = [leader.submit(each) for each in REQUESTS]
    assert [tokens_of(outbox) for outbox in outboxes] == [
        expected(each, SHAPE.max_context) for each in REQUESTS
    ]
    assert leader.drain(WAIT_S)
    assert [follower.result(WAIT_S) for follower in followers] == [None, None]
    assert pod.dispatches == [len(pod.plans)] * 3, "a host launched a tick that another one did not"
    assert pod.reads == pod.dispatches, "a host left a tick behind"


@pytest.mark.parametrize("sync", [False, True])
def test_a_fault_ends_every_host_with_its_name(make_pod, make_leader, sync):
    pod = make_pod(hosts=2)
    pod.damage[3] = ("version", 99)
    follower = in_background(follow, pod.device(1), SHAPE, sync=sync)
    leader = make_leader(pod, sync=sync)
    last = events_of(leader.submit(Request(1, (1,), Sampling(29))))[-1]
    assert last.finish is Finish.ERROR and "check VERSION" in last.error
    with pytest.raises(HostFailure, match=r"tick 3: a host refused the plan, check VERSION"):
        follower.result(WAIT_S)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ConnectionError("reset by peer"), r"tick 0 failed on the device: ConnectionError\('reset"),
        (HostFailure("the collective broke"), "tick 0: the collective broke"),
    ],
)
def test_a_broken_collective_raises(make_pod, error, message):
    pod = make_pod(hosts=1)
    pod.broken[0] = error
    with pytest.raises(HostFailure, match=message):
        follow(pod.device(), SHAPE)


def test_a_follower_out_of_step_raises(make_pod, make_leader):
    pod = make_pod(hosts=2)
    pod.echo[2] = 1
    follower = in_background(follow, pod.device(1), SHAPE)
    leader = make_leader(pod, idle_interval_s=0.001)
    with pytest.raises(HostFailure, match="tick 2: the device answered for tick 1"):
        follower.result(WAIT_S)
    assert not leader.drain(WAIT_S)


def test_pc_50_a_silent_leader_is_noticed(make_pod):
    pod = make_pod(hosts=2)
    noticed: list[HostFailure] = []
    fired = threading.Event()

    def on_timeout(failure: HostFailure) -> None:
        noticed.append(failure)
        fired.set()

    follower = in_background(
        follow,
        pod.device(1),
        SHAPE,
        tick_timeout_s=0.02,
        start_timeout_s=0.02,
        on_timeout=on_timeout,
    )
    assert fired.wait(WAIT_S)
    for _ in range(2):  # it is still blocked in tick 0: let that come back, too late
        pod.put(0, plan_layout(SHAPE).zeros())
    with pytest.raises(HostFailure, match=r"tick 0 did not come back within 0\.02 s"):
        follower.result(WAIT_S)
    assert len(noticed) == 1


def test_followers_import_nothing_of_the_leader():
    code = (
        "import sys, k3serve.lockstep.follower\n"
        "banned = ('jax', 'k3serve.scheduler', 'k3serve.api', 'k3serve.text', "
        "'k3serve.lockstep.leader', 'http')\n"
        "print([m for m in sys.modules if m in banned])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    assert done.stdout.strip() == "[]"
