"""What users and operators see of drafting; stop strings inside a block (PC-36, PC-46)."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from k3serve.api import drafts
from k3serve.types import DraftStats, Request, Sampling, TokenEvent
from tests.api.client import Served, joined
from tests.fakes import drafted, events_of, speculates

OFF = {"chat_template_kwargs": {"thinking": False}}
CHAT = pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def ask(served: Served, chat: bool, **body: Any) -> Any:
    return served.chat(**OFF, **body) if chat else served.complete(prompt="x", **body)


def usage_of(served: Served, chat: bool, stream: bool, **body: Any) -> dict[str, Any]:
    if not stream:
        return ask(served, chat, **body).json["usage"]
    options = {"include_usage": True}
    return ask(served, chat, stream=True, stream_options=options, **body).frames[-2]["usage"]


# ------------------------------------------------------------------------------- the field


@CHAT
def test_speculate_is_on_unless_switched_off(served: Served, chat: bool) -> None:
    for value, wanted in ((None, True), (True, True), (False, False)):
        assert ask(served, chat, speculate=value, max_tokens=2).status == 200
        assert served.executor.submitted[-1].sampling.speculate is wanted
    assert ask(served, chat, max_tokens=2).headers["x-k3serve-ignored"] is None


@CHAT
@pytest.mark.parametrize("value", [0, 1, "false", "", [], {}, 1.0])
def test_speculate_of_another_type_is_a_400(served: Served, chat: bool, value: Any) -> None:
    got = ask(served, chat, speculate=value)
    assert got.status == 400 and got.error["param"] == "speculate"
    assert "true or false" in got.error["message"]
    assert not served.executor.submitted


# ------------------------------------------------------------------------------- usage


@CHAT
@STREAM
def test_usage_adds_up_the_events(served: Served, chat: bool, stream: bool) -> None:
    served.executor.script = speculates(list(b"abcdefghijk"), (2, 0), (5,))
    usage = usage_of(served, chat, stream, max_tokens=11)
    assert usage["completion_tokens"] == 11
    assert usage["speculation"] == {
        "steps": 3,
        "drafted": 21,
        "accepted": 7,
        "acceptance_length": 3.3333,
        "drafted_per_position": [3, 3, 3, 3, 3, 3, 3],
        "accepted_per_position": [2, 2, 1, 1, 1, 0, 0],
    }


@CHAT
@STREAM
def test_usage_adds_up_the_choices(served: Served, chat: bool, stream: bool) -> None:
    def script(request: Request) -> Any:
        return speculates(list(b"abcdef"), (3,), (request.sampling.choice,))(request)

    served.executor.script = script
    spec = usage_of(served, chat, stream, n=2, temperature=1, max_tokens=6)["speculation"]
    assert (spec["steps"], spec["accepted"]) == (4, 6)
    assert spec["accepted_per_position"] == [2, 2, 2, 0, 0, 0, 0]


@CHAT
@STREAM
def test_no_draft_no_extension(served: Served, chat: bool, stream: bool) -> None:
    assert "speculation" not in usage_of(served, chat, stream, max_tokens=5)


def test_without_a_decode_step_there_is_nothing_to_say(served: Served) -> None:
    served.executor.script = speculates(list(b"abc"), (1,))
    assert "speculation" not in usage_of(served, False, False, max_tokens=1)


def test_a_request_without_drafts_has_length_one(served: Served) -> None:
    served.executor.script = speculates(list(b"abc"), offered=0)
    spec = usage_of(served, False, False, max_tokens=3, speculate=False)["speculation"]
    assert (spec["steps"], spec["drafted"], spec["acceptance_length"]) == (2, 0, 1.0)


def test_usage_in_every_chunk_grows(served: Served) -> None:
    served.executor.script = speculates(list(b"abcdefgh"), (2,), (3,))
    options = {"include_usage": True, "continuous_usage_stats": True}
    got = served.complete(prompt="x", max_tokens=8, stream=True, stream_options=options)
    seen = [f["usage"].get("speculation", {}).get("accepted") for f in got.frames[:-1]]
    assert seen == [None, 2, 5, 5]


# ------------------------------------------------------------------------------- the cut


@CHAT
@STREAM
@pytest.mark.parametrize("at", range(1, 9))
def test_pc_36_stop_string_inside_a_block(
    served: Served, chat: bool, stream: bool, at: int
) -> None:
    """The stop ends at token `at` of an event of 8: nothing behind it shows anywhere."""
    tokens = list(b"abcdefghi")
    served.executor.script = speculates(tokens, (7,))
    body: dict[str, Any] = {"stop": chr(tokens[at]), "max_tokens": 9, "return_token_ids": True}
    body |= {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
    options = {"stream_options": {"include_usage": True}} if stream else {}
    got = ask(served, chat, stream=stream, **body, **options)
    if stream:
        *frames, last = got.frames[:-1]
        usage, choices = last["usage"], [c for f in frames for c in f["choices"]]
        said = joined(got.frames)
        text, finish = said["content"] if chat else said["text"], said["finish"]
    else:
        usage, choices = got.json["usage"], got.json["choices"]
        (choice,) = choices
        text = choice["message"]["content"] if chat else choice["text"]
        finish = choice["finish_reason"]
    assert (text, finish) == ("abcdefghi"[:at], "stop")
    kept = at + 1
    assert [i for c in choices for i in c.get("token_ids") or []] == tokens[:kept]
    key = "content" if chat else "token_logprobs"
    scores = [e for c in choices if c["logprobs"] for e in c["logprobs"][key]]
    assert len(scores) == kept
    assert usage["completion_tokens"] == kept
    spec = usage["speculation"]
    assert (spec["steps"], spec["accepted"]) == (1, min(7, at))
    assert spec["accepted_per_position"] == [int(i < at) for i in range(7)]


@CHAT
@pytest.mark.parametrize("at", range(1, 9))
def test_pc_36_stop_token_inside_a_block(served: Served, chat: bool, at: int) -> None:
    """The device cuts; the answer says no token more."""
    tokens = list(b"abcdefghi")
    tokens[at] = 258
    served.executor.script = speculates(tokens, (7,))
    got = ask(served, chat, max_tokens=9, return_token_ids=True)
    choice = got.json["choices"][0]
    text = choice["message"]["content"] if chat else choice["text"]
    assert text == "abcdefghi"[:at]
    assert choice["token_ids"] == tokens[: at + 1]
    assert got.json["usage"]["completion_tokens"] == at + 1
    assert got.json["usage"]["speculation"]["accepted"] == at - 1


@pytest.mark.parametrize(
    ("steps", "tokens", "used", "wanted"),
    [
        ((3, 0), 5, 5, drafted(3, 0)),  # no cut
        ((3, 0), 5, 4, drafted(0, 3)),
        ((3, 0), 5, 3, drafted(0, 2)),
        ((3, 0), 5, 2, drafted(0, 1)),
        ((3, 0), 5, 1, drafted(0)),
        ((2, 2), 7, 1, None),  # the prompt's first token came in the same event
        ((2, 2), 7, 2, drafted(1)),
        ((), 1, 0, None),
    ],
)
def test_the_rule_of_the_cut(
    steps: tuple[int, ...], tokens: int, used: int, wanted: DraftStats | None
) -> None:
    got = drafts.emitted_part(drafted(*steps), tokens, used)
    if wanted is None:
        assert got is None
        return
    assert got is not None
    assert (got.steps, got.accepted) == (wanted.steps, wanted.accepted)
    assert got.offered == tuple(got.steps for _ in range(7))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=6), st.booleans(), st.data())
def test_what_counts_was_emitted(steps: list[int], first: bool, data: Any) -> None:
    """In whatever order the steps ran: no more accepted drafts than really came before the cut."""
    tokens = sum(steps) + len(steps) + first
    used = data.draw(st.integers(1, tokens))
    got = drafts.emitted_part(drafted(*steps), tokens, used)
    left, really = used - first, 0
    for accepted in steps:
        really += max(0, min(accepted, left))
        left -= accepted + 1
    if got is None:
        assert used <= first
        return
    assert sum(got.accepted) <= really <= used
    assert got.steps <= len(steps)
    assert all(a <= o for a, o in zip(got.accepted, got.offered, strict=True))
    if used == tokens or len(steps) == 1:
        assert sum(got.accepted) == really


# ------------------------------------------------------------------------------- operators


def counts(served: Served) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(served.get("/metrics").body.decode()):
        for sample in family.samples:
            if "spec_decode" in sample.name or "acceptance" in sample.name:
                if "le" not in sample.labels and not sample.name.endswith("_created"):
                    position = sample.labels.get("position")
                    found[sample.name + (f"|{position}" if position else "")] = sample.value
    return found


def test_pc_46_metrics_say_what_usage_says(start_server: Any) -> None:
    served = start_server()
    served.executor.script = speculates(list(b"abcdefghijk"), (2, 0), (5,))
    sums = {"steps": 0, "drafted": 0, "accepted": 0}
    places = [0] * 7
    for body in ({"max_tokens": 11}, {"max_tokens": 11, "stop": "h"}, {"max_tokens": 6, "n": 2}):
        spec = served.complete(prompt="x", **body).json["usage"]["speculation"]
        sums = {name: sums[name] + spec[name] for name in sums}
        places = [a + b for a, b in zip(places, spec["accepted_per_position"], strict=True)]
    seen = counts(served)
    assert seen["vllm:spec_decode_num_drafts_total"] == sums["steps"]
    assert seen["vllm:spec_decode_num_draft_tokens_total"] == sums["drafted"]
    assert seen["vllm:spec_decode_num_accepted_tokens_total"] == sums["accepted"]
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert [seen[f"{name}|{i}"] for i in range(7)] == places
    assert seen["k3serve_draft_acceptance_length_count"] == 4


def test_metrics_leave_out_who_had_no_drafts(start_server: Any) -> None:
    served = start_server()
    served.executor.script = speculates(list(b"abc"), offered=0)
    served.complete(prompt="x", max_tokens=3, speculate=False)
    assert set(counts(served).values()) == {0.0}


def test_metrics_of_a_failed_request_stay_zero(start_server: Any) -> None:
    """Its tokens do not count either."""
    served = start_server()

    def script(request: Request) -> Any:
        yield from list(speculates(list(b"abcdef"), (2,))(request))[:2]
        raise ZeroDivisionError

    served.executor.script = script
    assert served.complete(prompt="x", max_tokens=6).status == 500
    assert set(counts(served).values()) == {0.0}


@STREAM
def test_access_log_shows_drafting(
    served: Served, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    served.executor.script = speculates(list(b"abcdefghijk"), (2, 0), (5,))
    body = b'{"prompt":"x","max_tokens":11,"stream":%b}' % str(stream).lower().encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n" % len(body)
    with caplog.at_level(logging.INFO, logger="k3serve.access"):
        served.exchange(head + b"Connection: close\r\n\r\n" + body)
    (line,) = [r.getMessage() for r in caplog.records if "/v1/completions" in r.getMessage()]
    assert line.endswith("completion=11 finish=length steps=3 accepted=7 accept_len=3.33")


def test_scripted_events_are_those_of_a_device() -> None:
    """The double itself: tokens of a step are one more than it accepted."""
    request = Request(1, (1,), Sampling(max_tokens=100))
    events = list(speculates(list(range(20)), (3, 1), (7,))(request))
    assert [len(e.tokens) for e in events] == [1, 6, 8, 1, 1, 1, 1, 1]
    assert [t for e in events for t in e.tokens] == list(range(20))
    plain: list[TokenEvent] = list(events_of(request, list(range(20))))
    assert events[-1].finish is plain[-1].finish
