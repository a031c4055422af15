"""The cache page pool: which of the device's cache pages are free.

Rule: a page has one owner from `take` to `give_back`. Pages come back in the plan that releases
their slot; the device runs ticks in order, so the next owner may have them in that same plan.
"""

from __future__ import annotations


class PagePool:
    """A free list over pages 0 .. num_pages-1; the page given back last is taken first."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> tuple[int, ...] | None:
        """So many pages, or None (and nothing taken) when fewer are free."""
        if count > len(self._free):
            return None
        return tuple(self._free.pop() for _ in range(count))

    def give_back(self, pages: tuple[int, ...]) -> None:
        self._free.extend(reversed(pages))
        assert len(self._free) <= self.num_pages, "a cache page was given back twice"
