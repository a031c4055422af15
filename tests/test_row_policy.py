"""How many rows a slot verifies: from its own history, never too few to recover."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from k3serve.runtime.row_policy import next_level, offers, start_level

M = 7


def run(outcomes: list[int]) -> list[int]:
    """Drafts offered in each step, when the draft would be right for so many tokens each time."""
    level, position, seen = np.array([start_level(M)], np.int32), np.zeros(1, np.int32), []
    for right in outcomes:
        offered = offers(level, position, M)
        accepted = np.minimum(offered, right)
        seen.append(int(offered[0]))
        level = next_level(level, offered, accepted, M)
        position = position + 1 + accepted
    return seen


def test_a_slot_whose_drafts_fail_asks_for_few_then_seldom_and_recovers() -> None:
    seen = run([0] * 40 + [7] * 30)
    assert seen[0] == M and seen[-1] == M
    falling = seen[: seen.index(0)]
    assert falling == sorted(falling, reverse=True) and falling[-1] == 2
    assert sum(n > 0 for n in seen[24:40]) == 2  # every eighth position
    rising = [n for n in seen[40:] if n]
    assert rising == sorted(rising)


def test_a_slot_that_accepts_three_asks_for_a_little_more() -> None:
    assert set(run([3] * 40)[20:]) <= {4, 5}


@given(st.lists(st.integers(0, M), max_size=80))
def test_nobody_is_given_up_and_nobody_gets_more_than_there_are(outcomes: list[int]) -> None:
    seen = run(outcomes)
    assert all(0 <= n <= M for n in seen)
    assert all(any(seen[i : i + 8]) for i in range(len(seen) - 7))


@given(st.integers(0, 16 * M))
def test_a_step_without_drafts_teaches_nothing(level: int) -> None:
    before, none = np.array([level], np.int32), np.zeros(1, np.int32)
    assert next_level(before, none, none, M)[0] == level
