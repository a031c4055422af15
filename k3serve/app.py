"""Puts the layers together: the only file that sees all of them.

serve() runs one host: join the others, load its share of the weights, compile the tick, then lead
(process 0: scheduler; tokenizer and HTTP here or in a front of its own) or follow. Rule: what only
the leader needs is imported in the leader's functions, so a follower never loads api, text or
scheduler.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import jax

from k3serve.errors import CheckpointError, ConfigError, HostFailure
from k3serve.link import LINK_FD
from k3serve.local_hosts import watch_parent
from k3serve.process import exit_now, start_logging
from k3serve.runtime.compiling import is_compiling
from k3serve.runtime.engine import Engine
from k3serve.runtime.mesh import is_joined, leave, tell_failure, this_host
from k3serve.settings import ServeConfig
from k3serve.startup import build_engine, end_on_failure

log = logging.getLogger("k3serve")

FAILURE_GRACE_S = 0.5
OTHERS_GRACE_S, MEETING_POINT_GRACE_S = 0.5, 2.0  # when a start fails
# Any thread may take a signal, but its handler runs in the main thread, once that wakes up.
WAKE_S = 0.2


def serve(config: ServeConfig) -> int:
    """Runs this host until it is told to stop; returns the process's exit status."""
    start_logging()
    watch_parent()
    link = _front_link()
    prepared: list[Any] = []  # the leader's tokenizer

    def joined() -> None:
        if link is not None:
            link.joined(leads=jax.process_index() == 0)
        else:
            prepared.extend(prepare(config))

    try:
        engine = build_engine(config, joined)
    except (ConfigError, CheckpointError, HostFailure) as error:
        if isinstance(error, HostFailure) or is_joined() or is_compiling():
            end_failed_start(error)
        raise
    except KeyboardInterrupt:
        if is_compiling():
            exit_now(128 + signal.SIGINT)
        raise
    try:
        if jax.process_index() != 0:
            follow(engine, config, link)
        elif link is not None:
            lead_for_front(engine, config, link)
        else:
            lead(engine, config, *prepared)
        leave(config.tick_timeout_s)
    except HostFailure as error:
        end_on_failure(error)
    if link is not None:
        link.close()
    if jax.process_count() > 1:
        exit_now(0)  # past JAX's own clean-up: it has left already
    return 0


def _front_link() -> Any:
    """The link to the front that started this process, which alone hears signals; else None."""
    if LINK_FD not in os.environ:
        return None
    from k3serve.lockstep.for_front import front_link

    _ignore_signals()
    return front_link()


def _ignore_signals() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)


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
        time.sleep(MEETING_POINT_GRACE_S if this_host() == 0 else OTHERS_GRACE_S)
    exit_now(2 if own_fault else 1)


# ------------------------------------------------------------------------------------- roles


def follow(engine: Engine, config: ServeConfig, link: Any = None) -> None:
    """A follower's life: tick until the leader's plan says stop."""
    from k3serve.lockstep.follower import follow as follow_leader

    _ignore_signals()  # the leader drains, then tells every host
    engine.compilations.ready()
    if link is not None:
        link.serve(None, engine.shape)
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
    from k3serve.front.http import ANSWERS_GRACE_S, announce, model_names, start_http
    from k3serve.lockstep.leader import TickStats
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
    metrics = Metrics(model_names(config)[0])

    def on_tick(stats: TickStats, compilations: int) -> None:
        metrics.ticked(stats.times, stats.prompt_tokens + stats.tokens, compilations)

    leader = start_leader(
        engine, config, on_tick, on_failure=lambda failure: changed.set(), queue=config.max_queue
    )
    _until_ready(leader)
    try:
        server = start_http(leader, engine.config, config, tokenizer, metrics)
    except BaseException:
        leader.stop()  # else the other hosts would wait for its next tick
        raise
    announce(config, server.port)
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


def lead_for_front(engine: Engine, config: ServeConfig, link: Any) -> None:
    """The same for a front in another process, which speaks HTTP and says when to stop."""

    def on_failure(failure: HostFailure) -> None:
        link.failed(failure)

    # the front keeps the queue's limit; what it cancelled may still be open here
    leader = start_leader(engine, config, link.ticked, on_failure, queue=sys.maxsize)
    _until_ready(leader)
    link.serve(leader, engine.shape)
    _until(leader.wait_ended)
    if leader.failure is not None:
        raise leader.failure


def _until_ready(leader: Any) -> None:
    while not leader.wait_ready(WAKE_S):
        if leader.wait_ended(0.0):
            raise leader.failure or HostFailure("the first tick did not come back")


def _until(wait: Callable[[float], bool]) -> None:
    while not wait(WAKE_S):
        pass


def start_leader(
    engine: Engine,
    config: ServeConfig,
    on_tick: Callable[[Any, int], None],
    on_failure: Callable[[HostFailure], None],
    queue: int,
) -> Any:
    """A lockstep.leader.Leader whose first tick is on its way.

    on_tick gets each tick's TickStats, and how many programs were compiled since the one before.
    """
    from k3serve.lockstep.leader import Leader, TickStats

    engine.compilations.ready()

    def ticked(stats: TickStats) -> None:
        on_tick(stats, engine.compilations.take())

    leader = Leader(
        engine,
        engine.shape,
        max_queue=queue,
        tick_timeout_s=config.tick_timeout_s,
        start_timeout_s=config.connect_timeout_s,
        sync=config.sync,
        on_failure=on_failure,
        on_tick=ticked,
    )
    leader.start()
    return leader


def prepare(config: ServeConfig) -> list[Any]:
    """What the leader can find wrong before weights are loaded: a taken port, a damaged tokenizer.
    The tokenizer, or nothing on a follower. Raises ConfigError or CheckpointError.
    """
    if jax.process_index() != 0:
        return []
    from k3serve.api.server import check_address
    from k3serve.text.tokenizer import load_tokenizer

    check_address(config.host, config.port)
    return [load_tokenizer(config.checkpoint)]
