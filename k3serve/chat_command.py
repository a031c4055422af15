"""The `chat` command: a conversation in the terminal with a running server, over HTTP.

Rule: a client like any other, it knows the HTTP API only; standard library, so it starts at once.
Answers go to stdout, all else (statistics, hints, errors) to stderr: an answer can be piped.
Try it: python -m k3serve chat "What is the capital of France?"
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO
from urllib.parse import urlsplit

CONNECT_TIMEOUT_S = 10.0
START_HINT = "start one with `python -m k3serve`, or name another with --url"
HELP = """\
/reset   forget the conversation        /quit, Ctrl-D   end
/help    this list                      Ctrl-C          stop the running answer
A line that ends with a backslash goes on in the next one."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and line feed


class ChatError(Exception):
    """What kept the server from answering; the message says what to do."""


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """Where the server is, and what to ask of it."""

    url: str = "http://127.0.0.1:8000"
    model: str | None = None
    temperature: float = 0.0
    max_tokens: int | None = None
    system: str | None = None
    thinking: bool = True
    speculate: bool = True
    api_key: str | None = None

    def body(self, messages: Sequence[dict[str, str]]) -> dict[str, Any]:
        """The JSON of a request; what is as the server does it anyway is left out."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        body: dict[str, Any] = {
            "messages": [*system, *messages],
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.model is not None:
            body["model"] = self.model
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        if not self.thinking:
            body["chat_template_kwargs"] = {"thinking": False}
        if not self.speculate:
            body["speculate"] = False
        return body


def chat(prompt: Sequence[str], settings: ChatSettings) -> int:
    """Answers the prompt's words and ends, or converses; returns the exit status."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows ?
    screen = Screen(sys.stdout, sys.stderr)
    try:
        if prompt:
            answer_once(" ".join(prompt), settings, screen)
            return 0
        return converse(settings, screen)
    except ChatError as error:
        screen.error(str(error))
        return 1
    except BrokenPipeError:  # whoever reads our answer has enough, as `head` does
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


# ------------------------------------------------------------------------------------- turns


def answer_once(prompt: str, settings: ChatSettings, screen: Screen) -> None:
    answer = Answer()
    answer.read(settings, [{"role": "user", "content": prompt}], screen)
    screen.note(answer.statistics())


def converse(settings: ChatSettings, screen: Screen) -> int:
    """Turns until the input ends. Input that is no terminal ends with its first failure."""
    by_hand = sys.stdin.isatty()
    name = server_model(settings)
    if by_hand:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # line editing and a history for input()
        screen.note(f"{settings.model or name} at {settings.url}. /help lists commands")
    messages: list[dict[str, str]] = []
    while True:
        try:
            text = read_line("> " if by_hand else "")
        except KeyboardInterrupt:
            screen.note("\n(Ctrl-D or /quit ends)")
            continue
        if text is None or text.strip() == "/quit":
            return 0
        if text.startswith("/"):
            command(text.strip(), messages, screen)
        elif text.strip():
            try:
                turn(text, messages, settings, screen)
            except ChatError as error:
                if not by_hand:
                    raise
                screen.error(str(error))


def read_line(marker: str) -> str | None:
    """The next input, which lines with a backslash at their end continue; None at the end."""
    parts: list[str] = []
    while True:
        try:
            line = input(marker)
        except EOFError:
            return "\n".join(parts) if parts else None
        if not line.endswith("\\"):
            return "\n".join([*parts, line])
        parts.append(line[:-1])


def command(text: str, messages: list[dict[str, str]], screen: Screen) -> None:
    if text == "/reset":
        messages.clear()
        screen.note("(forgotten)")
    elif text == "/help":
        screen.note(HELP)
    else:
        screen.note(f"{text} is no command; put a blank in front to send it\n{HELP}")


def turn(text: str, messages: list[dict[str, str]], settings: ChatSettings, screen: Screen) -> None:
    """One question and its answer, which join the conversation; Ctrl-C keeps what was said."""
    question = {"role": "user", "content": text}
    answer = Answer()
    try:
        answer.read(settings, [*messages, question], screen)
        screen.note(answer.statistics())
    except KeyboardInterrupt:
        screen.end()
        screen.note("(stopped)")
    if answer.content or answer.reasoning:
        messages += [question, answer.message()]


@dataclass(slots=True)
class Answer:
    """One answer as it comes in."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    finish: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    first_s: float = 0.0  # from the request to the first text
    total_s: float = 0.0

    def read(self, settings: ChatSettings, messages: list[dict[str, str]], screen: Screen) -> None:
        started = time.monotonic()
        with contextlib.closing(stream(settings, settings.body(messages))) as chunks:
            for chunk in chunks:
                self.usage = _object(chunk.get("usage")) or self.usage
                for choice in _objects(chunk.get("choices")):
                    self.finish = _text(choice.get("finish_reason")) or self.finish
                    self._take(_object(choice.get("delta")), screen)
                    if (self.content or self.reasoning) and not self.first_s:
                        self.first_s = time.monotonic() - started
        self.total_s = time.monotonic() - started
        screen.end()

    def _take(self, delta: dict[str, Any], screen: Screen) -> None:
        if thought := _text(delta.get("reasoning_content")):
            self.reasoning.append(thought)
            screen.thought(thought)
        if said := _text(delta.get("content")):
            self.content.append(said)
            screen.said(said)

    def message(self) -> dict[str, str]:
        """As a past turn: the model is used to seeing its earlier reasoning."""
        made = {"role": "assistant", "content": "".join(self.content)}
        if self.reasoning:
            made["reasoning_content"] = "".join(self.reasoning)
        return made

    def statistics(self) -> str:
        tokens = self.usage.get("completion_tokens")
        tokens = tokens if isinstance(tokens, int) else 0
        parts = [
            f"{tokens} tokens",
            f"{tokens / max(self.total_s, 1e-9):,.0f} tokens/s",
            f"first after {self.first_s * 1000:,.0f} ms",
        ]
        if self.finish != "stop":
            parts.append(f"ended by {self.finish or 'the server'}")
        if spec := _object(self.usage.get("speculation")):
            # another server's may have other fields
            with contextlib.suppress(KeyError, TypeError, ValueError):
                parts.append(drafting(spec))
        return f"[{', '.join(parts)}]"


def drafting(spec: dict[str, Any]) -> str:
    """What usage.speculation says, in words."""
    if not spec["drafted"]:
        return "no drafts"
    shares = " ".join(
        f"{100 * accepted / drafted:.0f}" if drafted else "-"
        for accepted, drafted in zip(
            spec["accepted_per_position"], spec["drafted_per_position"], strict=True
        )
    )
    return f"{spec['acceptance_length']:.2f} tokens a step, drafts accepted by position: {shares} %"


# ------------------------------------------------------------------------------------- screen


class Screen:
    """Where text goes. On a terminal reasoning is shown, dimmed; a pipe gets the answer alone."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._out, self._err = out, err
        self._terminal = out.isatty()
        plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
        self._dim_out = self._terminal and not plain
        self._dim_err = err.isatty() and not plain
        self._thinking = False
        self._last = "\n"  # the last character on the line

    def thought(self, text: str) -> None:
        if not self._terminal:
            return
        if not self._thinking:
            self._thinking = True
            self._write("\x1b[2m" if self._dim_out else "(thinks) ")
        self._say(text)

    def said(self, text: str) -> None:
        self._close_thought()
        self._say(text)

    def end(self) -> None:
        """The answer is over: the next line starts at its left."""
        self._close_thought()
        if self._last != "\n":
            self._write("\n")
        self._last = "\n"

    def note(self, text: str) -> None:
        self._out.flush()
        before, after = ("\x1b[2m", "\x1b[0m") if self._dim_err else ("", "")
        print(f"{before}{_CONTROL.sub('�', text)}{after}", file=self._err, flush=True)

    def error(self, text: str) -> None:
        self.end()
        print(f"k3serve: {_CONTROL.sub('�', text)}", file=self._err, flush=True)

    def _close_thought(self) -> None:
        if self._thinking:
            self._thinking = False
            self._write("\x1b[0m\n" if self._dim_out else "\n")
            self._last = "\n"

    def _say(self, text: str) -> None:
        """A model may write what a terminal would obey: only a pipe gets that as it is."""
        self._write(_CONTROL.sub("�", text) if self._terminal else text)
        self._last = text[-1:]

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


# ------------------------------------------------------------------------------------- HTTP


def server_model(settings: ChatSettings) -> str:
    """The first model served there; also tells early when nobody answers."""
    with request(settings, "GET", "/v1/models", None) as response:
        listed = _objects(parsed(response.read(), settings).get("data")) or [{}]
        return _text(listed[0].get("id")) or "a model"


def stream(settings: ChatSettings, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
    """The chunks of a chat completion. Leaving early closes the connection: the server stops."""
    with request(settings, "POST", "/v1/chat/completions", body) as response:
        while line := response.readline():
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            chunk = parsed(data, settings)
            if "error" in chunk:
                raise ChatError(message_of(chunk, "the server failed"))
            yield chunk
    raise ChatError("the server broke its answer off; its log may say why")


@contextlib.contextmanager
def request(
    settings: ChatSettings, method: str, path: str, body: dict[str, Any] | None
) -> Iterator[http.client.HTTPResponse]:
    """A response with status 200, still open; ChatError for everything else."""
    connection, base = connect(settings.url)
    headers = {"Content-Type": "application/json", "User-Agent": "k3serve-chat"}
    if settings.api_key:
        if not settings.api_key.isprintable() or max(settings.api_key) > "\xff":
            raise ChatError("the API key must be printable, and Latin-1, as HTTP headers are")
        headers["Authorization"] = f"Bearer {settings.api_key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        try:
            connection.connect()
        except (OSError, UnicodeError) as error:  # a name that DNS cannot have
            raise ChatError(f"no server at {settings.url} ({error}); {START_HINT}") from error
        if isinstance(connection.sock, socket.socket):
            connection.sock.settimeout(None)  # a full server answers when it has a free slot
        try:
            connection.request(method, base + path, data, headers)
            response = connection.getresponse()
            if response.status != 200:
                raise refusal(response, settings)
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise ChatError(
                f"the connection to {settings.url} broke ({type(error).__name__}: {error})"
            ) from error
    finally:
        connection.close()


def connect(url: str) -> tuple[http.client.HTTPConnection, str]:
    """(a connection that is not open yet, what stands before /v1 in its paths)."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname, parts.port
        if parts.scheme not in ("http", "https") or not host or not parts.path.isascii():
            raise ValueError
        secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(host, port, timeout=CONNECT_TIMEOUT_S)
    except (ValueError, http.client.InvalidURL):
        raise ChatError(f"--url {url}: must look like http://127.0.0.1:8000") from None
    return connection, parts.path.rstrip("/").removesuffix("/v1")


def refusal(response: http.client.HTTPResponse, settings: ChatSettings) -> ChatError:
    try:
        said = message_of(json.loads(response.read(65536)), "")
    except (ValueError, RecursionError):
        said = ""
    hint = {
        401: "; give the key with --api-key or in K3SERVE_API_KEYS",
        404: "" if said else f"; is {settings.url} a k3serve server?",
    }.get(response.status, "")
    return ChatError(f"{settings.url}: {response.status} {said or response.reason}{hint}")


def message_of(body: Any, otherwise: str) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message") or otherwise) if isinstance(error, dict) else otherwise


def parsed(data: bytes, settings: ChatSettings) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ChatError(f"{settings.url} did not answer in JSON; is it a k3serve server?")
    return value


# What a server sends may have any shape: what does not fit counts as absent.


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _objects(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
