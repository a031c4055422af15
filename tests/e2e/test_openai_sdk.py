"""The openai package against K3-nano: chat and completions, streamed and not, with logprobs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.serving import Server

ASK: list[Any] = [{"role": "user", "content": "What is the capital of Italy?"}]
ANSWER = "The capital of Italy is Rome."


@pytest.fixture(scope="module")
def client(nano: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=nano.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["k3-nano"]
    assert client.models.retrieve("k3-nano").object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-x")


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="k3-nano", messages=ASK, temperature=0)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_chat_streamed_with_usage_and_logprobs(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="k3-nano", messages=ASK, temperature=0, logprobs=True, top_logprobs=3
    )
    text, scored, usage = "", [], None
    stream = client.chat.completions.create(
        model="k3-nano", messages=ASK, temperature=0, logprobs=True, top_logprobs=3,
        stream=True, stream_options={"include_usage": True},
    )  # fmt: skip
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            scored += (choice.logprobs.content or []) if choice.logprobs else []
    assert text == whole.choices[0].message.content == ANSWER
    assert usage == whole.usage
    assert whole.choices[0].logprobs is not None
    assert scored == whole.choices[0].logprobs.content
    for entry in scored:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0
        assert entry.bytes is not None


def test_completions_streamed_equal_unstreamed(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"model": "k3-nano", "prompt": "The days of the week are Monday,",
                                "max_tokens": 24, "temperature": 0, "logprobs": 2}  # fmt: skip
    whole = client.completions.create(**settings)
    parts = [c.choices[0] for c in client.completions.create(**settings, stream=True) if c.choices]
    assert "".join(part.text for part in parts) == whole.choices[0].text
    assert whole.choices[0].logprobs is not None
    streamed = [v for part in parts if part.logprobs for v in part.logprobs.token_logprobs or []]
    assert streamed == whole.choices[0].logprobs.token_logprobs


def test_echo_scores_every_prompt_token(client: openai.OpenAI) -> None:
    prompts = [[100, 200, 300], [5], list(range(60, 200))]
    answer = client.completions.create(
        model="k3-nano", prompt=prompts, max_tokens=1, temperature=0, logprobs=1, echo=True
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        values = choice.logprobs.token_logprobs if choice.logprobs else None
        assert values is not None and len(values) == len(prompt) + 1
        assert values[0] is None and all(v <= 0 for v in values[1:])


def test_seeds_replay_and_n_choices_differ(client: openai.OpenAI) -> None:
    def stories(**more: Any) -> list[str | None]:
        answer = client.chat.completions.create(
            model="k3-nano", n=4, temperature=1.0,
            messages=[{"role": "user", "content": "Tell me a story."}], **more,
        )  # fmt: skip
        return [choice.message.content for choice in answer.choices]

    first = stories(seed=3)
    assert len(set(first)) == 4
    assert stories(seed=3) == first
    assert stories() != stories()


@pytest.mark.parametrize(
    ("settings", "field"),
    [({"temperature": 3.0}, "temperature"), ({"max_tokens": -1}, "max_tokens"),
     ({"stop": [""]}, "stop"), ({"extra_body": {"top_k": "5"}}, "top_k")],
    ids=str,
)  # fmt: skip
def test_bad_fields_are_named(client: openai.OpenAI, settings: Any, field: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="k3-nano", messages=ASK, **settings)
    assert field in str(caught.value)
