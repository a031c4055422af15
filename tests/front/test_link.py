"""The pipe between front and engine: order, ends, and that nobody waits for the other side."""

from __future__ import annotations

import queue
import socket
import threading
from dataclasses import fields
from typing import Any

import numpy as np

from k3serve.link import Beat, Link
from k3serve.types import Cancel, DraftStats, Finish, Request, Sampling, TokenEvent
from tests.fakes import prompt_scores


class End:
    """One end and what came out of it."""

    def __init__(self, sock: socket.socket) -> None:
        self.got: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.ended = threading.Event()
        self.link = Link(sock, self.got.put, self.ended.set)

    def next(self) -> Any:
        return self.got.get(timeout=10)


def pair() -> tuple[End, End]:
    a, b = socket.socketpair()
    return End(a), End(b)


def started() -> tuple[End, End]:
    ends = pair()
    for end in ends:
        end.link.start()
    return ends


def test_messages_arrive_whole_and_in_order_both_ways() -> None:
    front, engine = started()
    requests = [Request(i, tuple(range(1, 5000)), Sampling(i, seed=2**64 - 1)) for i in range(50)]
    for request in requests:
        front.link.send(request)
        front.link.send(Cancel(request.id))
    for request in requests:
        assert engine.next() == request
        assert engine.next() == Cancel(request.id)
    scores = prompt_scores(range(40), 1, 40)
    sent = TokenEvent(
        3, (1, 2), (-0.1, float("-inf")), ((5, 6),), ((-0.25, -3e-38),), scores,
        DraftStats(2, (1,), (1,)), 64, Finish.STOP,
    )  # fmt: skip
    engine.link.send(sent)
    got = front.next()
    for field in fields(TokenEvent):
        if field.name != "prompt_scores":
            assert getattr(got, field.name) == getattr(sent, field.name)
    for name in ("logprobs", "top_ids", "top_logprobs"):
        a, b = getattr(got.prompt_scores, name), getattr(scores, name)
        assert a.dtype == b.dtype and np.array_equal(a, b)
    front.link.close()
    assert engine.ended.wait(10)


def test_what_was_sent_before_the_close_arrives() -> None:
    front, engine = started()
    for i in range(1000):
        engine.link.send(Beat(i))
    engine.link.close()
    assert [front.next() for _ in range(1000)] == [Beat(i) for i in range(1000)]
    assert front.ended.wait(10)


def test_a_sender_never_waits_for_an_end_that_does_not_read() -> None:
    front, engine = pair()
    front.link.start()
    for i in range(200):  # far more than a socket holds
        front.link.send(Request(i, tuple(range(10_000)), Sampling(1)))
    engine.link.start()
    assert [engine.next().id for _ in range(200)] == list(range(200))
    engine.link.close()
    assert front.ended.wait(10)


def test_a_message_that_cannot_be_read_ends_the_link() -> None:
    a, b = socket.socketpair()
    end = End(a)
    end.link.start()
    b.sendall(b"\x00\x00\x00\x03abc")
    assert end.ended.wait(10)
    end.link.close()
    b.close()
