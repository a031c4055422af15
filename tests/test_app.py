"""What app decides by itself: the score command as users run it, a checkpoint with no tokenizer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from k3serve import app
from k3serve.config import TargetConfig
from k3serve.metrics import Metrics
from k3serve.settings import ServeConfig
from k3serve.text.tokenizer import Tokenizer
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
    engine = SimpleNamespace(config=target)
    config = ServeConfig(checkpoint=folder, port=0)
    server = app.start_http(FakeExecutor([]), engine, config, Metrics())
    try:
        assert server.context.tokenizer is None
        assert server.context.eos_ids == (target.eos_token_id,)
    finally:
        server.shutdown()
