"""Puts the layers together: the only file that sees all of them.

serve() runs one host: join the others, load its share of the weights, compile the tick, then lead
(process 0: tokenizer, scheduler, HTTP) or follow. Rule: what only the leader needs is imported in
the leader's functions, so a follower never loads api, text or scheduler.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3serve.checkpoint.load import load
from k3serve.checkpoint.vocabulary import sampling_mask
from k3serve.config import TargetConfig
from k3serve.errors import ConfigError, HostFailure
from k3serve.local_hosts import watch_parent
from k3serve.runtime.engine import Engine
from k3serve.runtime.mesh import HostGroup, join, make_mesh, wait_for_all_hosts
from k3serve.settings import NANO, ServeConfig

log = logging.getLogger("k3serve")

FAILURE_GRACE_S = 0.5
ANSWERS_GRACE_S = 5.0  # for answers that are complete but not yet written when the run ends
# Any thread may take a signal, but its handler runs in the main thread, once that wakes up.
WAKE_S = 0.2


def serve(config: ServeConfig) -> int:
    """Runs this host until it is told to stop; returns the process's exit status."""
    _start_logging()
    watch_parent()
    try:
        engine = build_engine(config)
        leads = jax.process_index() == 0
        status = lead(engine, config) if leads else follow(engine, config)
    except HostFailure as error:
        log.error("host failure: %s", error)
        status = 1
    if status == 0 and jax.process_count() > 1:
        jax.distributed.shutdown()  # a barrier: all hosts saw the stop and come here
    if status != 0 or jax.process_count() > 1:
        # after a failure JAX's own clean-up waits for dead peers or for a tick that hangs
        _exit_now(status)
    return status


def _exit_now(status: int) -> None:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _start_logging() -> None:
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    for noisy in ("jax", "absl"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


# ------------------------------------------------------------------------------------ engine


def build_engine(config: ServeConfig) -> Engine:
    """Joins the hosts, loads the weights and compiles; the engine of this host, ready to tick."""
    group = HostGroup(
        config.coordinator, config.num_hosts, config.host_id, config.connect_timeout_s
    )
    join(group, cpu_ranks=config.ranks or 1, on_timeout=_end_on_failure)
    _use_compilation_cache()
    target = TargetConfig.from_dir(config.checkpoint)
    shape = config.tick_shape(target.max_position)
    on_cpu = jax.devices()[0].platform == "cpu"
    mesh = make_mesh(config.ranks or (1 if on_cpu else None))
    dtype = _dtype(config.dtype, on_cpu)
    started = time.monotonic()
    weights = load(
        config.checkpoint,
        target,
        mesh,
        dtype=dtype,
        expert_format=_expert_format(config.experts, target, on_cpu),
        progress=_Progress("loading weights"),
    )
    log.info("weights loaded in %.1f s; compiling the tick", time.monotonic() - started)
    started = time.monotonic()
    allowed = (
        np.ones(target.vocab_size, bool)
        if config.allow_reserved
        else sampling_mask(config.checkpoint, target.vocab_size)
    )
    engine = Engine(target, shape, mesh, weights, allowed, dtype=dtype)
    log.info("compiled in %.1f s", time.monotonic() - started)
    wait_for_all_hosts(config.connect_timeout_s)
    return engine


def _dtype(name: str, on_cpu: bool) -> Any:
    if name == "auto":
        name = "float32" if on_cpu else "bfloat16"
    return jnp.dtype(name)


def _expert_format(name: str, target: TargetConfig, on_cpu: bool) -> str:
    if name == "auto":
        return "dense" if on_cpu or not target.packed_experts else "packed"
    return name


def _use_compilation_cache() -> None:
    """Keeps compiled programs between runs, unless JAX's own variable already says where."""
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        jax.config.update("jax_compilation_cache_dir", str(base / "k3serve" / "jax"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


class _Progress:
    """Logs a long transfer at most every two seconds."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._started = time.monotonic()
        self._logged = self._started

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._logged < 2.0:
            return
        self._logged = now
        rate = done / (now - self._started)
        left_s = (total - done) / rate if rate else float("inf")
        log.info("%s: %.0f %%, %.0f s left", self._what, 100 * done / total, left_s)


# ------------------------------------------------------------------------------------- roles


def follow(engine: Engine, config: ServeConfig) -> int:
    """A follower's life: tick until the leader's plan says stop."""
    from k3serve.lockstep.follower import follow as follow_leader

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # the leader drains, then tells every host
    log.info("host %d of %d follows", jax.process_index(), jax.process_count())
    follow_leader(
        engine,
        engine.shape,
        tick_timeout_s=config.tick_timeout_s,
        start_timeout_s=config.connect_timeout_s,
        sync=config.sync,
        on_timeout=_end_on_failure,
    )
    log.info("host %d ends: the leader said stop", jax.process_index())
    return 0


def _end_on_failure(failure: HostFailure) -> None:
    """From a watchdog: the main thread is blocked in a collective and cannot end the process."""
    log.error("host failure: %s", failure)
    _exit_now(1)


def lead(engine: Engine, config: ServeConfig) -> int:
    """The leader's life: schedule, speak HTTP, drain when asked to stop."""
    from k3serve.metrics import Metrics

    changed = threading.Event()  # a signal came, or the run failed
    signals: list[int] = []

    def on_signal(signum: int, _frame: object) -> None:
        signals.append(signum)
        if len(signals) > 1:
            log.warning("second signal: ending at once")
            _exit_now(130)
        changed.set()

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, on_signal)
    name = model_names(config)[0]
    metrics = Metrics(name)
    leader = start_leader(engine, config, metrics, on_failure=lambda failure: changed.set())
    while not leader.wait_ready(WAKE_S):
        if leader.wait_ended(0.0):
            raise leader.failure or HostFailure("the first tick did not come back")
    try:
        server = start_http(leader, engine, config, metrics)
    except BaseException:
        leader.stop()  # else the other hosts would wait for its next tick
        raise
    _announce(config, server.port, name)
    _until(changed.wait)
    if leader.failure is not None:
        # the open requests have their error already; give the threads that write it a moment
        time.sleep(FAILURE_GRACE_S)
        raise leader.failure
    log.info("stopping: up to %.0f s for what runs", config.drain_timeout_s)
    leader.begin_drain(config.drain_timeout_s)
    _until(leader.wait_ended)
    server.shutdown(ANSWERS_GRACE_S)
    if leader.failure is not None:
        raise leader.failure
    return 0


def _until(wait: Callable[[float], bool]) -> None:
    while not wait(WAKE_S):
        pass


def start_leader(
    engine: Engine,
    config: ServeConfig,
    metrics: Any,
    on_failure: Callable[[HostFailure], None],
) -> Any:
    """A lockstep.leader.Leader whose first tick is on its way."""
    from k3serve.lockstep.leader import Leader, TickStats

    engine.compilations.reset()

    def on_tick(stats: TickStats) -> None:
        metrics.ticks.inc()
        if tokens := stats.prompt_tokens + stats.tokens:
            metrics.iteration_tokens.observe(tokens)
        late = engine.compilations.take()
        if late:
            metrics.compilations_after_ready.inc(late)
            log.warning("%d programs were compiled after start-up", late)

    leader = Leader(
        engine,
        engine.shape,
        max_queue=config.max_queue,
        tick_timeout_s=config.tick_timeout_s,
        start_timeout_s=config.connect_timeout_s,
        sync=config.sync,
        on_failure=on_failure,
        on_tick=on_tick,
    )
    leader.start()
    return leader


def start_http(leader: Any, engine: Engine, config: ServeConfig, metrics: Any) -> Any:
    """The HTTP server of a leader, already listening."""
    from k3serve.api.server import serve as serve_http
    from k3serve.api.settings import ApiSettings

    tokenizer = load_tokenizer(config.checkpoint)
    settings = ApiSettings(
        vocab_size=engine.config.vocab_size,
        eos_ids=(engine.config.eos_token_id,) if tokenizer is None else (),
        host=config.host,
        port=config.port,
        served_model_names=model_names(config),
        model_root=str(config.checkpoint),
        version=metadata.version("k3serve"),
        api_keys=config.api_keys,
        cors_origins=config.allowed_origins,
        max_body_bytes=config.max_body_mib << 20,
    )
    try:
        return serve_http(leader, tokenizer, settings, metrics)
    except OSError as error:
        raise ConfigError(
            f"--host {config.host} --port {config.port}: cannot listen there ({error}); "
            "stop what uses the port, or choose another (0 picks a free one)"
        ) from error


def load_tokenizer(checkpoint: Path) -> Any:
    """The checkpoint's tokenizer, or None where it ships none (token-id prompts still work)."""
    from k3serve.text.tokenizer import Tokenizer

    if not (checkpoint / "tiktoken.model").exists():
        log.warning("%s has no tiktoken.model: only token-id prompts will work", checkpoint)
        return None
    return Tokenizer.load(checkpoint)


def model_names(config: ServeConfig) -> tuple[str, ...]:
    if config.served_model_names:
        return config.served_model_names
    return ("k3-nano" if config.checkpoint == NANO else config.checkpoint.resolve().name,)


def _announce(config: ServeConfig, port: int, name: str) -> None:
    host = "127.0.0.1" if config.host in ("0.0.0.0", "::") else config.host
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    log.info("%s is ready: %s", name, url)


# ------------------------------------------------------------------------------------- score


def score(
    *,
    checkpoint: Path,
    input: Path,
    output: Path,
    dtype: str,
    logits: bool,
    top: int,
    ranks: int | None,
) -> int:
    """The `score` command; see its --help."""
    from k3serve.score import score as score_lines

    _start_logging()
    join(HostGroup(num_hosts=1), cpu_ranks=ranks or 1)
    _use_compilation_cache()
    target = TargetConfig.from_dir(checkpoint)
    on_cpu = jax.devices()[0].platform == "cpu"
    lines = _read_lines(input)
    tokenizer = load_tokenizer(checkpoint) if any("text" in line for line in lines) else None
    if output.suffix != ".npz":
        raise ConfigError(f"--output {output}: the name must end in .npz")
    arrays = score_lines(
        checkpoint,
        lines,
        dtype=_dtype(dtype, on_cpu),
        want_logits=logits,
        top=top,
        ranks=ranks or 1,
        expert_format=_expert_format("auto", target, on_cpu),
        # special strings become their single id, as in prompts of /v1/completions
        encode=partial(tokenizer.encode, allow_special=True) if tokenizer is not None else None,
        progress=_Progress("scoring lines"),
    )
    _write_npz(output, arrays)
    log.info("wrote %d sequences to %s", len(lines), output)
    return 0


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file; blank lines are skipped."""
    lines = []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--input {path}: cannot be read as UTF-8 text ({error})") from error
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"--input {path}, line {number}: not JSON ({error})") from error
        if not isinstance(value, dict):
            raise ConfigError(f"--input {path}, line {number}: must be an object, is {line[:80]!r}")
        lines.append(value)
    return lines


def _write_npz(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Whole or not at all: the file appears under its name when it is complete."""
    unfinished = path.with_name(path.name + ".part")
    try:
        with unfinished.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise ConfigError(f"--output {path}: cannot be written ({error})") from error
