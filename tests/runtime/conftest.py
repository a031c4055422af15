"""One compiled engine for all tests of this folder, and a loop that runs requests on it."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import pytest

from k3serve.lockstep.bare import BareLoop
from k3serve.runtime.engine import Engine
from k3serve.settings import ServeConfig
from k3serve.types import Finish, Request, Sampling
from tests.serving import TINY_CHAT

jax.config.update("jax_num_cpu_devices", 4)

CONFIG = ServeConfig(
    checkpoint=TINY_CHAT, context=512, max_slots=4, page_tokens=32, allow_reserved=True
)


@dataclass
class Answer:
    """All that one request brought."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_ids: list[Any] = field(default_factory=list)
    top_logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_top: list[Any] = field(default_factory=list)
    cached_tokens: int = field(default=0, compare=False)
    finish: Finish = Finish.NONE


class Runner:
    """Runs requests on the shared engine; ids are the place in the list."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.loop = BareLoop(engine, engine.shape)

    def forget(self) -> None:
        """The next runs begin with an empty prefix cache and find what runs from here on left."""
        self.loop.forget()
        self.loop.warm = True

    def run(self, requests: Iterable[tuple[list[int], Sampling]], depth: int = 2) -> list[Answer]:
        self.loop.depth = depth
        answers: dict[int, Answer] = defaultdict(Answer)
        queued = [Request(i, tuple(p), s) for i, (p, s) in enumerate(requests)]
        for event in self.loop.run(queued):
            answer = answers[event.request_id]
            assert answer.finish is Finish.NONE, "an event after the last one"
            answer.tokens += event.tokens
            answer.logprobs += event.logprobs
            answer.top_ids += event.top_ids
            answer.top_logprobs += event.top_logprobs
            if event.prompt_scores is not None:
                scores = event.prompt_scores
                assert scores.start == 1 + len(answer.prompt_logprobs)
                answer.prompt_logprobs += np.asarray(scores.logprobs).tolist()
                answer.prompt_top += zip(
                    scores.top_ids.tolist(), scores.top_logprobs.tolist(), strict=True
                )
            answer.finish = event.finish
            answer.cached_tokens += event.cached_tokens
        assert all(answers[r.id].finish is not Finish.NONE for r in queued)
        return [answers[r.id] for r in queued]


@pytest.fixture(scope="package")
def engine() -> Engine:
    from k3serve.startup import build_engine

    built = build_engine(CONFIG)
    built.compilations.reset()
    return built


@pytest.fixture(scope="package")
def runner(engine: Engine) -> Runner:
    return Runner(engine)


@pytest.fixture(autouse=True)
def nothing_compiles(engine: Engine) -> Callable[[], None]:
    """Invariant 4: no test may make the engine's process compile anything."""
    yield
    assert engine.compilations.take() == 0
