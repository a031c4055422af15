"""Property: what a client gets does not depend on how ticks cut the tokens into events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from k3serve.api.chat import ChatChoice
from k3serve.api.completions import TextChoice
from k3serve.api.context import Context
from k3serve.api.prompt import ChatPrompt
from k3serve.api.schema import ChatBody, CompletionBody
from k3serve.api.settings import ApiSettings
from k3serve.metrics import Metrics
from k3serve.types import Finish, Request, Sampling, TokenEvent
from tests.api.client import answers_hello
from tests.fakes import ByteTokenizer, FakeExecutor, events_of, joined

TOKENIZER = ByteTokenizer()
PIECES = [
    TOKENIZER.piece(p)
    for p in ("a", "b", "ab", "aba", b"\xe3", b"\x81\x96", b"\xff", "think", "response", "tools")
] + [TOKENIZER.special_id(s) for s in ("<|open|>", "<|close|>", "<|sep|>", "[BOS]")]
CONTEXT = Context(
    FakeExecutor(answers_hello), TOKENIZER, ApiSettings(vocab_size=2000), Metrics("m")
)
END = TOKENIZER.special_id("<|end_of_msg|>")

tokens = st.lists(st.sampled_from(PIECES), max_size=25)
stops = st.lists(st.sampled_from(["a", "ab", "ba", "abab", "ざ", "�", "baa"]), max_size=3)
cuts = st.lists(st.integers(1, 9), min_size=1, max_size=8)


def request_for(prompt: tuple[int, ...]) -> Request:
    sampling = Sampling(max_tokens=100, stop_token_ids=(END,), top_logprobs=2, prompt_logprobs=2)
    return Request(1, prompt, sampling)


def cut(events: list[TokenEvent], sizes: list[int]) -> Iterator[TokenEvent]:
    """The same events, several of them joined into one."""
    at, turn = 0, 0
    while at < len(events):
        part = events[at : at + sizes[turn % len(sizes)]]
        at, turn = at + len(part), turn + 1
        if part[0].prompt_scores is not None:  # scores come alone
            yield part[0]
            at -= len(part) - 1
            continue
        yield joined(part)


def play(choice: Any, events: Iterator[TokenEvent] | list[TokenEvent]) -> Any:
    chunks = []
    for event in events:
        chunks += choice.feed(event)
        if choice.finish_reason is not None:
            break
    assert choice.finish_reason is not None
    return chunks, choice.whole(), choice.completion_tokens


@settings(max_examples=150, deadline=None)
@given(tokens, stops, cuts, st.booleans(), st.booleans(), st.integers(0, 4))
def test_completions_do_not_depend_on_cuts(
    ids: list[int], stop: list[str], sizes: list[int], echo: bool, include: bool, least: int
) -> None:
    prompt = (0xE3, 0x81)  # half a character, which the answer may complete
    body = CompletionBody(
        echo=echo, logprobs=2, include_stop_str_in_output=include, min_tokens=least
    )
    events = list(events_of(request_for(prompt), [*ids, END]))
    made = [
        play(TextChoice(CONTEXT, body, 0, prompt, tuple(stop)), given)
        for given in (events, cut(events, sizes))
    ]
    assert made[0][1:] == made[1][1:]
    for chunks, whole, count in made:
        assert "".join(c["text"] for c in chunks) == whole["text"]
        length = count + (len(prompt) if echo else 0)
        assert {len(v) for v in whole["logprobs"].values()} == {length}
        offsets = whole["logprobs"]["text_offset"]
        assert offsets == sorted(offsets)
        if not include and whole["stop_reason"] in stop and not echo and not least:
            assert not any(s in whole["text"] for s in stop)


@settings(max_examples=150, deadline=None)
@given(tokens, stops, cuts, st.sampled_from(["think", "response", None]))
def test_chats_do_not_depend_on_cuts(
    ids: list[int], stop: list[str], sizes: list[int], channel: str | None
) -> None:
    prompt = ChatPrompt((1,), channel, named_tool=False)
    body = ChatBody(logprobs=True, top_logprobs=1, return_token_ids=True)
    events = list(events_of(request_for((1,)), [*ids, END]))
    events = [e for e in events if e.prompt_scores is None]
    made = [
        play(ChatChoice(CONTEXT, body, 0, prompt, tuple(stop)), given)
        for given in (events, cut(events, sizes))
    ]
    assert made[0][1:] == made[1][1:]
    for chunks, whole, count in made:
        content = "".join(c["delta"].get("content", "") for c in chunks)
        assert content == (whole["message"]["content"] or "")
        assert len(whole["logprobs"]["content"]) == len(whole["token_ids"]) == count
        assert [c["finish_reason"] for c in chunks if c["finish_reason"]] == [
            whole["finish_reason"]
        ]


def test_an_empty_answer_has_a_whole() -> None:
    choice = TextChoice(CONTEXT, CompletionBody(), 0, (1,), ())
    play(choice, [TokenEvent(1, finish=Finish.LENGTH)])
    assert choice.whole()["text"] == ""
