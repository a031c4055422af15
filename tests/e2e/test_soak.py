"""A few seconds of scripts/soak.py, and that it sees what it is there to see."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from scripts import soak
from scripts.soak import Run, Sample
from scripts.soak_load import Failed, Target, score, stream, whole
from tests.serving import Server

CALM = Sample(0, 300.0, 9, 40, 0, 0, 0)


def test_mixed_load_leaves_the_server_as_it_was(nano: Server) -> None:
    done = soak.soak(nano.url, seconds=4, clients=8, every_s=1)
    assert done.verdict() == []
    assert done.counts["stream"] and done.counts["whole"] and done.counts["bad"]


def test_growth_and_what_is_left_behind_are_seen() -> None:
    grows = [replace(CALM, rss_mib=300.0 + 2 * i) for i in range(40)]
    assert "memory grew from 329.0 to 369.0 MiB" in soak.grown(grows)
    warms_up = [replace(CALM, rss_mib=min(400.0, 300.0 + 20 * i)) for i in range(40)]
    assert soak.grown(warms_up) == []
    after = replace(CALM, threads=CALM.threads + 10, running=1, late_compilations=1)
    found = " ".join(soak.left(CALM, after))
    assert "threads: 19" in found and "running: 1" in found and "late_compilations: 1" in found
    assert "fds" not in found
    assert soak.left(CALM, replace(CALM, threads=CALM.threads - 5)) == []


def test_another_answer_is_seen(nano: Server) -> None:
    right = soak.learn(nano.url, prompts=1)
    other = replace(right.known[0], text="something else", scores=[None, -1.0])
    wrong = Target(right.host, right.port, (other,) * 3)
    for kind in (stream, whole, score):
        kind(replace(wrong, known=right.known * 3), random.Random(0))
        with pytest.raises(Failed):
            kind(wrong, random.Random(0))
    run = Run(before=CALM, after=CALM)
    run.note("stream", "it differs")
    assert run.verdict() == ["stream: it differs"]
