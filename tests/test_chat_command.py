"""The `chat` command against a scripted server: an answer, conversations, Ctrl-C, failures."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from k3serve.__main__ import main
from k3serve.chat_command import Screen, drafting
from k3serve.types import Finish, Request, TokenEvent
from tests.api.client import Served
from tests.api.conftest import start
from tests.fakes import events_of, speculates

ROOT = Path(__file__).parent.parent
THINK = "<|close|>think<|sep|>"
Chat = Callable[..., tuple[int, str, str]]


@pytest.fixture
def served() -> Iterator[Served]:
    one = start()
    yield one
    one.server.shutdown()


@pytest.fixture
def chat(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Chat:
    """Runs the command with text on its standard input: (status, stdout, stderr)."""
    monkeypatch.delenv("K3SERVE_API_KEYS", raising=False)

    def run(*flags: str, typed: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        capsys.readouterr()
        url = f"http://127.0.0.1:{served.server.port}"
        status = main(["chat", "--url", url, *flags])
        return status, *capsys.readouterr()

    return run


def replies(served: Served, *texts: str, **how: Any) -> list[Request]:
    """Each request in turn gets one of the texts; gives the list that the requests join."""
    seen: list[Request] = []

    def script(request: Request) -> Any:
        text = texts[min(len(seen), len(texts) - 1)]
        seen.append(request)
        ids = served.tokenizer.encode(text, allow_special=True)
        return events_of(request, [*ids, 258], **how)

    served.executor.script = script
    return seen


def prompt_of(served: Served, request: Request) -> str:
    return served.tokenizer.decode(request.prompt)


# --------------------------------------------------------------------------- one answer


def test_one_answer_goes_to_stdout_alone(served: Served, chat: Chat) -> None:
    (seen := replies(served, f"let me see{THINK}<|open|>response<|sep|>It is Paris."))
    status, out, err = chat("What", "is the capital?")
    assert (status, out) == (0, "It is Paris.\n")
    assert err.startswith("[") and "tokens/s, first after " in err and "let me see" not in err
    assert "step" not in err and "ended by" not in err
    assert "What is the capital?" in prompt_of(served, seen[0])
    assert seen[0].sampling.temperature == 0 and seen[0].sampling.speculate


def test_flags_reach_the_request(served: Served, chat: Chat) -> None:
    seen = replies(served, "hello")
    flags = "--temperature 0.5 --max-tokens 3 --no-think --no-speculate --model k3-nano".split()
    status, out, err = chat(*flags, "--system", "Be brief", "hi")
    assert (status, out) == (0, "hel\n") and "3 tokens" in err and "ended by length" in err
    sampling = seen[0].sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.speculate) == (0.5, 3, False)
    assert "Be brief" in prompt_of(served, seen[0])


def test_statistics_show_what_drafting_did(served: Served, chat: Chat) -> None:
    served.executor.script = speculates([*b"abcdefgh", 258], (3,), (3,), offered=4)
    status, out, err = chat("--no-think", "hi")
    assert (status, out) == (0, "abcdefgh\n")
    assert "9 tokens" in err
    assert "4.00 tokens a step, drafts accepted by position: 100 100 100 0 - - - %" in err


def test_no_drafts_are_said_to_be_none() -> None:
    assert drafting({"drafted": 0}) == "no drafts"


def test_control_characters_stay_in_a_pipe_only() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for out, wanted in ((Terminal(), "a�[31m\tb\n"), (io.StringIO(), "a\x1b[31m\tb\n")):
        screen = Screen(out, io.StringIO())
        screen.said("a\x1b[31m\tb")
        screen.end()
        assert out.getvalue() == wanted


def test_reasoning_on_a_terminal_is_dimmed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    screen = Screen(out, io.StringIO())
    for piece in ("so", " then"):
        screen.thought(piece)
    screen.said("yes")
    screen.end()
    assert out.getvalue() == "\x1b[2mso then\x1b[0m\nyes\n"


# --------------------------------------------------------------------------- conversations


def test_a_conversation_remembers_also_its_reasoning(served: Served, chat: Chat) -> None:
    seen = replies(served, f"hm{THINK}<|open|>response<|sep|>Hello Tim", f"{THINK}Tim")
    status, out, err = chat(typed="I am Tim\n\nWho am\\\nI?\n/quit\nnever sent\n")
    assert (status, out.splitlines()[0], len(seen)) == (0, "Hello Tim", 2)
    assert err.count("tokens/s") == 2
    second = prompt_of(served, seen[1])
    for part in ("I am Tim", "hm", "Hello Tim", "Who am\nI?"):
        assert part in second
    assert "I am Tim" not in second.split("Who am")[1]


def test_reset_forgets(served: Served, chat: Chat) -> None:
    seen = replies(served, "ok")
    status, _, err = chat("--system", "Be kind", typed="first\n/reset\nsecond\n")
    assert status == 0 and "(forgotten)" in err
    assert "first" not in prompt_of(served, seen[1]) and "Be kind" in prompt_of(served, seen[1])


def test_commands_are_not_sent(served: Served, chat: Chat) -> None:
    status, out, err = chat(typed="/help\n/nonsense\n")
    assert (status, out) == (0, "") and not served.executor.submitted
    assert err.count("/reset") == 2 and "/nonsense is no command" in err


class OnTerminal:
    """The command as a child on a terminal of its own."""

    def __init__(self, served: Served, *flags: str) -> None:
        self.master, slave = pty.openpty()
        url = f"http://127.0.0.1:{served.server.port}"
        self.child = subprocess.Popen(
            [sys.executable, "-m", "k3serve", "chat", "--url", url, *flags],
            stdin=slave, stdout=slave, stderr=slave, cwd=ROOT, start_new_session=True,
            env=os.environ | {"TERM": "dumb"},
            # a test run in the background may have inherited that Ctrl-C is ignored
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip
        os.close(slave)
        self.seen = ""

    def until(self, text: str) -> None:
        """Reads on until the text has come; pytest's time limit ends a wait in vain."""
        while text not in self.seen:
            self.seen += os.read(self.master, 4096).decode("utf-8", "replace")
        self.seen = self.seen.split(text, 1)[1]

    def interrupt(self, answer: str) -> None:
        """Ctrl-C until the program says so: Python's input() does not notice a signal that comes
        between its prompt and its wait."""
        while answer not in self.seen:
            self.child.send_signal(signal.SIGINT)
            while select.select([self.master], [], [], 2)[0] and answer not in self.seen:
                self.seen += os.read(self.master, 4096).decode("utf-8", "replace")
        self.seen = self.seen.split(answer, 1)[1]

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())


@pytest.fixture
def terminal(served: Served) -> Iterator[OnTerminal]:
    one = OnTerminal(served, "--no-think")
    yield one
    one.child.kill()
    one.child.wait(10)
    os.close(one.master)


def test_ctrl_c_stops_the_answer_and_ctrl_d_the_program(
    served: Served, terminal: OnTerminal
) -> None:
    gate = threading.Event()
    seen: list[Request] = []

    def script(request: Request) -> Any:
        seen.append(request)
        if len(seen) == 1:
            yield TokenEvent(request.id, tuple(b"Once upon"))
            yield gate
        yield TokenEvent(request.id, (*b"again", 258), finish=Finish.STOP)

    served.executor.script = script
    terminal.until("k3-nano at http")
    terminal.until("> ")
    terminal.type("tell\n")
    terminal.until("Once upon")
    terminal.interrupt("(stopped)")
    served.executor.wait_for(lambda e: len(e.cancelled) == 1)
    terminal.until("> ")
    terminal.interrupt("(Ctrl-D or /quit ends)")  # with no answer running
    terminal.until("> ")
    terminal.type("more\n")
    terminal.until("again")
    terminal.until("> ")
    terminal.type("\x04")
    assert terminal.child.wait(20) == 0
    assert "Once upon" in prompt_of(served, seen[1])


# --------------------------------------------------------------------------- what goes wrong


def test_no_server(chat: Chat) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound, not listening: nobody else can take it
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        for flags in (["hi"], []):
            status, out, err = chat("--url", url, *flags)
            assert (status, out) == (1, "")
            assert f"no server at {url}" in err and "python -m k3serve" in err


@pytest.mark.parametrize("url", [
    "ftp://x", "http://", "http://x:99999", "http://[::1", "http://a b", "http://h/ü",
])  # fmt: skip
def test_odd_urls(chat: Chat, url: str) -> None:
    status, _, err = chat("--url", url, "hi")
    assert status == 1 and "must look like http://127.0.0.1:8000" in err


def test_the_url_may_name_the_api(served: Served, chat: Chat) -> None:
    replies(served, "ok")
    for url in ("http://127.0.0.1:{}/v1/", "127.0.0.1:{}"):
        assert chat("--url", url.format(served.server.port), "hi")[0] == 0


def test_the_servers_own_words(served: Served, chat: Chat) -> None:
    status, _, err = chat("--temperature", "3", "hi")
    assert status == 1 and "400 temperature must be a number from 0 to 2" in err
    status, _, err = chat("--model", "other", "hi")
    assert status == 1 and "404 model 'other' does not exist here; served: k3-nano" in err


def test_piped_input_ends_with_its_first_failure(served: Served, chat: Chat) -> None:
    served.executor.script = lambda r: [TokenEvent(r.id, finish=Finish.ERROR, error="host 2 died")]
    status, _, err = chat(typed="one\ntwo\n")
    assert status == 1 and "host 2 died" in err and len(served.executor.submitted) == 1


def test_failure_in_mid_answer(served: Served, chat: Chat) -> None:
    def script(request: Request) -> Any:
        yield TokenEvent(request.id, tuple(b"Once"))
        yield TokenEvent(request.id, finish=Finish.ERROR, error="host 2 died")

    served.executor.script = script
    status, out, err = chat("--no-think", "hi")
    assert (status, out) == (1, "Once\n") and "host 2 died" in err


@pytest.mark.parametrize("host", ["a..b", "a" * 64 + ".invalid"])
def test_names_that_no_host_can_have(chat: Chat, host: str) -> None:
    status, _, err = chat("--url", f"http://{host}", "hi")
    assert status == 1 and f"no server at http://{host}" in err


@pytest.mark.parametrize("key", ["two\nlines", "ключ"])
def test_keys_that_no_header_can_hold(served: Served, chat: Chat, key: str) -> None:
    status, _, err = chat("--api-key", key, "hi")
    assert status == 1 and "the API key must be" in err


def answered_with(chat: Chat, body: bytes, *flags: str, typed: str = "") -> tuple[int, str, str]:
    """The command against a server that gives each of its requests this answer and hangs up."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            peer, _ = listener.accept()
            with peer, peer.makefile("rb") as reader:
                lines = iter(reader.readline, b"\r\n")  # an unread rest would reset the connection
                sizes = [int(v) for n, _, v in (x.partition(b":") for x in lines) if b"-Le" in n]
                reader.read(sum(sizes))
                peer.sendall(head + body)

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        result = chat("--url", url, *flags, typed=typed)
        thread.join(10)
    return result


def test_a_stream_that_breaks_off(chat: Chat) -> None:
    chunk = {"choices": [{"delta": {"content": "Once"}, "finish_reason": None}]}
    status, out, err = answered_with(chat, f"data: {json.dumps(chunk)}\n\n".encode(), "hi")
    assert (status, out) == (1, "Once\n") and "broke its answer off" in err


@pytest.mark.parametrize(
    "chunk",
    [
        {"choices": "abc"},
        {"choices": 3},
        {"choices": [1, {"delta": "x"}]},
        {"choices": [{"delta": {"content": 5, "reasoning_content": ["a"]}}]},
        {"usage": "x"},
        {"usage": {"completion_tokens": None}},
        {"usage": {"speculation": "x"}},
        {"usage": {"speculation": {"drafted": 3, "tokens": 2}}},
        {"usage": {"speculation": {"drafted": 3, "acceptance_length": "1", "steps": 1,
                                   "drafted_per_position": [1, 2], "accepted_per_position": [1]}}},
    ],
)  # fmt: skip
def test_a_chunk_of_another_shape(chat: Chat, chunk: dict[str, Any]) -> None:
    body = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode()
    status, out, err = answered_with(chat, body, "hi")
    assert (status, out) == (0, "") and "[0 tokens" in err


def test_json_too_deep_to_read(chat: Chat) -> None:
    status, _, err = answered_with(chat, b"data: " + b"[" * 100_000 + b"\n\n", "hi")
    assert status == 1 and "did not answer in JSON" in err


@pytest.mark.parametrize("models", [b'"abc"', b"3", b"[1]", b'{"a": 1}', b'[{"id": 7}]'])
def test_a_list_of_models_of_another_shape(chat: Chat, models: bytes) -> None:
    status, _, err = answered_with(chat, b'{"data": ' + models + b"}", typed="/quit\n")
    assert (status, err) == (0, "")


def test_statistics_hold_nothing_that_a_terminal_would_obey(chat: Chat) -> None:
    chunk = {"choices": [{"delta": {}, "finish_reason": "\x1b[2J"}]}
    body = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode()
    status, _, err = answered_with(chat, body, "hi")
    assert status == 0 and "\x1b" not in err and "ended by �[2J" in err


def test_a_key_from_the_flag_or_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("K3SERVE_API_KEYS", raising=False)
    locked = start(api_keys=("secret",))
    try:
        ask = ["chat", "--url", f"http://127.0.0.1:{locked.server.port}", "hi"]
        assert main(ask) == 1
        assert "401" in (err := capsys.readouterr().err) and "--api-key" in err
        assert main([*ask, "--api-key", "secret"]) == 0
        monkeypatch.setenv("K3SERVE_API_KEYS", "secret, other")
        assert main(ask) == 0
    finally:
        locked.server.shutdown()


def test_help_teaches_and_typos_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["chat", "--help"])
    assert ended.value.code == 0
    assert 'chat "What is the capital of France?"' in capsys.readouterr().out
    assert main(["chat", "--temprature=1", "hi"]) == 2
    assert "did you mean --temperature?" in capsys.readouterr().err
