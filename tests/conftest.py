"""What all tests share: a folder's compiled programs go when its tests are through.

Every program that XLA compiles for a CPU takes memory maps, of which Linux grants a process 65,530;
the whole suite in one process would need more, and ends in a segmentation fault.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    try:
        yield
    finally:
        leaves = nextitem is None or item.path.parent != nextitem.path.parent
        if leaves and "jax" in sys.modules:
            sys.modules["jax"].clear_caches()
            gc.collect()
