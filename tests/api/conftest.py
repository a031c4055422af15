"""One server for all tests of this folder; each test gets its executor back in its first state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from k3serve.api.server import serve
from k3serve.api.settings import ApiSettings
from k3serve.types import State
from tests.api.client import Served, answers_hello
from tests.fakes import ByteTokenizer, FakeExecutor

VOCAB = 2000  # more than the tokenizer knows, as in a checkpoint with padding rows


def start(tokenizer: ByteTokenizer | None = None, **settings: Any) -> Served:
    executor = FakeExecutor(answers_hello)
    known = tokenizer or ByteTokenizer()
    defaults = {"vocab_size": VOCAB, "port": 0, "version": "1.2.3", "gone_check_s": 0.02}
    given = settings.pop("tokenizer_given", known)
    server = serve(executor, given, ApiSettings(**(defaults | settings)))
    return Served(server, executor, known)


@pytest.fixture(scope="session")
def _shared() -> Iterator[Served]:
    served = start()
    yield served
    served.server.shutdown()


@pytest.fixture
def served(_shared: Served) -> Served:
    executor = _shared.executor
    executor.script = answers_hello
    executor.now = State.READY
    executor.refuse_after = None
    executor.submitted.clear()
    executor.cancelled.clear()
    return _shared


@pytest.fixture
def start_server() -> Iterator[Callable[..., Served]]:
    """Starts servers with settings of the test's own."""
    running: list[Served] = []

    def make(**settings: Any) -> Served:
        running.append(start(**settings))
        return running[-1]

    yield make
    for one in running:
        one.server.shutdown()
