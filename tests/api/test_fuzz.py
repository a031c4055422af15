"""Random requests of every kind: no server error, no dead thread, and the next one is answered."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.api import fuzzing
from tests.api.client import Served
from tests.api.conftest import start


@pytest.fixture(scope="module")
def target() -> Iterator[Served]:
    """A server for all examples. It looks for clients that left too seldom to see ours, which
    close their sending side at once."""
    served = start(gone_check_s=60.0, write_timeout_s=5.0)
    errors: list[str] = []
    watch = logging.Handler(logging.ERROR)
    watch.emit = lambda record: errors.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("k3serve").addHandler(watch)
    hook, threading.excepthook = threading.excepthook, lambda args: errors.append(repr(args))
    yield served
    threading.excepthook = hook
    logging.getLogger("k3serve").removeHandler(watch)
    served.server.shutdown(answers_s=10.0)
    assert errors == []
    assert set(served.executor.cancelled) == {r.id for r in served.executor.submitted}


@pytest.mark.parametrize("path", fuzzing.PATHS)
@fuzzing.fuzz()
@given(data=st.data())
def test_bodies_with_wrong_values(target: Served, path: str, data: st.DataObject) -> None:
    body = data.draw(fuzzing.bodies(path))
    answers = fuzzing.exchange(target.server.port, fuzzing.post(path, body))
    assert len(answers) == 1
    fuzzing.check(answers)
    target.alive()


@pytest.mark.parametrize("path", fuzzing.PATHS)
@fuzzing.fuzz()
@given(data=st.data())
def test_damaged_bodies(target: Served, path: str, data: st.DataObject) -> None:
    body = data.draw(fuzzing.bodies(path).flatmap(fuzzing.damaged))
    answers = fuzzing.exchange(target.server.port, fuzzing.post(path, body))
    assert len(answers) == 1
    fuzzing.check(answers)
    target.alive()


@fuzzing.fuzz(3)
@given(data=fuzzing.conversations())
def test_conversations(target: Served, data: bytes) -> None:
    fuzzing.check(fuzzing.exchange(target.server.port, data))
    target.alive()


@fuzzing.fuzz(1)
@given(data=st.binary(max_size=300))
def test_noise(target: Served, data: bytes) -> None:
    fuzzing.check(fuzzing.exchange(target.server.port, data))
    target.alive()
