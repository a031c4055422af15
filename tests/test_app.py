"""What app decides by itself: the score command, a checkpoint without tokenizer, ends of a run."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from k3serve import app, startup
from k3serve.config import TargetConfig
from k3serve.errors import ConfigError
from k3serve.front import http
from k3serve.metrics import Metrics
from k3serve.settings import ServeConfig
from k3serve.text.tokenizer import Tokenizer, load_tokenizer
from tests.fakes import FakeExecutor
from tests.serving import DATA, TINY_CHAT


def test_score_writes_what_it_promises_for_texts_and_tokens(tmp_path: Path) -> None:
    text = "hello world[EOS]"
    tokenizer = Tokenizer.load(TINY_CHAT)
    tokens = tokenizer.encode(text, allow_special=True)
    assert tokens[-1] == tokenizer.special_id("[EOS]")
    source, target = tmp_path / "in.jsonl", tmp_path / "out.npz"
    source.write_text("\n".join(json.dumps(x) for x in ({"text": text}, {"tokens": tokens})) + "\n")
    command = [sys.executable, "-m", "k3serve", "score", "--checkpoint", str(TINY_CHAT)]
    command += ["--input", str(source), "--output", str(target), "--logits", "--top", "3"]
    subprocess.run([*command, "--dtype", "float32"], check=True, timeout=300)
    arrays = np.load(target)
    for name in ("logprobs", "greedy", "logits", "top_ids", "top_logprobs"):
        assert np.array_equal(arrays[f"{name}_0"], arrays[f"{name}_1"], equal_nan=True), name
    vocab = TargetConfig.from_dir(TINY_CHAT).vocab_size
    assert arrays["logits_0"].shape == (len(tokens), vocab)
    assert arrays["logits_0"].dtype == arrays["logprobs_0"].dtype == np.float32
    assert np.array_equal(arrays["greedy_0"], arrays["logits_0"].argmax(-1))


def test_without_a_tokenizer_the_configs_end_token_ends_a_request() -> None:
    folder = DATA / "k3_tiny"
    target = TargetConfig.from_dir(folder)
    config = ServeConfig(checkpoint=folder, port=0)
    server = http.start_http(FakeExecutor([]), target, config, load_tokenizer(folder), Metrics())
    try:
        assert server.context.tokenizer is None
        assert server.context.eos_ids == (target.eos_token_id,)
    finally:
        server.shutdown()


def test_a_taken_port_is_found_before_the_weights_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(startup, "_read", lambda *_, **__: pytest.fail("reads the weights"))
    monkeypatch.setattr(app, "watch_parent", lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port}: cannot listen there"):
            app.serve(ServeConfig(port=port))
        command = [sys.executable, "-m", "k3serve", "--hosts", "2", "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "cannot listen there" in done.stderr
    assert len(done.stderr.splitlines()) == 1


class QuietLeader:
    """A lockstep.leader.Leader of which only its end is looked at."""

    failure = None
    stopped = False

    def wait_ready(self, timeout_s: float = 0.0) -> bool:
        return True

    def stop(self) -> None:
        self.stopped = True


def test_followers_are_told_when_the_leader_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port can be taken meanwhile; without a stop the followers would wait for a tick."""
    leader = QuietLeader()

    def taken(*_: Any) -> Any:
        raise ConfigError("--port 8000: cannot listen there")

    monkeypatch.setattr(app, "start_leader", lambda *_, **__: leader)
    monkeypatch.setattr(http, "start_http", taken)
    monkeypatch.setattr(app.signal, "signal", lambda *_: None)
    with pytest.raises(ConfigError):
        app.lead(SimpleNamespace(config=None), ServeConfig(), None)  # type: ignore[arg-type]
    assert leader.stopped
