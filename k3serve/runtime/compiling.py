"""Compiles a program in a thread of its own, while the weights are read.

Rule: whoever waits asks `check` now and then, so that an error of either side ends the start at
once. Python cannot end in good order while XLA compiles: a start that fails meanwhile must leave by
os._exit (see is_compiling).

Try it: `python -m k3serve` says how long it took, and whether the persistent cache had the program.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from k3serve.errors import ConfigError

log = logging.getLogger("k3serve")

THREAD = "compile-tick"
REPORT_S = 5.0
POLL_S = 0.5
_CACHE_HIT = "/jax/compilation_cache/cache_hits"


def is_compiling() -> bool:
    """Whether such a thread is at work in this process."""
    return any(thread.name == THREAD for thread in threading.enumerate())


class Compiling:
    """A program on its way."""

    def __init__(self, compile_program: Callable[[], Any]) -> None:
        self._compile = compile_program
        self._done = threading.Event()
        self._program: Any = None
        self._error: Exception | None = None
        self._cached = False
        self._started = self._reported = time.monotonic()
        log.info("compiling the tick")
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Logs that it goes on, every few seconds. Raises ConfigError if it has failed."""
        if isinstance(self._error, ConfigError):
            raise self._error
        if self._error is not None:
            raise ConfigError(
                f"the tick cannot be compiled for this machine: {self._error} (too large? then "
                "fewer --max-slots, a smaller --context or more --ranks)"
            ) from self._error
        now = time.monotonic()
        if not self._done.is_set() and now - self._reported >= REPORT_S:
            self._reported = now
            log.info("compiling the tick: %.0f s", now - self._started)

    def result(self, meanwhile: Callable[[], None] = lambda: None) -> Any:
        """The compiled program; calls `meanwhile`, which may raise, again and again until then."""
        while not self._done.wait(POLL_S):
            self.check()
            meanwhile()
        self.check()
        self._thread.join()
        return self._program

    def _run(self) -> None:
        own = threading.get_ident()

        def on_event(event: str, **_: Any) -> None:
            # events of other threads, which make the state say, are not ours
            if event == _CACHE_HIT and threading.get_ident() == own:
                self._cached = True

        jax.monitoring.register_event_listener(on_event)
        try:
            self._program = self._compile()
            how = "from the persistent cache" if self._cached else "compiled"
            log.info("the tick is ready in %.1f s, %s", time.monotonic() - self._started, how)
        except Exception as error:
            if not isinstance(error, ConfigError):
                log.error("the tick cannot be compiled", exc_info=error)
            self._error = error
        finally:
            jax.monitoring.unregister_event_listener(on_event)
            self._done.set()
