"""Who is where: one `Sequence` per request on its way, and the table of slots that hold them.

Rule: a slot has at most one occupant; what a sequence knows of the device's progress is only what
plans and committed results make certain.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from k3serve.scheduler.prefix import Node
from k3serve.types import PromptScores, Request, Sampling


@dataclass(slots=True, eq=False)
class Sequence:
    """A request between `add` and its last event, or between `add` and its cancel."""

    request: Request
    sampling: Sampling  # the request's, with max_tokens cut to what the context leaves
    slot: int | None = None  # where it sits now; None while waiting and after its release
    pages: tuple[int, ...] = ()  # its page table
    planned_prompt: int = 0  # prompt tokens given to plans so far, or found in the cache
    planned_tokens: int = 0  # tokens that it has emitted at least, once the plans so far have run,
    # unless a stop token ended it before
    last_tick: int | None = None  # the tick that uses up its budget, once planned
    emitted: int = 0  # tokens in committed results
    leaving: bool = False  # its slot is released by the next plan
    closed: bool = False  # finished or cancelled: no event of it may come out any more
    # of the prefix cache, which alone writes these:
    keys: tuple[bytes, ...] = ()  # of its whole prompt pages; empty where there is no cache
    nodes: list[Node] = field(default_factory=list)  # prompt pages in the tree that it holds
    own: list[int] = field(default_factory=list)  # cache pages that go back when it leaves
    saves: set[int] = field(default_factory=set)  # after so many pages its state is saved
    restore: int | None = None  # the snapshot that it starts from
    cached_tokens: int = 0  # prompt tokens that it need not compute
    cached_scores: PromptScores | None = None  # of these, until they have been told
    known_scores: int = 0  # prompt tokens whose scores are in the tree, if their pages are
    told_cached: bool = False  # its first event is out
    held_for: tuple[Sequence, int] | None = None  # waits for so many pages of that one
    was_held: bool = False

    @property
    def prompt_planned(self) -> bool:
        """Its final page is in a plan already: it emits, unless it has ended."""
        return self.planned_prompt >= len(self.request.prompt)

    @property
    def scored(self) -> bool:
        return self.sampling.prompt_logprobs is not None

    @property
    def can_decode(self) -> bool:
        """A decode step of the plan being made may yield a token: the first one comes from the
        final page.
        """
        return self.prompt_planned and max(self.planned_tokens, 1) < self.sampling.max_tokens


class SlotTable:
    """The occupants of slots 0 .. max_slots-1; the lowest free slot is taken first."""

    def __init__(self, max_slots: int) -> None:
        self._occupants: list[Sequence | None] = [None] * max_slots
        self._free = list(range(max_slots))  # a heap

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return len(self._occupants) - len(self._free)

    def enter(self, sequence: Sequence) -> int:
        slot = heapq.heappop(self._free)
        self._occupants[slot] = sequence
        sequence.slot = slot
        return slot

    def leave(self, sequence: Sequence) -> int:
        slot = sequence.slot
        assert slot is not None and self._occupants[slot] is sequence, (
            "released from another's slot"
        )
        self._occupants[slot] = None
        heapq.heappush(self._free, slot)
        sequence.slot = None
        return slot

    def occupants(self) -> list[tuple[int, Sequence]]:
        """(slot, sequence) of every used slot, by rising slot."""
        return [(s, q) for s, q in enumerate(self._occupants) if q is not None]
