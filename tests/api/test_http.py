"""HTTP/1.1 on the wire: framing, kept connections, limits, keys, origins. Raw sockets."""

from __future__ import annotations

import json
import logging
import shutil
import socket
import subprocess
import threading
from typing import Any

import pytest

from k3serve.api import handler
from tests.api.client import Served, read_all, read_reply
from tests.fakes import hangs_after

BODY = b'{"prompt": "x", "max_tokens": 5}'


def post(
    body: bytes = BODY, *headers: str, path: str = "/v1/completions", version: str = "1.1"
) -> bytes:
    lines = [f"POST {path} HTTP/{version}", "Host: x", *headers]
    if not any(h.lower().startswith(("content-length", "transfer-encoding")) for h in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


def test_kept_connection_answers_many_requests(served: Served) -> None:
    with served.raw() as sock:
        for _ in range(3):
            sock.sendall(post())
            got = read_reply(sock)
            assert got.status == 200
            assert got.headers["Connection"] is None
            assert got.json["choices"][0]["text"] == "hello"


def test_pipelined_requests_are_answered_in_order(served: Served) -> None:
    other = post(b'{"prompt": "x", "max_tokens": 2}')
    with served.raw(post() + other + HEALTH + post(b"{}")) as sock:
        sock.shutdown(socket.SHUT_WR)
        # http.client would read ahead on a fresh buffer per answer: take the bytes apart here
        answers = read_all(sock).split(b"HTTP/1.1 ")[1:]
    assert [a[:3] for a in answers] == [b"200", b"200", b"200", b"400"]
    assert b'"text":"hello"' in answers[0] and b'"text":"he"' in answers[1]


def test_nodelay_is_on(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = handler.Handler.setup

    def setup(self: handler.Handler) -> None:
        original(self)
        seen.append(self.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(handler.Handler, "setup", setup)
    served.get("/health")
    assert seen and all(seen)


def test_error_keeps_the_connection_when_the_body_is_read(served: Served) -> None:
    with served.raw(post(b"{}", path="/nowhere")) as sock:
        assert read_reply(sock).status == 404
        sock.sendall(post())
        assert read_reply(sock).status == 200


def test_body_on_a_get_is_drained(served: Served) -> None:
    request = HEALTH.replace(b"Host: x", b"Host: x\r\nContent-Length: 7") + b"garbage"
    with served.raw(request) as sock:
        assert read_reply(sock).status == 200
        sock.sendall(HEALTH)
        assert read_reply(sock).status == 200


def test_expect_100_continue(served: Served) -> None:
    head = post(BODY, "Expect: 100-continue")[: -len(BODY)]
    with served.raw(head) as sock:
        assert sock.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(BODY)
        assert read_reply(sock).status == 200


def test_expect_is_not_continued_for_a_refused_request(served: Served) -> None:
    head = post(BODY, "Expect: 100-continue", path="/nowhere")[: -len(BODY)]
    answer = served.exchange(head)
    assert answer.startswith(b"HTTP/1.1 404") and b"Connection: close" in answer


def chunks(*parts: bytes, trailer: bytes = b"") -> bytes:
    framed = b"".join(b"%x;ext=1\r\n%b\r\n" % (len(p), p) for p in parts)
    return framed + b"0\r\n" + trailer + b"\r\n"


def test_chunked_body(served: Served) -> None:
    body = chunks(BODY[:7], BODY[7:], trailer=b"X-Sum: 1\r\n")
    with served.raw(post(body, "Transfer-Encoding: chunked")) as sock:
        assert read_reply(sock).json["choices"][0]["text"] == "hello"
        sock.sendall(HEALTH)
        assert read_reply(sock).status == 200


@pytest.mark.parametrize(
    "body",
    [b"zz\r\n", b"-1\r\nx\r\n0\r\n\r\n", b"3\r\nabcdef\r\n0\r\n\r\n", b"0x3\r\nabc\r\n", b"\r\n"],
)
def test_bad_chunks(served: Served, body: bytes) -> None:
    answer = served.exchange(post(body, "Transfer-Encoding: chunked"))
    assert answer.startswith(b"HTTP/1.1 400") and b"chunked" in answer
    served.alive()


@pytest.mark.parametrize(
    "headers",
    [
        ("Content-Length: -1",),
        ("Content-Length: abc",),
        ("Content-Length: 1_0",),
        ("Content-Length: +5",),
        ("Content-Length: 5", "Content-Length: 6"),
        ("Content-Length: 5", "Transfer-Encoding: chunked"),
        ("Transfer-Encoding: gzip, chunked",),
        ("Transfer-Encoding: identity",),
        ("Content-Length: " + "9" * 40,),
    ],
)
def test_bad_framing_is_refused_and_closed(served: Served, headers: tuple[str, ...]) -> None:
    answer = served.exchange(post(BODY, *headers))
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"Connection: close" in answer
    assert answer.count(b"HTTP/1.1 ") == 1
    served.alive()


def test_body_shorter_than_announced(served: Served) -> None:
    with served.raw(post(BODY, f"Content-Length: {len(BODY) + 10}")) as sock:
        sock.shutdown(socket.SHUT_WR)
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 400") and b"announced" in answer
    assert not served.executor.submitted


def test_body_longer_than_announced(served: Served) -> None:
    """The rest reads as a next request, and a bad one."""
    answer = served.exchange(post(BODY + b" garbage\r\n\r\n", f"Content-Length: {len(BODY)}"))
    first, second = answer.split(b"HTTP/1.1 ")[1:]
    assert first.startswith(b"200") and second.startswith(b"400")


def test_413_announced_and_chunked(start_server: Any) -> None:
    served = start_server(max_body_bytes=1000)
    big = b'{"prompt": "' + b"x" * 300_000 + b'"}'
    answer = served.exchange(post(big))  # more than is drained: the answer must still arrive
    assert answer.startswith(b"HTTP/1.1 413") and b"1000" in answer
    answer = served.exchange(post(chunks(big), "Transfer-Encoding: chunked"))
    assert answer.startswith(b"HTTP/1.1 413")
    answer = served.exchange(post(b"", "Expect: 100-continue", "Content-Length: 5000"))
    assert answer.startswith(b"HTTP/1.1 413") and b"100 Continue" not in answer
    assert served.complete(prompt="x", max_tokens=5).status == 200
    assert not served.executor.submitted[1:]


def test_413_reaches_a_client_that_sends_everything_first(start_server: Any) -> None:
    """A connection closed with unread bytes is reset, and most clients never see the answer."""
    served = start_server(max_body_bytes=1000)
    body = b"x" * 20_000_000  # more than the sockets' buffers hold
    with served.raw() as sock:
        sock.sendall(post(body))
        sock.shutdown(socket.SHUT_WR)
        answer = sock.recv(12)
    assert answer == b"HTTP/1.1 413"


@pytest.mark.parametrize("sent", [b"", b"GET /hea", HEALTH[:-2], post()[:-3]])
def test_slow_client_is_cut_off(start_server: Any, sent: bytes) -> None:
    served = start_server(idle_timeout_s=0.2, head_timeout_s=0.2, body_timeout_s=0.2)
    answer = served.exchange(sent)
    if sent:
        assert answer.startswith(b"HTTP/1.1 408")
    else:
        assert answer == b""


def test_trickling_client_does_not_get_more_time(start_server: Any) -> None:
    served = start_server(head_timeout_s=0.3)
    stop = threading.Event()
    with served.raw(b"GET /health HTTP/1.1\r\nX: ") as sock:

        def trickle() -> None:
            try:
                while not stop.wait(0.05):
                    sock.sendall(b"a")
            except OSError:
                pass

        thread = threading.Thread(target=trickle)
        thread.start()
        answer = read_all(sock)
        stop.set()
        thread.join()
    assert b"408" in answer or answer == b""  # the trickle may have reset the connection


def test_client_that_does_not_read_is_dropped(start_server: Any) -> None:
    served = start_server(write_timeout_s=0.2)
    piece = served.tokenizer.piece("x" * 100_000)

    def endless(request: Any) -> Any:
        from k3serve.types import TokenEvent

        while True:
            yield TokenEvent(request.id, (piece,))

    served.executor.script = endless
    with served.raw(post(b'{"prompt": "x", "max_tokens": 4000, "stream": true}')):
        served.executor.wait_for(lambda e: len(e.cancelled) == 1)


def test_http_10_gets_no_chunks(served: Served) -> None:
    body = b'{"prompt": "x", "max_tokens": 5, "stream": true}'
    answer = served.exchange(post(body, version="1.0"))
    head, _, data = answer.partition(b"\r\n\r\n")
    assert b"chunked" not in head and b"Connection: close" in head
    assert data.startswith(b"data: {") and data.endswith(b"data: [DONE]\n\n")
    answer = served.exchange(post(version="1.0"))
    assert b"Content-Length" in answer and b'"text":"hello"' in answer


def test_http_10_keep_alive(served: Served) -> None:
    with served.raw(post(BODY, "Connection: keep-alive", version="1.0")) as sock:
        got = read_reply(sock)
        assert got.headers["Connection"] == "keep-alive"
        sock.sendall(HEALTH)
        assert read_reply(sock).status == 200


def test_connection_close_is_honoured(served: Served) -> None:
    answer = served.exchange(post(BODY, "Connection: close"))
    assert answer.startswith(b"HTTP/1.1 200") and b"Connection: close" in answer


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\r\n", 400),
        (b"hello\r\n\r\n", 400),
        (b"GET /health\r\n", 400),
        (b"GET / HTTP/2.0\r\n\r\n", 400),
        (b"GET / HTTP/x\r\n\r\n", 400),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 300 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\nX: " + b"y" * 70_000 + b"\r\n\r\n", 431),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n", 400),
    ],
)
def test_broken_requests(served: Served, data: bytes, status: int) -> None:
    with served.raw(data) as sock:
        sock.shutdown(socket.SHUT_WR)
        answer = read_all(sock)
    if data == b"\r\n":  # an empty line is no request
        assert answer == b"" or answer.startswith(b"HTTP/1.1 400")
    else:
        assert answer.startswith(b"HTTP/1.1 %d" % status), answer[:200]
        assert b'"error"' in answer
    served.alive()


@pytest.mark.parametrize(
    "path", ["/chats", "/v1", "/v1/models/", "/health/x", "//health", "/V1/models"]
)
def test_unknown_path(served: Served, path: str) -> None:
    got = served.get(path)
    if path == "//health":  # the standard library joins leading slashes
        assert got.status == 200
        return
    assert got.status == 404
    assert "/v1/chat/completions" in got.error["message"]


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/completions", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("DELETE", "/health", "GET, HEAD"),
        ("PUT", "/tokenize", "POST"),
        ("OPTIONS", "/tokenize", "POST"),
        ("BREW", "/ping", "GET, POST, HEAD"),
        ("HEAD", "/v1/completions", "POST"),
    ],
)
def test_wrong_method(served: Served, method: str, path: str, allow: str) -> None:
    got = served.ask(method, path)
    assert got.status == 405
    assert got.headers["Allow"] == allow


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models"])
def test_head(served: Served, path: str) -> None:
    with served.raw(f"HEAD {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode() + HEALTH) as sock:
        sock.shutdown(socket.SHUT_WR)
        head, rest = read_all(sock).split(b"\r\n\r\n", 1)
    assert head.startswith(b"HTTP/1.1 200") and b"Content-Length: " in head
    assert rest.startswith(b"HTTP/1.1 200")  # no body came between


def test_query_is_not_part_of_the_path(served: Served) -> None:
    assert served.ask("POST", "/v1/completions?beta=true", {"prompt": "x"}).status == 200


def test_absolute_form_of_the_target(served: Served) -> None:
    answer = served.exchange(b"GET http://x/health HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")


# ------------------------------------------------------------------------------ keys


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"Authorization": "Basic one"}, 401),
        ({"Authorization": "one"}, 401),
        ({"Authorization": "Bearer \xe9"}, 401),
        ({"Authorization": "Bearer one"}, 200),
        ({"Authorization": "bearer  two"}, 200),
        ({"x-api-key": "two"}, 200),
        ({"x-api-key": "three"}, 401),
    ],
)
def test_api_key(start_server: Any, headers: dict[str, str], status: int) -> None:
    served = start_server(api_keys=("one", "two"))
    got = served.ask("POST", "/v1/completions", {"prompt": "x"}, headers)
    assert got.status == status
    if status == 401:
        assert got.error["code"] == "invalid_api_key"
        assert got.headers["WWW-Authenticate"] == "Bearer"
        assert not served.executor.submitted


def test_public_paths_need_no_key(start_server: Any) -> None:
    served = start_server(api_keys=("one",))
    for path in ("/health", "/ping", "/version", "/metrics"):
        assert served.get(path).status == 200
    for path in ("/v1/models", "/v1/models/k3-nano", "/tokenizer_info"):
        assert served.get(path).status == 401


def test_empty_bearer_is_fine_without_keys(served: Served) -> None:
    """lm-eval sends it when no key is set."""
    assert served.get("/v1/models", Authorization="Bearer ").status == 200


# ------------------------------------------------------------------------------ origins


def test_cors_is_off_by_default(served: Served) -> None:
    got = served.get("/v1/models", Origin="http://evil.example")
    assert got.status == 200 and got.headers["Access-Control-Allow-Origin"] is None


def test_cors_for_allowed_origins(start_server: Any) -> None:
    served = start_server(cors_origins=("http://a.example",), api_keys=("k",))
    asked = {"Origin": "http://a.example", "Access-Control-Request-Headers": "authorization"}
    got = served.ask("OPTIONS", "/v1/chat/completions", None, asked)
    assert got.status == 204
    assert got.headers["Access-Control-Allow-Origin"] == "http://a.example"
    assert got.headers["Access-Control-Allow-Headers"] == "authorization"
    got = served.get("/v1/models", Origin="http://a.example", Authorization="Bearer k")
    assert got.headers["Access-Control-Allow-Origin"] == "http://a.example"
    assert got.headers["Vary"] == "Origin"
    got = served.get("/health", Origin="http://b.example")
    assert got.headers["Access-Control-Allow-Origin"] is None
    assert served.ask("OPTIONS", "/health", None, {"Origin": "http://b.example"}).status == 405


def test_cors_for_everybody(start_server: Any) -> None:
    served = start_server(cors_origins=("*",))
    got = served.get("/health", Origin="http://b.example")
    assert got.headers["Access-Control-Allow-Origin"] == "*"


def test_foreign_page_cannot_post_without_asking(served: Served) -> None:
    headers = {"Content-Type": "text/plain", "Origin": "http://evil.example"}
    assert served.ask("POST", "/v1/completions", {"prompt": "x"}, headers).status == 415
    own = {"Content-Type": "text/plain", "Origin": f"http://127.0.0.1:{served.server.port}"}
    assert served.ask("POST", "/v1/completions", {"prompt": "x"}, own).status == 200


# ------------------------------------------------------------------------------ body types


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("application/vnd.x+json", 200),
        ("application/x-www-form-urlencoded", 200),
        ("", 200),
        ("application/json; charset=utf-16", 415),
        ("multipart/form-data; boundary=x", 415),
        ("application/xml", 415),
    ],
)
def test_content_types(served: Served, content_type: str, status: int) -> None:
    got = served.ask("POST", "/v1/completions", {"prompt": "x"}, {"Content-Type": content_type})
    assert got.status == status
    assert status == 200 or got.error["code"] == "unsupported_media_type"


def test_pc_75_compressed_body(served: Served) -> None:
    got = served.ask("POST", "/v1/completions", b"\x1f\x8b", {"Content-Encoding": "gzip"})
    assert got.status == 415
    served.alive()


# ------------------------------------------------------------------------------ ids and logs


def test_request_id_comes_back(served: Served) -> None:
    assert served.get("/health", **{"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made = {served.get("/health").headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2
    assert served.get("/nowhere").headers["x-request-id"]


@pytest.mark.parametrize("given", ["a b", "x" * 200, "\xe9"])
def test_odd_request_ids_are_replaced(served: Served, given: str) -> None:
    got = served.get("/health", **{"x-request-id": given})
    assert got.headers["x-request-id"].startswith("req-")


def test_access_log_has_no_prompt(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    secret = b'{"prompt": "my secret", "max_tokens": 5%b}'
    stream = b', "stream": true'
    # One connection: a request's line is written before the next request is read.
    with (
        caplog.at_level(logging.INFO, logger="k3serve.access"),
        served.raw(post(secret % b"", "x-request-id: log-1")) as sock,
    ):
        assert read_reply(sock).status == 200
        sock.sendall(post(secret % stream, "x-request-id: log-2"))
        assert read_reply(sock).status == 200
        sock.sendall(b"GET /v1/mod%0aels?key=secret HTTP/1.1\r\nx-request-id: log-3\r\n\r\n")
        assert read_reply(sock).status == 404
        sock.sendall(HEALTH)
        assert read_reply(sock).status == 200
    lines = [r.getMessage() for r in caplog.records if " log-" in r.getMessage()]
    assert len(lines) == 3
    assert all("secret" not in line and "\n" not in line for line in lines)
    for line in lines[:2]:
        assert "POST /v1/completions 200" in line
        assert "prompt=9 completion=5 finish=length" in line


def test_a_bug_is_a_500_without_a_trace(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    def broken(request: Any) -> Any:
        raise ZeroDivisionError("secret detail")

    served.executor.script = broken
    for stream in (False, True):
        got = served.complete(prompt="x", stream=stream)
        assert got.status == 500
        assert got.error["type"] == "server_error"
        assert b"secret" not in got.body and b"ZeroDivision" not in got.body
        assert got.headers["x-should-retry"] == "false"
    assert "secret detail" in caplog.text
    served.alive()


# ------------------------------------------------------------------------------ many connections


def test_health_answers_while_requests_hang(served: Served) -> None:
    gate = threading.Event()
    served.executor.script = hangs_after(b"", gate)
    threads = [
        threading.Thread(target=lambda: served.complete(prompt="x", max_tokens=9))
        for _ in range(10)
    ]
    for thread in threads:
        thread.start()
    served.executor.wait_for(lambda e: len(e.submitted) == 10)
    assert served.get("/health").status == 200
    gate.set()
    for thread in threads:
        thread.join()


def test_shutdown_frees_the_port(start_server: Any) -> None:
    served = start_server()
    port = served.server.port
    assert served.get("/health").status == 200
    served.server.shutdown()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", port))


# ------------------------------------------------------------------------------ curl

CURL = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


def curl(served: Served, *args: str, path: str = "/v1/completions") -> bytes:
    url = f"http://127.0.0.1:{served.server.port}{path}"
    done = subprocess.run(
        ["curl", "-sS", "--noproxy", "*", "--max-time", "20", *args, url],
        capture_output=True,
        check=True,
    )
    return done.stdout


@CURL
def test_curl_d_without_a_content_type(served: Served) -> None:
    assert json.loads(curl(served, "-d", '{"prompt":"x"}'))["choices"][0]["text"] == "hello"


@CURL
def test_curl_streams(served: Served) -> None:
    out = curl(served, "-N", "-d", '{"prompt":"x","stream":true}')
    assert out.endswith(b"data: [DONE]\n\n")


@CURL
def test_curl_with_a_large_body_and_expect(served: Served) -> None:
    body = json.dumps({"prompt": "x" * 3000, "max_tokens": 5, "user": "y" * 2_000_000})
    done = subprocess.run(
        [
            "curl",
            "-sS",
            "--noproxy",
            "*",
            "--max-time",
            "20",
            "-H",
            "Expect: 100-continue",
            "-H",
            "Content-Type: application/json",
            "--data-binary",
            "@-",
            f"http://127.0.0.1:{served.server.port}/v1/completions",
        ],
        input=body.encode(),
        capture_output=True,
        check=True,
    )
    assert json.loads(done.stdout)["usage"]["prompt_tokens"] == 3000


@CURL
def test_curl_http_10_and_head(served: Served) -> None:
    out = curl(served, "--http1.0", "-N", "-d", '{"prompt":"x","stream":true}')
    assert out.endswith(b"data: [DONE]\n\n")
    assert curl(served, "-I", path="/metrics").startswith(b"HTTP/1.1 200")
