"""The openai SDK against a real socket: strict where it can be, streams, errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.api.client import Served
from tests.api.test_chat import END, TOOL, call, close, k3_ids, response, tools
from tests.fakes import events_of, says

openai = pytest.importorskip("openai")

REPLY = "think" + close("think") + response("Hello, é😊") + close("message") + END
MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(served: Served) -> Iterator[Any]:
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{served.server.port}/v1",
        api_key="unused",
        max_retries=0,
        timeout=20,
        _strict_response_validation=True,
    ) as made:
        yield made


def test_chat(served: Served, client: Any) -> None:
    served.executor.script = says(k3_ids(served, REPLY), per_event=3)
    got = client.chat.completions.create(
        model="k3-nano", messages=MESSAGES, logprobs=True, top_logprobs=3, n=2
    )
    assert [c.index for c in got.choices] == [0, 1]
    message = got.choices[0].message
    assert message.content == "Hello, é😊"
    assert message.reasoning_content == "think"
    assert got.choices[0].finish_reason == "stop"
    assert got.usage.completion_tokens_details.reasoning_tokens == 2 * 5
    entries = got.choices[0].logprobs.content
    assert len(entries) == len(k3_ids(served, REPLY))
    assert all(e.logprob == e.top_logprobs[0].logprob for e in entries)
    assert got._request_id


def test_chat_stream(served: Served, client: Any) -> None:
    served.executor.script = says(k3_ids(served, REPLY), per_event=2)
    stream = client.chat.completions.create(
        model="k3-nano",
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "Hello, é😊"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 0


def test_stream_helper(served: Served, client: Any) -> None:
    text = close("think") + response("Calling") + tools(call("f", a="1"), call("f", 2)) + END
    served.executor.script = says(k3_ids(served, text))
    with client.chat.completions.stream(
        model="k3-nano", messages=MESSAGES, tools=[TOOL], stream_options={"include_usage": True}
    ) as stream:
        final = stream.get_final_completion()
    message = final.choices[0].message
    assert final.choices[0].finish_reason == "tool_calls"
    assert message.content == "Calling"
    assert [c.id for c in message.tool_calls] == ["functions.f:0", "functions.f:1"]
    assert message.tool_calls[0].function.name == "f"
    assert final.usage.total_tokens > 0


def test_stream_helper_with_several_choices(served: Served, client: Any) -> None:
    served.executor.script = lambda r: events_of(
        r, k3_ids(served, close("think") + response(str(r.sampling.choice)) + END)
    )
    with client.chat.completions.stream(model="k3-nano", messages=MESSAGES, n=3) as stream:
        final = stream.get_final_completion()
    assert [c.message.content for c in final.choices] == ["0", "1", "2"]


def test_tool_round_trip(served: Served, client: Any) -> None:
    """The message that came out goes back in with its result."""
    text = "r" + close("think") + tools(call("f", a="1")) + END
    served.executor.script = says(k3_ids(served, text))
    message = (
        client.chat.completions.create(model="k3-nano", messages=MESSAGES, tools=[TOOL])
        .choices[0]
        .message
    )
    back = [
        *MESSAGES,
        message.model_dump(),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "42"},
    ]
    assert client.chat.completions.create(model="k3-nano", messages=back, tools=[TOOL]).choices
    prompt = bytes(i for i in served.executor.submitted[-1].prompt if i < 256)
    assert b'call tool="f" index="1"' in prompt and b"42" in prompt


def test_completions(served: Served, client: Any) -> None:
    got = client.completions.create(
        model="k3-nano", prompt=["a", "b"], max_tokens=5, logprobs=2, temperature=0
    )
    assert [c.text for c in got.choices] == ["hello", "hello"]
    logprobs = got.choices[0].logprobs
    assert logprobs.tokens == list("hello")
    best = [max(top.values()) for top in logprobs.top_logprobs]
    assert logprobs.token_logprobs == best


def test_completions_stream(served: Served) -> None:
    with openai.OpenAI(  # the SDK's own type forbids the null finish_reason of every chunk
        base_url=f"http://127.0.0.1:{served.server.port}/v1", api_key="x", max_retries=0
    ) as client:
        stream = client.completions.create(
            model="k3-nano", prompt="x", max_tokens=5, stream=True, logprobs=1, echo=True
        )
        chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks) == "xhello"
    assert next(v for c in chunks for v in c.choices[0].logprobs.token_logprobs) is None


def test_models(client: Any) -> None:
    assert [m.id for m in client.models.list()] == ["k3-nano"]
    assert client.models.retrieve("k3-nano").owned_by == "k3serve"


def test_errors(served: Served, client: Any) -> None:
    create = client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as bad:
        create(model="k3-nano", messages=MESSAGES, temperature=9)
    assert bad.value.param == "temperature" and "from 0 to 2" in bad.value.message
    with pytest.raises(openai.NotFoundError) as missing:
        create(model="gpt-9", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    served.executor.refuse_after = 0
    with pytest.raises(openai.RateLimitError):
        create(model="k3-nano", messages=MESSAGES)


def test_error_inside_a_stream(served: Served, client: Any) -> None:
    from tests.api.test_streaming import failing

    served.executor.script = failing(b"ab")
    stream = client.chat.completions.create(model="k3-nano", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="host 2 died"):
        list(stream)


def test_closing_the_stream_cancels(served: Served, client: Any) -> None:
    import threading

    from tests.fakes import hangs_after

    served.executor.script = hangs_after(list(b"abc"), threading.Event())
    stream = client.chat.completions.create(model="k3-nano", messages=MESSAGES, stream=True)
    next(iter(stream))
    stream.close()
    served.executor.wait_for(lambda e: len(e.cancelled) == 1)


def test_authentication(start_server: Any) -> None:
    served = start_server(api_keys=("sk-1",))
    url = f"http://127.0.0.1:{served.server.port}/v1"
    with openai.OpenAI(base_url=url, api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
    with openai.OpenAI(base_url=url, api_key="sk-1", max_retries=0) as client:
        assert list(client.models.list())
