"""What drafting did for a request: for its usage, the metrics and the access log.

Rule: only drafts whose tokens were emitted count as accepted. An event that a stop string cuts
counts by `emitted_part`; all others count as the device counted them.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

from k3serve.types import DraftStats


def emitted_part(stats: DraftStats, tokens: int, used: int) -> DraftStats | None:
    """The part of an event's stats that its first `used` tokens, of `tokens`, stand for.

    How many drafts each step accepted follows from the counts by position; the order of the steps
    does not, so short steps are taken first: what counts is certainly emitted. Of the step in which
    the cut falls all drafts count as offered, and as accepted those before the cut, as after a stop
    token. None where no step is left.
    """
    if used >= tokens:
        return stats
    left = used - max(0, tokens - stats.steps - sum(stats.accepted))  # a prompt's first token
    kept, accepted_by_step, offered_by_step = 0, [], []
    for accepted, offered in zip(
        _by_step(stats.accepted, stats.steps), _by_step(stats.offered, stats.steps), strict=True
    ):
        if left <= 0:
            break
        kept += 1
        accepted_by_step.append(min(accepted, left))
        offered_by_step.append(offered)
        left -= accepted + 1
    if not kept:
        return None
    size = len(stats.offered)
    return DraftStats(
        kept, _by_position(offered_by_step, size), _by_position(accepted_by_step, size)
    )


def _by_step(by_position: tuple[int, ...], steps: int) -> list[int]:
    """How many drafts each step had, fewest first: position k counts the steps with more than k."""
    return [sum(count >= step for count in by_position) for step in range(steps, 0, -1)]


def _by_position(by_step: list[int], size: int) -> tuple[int, ...]:
    return tuple(sum(count > position for count in by_step) for position in range(size))


def total(parts: Iterable[DraftStats | None]) -> DraftStats | None:
    """All of them together; None where there is none."""
    steps, found = 0, False
    offered: list[int] = []
    accepted: list[int] = []
    for part in parts:
        if part is not None:
            found = True
            steps += part.steps
            offered = [a + b for a, b in zip_longest(offered, part.offered, fillvalue=0)]
            accepted = [a + b for a, b in zip_longest(accepted, part.accepted, fillvalue=0)]
    return DraftStats(steps, tuple(offered), tuple(accepted)) if found else None


def acceptance_length(stats: DraftStats) -> float:
    """Mean tokens of a decode step."""
    return round(1 + sum(stats.accepted) / max(1, stats.steps), 4)


def usage(stats: DraftStats) -> dict[str, Any]:
    """`usage.speculation`; item 0 of the lists is the first draft of a step."""
    return {
        "steps": stats.steps,
        "drafted": sum(stats.offered),
        "accepted": sum(stats.accepted),
        "acceptance_length": acceptance_length(stats),
        "drafted_per_position": list(stats.offered),
        "accepted_per_position": list(stats.accepted),
    }


def note(stats: DraftStats) -> str:
    """For the access log."""
    accepted = sum(stats.accepted)
    return f"steps={stats.steps} accepted={accepted} accept_len={acceptance_length(stats):.2f}"
