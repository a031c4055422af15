"""The books of a scheduler, audited between ticks: every slot, cache page and snapshot is in one
place, and the queue keeps its budget.

Rule: reads private fields, changes nothing; each assert names what would be lost or held twice.
"""

from __future__ import annotations

from collections import Counter

from k3serve.scheduler.scheduler import Scheduler


def audit(scheduler: Scheduler, depth: int) -> None:
    """After a plan was made, or a result committed. depth: most plans in flight."""
    audit_slots(scheduler)
    audit_pages(scheduler)
    audit_snapshots(scheduler)
    audit_queue(scheduler, depth)


def audit_slots(scheduler: Scheduler) -> None:
    occupants = scheduler._slots.occupants()
    taken = [slot for slot, _ in occupants]
    everywhere = sorted(taken + scheduler._slots._free)
    assert everywhere == list(range(scheduler.shape.max_slots)), "a slot is lost or given twice"
    assert all(sequence.slot == slot for slot, sequence in occupants)


def audit_pages(scheduler: Scheduler) -> None:
    cache, sequences = scheduler.cache, [q for _, q in scheduler._slots.occupants()]
    nodes = cache._tree._nodes
    own = [page for sequence in sequences for page in sequence.own]
    everywhere = sorted(cache._pool._free + [node.page for node in nodes.values()] + own)
    assert everywhere == list(range(scheduler.shape.num_pages)), "a page is lost or owned twice"
    users = Counter(id(node) for sequence in sequences for node in sequence.nodes)
    children = Counter(id(node.parent) for node in nodes.values())
    for node in nodes.values():
        assert node.users == users[id(node)], "a node is held for nobody, or by somebody unknown"
        assert node.children == children[id(node)]
        assert node.parent is None or nodes.get(node.parent.key) is node.parent
    for sequence in sequences:
        assert all(nodes.get(node.key) is node for node in sequence.nodes), "evicted while in use"
        mine = {*sequence.own, *(node.page for node in sequence.nodes)}
        assert len(set(sequence.pages)) == len(sequence.pages), "a page is in a table twice"
        assert {*sequence.own} <= {*sequence.pages} <= mine, "a table names a page it does not hold"


def audit_snapshots(scheduler: Scheduler) -> None:
    tree = scheduler.cache._tree
    assert sorted(tree._snapshots) == list(range(scheduler.shape.num_snapshots))
    owned = {index: node for index, node in tree._snapshots.items() if node is not None}
    assert all(tree._nodes.get(node.key) is node for node in owned.values())
    known = {n.snapshot: n for n in tree._nodes.values() if n.snapshot is not None}
    assert known == owned, "a snapshot is lost, or two nodes think that it is theirs"


def audit_queue(scheduler: Scheduler, depth: int) -> None:
    assert len(scheduler._open) <= scheduler.max_open
    assert len(scheduler._in_flight) <= depth
    waiting, prefilling = scheduler._waiting, scheduler._prefilling
    assert all(scheduler._open.get(q.request.id) is q and q.slot is None for q in waiting)
    assert all(q.slot is not None and not q.prompt_planned for q in prefilling)
    assert len({id(q) for q in prefilling}) == len(prefilling) <= scheduler._slots.used
