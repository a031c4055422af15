"""A front's life: start the engine, serve HTTP, watch the engine, start it again where asked to.

Rule: no JAX. The main thread alone decides; threads of the link and signals only leave it news.
Whatever the engine does, this process ends it, answers every open request, and never hangs.
"""

from __future__ import annotations

import logging
import signal
import socket
import threading
import time
from typing import Any

from k3serve import link as wire
from k3serve.api.server import ApiServer
from k3serve.config import TargetConfig
from k3serve.errors import CheckpointError, ConfigError
from k3serve.front.executor import EngineClient
from k3serve.front.http import ANSWERS_GRACE_S, announce, model_names, start_http
from k3serve.link import Link
from k3serve.local_hosts import GRACE_S, LocalHosts, start_hosts
from k3serve.metrics import Metrics
from k3serve.process import exit_now, start_logging
from k3serve.settings import ServeConfig
from k3serve.text.tokenizer import load_tokenizer
from k3serve.types import TokenEvent

log = logging.getLogger("k3serve")

LOOK_S = 0.1  # how often the main thread looks at processes and the clock
SLACK_S = 2.0  # an engine notices a hung tick by itself, and may say so first
FAILURE_GRACE_S = 0.5
END_S = 10.0  # what an engine has beyond its drain
MOST_FAILED_STARTS = 5  # in a row, before a front gives up
LONGEST_PAUSE_S = 30.0
MISUSE = 2  # exit status of a host that cannot honour its flags or its checkpoint


def run(config: ServeConfig, flags: list[str]) -> int:
    """Serves with an engine of its own; flags: those of the command line, without --hosts."""
    start_logging()
    front = Front(config, flags)
    try:
        return front.run()
    finally:
        front.close()


class Front:
    """One HTTP server, and one engine after another."""

    def __init__(self, config: ServeConfig, flags: list[str]) -> None:
        self._config = config
        self._flags = flags
        self._metrics = Metrics(model_names(config)[0])
        self._client: EngineClient | None = None
        self._server: ApiServer | None = None
        self._news = threading.Event()
        self._signals: list[int] = []
        self._life: Life | None = None

    def run(self) -> int:
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._on_signal)
        failed_starts = restarts = 0
        while True:
            life = self._life = Life(self._config, self._flags, self)
            status = self._watch(life)
            self._life = None
            if self._signals or status == 0:
                log.info("stopped")
                return status
            failed_starts = 0 if life.ready.is_set() else failed_starts + 1
            if not self._config.restart or (status == MISUSE and not restarts):
                if self._server is not None:
                    self._pause(FAILURE_GRACE_S)  # for /health to be asked once more
                return status
            if failed_starts >= MOST_FAILED_STARTS:
                log.error("%d starts in a row failed: giving up", failed_starts)
                return status
            pause_s = min(LONGEST_PAUSE_S, 2.0**failed_starts - 1)
            log.warning("the engine ended with status %d; starting it again", status)
            if self._pause(pause_s):
                return 0
            restarts += 1
            self._metrics.engine_restarts.inc()

    def close(self) -> None:
        """Ends what is left of the engine, then HTTP, once the answers that are due are out."""
        if self._life is not None:
            self._life.hosts.kill()
        if self._client is not None:
            self._client.drain(0.0)
        if self._server is not None:
            self._server.shutdown(ANSWERS_GRACE_S)

    # -------------------------------------------------------------------------- main thread

    def _watch(self, life: Life) -> int:
        """Until all processes of this life have ended; their status."""
        restarts = self._config.restart
        asked = False
        while (status := life.hosts.poll()) is None:
            self._news.wait(LOOK_S)
            self._news.clear()
            if life.failure(self._config) and not life.told:
                life.told = True
                life.hosts.expect_end(life.grace_s)
                self._lose(str(life.reason), restarts=restarts and not self._signals)
            if self._signals and not asked:
                asked = True
                self._stop(life)
        life.close()
        if not life.told:
            reason = life.reason or f"the engine ended with status {status}"
            self._lose(reason, restarts=restarts and not self._signals and status != 0)
        if asked and not life.ready.is_set():
            return 0  # ended by us, before it could serve
        return status

    def _stop(self, life: Life) -> None:
        drain_s = self._config.drain_timeout_s
        if self._client is not None and life.leads and self._client.drain(drain_s):
            log.info("stopping: up to %.0f s for what runs", drain_s)
            life.hosts.expect_end(drain_s + END_S)
        elif life.leads is False:
            log.info("host %s ends when the leader does", self._config.host_id)
        else:
            log.info("stopping during the start")
            life.hosts.kill()

    def _lose(self, reason: str, *, restarts: bool) -> None:
        if self._client is not None:
            self._client.lose(reason, restarts=restarts)

    def _pause(self, seconds: float) -> bool:
        """True: a signal came meanwhile."""
        by = time.monotonic() + seconds
        while not self._signals and (left_s := by - time.monotonic()) > 0:
            self._news.wait(min(left_s, LOOK_S))
            self._news.clear()
        return bool(self._signals)

    def _on_signal(self, signum: int, _frame: object) -> None:
        self._signals.append(signum)
        if len(self._signals) > 1:
            log.warning("second signal: ending at once")
            if self._life is not None:
                self._life.hosts.kill()
            exit_now(130)
        self._news.set()

    # ------------------------------------------------------------------ the link's thread

    def receive(self, life: Life, message: Any) -> None:
        """One message of the engine."""
        life.heard = True
        match message:
            case TokenEvent():
                if self._client is not None:
                    self._client.deliver(life.link, [message])
            case wire.Ticked():
                tokens = message.prompt_tokens + message.tokens
                self._metrics.ticked(message.times, tokens, message.compilations)
                if self._client is not None:
                    self._client.report(message.running)
            case wire.Joined():
                life.leads = message.leads
                life.link.send(self._prepare() if message.leads else wire.Go())
            case wire.Beat(resident_bytes):
                self._metrics.engine_memory.set(resident_bytes)
            case wire.Ready():
                self._ready(life, message)
            case wire.Failed():
                life.reason = message.reason
                self._news.set()

    def _prepare(self) -> wire.Go | wire.Refuse:
        """Opens HTTP, once: what cannot work should say so before weights are loaded."""
        config = self._config
        try:
            if self._server is None:
                target = TargetConfig.from_dir(config.checkpoint)
                shape = config.tick_shape(target.max_position)
                tokenizer = load_tokenizer(config.checkpoint)
                client = EngineClient(shape, config.max_queue, resume=config.resume)
                self._server = start_http(client, target, config, tokenizer, self._metrics)
                self._client = client
        except (ConfigError, CheckpointError) as error:
            return wire.Refuse(str(error))
        return wire.Go()

    def _ready(self, life: Life, message: wire.Ready) -> None:
        life.ready.set()
        if self._client is not None and self._server is not None:
            before = self._client.resumed
            self._client.attach(life.link, message.shape)
            self._metrics.resumed_requests.inc(self._client.resumed - before)
            announce(self._config, self._server.port)

    def ended(self, life: Life) -> None:
        life.gone = True
        self._news.set()


class Life:
    """One engine: its processes, the link to its leader, and what is known of it."""

    def __init__(self, config: ServeConfig, flags: list[str], front: Front) -> None:
        ours, theirs = socket.socketpair()
        count = config.hosts if (config.hosts or 1) > 1 else None
        self.hosts: LocalHosts = start_hosts(flags, count, theirs.fileno())
        theirs.close()
        self.leads: bool | None = None  # not known yet
        self.ready = threading.Event()
        self.heard = False  # since the main thread looked last
        self.gone = False  # the link has ended
        self.reason: str | None = None
        self.told = False  # the requests know
        self.grace_s = GRACE_S
        self._silent_s = 0.0
        self._looked_at = time.monotonic()
        self.link = Link(
            ours, lambda message: front.receive(self, message), lambda: front.ended(self)
        )
        self.link.start()

    def failure(self, config: ServeConfig) -> bool:
        """Whether this engine is lost, with the reason; the main thread asks now and then."""
        now = time.monotonic()
        # a pause of this process itself, as by SIGSTOP, is no silence of the engine
        self._silent_s += min(now - self._looked_at, 2 * LOOK_S)
        self._looked_at = now
        if self.heard:
            self.heard, self._silent_s = False, 0.0
        limit_s = config.tick_timeout_s if self.ready.is_set() else float(config.connect_timeout_s)
        if self.reason is None and self.gone:
            self.reason = "the engine's process ended"
        if self.reason is None and self._silent_s > limit_s + SLACK_S:
            self.reason = f"the engine said nothing for {limit_s:g} s"
            self.grace_s = 0.0
        return self.reason is not None

    def close(self) -> None:
        self.link.close()
        self.hosts.close()
