"""The engine thread's clock, with a clock and a device that the test turns by hand."""

from k3serve.lockstep.clock import TickClock
from k3serve.types import TickTimes


class Bench:
    """A TickClock, its time, and the set of ticks that have run."""

    def __init__(self) -> None:
        self.at = 0.0
        self.run: set[str] = set()
        self.clock = TickClock(lambda handle: handle in self.run, lambda: self.at)

    def spend(self, seconds: float, phase: str) -> None:
        self.at += seconds
        self.clock.lap(phase)

    def dispatch(self, tick: str, seconds: float = 0.0) -> None:
        self.clock.dispatches()
        self.at += seconds
        self.clock.dispatched(tick)

    def wait(self, tick: str, seconds: float) -> None:
        self.at += seconds
        self.run.add(tick)
        self.clock.waited(tick)


def test_without_overlap_the_device_waits_for_all_of_the_hosts_work():
    bench = Bench()
    bench.clock.wake()
    for tick in ("a", "b", "c"):
        bench.spend(1.0, "plan")
        bench.dispatch(tick, 0.5)
        bench.wait(tick, 8.0)
        bench.spend(2.0, "commit")
        bench.spend(3.0, "deliver")
    times = TickTimes(plan=3, dispatch=1.5, wait=24, commit=6, deliver=9, device_idle=2 * 6.0)
    assert bench.clock.take() == times
    assert bench.clock.take() == TickTimes()


def test_with_overlap_the_device_does_not_wait_while_a_tick_is_queued():
    bench = Bench()
    bench.clock.wake()
    bench.spend(1.0, "plan")
    bench.dispatch("a")
    for running, following in (("a", "b"), ("b", "c"), ("c", "d")):
        bench.spend(1.0, "plan")
        bench.dispatch(following)
        bench.wait(running, 8.0)
        bench.spend(2.0, "commit")
    assert bench.clock.take() == TickTimes(plan=4, wait=24, commit=6)


def test_a_queue_that_ran_dry_counts_from_the_last_look_that_found_a_tick_running():
    bench = Bench()
    bench.clock.wake()
    bench.dispatch("a")
    bench.dispatch("b")
    bench.wait("a", 8.0)
    bench.spend(1.0, "commit")  # b still runs
    bench.run.add("b")  # at some point of the next two seconds
    bench.spend(2.0, "deliver")
    bench.spend(4.0, "plan")
    bench.dispatch("c")
    assert bench.clock.take() == TickTimes(wait=8, commit=1, deliver=2, plan=4, device_idle=6)


def test_time_without_work_counts_nowhere():
    bench = Bench()
    bench.clock.wake()
    bench.dispatch("a")
    bench.wait("a", 1.0)
    bench.clock.rest()
    bench.at += 100.0
    bench.clock.wake()
    bench.clock.wake()
    bench.spend(1.0, "plan")
    bench.dispatch("b")
    bench.wait("b", 1.0)
    assert bench.clock.take() == TickTimes(plan=1, wait=2)
