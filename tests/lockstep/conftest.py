from collections.abc import Callable, Iterator

import pytest

from k3serve.lockstep.leader import Leader
from k3serve.types import TickShape
from tests.lockstep.fake_pod import WAIT_S, FakePod

SHAPE = TickShape(
    max_slots=3,
    page_tokens=4,
    pages_per_tick=2,
    steps_per_tick=4,
    rows=1,
    pages_per_slot=8,
    num_pages=24,
)


@pytest.fixture
def make_pod() -> Iterator[Callable[..., FakePod]]:
    """FakePod(SHAPE, ...), closed after the test."""
    pods: list[FakePod] = []

    def make(hosts: int = 1, *, held: bool = False) -> FakePod:
        pods.append(FakePod(SHAPE, hosts, held=held))
        return pods[-1]

    yield make
    for pod in pods:
        pod.close()


@pytest.fixture
def make_leader() -> Iterator[Callable[..., Leader]]:
    """A started leader of a pod, stopped after the test."""
    leaders: list[tuple[Leader, FakePod]] = []

    def make(pod: FakePod, **options) -> Leader:
        options = {"max_queue": 4, "idle_interval_s": 3600.0, **options}
        leaders.append((Leader(pod.device(), SHAPE, **options), pod))
        leaders[-1][0].start()
        return leaders[-1][0]

    yield make
    for leader, pod in leaders:
        pod.let_go()
        leader.begin_drain(0.0)
        assert leader.wait_ended(WAIT_S), "the leader did not end"
