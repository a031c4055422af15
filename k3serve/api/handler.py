"""One connection: parse, check, dispatch, answer, again.

Rule: every request gets exactly one answer, and the connection is kept only if it provably stands
at the start of a next request. Nothing an endpoint raises ends more than its own request.
"""

from __future__ import annotations

import hmac
import io
import logging
import re
import time
import uuid
from email.utils import formatdate
from http import HTTPStatus
from http.client import HTTPMessage
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any

from k3serve.api import routes
from k3serve.api.connections import Stage
from k3serve.api.exchange import ClientGone, Exchange, Headers
from k3serve.api.framing import (
    SLOWEST_SENDER,
    CheckedLines,
    Framing,
    TimedSocket,
    client_gone,
)
from k3serve.api.replies import (
    Reply,
    error_reply,
    internal_error,
    made_room,
    status_line,
    too_many_connections,
)
from k3serve.api.writing import Stream, Writer
from k3serve.errors import RequestError

if TYPE_CHECKING:
    from k3serve.api.server import ApiServer

access_log = logging.getLogger("k3serve.access")
log = logging.getLogger("k3serve.api")

CHARSETS = ("utf-8", "utf8", "us-ascii")
RESERVE_S = 2.0  # for all of a request on a place beyond the limit
BODY_TYPES = ("application/json", "application/x-www-form-urlencoded", "text/plain")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_SAFE_HEADER = re.compile(r"[^\x20-\x7e]")


class Handler(BaseHTTPRequestHandler):
    """See the module. Attribute names stay clear of the base class: headers, responses, ..."""

    server: ApiServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each kept-alive answer can wait 40 ms for a delayed ACK
    request_id = ""
    framing: Framing | None = None
    answered = 0  # status already on the wire, 0 before

    def setup(self) -> None:
        super().setup()
        self.settings = self.server.context.settings
        self._place = self.server.connections.of(self.connection)
        self._writer = Writer(self.connection, self.settings.write_timeout_s)
        self._timed = TimedSocket(self.connection)
        self._reader = io.BufferedReader(self._timed, 65536)
        self.rfile = self._reader

    # ------------------------------------------------------------------ reading one request

    def handle_one_request(self) -> None:
        self.close_connection = True
        self.framing = None
        self.answered = 0
        self.request_id = f"req-{uuid.uuid4().hex}"
        self.command, self.path, self.requestline = "-", "-", ""
        self.request_version = "HTTP/1.0"
        self.headers = HTTPMessage()  # not those of the request before
        try:
            self._timed.allow(RESERVE_S if self._place.reserve else self.settings.idle_timeout_s)
            if not self._reader.peek(1) or not self._moved(Stage.RECEIVING):
                return
            self._timed.allow(RESERVE_S if self._place.reserve else self.settings.head_timeout_s)
        except OSError:  # idle for too long, or reset
            return
        started = time.monotonic()
        note = ""
        try:
            with self.server.answering(), self.server.bodies.share() as self._share:
                note = self._answer_one()
        except ClientGone as gone:
            note, self.close_connection = str(gone) or "client gone", True
        except OSError as error:
            note, self.close_connection = f"connection lost: {type(error).__name__}", True
        self._log_access(started, note)
        self.close_connection |= not self._moved(Stage.IDLE)

    def _moved(self, stage: Stage) -> bool:
        return self.server.connections.move(self._place, stage)

    def _answer_one(self) -> str:
        """Reads, answers, and returns the note for the access log."""
        exchange: Exchange | None = None
        try:
            if not self._read_head():
                return "bad request"
            endpoint, path_arg = self._checked_route()
            body = self._read_body() if self.command == "POST" else self._no_body()
            if not self._moved(Stage.ANSWERING):
                raise made_room()
            exchange = Exchange(
                body=body,
                gone=lambda: client_gone(self.connection),
                open_stream=self._open_stream,
                path_arg=path_arg,
            )
            reply = endpoint(self.server.context, exchange)
        except RequestError as error:
            if self._place.closed and exchange is None:  # its end is ours, not the client's
                self.close_connection = True
                reply = error_reply(made_room())
            else:
                reply = error_reply(error, self._extra_headers(error))
        except TimeoutError:
            self.close_connection = True
            reply = error_reply(self._timed_out(head=self.framing is None))
        except (ClientGone, ConnectionError):
            raise
        except RecursionError:
            reply = error_reply(RequestError("the request is nested too deeply"))
        except Exception:
            log.exception("request %s failed", self.request_id)
            reply = error_reply(internal_error())
        if reply is None:
            return exchange.note if exchange else ""
        if self.answered:  # a stream was under way and could not say it itself
            self.close_connection = True
            return reply.note
        self._write_reply(reply)
        return reply.note

    def _read_head(self) -> bool:
        """Request line and headers. On a syntax error the answer is already sent."""
        self.raw_requestline = self.rfile.readline(65537)
        if len(self.raw_requestline) > 65536:
            self.send_error(414)
            return False
        self.rfile = CheckedLines(self._reader)  # type: ignore[assignment]  # has all it needs
        try:
            if not self.parse_request():
                return False
        except RequestError:
            self.close_connection = True
            raise
        finally:
            self.rfile = self._reader
        if self.request_version == "HTTP/0.9":
            self.send_error(400, "HTTP/0.9 is not supported")
            return False
        self.close_connection |= self._place.reserve
        given = self.headers.get("x-request-id", "").strip()
        if _REQUEST_ID.fullmatch(given):
            self.request_id = given
        try:
            self.framing = Framing(self.headers, self._reader, self.settings.max_body_bytes)
        except RequestError:
            self.close_connection = True
            raise
        return True

    def handle_expect_100(self) -> bool:
        """Too early: the 100 goes out when the body is wanted."""
        return True

    def _checked_route(self) -> tuple[routes.Endpoint, str]:
        found = routes.find(self.path)
        if found is None:
            raise RequestError(
                f"no such path: {self.path.split('?')[0][:200]!a}; this server answers "
                + " ".join(routes.ROUTES),
                status=404,
                code="not_found",
            )
        route, path_arg = found
        if self.command == "OPTIONS" and self._cors_origin():
            return self._preflight, path_arg
        method = "GET" if self.command == "HEAD" else self.command
        endpoint = route.methods.get(method)
        if endpoint is None:
            raise RequestError(
                f"{self.command[:40]} is not allowed here; use {route.allow}",
                status=405,
                code="method_not_allowed",
            )
        if not route.public:
            if self._place.reserve:
                raise too_many_connections(self.settings.max_connections)
            self._check_key()
        if route.generates:
            self.server.context.check_room()
        return endpoint, path_arg

    def _check_key(self) -> None:
        keys = self.settings.api_keys
        if not keys:
            return
        scheme, _, token = self.headers.get("Authorization", "").strip().partition(" ")
        offered = [token.strip()] if scheme.lower() == "bearer" else []
        offered.append(self.headers.get("x-api-key", "").strip())
        right = False
        for key in keys:  # all of them, so that the time tells nothing
            for candidate in offered:
                right |= hmac.compare_digest(candidate.encode(), key.encode())
        if not right:
            raise RequestError(
                "missing or wrong API key; send `Authorization: Bearer KEY` or `x-api-key: KEY`",
                status=401,
                code="invalid_api_key",
            )

    def _read_body(self) -> bytes:
        assert self.framing is not None
        self._check_content_type()
        self._share.check(self.framing.check_size())
        if not self._place.reserve:
            self._timed.allow(self.settings.body_timeout_s, SLOWEST_SENDER)
        if self.headers.get("Expect", "").lower() == "100-continue" and not self.framing.clean:
            if self.request_version >= "HTTP/1.1":
                self._writer.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = self.framing.read(self._share.take)
        self._share.take_for_parsing(body)
        return body

    def _no_body(self) -> bytes:
        assert self.framing is not None
        self.framing.drain()
        return b""

    def _check_content_type(self) -> None:
        encoding = self.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            raise RequestError(
                f"Content-Encoding {encoding[:40]!a} is not supported; send plain JSON",
                status=415,
                code="unsupported_media_type",
            )
        given = self.headers.get("Content-Type", "application/json")
        media = given.partition(";")[0].strip().lower() or "application/json"
        charset = self.headers.get_content_charset("utf-8")
        if not (media in BODY_TYPES or media.endswith("+json")) or charset not in CHARSETS:
            raise RequestError(
                f"Content-Type {given[:80]!a} is not supported; send application/json",
                status=415,
                code="unsupported_media_type",
            )
        if media in BODY_TYPES[1:] and self._foreign_origin():
            # A page elsewhere can post these types without asking first; curl -d sends no Origin.
            raise RequestError(
                "a web page must send Content-Type application/json",
                status=415,
                code="unsupported_media_type",
            )

    # ------------------------------------------------------------------ origins

    def _foreign_origin(self) -> bool:
        origin = self.headers.get("Origin")
        own = self.headers.get("Host", "")
        return bool(origin) and origin not in (f"http://{own}", f"https://{own}")

    def _cors_origin(self) -> str | None:
        """What Access-Control-Allow-Origin should say to this request, if anything."""
        allowed = self.settings.cors_origins
        origin = self.headers.get("Origin")
        if not origin or not allowed:
            return None
        if "*" in allowed:
            return "*"
        return origin if origin in allowed else None

    def _preflight(self, context: Any, exchange: Exchange) -> Reply:
        asked = self.headers.get("Access-Control-Request-Headers", "")
        return Reply(
            204,
            content_type=None,
            headers=(
                ("Access-Control-Allow-Methods", "GET, POST, OPTIONS"),
                ("Access-Control-Allow-Headers", asked[:1000] or "Authorization, Content-Type"),
                ("Access-Control-Max-Age", "600"),
            ),
        )

    def _extra_headers(self, error: RequestError) -> Headers:
        if error.status == 401:
            return (("WWW-Authenticate", "Bearer"),)
        if error.status == 405 and (found := routes.find(self.path)):
            return (("Allow", found[0].allow),)
        return ()

    def _timed_out(self, head: bool) -> RequestError:
        part = "head" if head else "body"
        limit_s = self.settings.head_timeout_s if head else self.settings.body_timeout_s
        return RequestError(
            f"the request's {part} did not arrive within {limit_s:g} s",
            status=408,
            code="request_timeout",
        )

    # ------------------------------------------------------------------ writing one answer

    def _head(self, status: int, headers: Headers) -> bytes:
        lines = [
            status_line(status),
            "Server: k3serve\r\n",
            f"Date: {formatdate(usegmt=True)}\r\n",
            f"x-request-id: {self.request_id}\r\n",
        ]
        if origin := self._cors_origin():
            lines.append(f"Access-Control-Allow-Origin: {_SAFE_HEADER.sub('?', origin)}\r\n")
            lines.append("Access-Control-Expose-Headers: x-request-id, x-k3serve-ignored\r\n")
            if origin != "*":
                lines.append("Vary: Origin\r\n")
        lines += [f"{name}: {_SAFE_HEADER.sub('?', value)}\r\n" for name, value in headers]
        if self.close_connection:
            lines.append("Connection: close\r\n")
        elif self.request_version == "HTTP/1.0":
            lines.append("Connection: keep-alive\r\n")
        return "".join([*lines, "\r\n"]).encode("latin-1")

    def _settle_body(self) -> None:
        """Reads the rest of a refused request, or gives the connection up."""
        if self.framing is None:
            self.close_connection = True
        elif not self.framing.clean:
            try:
                if not self.headers.get("Expect"):
                    self.framing.drain()
            except (RequestError, OSError):
                pass
            self.close_connection |= not self.framing.clean
        if self.close_connection and not (self.framing and self.framing.clean):
            self.server.linger_on_close(self.connection)

    def _write_reply(self, reply: Reply) -> None:
        self._settle_body()
        headers = list(reply.headers)
        if reply.content_type:
            headers.append(("Content-Type", reply.content_type))
        if reply.status != 204:
            headers.append(("Content-Length", str(len(reply.body))))
        if reply.status == 503:
            self.close_connection = True  # a draining or failed server wants no idle connections
        head = self._head(reply.status, tuple(headers))
        self._moved(Stage.ANSWERING)  # whatever came before, this is not to be cut
        self.answered = reply.status
        self._writer.send(head if self.command == "HEAD" else head + reply.body)

    def _open_stream(self, content_type: str, headers: Headers) -> Stream:
        """Head of an answer without a length: chunked, or until close for HTTP/1.0."""
        chunked = self.request_version >= "HTTP/1.1"
        self.close_connection |= not chunked
        headers = (*headers, ("Content-Type", content_type), ("Cache-Control", "no-cache"))
        if chunked:
            headers = (*headers, ("Transfer-Encoding", "chunked"))
        head = self._head(200, headers)
        self.answered = 200
        keep, self.close_connection = not self.close_connection, True  # until the body is complete
        return Stream(
            self._writer, head, chunked, lambda: setattr(self, "close_connection", not keep)
        )

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """The base class reports syntax errors of a request through this."""
        self.close_connection = True
        text = message or HTTPStatus(code).phrase
        code = 400 if code >= 500 else code  # as for HTTP/2.0: no fault of this server
        error = RequestError(text[:300], status=code, code="bad_request")
        self._write_reply(error_reply(made_room() if self._place.closed else error))

    def _log_access(self, started: float, note: str) -> None:
        self.server.context.metrics.http_responses.labels(str(self.answered or 499)).inc()
        access_log.info(
            "%s %s %s %d %.1fms %s %s",
            self.client_address[0],
            ascii((self.command or "-")[:20])[1:-1],
            ascii(self.path.split("?")[0][:120])[1:-1],
            self.answered or 499,
            (time.monotonic() - started) * 1000,
            self.request_id,
            note,
        )

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)
