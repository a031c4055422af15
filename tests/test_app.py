"""The leader's life around its parts: an end that is no failure of a host still ends the hosts."""

from __future__ import annotations

from typing import Any

import pytest

from k3serve import app
from k3serve.errors import CheckpointError
from k3serve.settings import ServeConfig


class QuietLeader:
    """A lockstep.leader.Leader of which only its end is looked at."""

    failure = None
    stopped = False

    def wait_ready(self, timeout_s: float = 0.0) -> bool:
        return True

    def stop(self) -> None:
        self.stopped = True


def test_followers_are_told_when_the_leader_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged tokenizer is found late; without a stop the followers would wait for a tick."""
    leader = QuietLeader()

    def damaged(*_: Any) -> Any:
        raise CheckpointError("tiktoken.model: damaged")

    monkeypatch.setattr(app, "start_leader", lambda *_, **__: leader)
    monkeypatch.setattr(app, "start_http", damaged)
    monkeypatch.setattr(app.signal, "signal", lambda *_: None)
    with pytest.raises(CheckpointError):
        app.lead(None, ServeConfig())  # type: ignore[arg-type]
    assert leader.stopped
