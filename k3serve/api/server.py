"""The HTTP server: stdlib ThreadingHTTPServer, one thread per connection.

Rule: everything about sockets and HTTP/1.1 is here and in framing.py; endpoints never see a socket.
Try it: `server.serve(executor, tokenizer, settings)` returns a running server; see tests/api.
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from typing import Any

from k3serve.api.bodies import BodyMemory
from k3serve.api.connections import Connections, watch_peer
from k3serve.api.context import Context
from k3serve.api.framing import linger
from k3serve.api.handler import Handler
from k3serve.api.replies import busy_answer
from k3serve.api.settings import ApiSettings
from k3serve.errors import ConfigError
from k3serve.metrics import Metrics
from k3serve.types import Executor

log = logging.getLogger("k3serve.api")


class ApiServer(ThreadingHTTPServer):
    """A listening server. `port` is the real one; `shutdown()` stops accepting and closes."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 1024

    def __init__(self, context: Context) -> None:
        settings = context.settings
        if ":" in settings.host:
            self.address_family = socket.AF_INET6
        self.context = context
        self.connections = Connections(settings.max_connections)
        self.bodies = BodyMemory(settings.body_memory_bytes)
        self._lingering: set[int] = set()
        self._answers = threading.Condition()
        self._answering = 0
        self._pause = threading.Event()  # never set
        super().__init__((settings.host, settings.port), Handler)
        self._thread = threading.Thread(target=self._serve, name="k3serve-http", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def server_bind(self) -> None:
        """Without HTTPServer's reverse name lookup, which can take seconds on a laptop."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.port

    def _serve(self) -> None:
        self.serve_forever(poll_interval=0.05)

    def shutdown(self, answers_s: float = 0.0) -> None:
        """Stops accepting; requests that were read have answers_s to get their answers out."""
        super().shutdown()
        self.server_close()
        self._thread.join()
        with self._answers:
            if not self._answers.wait_for(lambda: self._answering == 0, answers_s) and answers_s:
                log.warning("%d answers were not written in time", self._answering)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Around one request, from its first byte to the last of its answer."""
        with self._answers:
            self._answering += 1
        try:
            yield
        finally:
            with self._answers:
                self._answering -= 1
                self._answers.notify_all()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self.connections.admit(request) is None:
            self._refuse(request)
            return
        try:
            watch_peer(request, self.context.settings.send_buffer_bytes)
            super().process_request(request, client_address)
        except BaseException:
            self.connections.leave(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.connections.leave(request)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Where file descriptors run out, one that waits goes, and nobody spins meanwhile."""
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self.connections.make_room()
                self._pause.wait(0.05)
            raise

    def _refuse(self, request: socket.socket) -> None:
        """Runs on the accepting thread, so it must not wait for the peer."""
        try:
            request.setblocking(False)
            request.send(busy_answer(self.context.settings.max_connections))
        except OSError:
            pass
        self.shutdown_request(request)

    def linger_on_close(self, request: socket.socket) -> None:
        """The handler left bytes unread on this connection."""
        self._lingering.add(request.fileno())

    def shutdown_request(self, request: Any) -> None:
        if request.fileno() in self._lingering:
            self._lingering.discard(request.fileno())
            linger(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.exception("connection from %s failed", client_address[0])


def cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"--host {host} --port {port}: cannot listen there ({error}); "
        "stop what uses the port, or choose another (0 picks a free one)"
    )


def check_address(host: str, port: int) -> None:
    """Says now what `serve` would say after a long start-up: the address is taken or not ours."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise cannot_listen(host, port, error) from error


def serve(
    executor: Executor,
    tokenizer: Any,
    settings: ApiSettings,
    metrics: Metrics | None = None,
) -> ApiServer:
    """Binds, listens and answers in background threads until `shutdown()`.

    `tokenizer` is a text.Tokenizer, or None for a checkpoint without one. `metrics` is created
    where none is given. Raises OSError when the address cannot be bound.
    """
    metrics = metrics if metrics is not None else Metrics(settings.model_name)
    metrics.watch_load(
        lambda: executor.capacity().running,
        lambda: executor.capacity().waiting,
    )
    server = ApiServer(Context(executor, tokenizer, settings, metrics))
    log.info("listening on %s port %d", settings.host, server.port)
    return server
