"""lm-eval against K3-nano: four ways of asking agree, and equal the offline `score` exactly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lm_eval import utils

from tests.serving import DATA, Server

RUNNER = DATA / "lm_eval" / "run_eval.py"
LIMIT = 40  # all documents of each task
MAX_LENGTH = 1024  # the runner's


@pytest.fixture(scope="module")
def out(nano: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lm_eval")
    done = subprocess.run(
        [sys.executable, str(RUNNER), "--base-url", nano.url, "--matrix", "--tol", "1e-4",
         "--limit", str(LIMIT), "--out", str(folder)],
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    report = done.stdout + done.stderr
    assert done.returncode == 0, report
    (folder / "runner.txt").write_text(report)
    return folder


@pytest.mark.timeout(900)
def test_all_ways_of_asking_agree(out: Path) -> None:
    report = (out / "runner.txt").read_text()
    assert report.count(" 0 differences from 'ids'") == 5, report


def samples(out: Path, task: str) -> list[dict[str, Any]]:
    files = sorted((out / "ids").rglob(f"samples_{task}_*.jsonl"))
    assert files, f"lm-eval wrote no samples of {task}"
    return [json.loads(line) for line in files[-1].read_text().splitlines()]


def offline(lines: list[list[int]], folder: Path) -> dict[str, np.ndarray]:
    source, target = folder / "score.jsonl", folder / "score.npz"
    source.write_text("\n".join(json.dumps({"tokens": tokens}) for tokens in lines))
    command = [sys.executable, "-m", "k3serve", "score"]
    subprocess.run([*command, "--input", source, "--output", target], check=True, timeout=300)
    return dict(np.load(target))


def test_multiple_choice_scores_equal_score_exactly(nano: Server, out: Path) -> None:
    def encode(text: str) -> list[int]:
        return nano.post("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]

    cases, sequences = [], []
    for row in samples(out, "k3serve_mc"):
        arguments = row["arguments"].values() if isinstance(row["arguments"], dict) else ()
        pairs = [(a["arg_0"], a["arg_1"]) for a in arguments] or row["arguments"]
        for (context, answer), response in zip(pairs, row["resps"], strict=True):
            # as lm-eval splits them: blanks before the answer belong to the answer
            blanks = len(context) - len(context.rstrip())
            if blanks:
                context, answer = context[:-blanks], context[-blanks:] + answer
            whole = encode(context + answer)
            cases.append((len(encode(context)), response[0]))
            sequences.append(whole)
    assert len(cases) >= 4 * LIMIT
    scored = offline(sequences, out)
    for i, (start, (value, is_greedy)) in enumerate(cases):
        own = scored[f"logprobs_{i}"][start:].astype(float)
        assert float(value) == sum(own.tolist()), i
        best = scored[f"greedy_{i}"][start - 1 : -1]
        assert (str(is_greedy) == "True") == (best.tolist() == sequences[i][start:]), i


def test_rolling_scores_equal_score_exactly(nano: Server, out: Path) -> None:
    """Each token of a text given those before it, long texts in lm-eval's own windows."""
    begin = nano.post("/tokenize", {"prompt": nano.get("/tokenizer_info")["bos_token"]})["tokens"]
    assert len(begin) == 1
    rows = samples(out, "k3serve_ppl")
    assert len(rows) == LIMIT
    windows, owner = [], []
    for number, row in enumerate(rows):
        tokens = nano.post("/tokenize", {"prompt": row["doc"]["text"]})["tokens"]
        rolling = utils.get_rolling_token_windows(
            token_list=tokens, prefix_token=begin[0], max_seq_len=MAX_LENGTH - 2, context_len=1
        )
        windows += [utils.make_disjoint_window(window) for window in rolling]
        owner += [number] * (len(windows) - len(owner))
    assert len(windows) > LIMIT, "no text needed several windows"
    scored = offline([context + rest for context, rest in windows], out)
    totals = [0.0] * len(rows)
    for i, (context, _) in enumerate(windows):
        own = scored[f"logprobs_{i}"][len(context) :].astype(float)
        totals[owner[i]] += sum(own.tolist())
    assert [float(np.ravel(row["resps"])[0]) for row in rows] == totals
