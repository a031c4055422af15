"""Counts of accepted drafts, from a simulation or from a server's `usage.speculation`.

Rule: a step emits one token more than it accepted; a token that no draft could still follow (the
last of an answer) counts as that one.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Tally:
    steps: int  # decode steps of the target
    accepted: tuple[int, ...]  # by position in the block

    @classmethod
    def empty(cls, drafts: int) -> "Tally":
        return cls(0, (0,) * drafts)

    @classmethod
    def of_usage(cls, usage: dict[str, Any]) -> "Tally | None":
        """What a response's `usage` says; None where the server drafted nothing."""
        found = usage.get("speculation")
        return found and cls(found["steps"], tuple(found["accepted_per_position"]))

    @classmethod
    def total(cls, tallies: Iterable["Tally"]) -> "Tally":
        items = list(tallies)
        width = max((len(item.accepted) for item in items), default=0)
        columns = [
            sum(item.accepted[i] for item in items if i < len(item.accepted)) for i in range(width)
        ]
        return cls(sum(item.steps for item in items), tuple(columns))

    @property
    def length(self) -> float:
        """Mean acceptance length: tokens emitted per step."""
        return 1 + sum(self.accepted) / self.steps if self.steps else 0.0

    @property
    def rates(self) -> tuple[float, ...]:
        """Share of steps that accepted the draft at each position."""
        return tuple(count / max(1, self.steps) for count in self.accepted)
