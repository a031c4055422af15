"""Finding the other hosts, and no wait for one without an end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from jax._src.clusters import ClusterEnv

from k3serve.errors import ConfigError, HostFailure
from k3serve.runtime import mesh


def platform(*, present: bool = True, count: int | None = 1, opt_in: bool = False) -> type:
    """A stand-in for one of JAX's cluster kinds; count None: it cannot tell."""

    class Platform:
        opt_in_only_method = opt_in

        @staticmethod
        def is_env_present() -> bool:
            return present

        @staticmethod
        def get_process_count() -> int:
            if count is None:
                raise RuntimeError("no job set")
            return count

    return Platform


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ([], False),
        ([platform(present=False, count=4)], False),
        ([platform(count=4, opt_in=True)], False),  # mpi4py is installed, say
        ([platform(count=1)], False),
        ([platform(count=None)], False),
        ([platform(present=False), platform(count=4)], True),
    ],
    ids=["none", "absent", "opt-in", "one-host", "cannot-tell", "four-hosts"],
)
def test_a_platform_with_several_processes_is_a_pod(
    monkeypatch: pytest.MonkeyPatch, kinds: list[type], expected: bool
) -> None:
    monkeypatch.setattr(ClusterEnv, "_cluster_types", kinds)
    assert mesh._on_pod() is expected


class MeetingPoint:
    """JAX's client, as far as the hosts' exchange uses it; silent: no call ever comes back."""

    def __init__(self, told: dict[str, str], *, silent_at: str = "") -> None:
        self.told, self.silent_at = told, silent_at
        self.let_go = threading.Event()

    def _hang(self, call: str) -> None:
        if call == self.silent_at:
            assert self.let_go.wait(30)

    def key_value_set(self, key: str, value: str) -> None:
        self._hang("set")
        self.told[key] = value

    def key_value_dir_get(self, folder: str) -> list[tuple[str, str]]:
        self._hang("get")
        return [(key, value) for key, value in self.told.items() if key.startswith(folder)]


@pytest.fixture
def meet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., MeetingPoint]]:
    """Makes this process host 0 of two that have met."""
    points: list[MeetingPoint] = []

    def make(told: dict[str, str], *, silent_at: str = "") -> MeetingPoint:
        points.append(MeetingPoint(told, silent_at=silent_at))
        monkeypatch.setattr(mesh, "_client", lambda: points[-1])
        return points[-1]

    monkeypatch.setattr(mesh.jax, "process_count", lambda: 2)
    monkeypatch.setattr(mesh, "LATE_S", 0.05)
    monkeypatch.setattr(mesh, "TELL_S", 0.05)
    yield make
    for point in points:
        point.let_go.set()


@pytest.mark.parametrize("call", ["set", "get"])
def test_a_meeting_point_that_does_not_answer_ends_the_wait(
    meet: Callable[..., MeetingPoint], call: str
) -> None:
    """Host 0 is stopped, say: the call itself never comes back."""
    meet({}, silent_at=call)
    with pytest.raises(
        HostFailure, match=r"host 0, where the hosts meet, did not answer .*'ready'"
    ):
        mesh.wait_for_all_hosts(0.05)


def test_a_host_that_does_not_come_is_named(meet: Callable[..., MeetingPoint]) -> None:
    meet({})
    with pytest.raises(HostFailure, match=r"host 1 did not get to 'ready'"):
        mesh.wait_for_all_hosts(0.0)


def test_a_host_that_could_not_start_is_named_with_its_reason(
    meet: Callable[..., MeetingPoint],
) -> None:
    meet({"k3serve/failed/1": "no such checkpoint"})
    with pytest.raises(HostFailure, match="host 1 could not start: no such checkpoint"):
        mesh.wait_for_all_hosts(30)


def test_telling_a_failure_to_nobody_does_not_hold_the_end(
    meet: Callable[..., MeetingPoint], caplog: pytest.LogCaptureFixture
) -> None:
    silent = meet({}, silent_at="set")
    mesh.tell_failure("disk full")
    assert "could not be told: host 0 does not answer" in caplog.text
    answering = meet({})
    mesh.tell_failure("disk full")
    assert answering.told == {"k3serve/failed/0": "disk full"} and not silent.told


def test_settings_that_differ_are_named_with_both_values(
    meet: Callable[..., MeetingPoint],
) -> None:
    meet({"k3serve/settings/1": '{"--dtype": "bfloat16"}'})
    with pytest.raises(ConfigError, match="--dtype is auto on host 0, but bfloat16 on host 1"):
        mesh.agree({"--dtype": "auto"}, 30)


def test_hosts_that_do_not_come_to_the_end_are_not_waited_for(
    meet: Callable[..., MeetingPoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    point = meet({})
    monkeypatch.setattr(mesh.jax.distributed, "shutdown", lambda: point.let_go.wait(30))
    with pytest.raises(HostFailure, match=r"not all hosts came to the end within 0\.05 s"):
        mesh.leave(0.05)
