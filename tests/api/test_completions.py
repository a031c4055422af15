"""/v1/completions: echo with log-probabilities, arrays, batches (public cases, group A)."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from k3serve.types import MAX_TOP_LOGPROBS, Finish, PromptScores, Request, TokenEvent
from tests.api.client import Served, joined
from tests.fakes import events_of, prompt_scores, says, score

EOS = 258


def arrays(got: Any, index: int = 0) -> dict[str, list[Any]]:
    assert got.status == 200, got.body
    return got.json["choices"][index]["logprobs"]


def check_arrays(logprobs: dict[str, list[Any]], count: int) -> None:
    assert {k: len(v) for k, v in logprobs.items()} == dict.fromkeys(
        ("text_offset", "token_logprobs", "tokens", "top_logprobs"), count
    )
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    for value, top in zip(
        logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True
    ):
        assert math.isfinite(value)
        assert value == max(top.values())  # the double's tokens are all the best ones
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets)


def test_pc_01_echo_returns_prompt_logprobs(served: Served) -> None:
    prompt = "The capital of France is"
    got = served.complete(prompt=prompt, echo=True, logprobs=1, max_tokens=1, temperature=0)
    logprobs = arrays(got)
    check_arrays(logprobs, len(prompt) + 1)
    assert got.json["usage"]["prompt_tokens"] == len(prompt)
    assert got.json["usage"]["completion_tokens"] == 1
    expected = [score(t, i) for i, t in enumerate(prompt.encode())][1:]
    assert logprobs["token_logprobs"][1:-1] == expected


def test_echo_entry_of_the_end_token_is_kept(served: Served) -> None:
    served.executor.script = lambda r: events_of(r, [EOS])
    got = served.complete(prompt=[[65, 66, 67]], echo=True, logprobs=1, max_tokens=1, seed=1234)
    logprobs = arrays(got)
    check_arrays(logprobs, 4)
    assert logprobs["tokens"] == ["A", "B", "C", "<|end_of_msg|>"]
    choice = got.json["choices"][0]
    assert choice["text"] == "ABC"
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] is None
    assert got.json["usage"]["completion_tokens"] == 1


def test_pc_02_first_prompt_token_keeps_its_text(served: Served) -> None:
    got = served.complete(
        prompt=[11, 22, 33], echo=True, logprobs=1, max_tokens=1, return_token_ids=True
    )
    assert arrays(got)["tokens"][0] == "\x0b"
    assert got.json["choices"][0]["prompt_token_ids"] == [11, 22, 33]
    assert got.json["choices"][0]["token_ids"] == [ord("h")]


def test_pc_03_tokens_and_offsets_line_up(served: Served) -> None:
    prompt = "\n1. Carol has 20"
    served.executor.script = says(served.ids("\n\n", " has", " 2", "0", "."))
    got = served.complete(prompt=prompt, echo=True, logprobs=1, max_tokens=5, temperature=0)
    text, logprobs = got.json["choices"][0]["text"], arrays(got)
    assert text == prompt + "\n\n has 20."
    assert "".join(logprobs["tokens"]) == text
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert text[offset : offset + len(token)] == token


def test_pc_03_offsets_count_characters_not_bytes(served: Served) -> None:
    served.executor.script = says(served.ids(b"\xe3\x81", b"\x96", "!"))
    got = served.complete(prompt="é", echo=True, logprobs=0, max_tokens=3)
    assert got.json["choices"][0]["text"] == "éざ!"
    assert arrays(got)["text_offset"] == [0, 0, 1, 1, 2]


def test_a_character_may_span_prompt_and_answer(served: Served) -> None:
    served.executor.script = lambda r: events_of(r, [0x96])
    got = served.complete(prompt=[0xE3, 0x81], echo=True, logprobs=1, max_tokens=1)
    assert got.json["choices"][0]["text"] == "ざ"


@pytest.mark.parametrize("bad", [-math.inf, math.nan, -1e30])
def test_pc_07_no_infinity_in_json(served: Served, bad: float) -> None:
    def script(request: Request) -> Any:
        scores = prompt_scores(request.prompt, 1, len(request.prompt))
        scores.logprobs[0] = bad
        scores.top_logprobs[0, 1] = bad
        yield TokenEvent(request.id, prompt_scores=scores)
        yield TokenEvent(
            request.id, (65,), (bad,), ((65, 66),), ((bad, -1.0),), finish=Finish.LENGTH
        )

    served.executor.script = script
    sampling = {"temperature": 1, "top_k": 1, "top_p": 0.3, "logit_bias": {"70": -100}}
    got = served.complete(prompt="horse", echo=True, logprobs=2, max_tokens=1, **sampling)
    values = arrays(got)["token_logprobs"]
    assert values[1] == -9999.0 and values[-1] == -9999.0
    assert served.executor.submitted[0].sampling.prompt_logprobs == 2


@pytest.mark.parametrize("top", [0, 1, 20])
def test_pc_11_max_tokens_0_scores_only(served: Served, top: int) -> None:
    got = served.complete(prompt="a b c", echo=True, logprobs=top, max_tokens=0)
    check_arrays(arrays(got), 5)
    choice = got.json["choices"][0]
    assert choice["text"] == "a b c" and choice["finish_reason"] == "length"
    assert got.json["usage"]["completion_tokens"] == 0
    plain = served.complete(prompt="a b c", max_tokens=0)
    assert plain.status == 200
    assert plain.json["choices"][0]["text"] == ""


@pytest.mark.parametrize("top", [0, 1, 3])
def test_pc_12_sampled_token_outside_the_top(served: Served, top: int) -> None:
    served.executor.script = lambda r: events_of(r, [ord("a")], rank=7)
    got = served.complete(prompt="x", logprobs=top, max_tokens=1)
    logprobs = arrays(got)
    assert logprobs["token_logprobs"] == [score(ord("a"), 1)]
    assert len(logprobs["top_logprobs"][0]) == top + 1  # the chosen one comes on top, as at OpenAI
    assert logprobs["top_logprobs"][0]["a"] == score(ord("a"), 1)


def test_pc_12_special_candidates(served: Served) -> None:
    event = ((65,), (-3.0,), ((256, 258),), ((-0.5, -1.0),))
    served.executor.script = lambda r: [TokenEvent(r.id, *event, finish=Finish.LENGTH)]
    got = served.complete(prompt="x", logprobs=2, max_tokens=1)
    expected = {"[BOS]": -0.5, "<|end_of_msg|>": -1.0, "A": -3.0}
    assert arrays(got)["top_logprobs"] == [expected]


def test_colliding_keys_keep_the_largest_value(served: Served) -> None:
    """Half characters all read U+FFFD; the chosen one must not look like the best."""
    event = ((0x80,), (-4.0,), ((0x81, 0x82),), ((-0.25, -2.0),))
    served.executor.script = lambda r: [TokenEvent(r.id, *event, finish=Finish.LENGTH)]
    got = served.complete(prompt="x", logprobs=2, max_tokens=1)
    assert arrays(got)["token_logprobs"] == [-4.0]
    assert arrays(got)["top_logprobs"] == [{"�": -0.25}]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": "1"}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 1000}, "logprobs"),
        ({"logprobs": 1.0}, "logprobs"),
    ],
)
def test_pc_13_bad_logprobs(served: Served, body: dict[str, Any], param: str) -> None:
    got = served.complete(prompt="x", **body)
    assert got.status == 400
    assert got.error["param"] == param
    assert str(MAX_TOP_LOGPROBS) in got.error["message"]
    assert not served.executor.submitted


@pytest.mark.parametrize(
    ("body", "param"),
    [({"logprobs": 3}, "logprobs"), ({"top_logprobs": 5}, "top_logprobs")],
)
def test_pc_13_bad_chat_logprobs(served: Served, body: dict[str, Any], param: str) -> None:
    got = served.chat(**body)
    assert got.status == 400
    assert got.error["param"] == param


@pytest.mark.parametrize("stream", [False, True])
def test_pc_15_order_and_index_of_a_batch(served: Served, stream: bool) -> None:
    prompts = [[65, 66], [67, 68, 69], [70]]
    got = served.complete(
        prompt=prompts, n=2, echo=True, logprobs=1, max_tokens=1, temperature=0, stream=stream
    )
    assert got.status == 200
    for i, prompt in enumerate(prompts):
        for j in range(2):
            index = 2 * i + j
            if stream:
                text = joined(got.frames, index)["text"]
            else:
                choice = got.json["choices"][index]
                assert choice["index"] == index
                check_arrays(choice["logprobs"], len(prompt) + 1)
                text = choice["text"]
            assert text == bytes(prompt).decode() + "h"
    assert [r.sampling.choice for r in served.executor.submitted] == [0, 1] * 3
    if not stream:
        assert got.json["usage"] == {
            "prompt_tokens": 6,
            "completion_tokens": 6,
            "total_tokens": 12,
            "prompt_tokens_details": {"cached_tokens": 0},
        }


@pytest.mark.parametrize("prompt", [[], [[]], ["a", [1]], [1, "a"], [[1], 2], ["a", ""], [None]])
def test_pc_15_bad_prompt_lists(served: Served, prompt: Any) -> None:
    got = served.complete(prompt=prompt)
    assert got.status == 400
    assert got.error["param"].startswith("prompt")


def test_batch_of_texts_with_different_lengths_to_answer(served: Served) -> None:
    def script(request: Request) -> Any:
        return events_of(request, [*list(b"xyz")[: request.prompt[0] - ord("0")], EOS])

    served.executor.script = script
    got = served.complete(prompt=["3", "1", "2"], max_tokens=9)
    assert [c["text"] for c in got.json["choices"]] == ["xyz", "x", "xy"]
    assert got.json["usage"]["completion_tokens"] == 9


def test_streamed_echo_adds_up(served: Served) -> None:
    body = {"prompt": "a b c d e", "echo": True, "logprobs": 2, "max_tokens": 4}
    whole = served.complete(**body).json["choices"][0]
    got = served.complete(**body, stream=True)
    merged: dict[str, list[Any]] = {k: [] for k in whole["logprobs"]}
    for frame in got.frames[:-1]:
        for key, values in (frame["choices"][0]["logprobs"] or {}).items():
            merged[key] += values
    assert merged == whole["logprobs"]
    assert joined(got.frames)["text"] == whole["text"]
    first = got.frames[0]["choices"][0]
    assert first["text"] == "a b c d eh"  # the prompt and the first token


def test_scores_of_a_long_prompt_arrive_in_pages(served: Served) -> None:
    prompt = [(i * 7) % 256 for i in range(100)]
    served.executor.script = lambda r: events_of(r, [65], page=8)
    paged = arrays(served.complete(prompt=prompt, echo=True, logprobs=3, max_tokens=1))
    served.executor.script = lambda r: events_of(r, [65], page=1000)
    assert arrays(served.complete(prompt=prompt, echo=True, logprobs=3, max_tokens=1)) == paged


def test_one_token_prompt_has_only_the_null_entry(served: Served) -> None:
    got = served.complete(prompt=[65], echo=True, logprobs=1, max_tokens=1)
    check_arrays(arrays(got), 2)


def test_f32_values_are_written_exactly(served: Served) -> None:
    value = float(np.float32(-0.1))
    scores = PromptScores(
        1,
        np.array([-0.1], np.float32),
        np.full((1, MAX_TOP_LOGPROBS), 65, np.int32),
        np.full((1, MAX_TOP_LOGPROBS), -0.1, np.float32),
    )

    def script(request: Request) -> Any:
        yield TokenEvent(request.id, prompt_scores=scores)
        yield TokenEvent(request.id, finish=Finish.LENGTH)

    served.executor.script = script
    logprobs = arrays(served.complete(prompt=[65, 65], echo=True, logprobs=1, max_tokens=0))
    assert logprobs["token_logprobs"][1] == value == logprobs["top_logprobs"][1]["A"]


def test_default_budget_is_16(served: Served) -> None:
    served.complete(prompt="x")
    assert served.executor.submitted[0].sampling.max_tokens == 16


def test_special_tokens_of_the_answer_are_skipped_unless_wanted(served: Served) -> None:
    served.executor.script = says(served.ids("a", "[BOS]", "b"))
    assert served.complete(prompt="x", max_tokens=3).json["choices"][0]["text"] == "ab"
    got = served.complete(prompt="x", max_tokens=3, skip_special_tokens=False)
    assert got.json["choices"][0]["text"] == "a[BOS]b"


def test_stop_token_id_is_reported_and_not_text(served: Served) -> None:
    served.executor.script = lambda r: events_of(r, list(b"abcd"))
    got = served.complete(prompt="x", stop_token_ids=[ord("c")], max_tokens=9)
    choice = got.json["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")
    assert choice["stop_reason"] == ord("c")
    assert got.json["usage"]["completion_tokens"] == 3


def test_without_tokenizer_ids_work_and_text_is_a_400(start_server: Any) -> None:
    served = start_server(tokenizer_given=None, eos_ids=(258,))
    got = served.complete(prompt=[65, 66], max_tokens=5, logprobs=1, echo=True)
    choice = got.json["choices"][0]
    assert choice["token_ids"] == list(b"hello") and choice["prompt_token_ids"] == [65, 66]
    assert choice["text"] == ""
    assert choice["logprobs"]["tokens"][:2] == ["token_id:65", "token_id:66"]
    for got, param in (
        (served.complete(prompt="text"), "prompt"),
        (served.complete(prompt=[65], stop="x"), "stop"),
        (served.chat(), "messages"),
        (served.ask("POST", "/tokenize", {"prompt": "a"}), "prompt"),
    ):
        assert got.status == 400 and got.error["code"] == "no_tokenizer"
        assert got.error["param"] == param
    assert served.get("/tokenizer_info").status == 404


def test_cached_tokens_count_each_prompt_once(start_server: Callable[..., Served]) -> None:
    """Of a prompt's choices the one that had to compute most counts: the others shared with it."""
    cached = {(0, 0): 0, (0, 1): 2, (1, 0): 3, (1, 1): 4}  # by prompt and choice

    def script(request: Request) -> Iterator[TokenEvent]:
        prompt, choice = request.prompt[0] - ord("a"), request.sampling.choice
        first, *rest = events_of(request, b"hello")
        yield replace(first, cached_tokens=cached[prompt, choice])
        yield from rest

    served = start_server()
    served.executor.script = script
    got = served.complete(prompt=["aaaaaa", "bbbbbb"], n=2, max_tokens=3)
    assert got.json["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    lines = served.get("/metrics").body.decode().splitlines()
    counted = {line.split("{")[0]: float(line.split()[-1]) for line in lines if "{" in line}
    assert counted["vllm:prefix_cache_queries_total"] == 24
    assert counted["vllm:prefix_cache_hits_total"] == 9


def test_the_process_tells_of_itself(served: Served) -> None:
    lines = served.get("/metrics").body.decode().splitlines()
    values = {name: float(value) for name, value in (x.split() for x in lines if x[0] != "#")}
    assert values["k3serve_threads"] >= 2
    if sys.platform == "linux":
        assert values["process_resident_memory_bytes"] > 2**20
        assert values["process_open_fds"] > 3
