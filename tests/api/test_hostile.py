"""Bodies that are no request: nesting, digits, surrogates, NaN, wrong shapes (group H)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from k3serve.api.jsonbody import MAX_DEPTH, parse_object
from k3serve.errors import RequestError
from tests.api.client import Got, Served

PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")


def send(served: Served, body: bytes, path: str = "/v1/completions") -> Got:
    return served.ask("POST", path, body)


def refused(served: Served, body: bytes, path: str = "/v1/completions") -> dict[str, Any]:
    got = send(served, body, path)
    assert got.status == 400, got.body[:300]
    assert not served.executor.submitted
    error = got.error
    served.alive()
    return error


@pytest.mark.parametrize(
    "body",
    [
        b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"x":' + b"[" * 100_000,
        b'{"x":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
        b'{"prompt":"x","x":' + b"[" * 500 + b"]" * 500 + b"}",
        b'{"prompt":"x","tools":' + b"[" * 3000 + b"]" * 3000 + b"}",
        b'{"prompt":"x","metadata":' + b"[" * 120 + b"]" * 120 + b"}",
        b'{"prompt":"x","logit_bias":' + b"[" * 900 + b"]" * 900 + b"}",
        b"[" * 100_000,
    ],
    ids=lambda b: f"{len(b)}",
)
def test_pc_71_deep_nesting(served: Served, body: bytes) -> None:
    error = refused(served, body)
    assert "nested" in error["message"] or "object" in error["message"]


def test_pc_71_a_million_keys(served: Served) -> None:
    keys = b",".join(b'"k%d":1' % i for i in range(1_000_000))
    assert "1000001 fields" in refused(served, b'{"prompt":"x",' + keys + b"}")["message"]


@pytest.mark.parametrize("name", ["x", "max_tokens", "seed", "temperature"])
def test_pc_71_a_megabyte_of_digits(served: Served, name: str) -> None:
    error = refused(served, b'{"prompt":"x","%b":%b}' % (name.encode(), b"9" * 1_000_000))
    assert "digits" in error["message"]


def test_many_digits_that_python_still_takes(served: Served) -> None:
    digits = b"9" * 4300
    for field in (b'"max_tokens":%b', b'"prompt":[%b]', b'"temperature":%b', b'"seed":-%b'):
        got = send(served, b'{"prompt":"x",%b}' % (field % digits))
        assert got.status == 400
        assert len(got.error["message"]) < 500
    assert send(served, b'{"prompt":"x","zebra":%b}' % digits).status == 200
    served.alive()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", rb'{"prompt":"\ud83d"}', "prompt"),
        ("/v1/completions", rb'{"prompt":["ok","a\ude00b"]}', "prompt[1]"),
        ("/v1/completions", rb'{"prompt":"x","stop":["\uDBFF"]}', "stop[0]"),
        ("/v1/completions", rb'{"prompt":"x","user":"\ud83d"}', "user"),
        ("/v1/completions", rb'{"prompt":"x","\ud83d":1}', None),
        (
            "/v1/chat/completions",
            rb'{"messages":[{"role":"user","content":"\ud83d"}]}',
            "messages[0].content",
        ),
        (
            "/v1/chat/completions",
            rb'{"messages":[{"role":"user","content":"x"}],'
            rb'"tools":[{"type":"function","function":{"name":"\ud83d"}}]}',
            "tools[0].function.name",
        ),
        ("/tokenize", rb'{"prompt":"\udc00\ud800"}', "prompt"),
    ],
)
def test_pc_73_lone_surrogates(served: Served, path: str, body: bytes, param: Any) -> None:
    error = refused(served, body, path)
    assert error["param"] == param
    assert "surrogate" in error["message"] and error["message"].isascii()


def test_pc_73_surrogate_inside_tool_arguments(served: Served) -> None:
    """Arguments are JSON in a string: the escape is decoded one level later."""
    calls = [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":"\\ud83d"}'}}
    ]
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": "r"},
    ]
    got = served.chat(messages=messages)
    assert got.status == 400 and got.error["param"].startswith("messages[1]")
    served.alive()


def test_pc_73_pairs_and_escaped_backslashes_are_fine(served: Served) -> None:
    assert (
        send(served, rb'{"prompt":"\ud83d\ude0a","echo":true}')
        .json["choices"][0]["text"]
        .startswith("😊")
    )
    assert send(served, rb'{"prompt":"\\ud83d"}').status == 200


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [
        b"42",
        b'"s"',
        b"true",
        b"null",
        b"[]",
        b"{}",
        b"",
        b"  ",
        b"{:",
        b'{"a":1',
        b"{'a':1}",
        b'{"prompt":"x"} extra',
        b"\xff",
        b'{"prompt":"\xed\xa0\x80"}',
        b"\xef\xbb\xbf" + b'{"prompt":"x"}',
        '{"prompt":"x"}'.encode("utf-16"),
        '{"prompt":"x"}'.encode("utf-16-le"),
        b'{"prompt":"a\x00b"}',
        b'{"prompt":"a\nb"}',
    ],
    ids=repr,
)
def test_pc_75_no_object_no_generation(served: Served, path: str, body: bytes) -> None:
    refused(served, body, path)


@pytest.mark.parametrize(
    "text",
    [
        '"temperature":NaN',
        '"top_p":Infinity',
        '"top_p":-Infinity',
        '"temperature":1e999',
        '"temperature":-1e999',
        '"zebra":NaN',
        '"logit_bias":{"5":NaN}',
    ],
)
def test_pc_76_numbers_must_be_finite(served: Served, text: str) -> None:
    assert "finite" in refused(served, b'{"prompt":"x",%b}' % text.encode())["message"]


def test_pc_76_of_duplicate_keys_the_last_counts(served: Served) -> None:
    assert send(served, b'{"prompt":"x","max_tokens":5000,"max_tokens":3}').status == 200
    assert served.executor.submitted[0].sampling.max_tokens == 3
    assert send(served, b'{"prompt":"x","max_tokens":3,"max_tokens":5000}').status == 400


def test_depth_limit_is_exact() -> None:
    def nested(depth: int) -> bytes:
        inner: Any = {}
        for _ in range(depth - 2):
            inner = [inner]
        return json.dumps({"x": inner}).encode()

    assert parse_object(nested(MAX_DEPTH))
    with pytest.raises(RequestError, match="nested"):
        parse_object(nested(MAX_DEPTH + 1))
    wide = json.dumps({"x": [[1]] * 1000}).encode()
    assert len(parse_object(wide)["x"]) == 1000


def test_schema_at_the_depth_limit_renders(served: Served) -> None:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range((MAX_DEPTH - 10) // 2):
        schema = {"properties": {"a": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert served.chat(tools=[tool]).status == 200


def test_error_messages_stay_short(served: Served) -> None:
    for body in (
        {"prompt": "x", "temperature": "9" * 100_000},
        {"prompt": "x", "model": "m" * 100_000},
        {"prompt": "x", "stop": ["s" * 100_000]},
        {"prompt": ["x", "y" * 100_000, 3]},
    ):
        got = served.complete(**body)
        assert got.status in (400, 404)
        assert len(got.error["message"]) < 1000


def test_prompt_of_a_million_ids(served: Served) -> None:
    got = served.complete(prompt=[65] * 1_000_000)
    assert got.status == 400 and got.error["code"] == "context_length_exceeded"


def test_a_text_that_cannot_fit_is_never_encoded(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = served.server.context.longest_token
    assert longest > 1
    fits, too_long = "x" * (4096 * longest), "x" * (4096 * longest + 1)
    assert "4096 tokens" in served.complete(prompt=fits).error["message"]  # encoded and counted
    assert served.ask("POST", "/tokenize", {"prompt": too_long}).json["count"] == len(too_long)

    def encode(*_: Any, **__: Any) -> list[int]:
        raise AssertionError("it was encoded")

    monkeypatch.setattr(served.tokenizer, "encode", encode)
    message = {"role": "user", "content": too_long}
    for got, param in (
        (served.complete(prompt=too_long), "prompt"),
        (served.complete(prompt=["a" * 5000 * longest]), "prompt[0]"),
        (served.chat(messages=[message]), "messages"),
    ):
        assert got.status == 400 and got.error["param"] == param
        assert got.error["code"] == "context_length_exceeded"
        assert "characters" in got.error["message"]
