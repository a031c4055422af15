"""More than the server can do, through HTTP and the real leader: who is refused, who never runs,
and that every slot comes back. Only the device is a double; its ticks run when a test says so.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from k3serve.api.server import ApiServer, serve
from k3serve.api.settings import ApiSettings
from k3serve.lockstep.leader import Leader
from k3serve.types import TickShape
from tests.api.client import Got, read_all, read_reply
from tests.fakes import ByteTokenizer
from tests.lockstep.fake_pod import WAIT_S, FakePod

SHAPE = TickShape(
    max_slots=2,
    page_tokens=16,
    pages_per_tick=2,
    steps_per_tick=4,
    rows=1,
    pages_per_slot=128,
    num_pages=256,
)


@dataclass
class Whole:
    """All of a server above the device."""

    pod: FakePod
    leader: Leader
    server: ApiServer

    def ask(self, prompt: list[int], **fields: Any) -> socket.socket:
        """A request on its way, its answer still to be read."""
        body = json.dumps({"prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        sock = socket.create_connection(("127.0.0.1", self.server.port), timeout=20)
        sock.sendall(head.encode() + body)
        return sock

    def answer(self, prompt: list[int], **fields: Any) -> Got:
        with self.ask(prompt, **fields) as sock:
            return read_reply(sock)

    def open_requests(self) -> int:
        load = self.leader.capacity()
        return load.running + load.waiting

    def ended(self, reason: str) -> float:
        """Sequences that ended so, by the server's metrics."""
        labels = {"model_name": "k3-nano", "engine": "0", "finished_reason": reason}
        registry = self.server.context.metrics.registry
        return registry.get_sample_value("vllm:request_success_total", labels) or 0

    def until(self, condition: Callable[[], bool]) -> None:
        """The leader has no condition to wait on, so this looks again and again."""
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.002)

    def ran(self) -> list[int]:
        """The first token of each prompt that the device got to see."""
        return [page.tokens[0] for plan in self.pod.plans for page in plan.pages if not page.start]


@pytest.fixture
def make_whole() -> Iterator[Callable[..., Whole]]:
    made: list[Whole] = []

    def make(held: bool = False, max_queue: int = 4, **settings: Any) -> Whole:
        pod = FakePod(SHAPE, held=held)
        leader = Leader(pod.device(), SHAPE, max_queue=max_queue, idle_interval_s=3600.0)
        leader.start()
        pod.step()
        assert leader.wait_ready(WAIT_S)
        given = {"vocab_size": 300, "port": 0, "gone_check_s": 0.02} | settings
        server = serve(leader, ByteTokenizer(), ApiSettings(**given))
        made.append(Whole(pod, leader, server))
        return made[-1]

    yield make
    for one in made:
        one.pod.let_go()
        one.leader.begin_drain(0.0)
        assert one.leader.wait_ended(WAIT_S)
        one.server.shutdown()
        one.pod.close()


def test_a_request_whose_client_left_the_queue_never_runs(make_whole: Any) -> None:
    whole = make_whole(held=True)
    kept = [whole.ask([n] * 3) for n in (1, 2)]
    whole.until(lambda: whole.open_requests() == 2)  # both slots
    left = [whole.ask([3] * 3), whole.ask([4] * 3, stream=True), whole.ask([5] * 3, n=2)]
    whole.until(lambda: whole.open_requests() == 6)
    for sock in left:
        sock.close()
    whole.until(lambda: whole.ended("abort") == 4)
    whole.pod.let_go()
    whole.until(lambda: whole.open_requests() == 0)
    kept.append(whole.ask([6] * 3))
    for sock in kept:
        assert read_reply(sock).status == 200
        sock.close()
    assert sorted(whole.ran()) == [1, 2, 6]


def test_a_burst_may_fill_slots_and_queue_before_the_next_plan(make_whole: Any) -> None:
    whole = make_whole(held=True)
    with whole.ask([1]) as first:
        whole.until(lambda: whole.open_requests() == 1)  # tick 1 is on the device, and stays there
        whole.until(lambda: whole.pod.dispatches[0] == 3)  # so does tick 2: no plan from here on
        rest = [whole.ask([n]) for n in range(2, 7)]
        whole.until(lambda: whole.open_requests() == 6)
        whole.pod.let_go()
        for sock in (first, *rest):
            assert read_reply(sock).status == 200
    for sock in rest:
        sock.close()


def test_a_full_queue_is_refused_at_once_while_the_device_stands_still(make_whole: Any) -> None:
    whole = make_whole(held=True)
    waiting = [whole.ask([n] * 3) for n in range(1, 7)]
    whole.until(lambda: whole.open_requests() == 6)  # 2 slots and a queue of 4
    for _ in range(3):
        got = whole.answer([9])
        assert got.status == 429 and got.headers["Retry-After"] == "1"
        assert got.error["code"] == "queue_full" and got.error["type"] == "rate_limit_error"
    whole.pod.let_go()
    for sock in waiting:
        assert read_reply(sock).status == 200
        sock.close()
    assert whole.answer([9]).status == 200
    assert sorted(whole.ran()) == [1, 2, 3, 4, 5, 6, 9]


def test_a_draining_server_refuses_and_finishes_what_runs(make_whole: Any) -> None:
    whole = make_whole(held=True)
    with whole.ask([1] * 3) as running:
        whole.until(lambda: whole.open_requests() == 1)
        whole.leader.begin_drain(3600.0)
        got = whole.answer([2] * 3)
        assert got.status == 503 and got.headers["Retry-After"]
        assert got.headers["Connection"] == "close" and got.error["code"] == "unavailable"
        whole.pod.let_go()
        assert read_reply(running).status == 200
    assert whole.leader.wait_ended(WAIT_S)


@pytest.mark.parametrize("stream", [True, False])
def test_a_time_out_frees_the_slot(make_whole: Any, stream: bool) -> None:
    whole = make_whole(held=True)
    got = whole.answer([1] * 3, stream=stream, max_tokens=1000, timeout=0.05)
    assert got.status == 504 and got.headers["x-should-retry"] == "false"
    assert whole.ended("timeout") == 1
    whole.pod.let_go()
    whole.until(lambda: whole.open_requests() == 0)
    both = [whole.ask([n] * 3) for n in (2, 3)]
    for sock in both:
        assert read_reply(sock).status == 200
        sock.close()


def test_a_stream_that_times_out_ends_with_an_error_and_frees_the_slot(make_whole: Any) -> None:
    whole = make_whole(held=True)
    with whole.ask([1] * 3, stream=True, max_tokens=1000, timeout=0.5) as sock:
        seen = b""
        while b"data: " not in seen:
            whole.pod.step()
            sock.settimeout(0.05)
            try:
                seen += sock.recv(65536)
            except TimeoutError:
                continue
        sock.settimeout(20)
        seen += read_all(sock)
    assert b'"code":"timeout"' in seen and b"[DONE]" not in seen
    assert not seen.endswith(b"0\r\n\r\n")
    whole.pod.let_go()
    whole.until(lambda: whole.open_requests() == 0)
    assert whole.answer([2] * 3).status == 200


def test_a_reader_that_stops_loses_its_slot_when_too_much_waits(make_whole: Any) -> None:
    whole = make_whole(max_outbox=8, write_timeout_s=3600.0, send_buffer_bytes=16384)
    long = {"max_tokens": 2000, "ignore_eos": True, "stream": True, "logprobs": 20}
    with whole.ask([1] * 3, **long), whole.ask([2] * 3, **long):
        whole.until(lambda: whole.ended("abort") == 2)
        assert whole.answer([3] * 3).status == 200
    assert whole.open_requests() == 0


def test_a_slow_reader_that_keeps_reading_gets_all_of_it(make_whole: Any) -> None:
    whole = make_whole(max_outbox=100_000, send_buffer_bytes=16384)
    with whole.ask([1] * 3, max_tokens=500, ignore_eos=True, stream=True, logprobs=5) as sock:
        whole.until(lambda: whole.open_requests() == 0)  # all is made, and waits for the reader
        frames = read_reply(sock).frames
    assert frames[-1] == "[DONE]"
    tokens = [t for f in frames[:-1] for t in f["choices"][0]["logprobs"]["token_logprobs"]]
    assert len(tokens) == 500
