"""Compiled programs shared by the model's tests: one compilation for each (checkpoint, ranks)."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache

import jax
import pytest

from tests.model.harness import Model

jax.config.update("jax_num_cpu_devices", 4)
if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


@pytest.fixture(scope="package")
def model() -> Callable[..., Model]:
    """model(name, ranks=1, page_tokens=64, expert_format="dense", dtype="float32")."""
    return cache(Model)
