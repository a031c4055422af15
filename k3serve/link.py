"""The pipe between the front (HTTP) and the engine, where each is a process: messages both ways.

Rule: send() never blocks and never fails; whoever is at the other end is gone once `on_end` is
called, and what was sent meanwhile is lost. Both ends are one program, started by one user, over a
socket pair that only they inherit: that is why messages may be pickled.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from k3serve.types import TickShape, TickTimes

log = logging.getLogger(__name__)

LINK_FD = "K3SERVE_LINK_FD"  # in the engine's environment: its end of the pair
BEAT_S = 1.0  # how often an engine says that it lives


# ------------------------------------------------------------- from the engine


@dataclass(frozen=True, slots=True)
class Joined:
    """All hosts have met. The engine loads nothing before the front answers Go or Refuse."""

    leads: bool  # False: this host follows, and needs no HTTP


@dataclass(frozen=True, slots=True)
class Ready:
    """The first tick came back on all hosts; requests are taken."""

    shape: TickShape


@dataclass(frozen=True, slots=True)
class Ticked:
    """A tick came back (metrics.Metrics.tick)."""

    prompt_tokens: int
    tokens: int
    running: int
    times: TickTimes
    compilations: int


@dataclass(frozen=True, slots=True)
class Beat:
    """The process runs."""

    resident_bytes: int  # its memory; 0 where the system does not say


@dataclass(frozen=True, slots=True)
class Failed:
    """A host failed: the run ends, and with it all requests."""

    reason: str


# -------------------------------------------------------------- from the front


@dataclass(frozen=True, slots=True)
class Go:
    """The front can serve: load the weights."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """The front cannot serve: end, and tell the other hosts why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Finish what runs, then end on every host. What is open after timeout_s is cancelled."""

    timeout_s: float


# ----------------------------------------------------------------- both ends


class Link:
    """One end. on_message and on_end are called by the reading thread, in order, on_end last."""

    def __init__(
        self,
        sock: socket.socket,
        on_message: Callable[[Any], None],
        on_end: Callable[[], None],
    ) -> None:
        self._sock = sock
        self._connection = Connection(os.dup(sock.fileno()))
        self._on_message = on_message
        self._on_end = on_end
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="k3serve-link-out", daemon=True)
        self._reader = threading.Thread(target=self._read, name="k3serve-link-in", daemon=True)

    def start(self) -> None:
        self._writer.start()
        self._reader.start()

    def send(self, message: Any) -> None:
        """Queues the message; those that wait together travel together."""
        self._outgoing.put(message)

    def close(self, timeout_s: float = 1.0) -> None:
        """Sends what is queued, if the other end takes it within timeout_s, then ends the link."""
        self._outgoing.put(None)
        self._writer.join(timeout_s)
        try:
            self._sock.shutdown(socket.SHUT_RDWR)  # also wakes both threads
        except OSError:
            pass
        if threading.current_thread() is not self._reader:
            self._reader.join(timeout_s)
        self._sock.close()

    def _write(self) -> None:
        open_ = True
        while open_:
            batch = [self._outgoing.get()]
            while not self._outgoing.empty():
                batch.append(self._outgoing.get())
            open_ = None not in batch
            try:
                self._connection.send([message for message in batch if message is not None])
            except OSError:
                return  # the reader sees the end, too

    def _read(self) -> None:
        try:
            while True:
                for message in self._connection.recv():
                    self._on_message(message)
        except (EOFError, OSError):
            pass
        except Exception:
            log.exception("a message of the other process broke its reader")
        finally:
            self._on_end()
