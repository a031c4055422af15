"""How many rows a slot verifies: from its own history, never too few to recover."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from k3serve.runtime.row_policy import next_level, offers, start_level

M = 7


def run(outcomes: list[int]) -> list[int]:
    """Drafts offered in each step, when the draft would be right for so many tokens each time."""
    level, seen = np.array([start_level(M)], np.int32), []
    for right in outcomes:
        offered = offers(level, M)
        seen.append(int(offered[0]))
        level = next_level(level, offered, np.minimum(offered, right), M)
    return seen


def test_a_slot_whose_drafts_fail_asks_for_few_and_recovers() -> None:
    seen = run([0] * 20 + [7] * 20)
    assert seen[0] == M and seen[19] == 2 and seen[-1] == M
    assert seen[:20] == sorted(seen[:20], reverse=True) and seen[20:] == sorted(seen[20:])


def test_a_slot_that_accepts_three_asks_for_a_little_more() -> None:
    assert set(run([3] * 40)[20:]) <= {4, 5}


@given(st.lists(st.integers(0, M), max_size=60))
def test_always_one_at_least_and_never_more_than_there_are(outcomes: list[int]) -> None:
    assert all(1 <= n <= M for n in run(outcomes))


@given(st.integers(0, 16 * M))
def test_a_step_without_drafts_teaches_nothing(level: int) -> None:
    before, none = np.array([level], np.int32), np.zeros(1, np.int32)
    assert next_level(before, none, none, M)[0] == level
