"""Cache pages and snapshots for sequences: what one may share, what it computes, what it leaves.

Rules, each with a test:
- A prompt's last token is always computed, and with it its page: what follows needs its logits.
- A scored prompt shares only pages whose scores are known, down to the token on the next page.
- Snapshots are saved where a prompt ends (its last whole page, and the one before where the prompt
  ends with a page), where it parts from the tree, and every SNAPSHOT_EVERY pages.
- A sequence that begins like one whose pages are being computed waits for those, once, rather than
  compute them too; others pass it meanwhile. It gets its slot when the pages are there, or when the
  other left.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from k3serve.scheduler.pages import PagePool
from k3serve.scheduler.prefix import (
    Node,
    PageScores,
    PrefixTree,
    joined,
    page_keys,
)
from k3serve.scheduler.slots import Sequence
from k3serve.types import SNAPSHOT_EVERY, PageWork, TickResult, TickShape


class PageCache:
    """All of the device's cache pages and snapshots."""

    def __init__(self, shape: TickShape) -> None:
        self._size = shape.page_tokens
        self._shape = shape
        self._pool = PagePool(shape.num_pages)
        self._tree = PrefixTree(shape.num_snapshots)

    @property
    def unused(self) -> int:
        """Pages that no slot uses, with or without a prompt's rows in them, once all have left."""
        return self._pool.free + self._tree.num_pages

    def counts(self) -> tuple[int, int]:
        """(pages, snapshots) that are kept for prompts to come."""
        return self._tree.num_pages, self._tree.num_snapshots

    def prepare(self, sequence: Sequence) -> None:
        """Once, when the sequence joins the queue."""
        if self._tree.enabled:
            sequence.keys = page_keys(sequence.request.prompt, self._size)

    # -------------------------------------------------------------------------- before a slot

    def waits(self, sequence: Sequence, prefilling: Iterable[Sequence]) -> bool:
        """Whether the sequence had better wait for pages that others are computing."""
        if sequence.held_for is None and not sequence.was_held:
            self._hold(sequence, prefilling)
        if sequence.held_for is None:
            return False
        other, pages = sequence.held_for
        done = other.known_scores if sequence.scored else other.planned_prompt
        if other.slot is not None and done < pages * self._size:
            return True
        sequence.held_for = None
        return False

    def _hold(self, sequence: Sequence, prefilling: Iterable[Sequence]) -> None:
        """Looks once for the one in a slot with which the sequence shares most pages to come."""
        sequence.was_held = True
        known = self._resumable(sequence, self._tree.match(sequence.keys))
        best: tuple[int, Sequence | None] = (known, None)
        for other in prefilling:
            if sequence.scored and not other.scored:
                continue
            common = min(_common(sequence.keys, other.keys), self._limit(sequence))
            if common > best[0] and other.planned_prompt < common * self._size:
                best = (common, other)
        pages, found = best
        if found is not None:
            found.saves.add(pages)
            sequence.held_for = (found, pages)

    # ------------------------------------------------------------------------------ in a slot

    def admit(self, sequence: Sequence) -> bool:
        """Gives the sequence its cache pages and the place to go on from; False (and nothing
        changed) when too few pages are free.
        """
        prompt = sequence.request.prompt
        path = self._tree.match(sequence.keys)
        total = self._shape.pages_for(len(prompt) + sequence.sampling.max_tokens)
        self._tree.hold(path)
        own = self._take(total - len(path))
        if own is None:
            self._tree.release(path)
            return False
        depth = self._resumable(sequence, path)
        sequence.nodes, sequence.own = path, list(own)
        sequence.pages = (*(node.page for node in path), *own)
        sequence.cached_tokens = sequence.planned_prompt = depth * self._size
        sequence.restore = self._tree.restore(path[depth - 1]) if depth else None
        if sequence.scored:
            sequence.cached_scores = joined(_with_scores(path[:depth], prompt, self._size))
        whole = len(prompt) // self._size
        ends = {self._limit(sequence), whole, len(path), *range(0, whole, SNAPSHOT_EVERY)}
        sequence.saves |= {end for end in ends if end > depth}
        return True

    def _take(self, count: int) -> tuple[int, ...] | None:
        """Free pages, and where they do not suffice, pages of prompts that nobody uses."""
        while self._pool.free < count:
            page = self._tree.evict_page()
            if page is None:
                return None
            self._pool.give_back((page,))
        return self._pool.take(count)

    def _limit(self, sequence: Sequence) -> int:
        """Most pages that the prompt may share: its last token is computed."""
        return (len(sequence.request.prompt) - 1) // self._size

    def _resumable(self, sequence: Sequence, path: list[Node]) -> int:
        """How many pages need not be computed: the deepest usable snapshot on the path."""
        usable = path[: self._limit(sequence)]
        if sequence.scored:
            scores = _with_scores(usable, sequence.request.prompt, self._size)
            usable = usable[: len(scores)]
        depths = (i for i in range(len(usable), 0, -1) if usable[i - 1].snapshot is not None)
        return next(depths, 0)

    def enter(self, sequence: Sequence, page: PageWork) -> PageWork:
        """A page that is about to be computed: a whole one enters the tree, and the plan is told
        where to save the state at its end.
        """
        index = page.start // self._size
        if not self._tree.enabled or len(page.tokens) < self._size:
            return page
        if index < len(sequence.nodes):  # known, but not from where the sequence went on
            node = sequence.nodes[index]
        else:
            node = self._new_node(sequence, index)
        if index + 1 not in sequence.saves:
            return page
        return replace(page, save=self._tree.save(node))

    def _new_node(self, sequence: Sequence, index: int) -> Node:
        node = self._tree.find(sequence.keys[index])
        if node is None:
            parent = sequence.nodes[-1] if sequence.nodes else None
            node = self._tree.insert(parent, sequence.keys[index], sequence.pages[index])
            sequence.own.remove(node.page)
        else:  # somebody else has computed it meanwhile, into another cache page
            self._tree.hold([node])
        sequence.nodes.append(node)
        return node

    def keep_scores(
        self, sequence: Sequence, index: int, page: PageWork, result: TickResult
    ) -> None:
        """After a scored page has run. index: its place in the plan."""
        sequence.known_scores = page.start + len(page.tokens)
        if not self._tree.enabled or len(page.tokens) < self._size:
            return
        at = page.start // self._size
        node = self._tree.find(sequence.keys[at])
        if node is None or (node.scores is not None and node.scores.next_token >= 0):
            return
        node.scores = PageScores(
            result.score_logprobs[index].copy(),
            result.score_top_ids[index].copy(),
            result.score_top_logprobs[index].copy(),
            page.next_token,
        )

    def leave(self, sequence: Sequence) -> None:
        """The sequence's slot is released."""
        self._pool.give_back(tuple(sequence.own))
        self._tree.release(sequence.nodes)
        sequence.nodes, sequence.own = [], []


def _common(a: tuple[bytes, ...], b: tuple[bytes, ...]) -> int:
    """How many pages two prompts begin with alike."""
    count = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        count += 1
    return count


def _with_scores(path: list[Node], prompt: tuple[int, ...], size: int) -> list[PageScores]:
    """Scores of the path's first pages, as far as they are known for this prompt."""
    known = []
    for index, node in enumerate(path):
        end = (index + 1) * size
        if node.scores is None or end >= len(prompt):
            break
        if (scores := node.scores.before(prompt[end])) is None:
            break
        known.append(scores)
    return known
