"""The prefix tree: which prompt pages the device holds already, and where one can go on from.

A node is one whole page of some prompt, in the context of all pages before it. It has a cache page
(the MLA rows), and may have a snapshot (the recurrent state at its end) and its scores. A prompt
shares the cache pages of all nodes it matches, and goes on from the deepest snapshot among them:
pages between that and its own are computed again, into the same cache pages, bit for bit.

Rule: only what the page program computed enters, when its plan is made: the device runs plans in
order, so whatever a later plan reads is there. Nodes that a slot uses and nodes with children stay;
others leave, least recently used first, when cache pages run out. Snapshots are reused likewise.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from k3serve.types import PromptScores


def page_keys(prompt: tuple[int, ...], page_tokens: int) -> tuple[bytes, ...]:
    """One key for each whole page of the prompt, of that page and all before it."""
    data, keys, key = np.asarray(prompt, np.int32).tobytes(), [], b""
    size = 4 * page_tokens
    for end in range(size, len(data) + 1, size):
        key = hashlib.blake2b(key + data[end - size : end], digest_size=16).digest()
        keys.append(key)
    return tuple(keys)


@dataclass(frozen=True, slots=True)
class PageScores:
    """What a scored page gave. The last row speaks of next_token, which stands on the next page."""

    logprobs: np.ndarray  # [C] f32
    top_ids: np.ndarray  # [C, MAX_TOP_LOGPROBS] i32
    top_logprobs: np.ndarray  # [C, MAX_TOP_LOGPROBS] f32
    next_token: int  # -1 where the prompt ended with the page

    def before(self, token: int) -> PageScores | None:
        """The same page before another next token; None where that one's score is not known."""
        if token == self.next_token:
            return self
        found = np.flatnonzero(self.top_ids[-1] == token)
        if not found.size:
            return None
        logprobs = self.logprobs.copy()
        logprobs[-1] = self.top_logprobs[-1, found[0]]  # the same bits: see PromptScores
        return PageScores(logprobs, self.top_ids, self.top_logprobs, token)


def joined(pages: Seq[PageScores]) -> PromptScores | None:
    """The scores of a prompt's first pages."""
    if not pages:
        return None
    return PromptScores(
        start=1,
        logprobs=np.concatenate([p.logprobs for p in pages]),
        top_ids=np.concatenate([p.top_ids for p in pages]),
        top_logprobs=np.concatenate([p.top_logprobs for p in pages]),
    )


@dataclass(slots=True, eq=False)
class Node:
    key: bytes
    parent: Node | None
    page: int  # cache page
    children: int = 0
    users: int = 0  # slots whose page table holds it
    snapshot: int | None = None
    scores: PageScores | None = None


class PrefixTree:
    """Nodes by key, least recently used first. Not thread-safe: the scheduler owns it."""

    def __init__(self, num_snapshots: int) -> None:
        """num_snapshots: size of the device's pool; 0 keeps the tree empty."""
        self._nodes: OrderedDict[bytes, Node] = OrderedDict()
        self._snapshots: OrderedDict[int, Node | None] = OrderedDict(
            (index, None) for index in range(num_snapshots)
        )

    @property
    def enabled(self) -> bool:
        return bool(self._snapshots)

    @property
    def num_pages(self) -> int:
        """Cache pages that the tree owns."""
        return len(self._nodes)

    @property
    def num_snapshots(self) -> int:
        """Snapshots in use."""
        return sum(node is not None for node in self._snapshots.values())

    def match(self, keys: Seq[bytes]) -> list[Node]:
        """The nodes of the longest known beginning."""
        path = []
        for key in keys:
            if (node := self._nodes.get(key)) is None:
                break
            path.append(node)
        return path

    def hold(self, path: Seq[Node]) -> None:
        """A slot uses these nodes from now on: they stay."""
        for node in path:
            node.users += 1
        self._touch(path)

    def release(self, path: Seq[Node]) -> None:
        for node in path:
            assert node.users > 0, "a node was released twice"
            node.users -= 1
        self._touch(path)

    def insert(self, parent: Node | None, key: bytes, page: int) -> Node:
        """A new page, in use by the slot that computes it; the tree owns its cache page now."""
        assert key not in self._nodes, "this page is in the tree already"
        node = self._nodes[key] = Node(key, parent, page, users=1)
        if parent is not None:
            parent.children += 1
        return node

    def find(self, key: bytes) -> Node | None:
        return self._nodes.get(key)

    def restore(self, node: Node) -> int:
        """The node's snapshot, for a plan that reads it."""
        assert node.snapshot is not None
        self._snapshots.move_to_end(node.snapshot)
        return node.snapshot

    def save(self, node: Node) -> int | None:
        """A snapshot for the end of this page, taken from the node that used its own least
        recently; None where the node has one.
        """
        if node.snapshot is not None or not self._snapshots:
            return None
        index, owner = next(iter(self._snapshots.items()))
        if owner is not None:
            owner.snapshot = None
        self._snapshots[index] = node
        self._snapshots.move_to_end(index)
        node.snapshot = index
        return index

    def evict_page(self) -> int | None:
        """Gives up the least recently used leaf that no slot uses; its cache page, or None."""
        node = next((n for n in self._nodes.values() if not n.users and not n.children), None)
        if node is None:
            return None
        del self._nodes[node.key]
        if node.parent is not None:
            node.parent.children -= 1
        if node.snapshot is not None:
            self._snapshots[node.snapshot] = None
            self._snapshots.move_to_end(node.snapshot, last=False)
        return node.page

    def _touch(self, path: Seq[Node]) -> None:
        """The ends first, so that a leaf is found before the nodes it hangs on."""
        for node in reversed(path):
            self._nodes.move_to_end(node.key)
