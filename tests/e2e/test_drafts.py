"""K3-nano with its draft behind a real server: faster, and in nothing else different."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from typing import Any

import pytest

from scripts import check_drafts
from tests.serving import Server

CHAT = "/v1/chat/completions"
STORY = {
    "messages": [{"role": "user", "content": "Tell me a story about a cat."}],
    "chat_template_kwargs": {"thinking": False},
    "max_tokens": 64,
}


def said(answer: Any) -> Any:
    return answer["choices"]


def counter(server: Server, name: str) -> float:
    found = re.search(rf"^{re.escape(name)}\{{[^}}]*\}} (\S+)$", server.text("/metrics"), re.M)
    return float(found.group(1)) if found else 0.0


@pytest.mark.parametrize("sampled", [False, True])
def test_no_bit_of_held_out_chats_depends_on_drafts(nano: Server, sampled: bool) -> None:
    """Also at temperature 1, by the default rule. scripts/check_drafts.py asks 300, on 1, 2 and 4
    hosts."""
    result = check_drafts.check(nano.url, 40, sampled)
    assert result["different"] == []
    assert result["acceptance_length"] > (1.8 if sampled else 2.2)


def test_pc_38_a_seed_replays_alone_in_a_crowd_and_without_drafts(nano: Server) -> None:
    body = STORY | {"temperature": 1, "seed": 7}
    alone = [said(nano.post(CHAT, body)) for _ in range(5)]
    with ThreadPoolExecutor(16) as pool:
        crowd = list(pool.map(lambda i: nano.post(CHAT, STORY | {"temperature": 1, "seed": i}),
                              range(15)))  # fmt: skip
    assert said(crowd[7]) == alone[0]
    assert said(nano.post(CHAT, body | {"speculate": False})) == alone[0]
    assert all(answer == alone[0] for answer in alone)
    assert (
        len({str(said(answer)) for answer in crowd}) > 3
    )  # sane neighbours with seeds of their own


def test_pc_41_logprobs_are_the_same_with_and_without_drafts(nano: Server) -> None:
    body = STORY | {"temperature": 0, "logprobs": True, "top_logprobs": 2}
    with_drafts, without = nano.post(CHAT, body), nano.post(CHAT, body | {"speculate": False})
    assert said(with_drafts) == said(without)
    rows = said(with_drafts)[0]["logprobs"]["content"]
    assert len({row["logprob"] for row in rows}) > 5
    for row in rows:
        assert row["logprob"] == row["top_logprobs"][0]["logprob"]
        assert row["token"] == row["top_logprobs"][0]["token"]


def test_choices_are_the_same_with_and_without_drafts(nano: Server) -> None:
    body = STORY | {"temperature": 1, "seed": 3, "n": 3, "logprobs": True, "top_logprobs": 2}
    with_drafts, without = nano.post(CHAT, body), nano.post(CHAT, body | {"speculate": False})
    assert said(with_drafts) == said(without)
    assert len({choice["message"]["content"] for choice in said(with_drafts)}) == 3
    assert with_drafts["usage"]["speculation"]["accepted"] > 0


def test_pc_36_stop_strings_cut_where_they_do_without_drafts(nano: Server) -> None:
    """Every word of a story as the stop string; the device is ahead by a block, or by several."""
    body = STORY | {"temperature": 0, "logprobs": True, "return_token_ids": True}
    whole = said(nano.post(CHAT, body | {"speculate": False}))[0]["message"]["content"]
    words = whole.split()[1:12]
    assert len(words) > 8
    for more in [{"stop": word} for word in words] + [{"stop": words[2], "min_tokens": 30}]:
        answers = [nano.post(CHAT, body | more | {"speculate": on}) for on in (True, False)]
        assert said(answers[0]) == said(answers[1])
        counted = [answer["usage"]["completion_tokens"] for answer in answers]
        assert counted[0] == counted[1] == len(said(answers[0])[0]["token_ids"])
        if "min_tokens" not in more:
            assert said(answers[0])[0]["message"]["content"] == whole[: whole.index(more["stop"])]
        found = answers[0]["usage"].get("speculation")
        assert found is None or found["accepted"] <= counted[0]


@pytest.mark.parametrize("settings", [
    {"frequency_penalty": 2}, {"presence_penalty": 2}, {"repetition_penalty": 1.5},
])  # fmt: skip
def test_pc_39_penalties_with_drafts(nano: Server, settings: dict[str, float]) -> None:
    question = [{"role": "user", "content": "Repeat hello"}]
    body = STORY | {"messages": question, "temperature": 0} | settings
    assert said(nano.post(CHAT, body)) == said(nano.post(CHAT, body | {"speculate": False}))


def test_pc_43_copies_are_right_with_drafts(nano: Server) -> None:
    """Words and invented words to repeat, alone and all at once, against no drafts at all."""
    words = ["zebra lamp", "grusk tavoli", "red apple tree", "wqx plo", "garden tiger"] * 4
    bodies = [
        STORY | {"messages": [{"role": "user", "content": f'Repeat after me: "{w}"'}],
                 "temperature": 0, "max_tokens": 40}
        for w in words
    ]  # fmt: skip
    plain = [said(nano.post(CHAT, body | {"speculate": False})) for body in bodies]
    assert [said(nano.post(CHAT, body)) for body in bodies] == plain
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda body: said(nano.post(CHAT, body)), bodies)) == plain


def test_pc_65_a_banned_token_never_comes_from_a_draft(nano: Server) -> None:
    body = STORY | {"temperature": 0, "return_token_ids": True}
    raw = {"prompt": "Tell me a story about a cat.", "max_tokens": 40, "temperature": 0,
           "return_token_ids": True}  # fmt: skip
    ids = nano.post("/v1/completions", raw)["choices"][0]["token_ids"]
    ban = {str(i): -100 for i in ids[:12]}
    for more in ({}, {"temperature": 1, "seed": 3}):
        answer = nano.post("/v1/completions", raw | {"logit_bias": ban} | more)["choices"][0]
        assert not set(ids[:12]) & set(answer["token_ids"])
    assert nano.post(CHAT, body)["choices"][0]["finish_reason"] in ("stop", "length")


def test_usage_metrics_and_chat_command_tell_of_drafts(nano: Server) -> None:
    names = (
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
    )
    before = [counter(nano, name) for name in names]
    usage = nano.post(CHAT, STORY | {"temperature": 0})["usage"]
    found = usage["speculation"]
    assert [counter(nano, n) - b for n, b in zip(names, before, strict=True)] == [
        found["drafted"],
        found["accepted"],
    ]
    # the first token comes from the prompt's page; the last step may be cut
    decoded = usage["completion_tokens"] - 1
    assert found["steps"] + found["accepted"] in (decoded, decoded + 1)
    assert found["acceptance_length"] == pytest.approx(1 + found["accepted"] / found["steps"])
    assert nano.post(CHAT, STORY | {"speculate": False})["usage"]["speculation"]["drafted"] == 0
    command = [sys.executable, "-m", "k3serve", "chat", "--url", nano.url, "Tell me a story."]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() and re.search(r"accept", done.stderr), done.stderr


def test_the_check_itself_sees_a_difference(
    nano: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A check that could not fail would be worth nothing."""
    made = check_drafts.bodies(4)
    monkeypatch.setattr(check_drafts, "bodies", lambda count: made)
    monkeypatch.setattr(sys, "argv", ["check_drafts.py", "--base-url", nano.url])
    with redirect_stdout(io.StringIO()) as out:
        assert check_drafts.main() == 0
    assert " 0 differences" in out.getvalue()
    original = check_drafts.ask

    def biased(client: Any, requests: list[dict[str, Any]], streams: int) -> Any:
        more = {"logit_bias": {"60": 100}} if streams == 8 else {}
        return original(client, [r | more for r in requests], streams)

    monkeypatch.setattr(check_drafts, "ask", biased)
    assert check_drafts.main() == 1
    assert " 8 differences" in capsys.readouterr().out

    def without(client: Any, requests: list[dict[str, Any]], streams: int) -> Any:
        return original(client, [r | {"speculate": False} for r in requests], streams)

    monkeypatch.setattr(check_drafts, "ask", without)  # a server that never drafts proves nothing
    assert check_drafts.main() == 1


def test_the_check_fails_where_nothing_was_drafted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = {"chats": 1, "different": [], "tokens": 5, "acceptance_length": None}
    monkeypatch.setattr(check_drafts, "check", lambda url, count: nothing)
    monkeypatch.setattr(sys, "argv", ["check_drafts.py", "--base-url", "http://127.0.0.1:1"])
    assert check_drafts.main() == 1
    assert "no drafts, so nothing was checked" in capsys.readouterr().out


def test_the_check_says_that_no_server_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["check_drafts.py", "--base-url", "http://127.0.0.1:1"])
    with pytest.raises(SystemExit):
        check_drafts.main()
    assert "no answer from http://127.0.0.1:1" in capsys.readouterr().err
