"""Puts the layers together: the only file that sees all of them.

serve() runs one host: join the others, load its share of the weights, compile the tick, then lead
(process 0: tokenizer, scheduler, HTTP) or follow. Rule: what only the leader needs is imported in
the leader's functions, so a follower never loads api, text or scheduler.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any, NoReturn

import jax

from k3serve.errors import CheckpointError, ConfigError, HostFailure
from k3serve.local_hosts import watch_parent
from k3serve.runtime.compiling import is_compiling
from k3serve.runtime.engine import Engine
from k3serve.runtime.mesh import is_joined, tell_failure
from k3serve.settings import NANO, ServeConfig
from k3serve.startup import (
    build_engine,
    end_on_failure,
    exit_now,
    load_tokenizer,
    start_logging,
)

log = logging.getLogger("k3serve")

FAILURE_GRACE_S = 0.5
OTHERS_GRACE_S, MEETING_POINT_GRACE_S = 0.5, 2.0  # when a start fails
ANSWERS_GRACE_S = 5.0  # for answers that are complete but not yet written when the run ends
# Any thread may take a signal, but its handler runs in the main thread, once that wakes up.
WAKE_S = 0.2


def serve(config: ServeConfig) -> int:
    """Runs this host until it is told to stop; returns the process's exit status."""
    start_logging()
    watch_parent()
    prepared: list[Any] = []  # the leader's tokenizer
    try:
        engine = build_engine(config, joined=lambda: prepared.extend(prepare(config)))
    except (ConfigError, CheckpointError, HostFailure) as error:
        if isinstance(error, HostFailure) or is_joined() or is_compiling():
            end_failed_start(error)
        raise
    except KeyboardInterrupt:
        if is_compiling():
            exit_now(128 + signal.SIGINT)
        raise
    try:
        if jax.process_index() == 0:
            lead(engine, config, *prepared)
        else:
            follow(engine, config)
    except HostFailure as error:
        end_on_failure(error)
    if jax.process_count() > 1:
        jax.distributed.shutdown()  # a barrier: all hosts saw the stop and come here
        exit_now(0)
    return 0


def end_failed_start(error: Exception) -> NoReturn:
    """Ends a host that cannot start: if one of several, so that the others end too, each with its
    reason.

    Past JAX's own clean-up, which waits for all hosts, and for a compilation. The host where the
    others meet goes last: JAX aborts whoever finds it gone.
    """
    own_fault = not isinstance(error, HostFailure)
    log.error("%s", error if own_fault else f"host failure: {error}")
    if own_fault:
        tell_failure(str(error))
    if is_joined():
        time.sleep(MEETING_POINT_GRACE_S if jax.process_index() == 0 else OTHERS_GRACE_S)
    exit_now(2 if own_fault else 1)


# ------------------------------------------------------------------------------------- roles


def follow(engine: Engine, config: ServeConfig) -> None:
    """A follower's life: tick until the leader's plan says stop."""
    from k3serve.lockstep.follower import follow as follow_leader

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # the leader drains, then tells every host
    engine.compilations.ready()
    log.info("host %d of %d follows", jax.process_index(), jax.process_count())
    follow_leader(
        engine,
        engine.shape,
        tick_timeout_s=config.tick_timeout_s,
        start_timeout_s=config.connect_timeout_s,
        sync=config.sync,
        on_timeout=end_on_failure,
    )
    log.info("host %d ends: the leader said stop", jax.process_index())


def lead(engine: Engine, config: ServeConfig, tokenizer: Any) -> None:
    """The leader's life: schedule, speak HTTP, drain when asked to stop."""
    from k3serve.metrics import Metrics

    changed = threading.Event()  # a signal came, or the run failed
    signals: list[int] = []

    def on_signal(signum: int, _frame: object) -> None:
        signals.append(signum)
        if len(signals) > 1:
            log.warning("second signal: ending at once")
            exit_now(130)
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
        server = start_http(leader, engine, config, tokenizer, metrics)
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
    log.info("stopped")


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

    engine.compilations.ready()

    def on_tick(stats: TickStats) -> None:
        metrics.ticked(stats.times)
        if tokens := stats.prompt_tokens + stats.tokens:
            metrics.iteration_tokens.observe(tokens)
        if late := engine.compilations.take():
            metrics.compilations_after_ready.inc(late)

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


def start_http(
    leader: Any, engine: Engine, config: ServeConfig, tokenizer: Any, metrics: Any
) -> Any:
    """The HTTP server of a leader, already listening."""
    from k3serve.api.server import cannot_listen
    from k3serve.api.server import serve as serve_http
    from k3serve.api.settings import ApiSettings

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
        max_connections=config.max_connections,
        request_timeout_s=config.request_timeout_s,
    )
    try:
        return serve_http(leader, tokenizer, settings, metrics)
    except OSError as error:
        raise cannot_listen(config.host, config.port, error) from error


def prepare(config: ServeConfig) -> list[Any]:
    """What the leader can find wrong before weights are loaded: a taken port, a damaged tokenizer.
    The tokenizer, or nothing on a follower. Raises ConfigError or CheckpointError.
    """
    if jax.process_index() != 0:
        return []
    from k3serve.api.server import check_address

    check_address(config.host, config.port)
    return [load_tokenizer(config.checkpoint)]


def model_names(config: ServeConfig) -> tuple[str, ...]:
    if config.served_model_names:
        return config.served_model_names
    return ("k3-nano" if config.checkpoint == NANO else config.checkpoint.resolve().name,)


def _announce(config: ServeConfig, port: int, name: str) -> None:
    host = "127.0.0.1" if config.host in ("0.0.0.0", "::") else config.host
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    log.info("%s is ready: %s", name, url)
