"""From settings to an engine that is ready to tick; what serving and scoring share.

Rule: runs the same on every host, leader or follower.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from k3serve import wire
from k3serve.checkpoint.draft import open_draft
from k3serve.checkpoint.fingerprint import fingerprints
from k3serve.checkpoint.load import Source, open_target, shapes
from k3serve.checkpoint.vocabulary import sampling_mask
from k3serve.config import TargetConfig
from k3serve.draft_config import DraftConfig
from k3serve.errors import HostFailure
from k3serve.model.acceptance import Rule
from k3serve.process import FLUSH_S, exit_now
from k3serve.runtime.compiling import Compiling
from k3serve.runtime.decode import ModelWeights, Speculation
from k3serve.runtime.engine import Engine
from k3serve.runtime.mesh import (
    HostGroup,
    agree,
    check_others,
    join,
    keeping_programs,
    make_mesh,
    own_cache_folder,
    wait_for_all_hosts,
)
from k3serve.runtime.program import Program
from k3serve.runtime.snapshots import page_bytes, snapshot_bytes
from k3serve.settings import ServeConfig

log = logging.getLogger("k3serve")


def build_engine(config: ServeConfig, joined: Callable[[], None] = lambda: None) -> Engine:
    """Joins the hosts, loads the weights and compiles; the engine of this host, ready to tick.

    `joined` is called before the slow part: what cannot work should say so then.
    """
    group = HostGroup(
        config.coordinator, config.num_hosts, config.host_id, config.connect_timeout_s
    )
    join(group, cpu_ranks=config.ranks or 1, on_timeout=end_on_failure)
    joined()
    use_compilation_cache()
    program, sources = _open(config)
    allowed = (
        np.ones(program.config.vocab_size, bool)
        if config.allow_reserved
        else sampling_mask(config.checkpoint, program.config.vocab_size)
    )
    compiling = Compiling(keeping_programs()(program.compile))
    weights = _read(sources, program.mesh, compiling)
    engine = Engine(program, compiling.result(check_others), weights, allowed)
    log.info("%s", _drafting(config, engine))
    wait_for_all_hosts(config.connect_timeout_s)
    return engine


def _open(config: ServeConfig) -> tuple[Program, ModelWeights]:
    """The program of this run, the same on all hosts, and the Sources of its weights."""
    target = TargetConfig.from_dir(config.checkpoint)
    draft_dir = config.draft_dir()
    draft = None if draft_dir is None else DraftConfig.from_dir(draft_dir, target)
    on_cpu = jax.devices()[0].platform == "cpu"
    shape = config.tick_shape(target.max_position, draft.block_size if draft else None, on_cpu)
    agree(_common(config, draft_dir), config.connect_timeout_s)
    mesh = make_mesh(config.ranks or (1 if on_cpu else None))
    dtype = dtype_of(config.dtype, on_cpu)
    shape = config.with_prefix_cache(
        shape,
        snapshot_bytes(target, draft, shape, mesh.size, dtype.itemsize),
        page_bytes(target, shape, dtype.itemsize),
        on_cpu,
    )
    expert_format = expert_format_of(config.experts, target, on_cpu)
    of_draft = None
    if draft is not None and draft_dir is not None:
        of_draft = open_draft(draft_dir, draft, mesh.size, dtype)
    sources = ModelWeights(
        target=open_target(config.checkpoint, target, mesh.size, dtype, expert_format),
        draft=of_draft,
    )
    program = Program(
        target,
        shape,
        mesh,
        jax.tree.map(lambda source: shapes(source.layout, mesh), sources),
        dtype,
        Speculation(draft, Rule(config.acceptance), config.markov_top),
    )
    return program, sources


def _read(sources: ModelWeights, mesh: Mesh, compiling: Compiling) -> ModelWeights:
    """The weights, while the tick is being compiled; an error of that, or of a host, ends it."""
    started = time.monotonic()

    def read(what: str, source: Source) -> Any:
        progress = Progress(what)

        def report(done: int, total: int) -> None:
            compiling.check()
            if progress(done, total):
                check_others()

        return source.load(mesh, report)

    target = read("loading weights", sources.target)
    draft = None
    if sources.draft is not None:
        draft = read("loading the draft's weights", sources.draft)
    log.info("weights loaded in %.1f s", time.monotonic() - started)
    return ModelWeights(target=target, draft=draft)


def _drafting(config: ServeConfig, engine: Engine) -> str:
    if engine.speculation.draft is None:
        return f"no drafts, {engine.shape.rows} rows a step"
    return (
        f"up to {engine.shape.rows - 1} drafts a step from {config.draft_dir()}, "
        f"acceptance {config.acceptance}"
    )


def _common(config: ServeConfig, draft_dir: Path | None) -> dict[str, str]:
    """What must be equal on all hosts, by the name that a message should use."""
    return config.common() | {
        "the k3serve version": f"{metadata.version('k3serve')}, plans {wire.VERSION}",
        **_files("checkpoint", config.checkpoint),
        **_files("draft", draft_dir),
    }


def _files(owner: str, folder: Path | None) -> dict[str, str]:
    if folder is None:
        return {}
    return {
        f"the {owner}'s file {name} (its checksum)": value
        for name, value in fingerprints(folder).items()
    }


def dtype_of(name: str, on_cpu: bool) -> Any:
    if name == "auto":
        name = "float32" if on_cpu else "bfloat16"
    return jnp.dtype(name)


def expert_format_of(name: str, target: TargetConfig, on_cpu: bool) -> str:
    if name == "auto":
        return "dense" if on_cpu or not target.packed_experts else "packed"
    return name


def use_compilation_cache() -> None:
    """Keeps compiled programs between runs, unless JAX's own variable already says where."""
    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if not folder:
        base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        folder = str(base / "k3serve" / "jax")
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    jax.config.update("jax_compilation_cache_dir", own_cache_folder(folder))


class Progress:
    """Logs a long transfer at most every two seconds; says whether it did."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._started = time.monotonic()
        self._logged = self._started

    def __call__(self, done: int, total: int) -> bool:
        now = time.monotonic()
        if now - self._logged < 2.0:
            return False
        self._logged = now
        rate = done / (now - self._started)
        left_s = (total - done) / rate if rate else float("inf")
        log.info("%s: %.0f %%, %.0f s left", self._what, 100 * done / total, left_s)
        return True


def end_on_failure(failure: HostFailure) -> NoReturn:
    """Ends the process past JAX's clean-up, which waits for dead peers or for a tick that hangs.

    A watchdog calls it while the main thread is blocked in a collective.
    """
    said = threading.Thread(target=log.error, args=("host failure: %s", failure), daemon=True)
    said.start()
    said.join(FLUSH_S)
    exit_now(1)
