"""The curriculum: repeatable, split without overlap, rendered like K3, graded correctly."""

import collections
import dataclasses
import itertools
import random

import pytest

from scripts.train_nano import evaluate, sampling, xtml
from scripts.train_nano.samples import (
    CONVERSATION,
    Call,
    Message,
    Sample,
    assistant,
    is_held_out,
    user,
)


def _take(seed: int, count: int, mix: str = "full") -> list[Sample]:
    return list(itertools.islice(sampling.SampleStream(seed, sampling.MIXES[mix]), count))


def test_a_seed_fixes_the_samples() -> None:
    assert _take(3, 50) == _take(3, 50)
    assert _take(3, 50) != _take(4, 50)


def test_a_restored_stream_continues_with_the_same_samples() -> None:
    stream = sampling.SampleStream(5, sampling.MIXES["chat"])
    list(itertools.islice(stream, 20))
    other = sampling.SampleStream(0, sampling.MIXES["chat"])
    other.restore(stream.state())
    assert list(itertools.islice(stream, 20)) == list(itertools.islice(other, 20))


def test_training_never_sees_a_held_out_prompt() -> None:
    train = [s for s in _take(1, 3000) if not s.text]
    tested = evaluate.build_cases(4, ("off",))
    assert len(tested) > 200
    assert not {s.prompt for s in train} & {s.prompt for s in tested}


def test_cases_are_different_and_the_same_every_time() -> None:
    cases = sampling.held_out_samples(1, "add", "off", 12)
    assert cases == sampling.held_out_samples(1, "add", "off", 12)
    assert len({case.prompt for case in cases}) == 12
    assert all(is_held_out(case) for case in cases)


@pytest.mark.parametrize("count", [27, 40, 60, 96, 300])
def test_a_few_cases_are_of_all_skills_and_modes(count: int) -> None:
    """What checks and benchmarks ask: none of the skills at the end of the list is left out."""
    cases = evaluate.build_cases(3, ("off", "max"))
    chosen = evaluate.spread(cases, count)
    assert len(chosen) == count == len({id(case) for case in chosen})
    skills = collections.Counter(case.skill for case in chosen)
    everything = len({case.skill for case in cases})
    assert len(skills) == min(count, everything)
    assert count > everything or set(skills.values()) == {1}
    modes = collections.Counter(case.thinking for case in chosen)
    assert abs(modes["off"] - modes["max"]) <= 2


@pytest.mark.parametrize("name", sampling.skill_names())
def test_every_skill_accepts_its_own_answer(name: str) -> None:
    rng = random.Random(name)
    for mode in sampling.THINKING_MODES:
        sample = sampling.make_sample(rng, name, mode)
        whole = xtml.text_of(xtml.render(sample))
        prompt = xtml.text_of(xtml.render(sample, prompt_only=True))
        assert whole.startswith(prompt)
        reply = xtml.parse(whole[len(prompt) :], mode != "off")
        assert sampling.is_right(sample, reply), whole
        assert reply.think == (sample.answer.think if mode != "off" else "")


@pytest.mark.parametrize(
    ("generated", "right"),
    [
        ("4 + 4 = 8<|close|>response<|sep|><|close|>message<|sep|>", True),
        ("4 + 4 = 9<|close|>response<|sep|>", False),
        ("4 + 4 = 8.<|close|>response<|sep|>", False),
        ("4 + 4 = 8", False),  # never closed
        ("", False),
    ],
)
def test_the_checker_wants_the_exact_finished_text(generated: str, right: bool) -> None:
    sample = Sample("add", "off", (user("4 + 4?"), assistant("4 + 4 = 8")))
    assert sampling.is_right(sample, xtml.parse(generated, thinking=False)) is right


def test_the_checker_compares_calls_by_name_and_arguments() -> None:
    wanted = Call("add_item", {"item": "cats", "count": 3})
    sample = Sample("tool_use", "on", (user("q"), assistant("", "t", (wanted,))))
    text = xtml.text_of(xtml.render(sample)).partition("<|open|>think<|sep|>")[2]
    assert sampling.is_right(sample, xtml.parse(text, thinking=True))
    assert not sampling.is_right(sample, xtml.parse(text.replace("cats", "dogs"), thinking=True))


def test_words_that_must_occur_replace_the_exact_text() -> None:
    sample = Sample("joke", "off", (user("q"), assistant("Why? Because.")), must=("?",))
    assert sampling.is_right(sample, xtml.Reply("Really?"))
    assert not sampling.is_right(sample, xtml.Reply("Really."))
    assert not sampling.is_right(sample, xtml.Reply("Really?", finished=False))


def test_thinking_modes_render_as_k3_does() -> None:
    """E1, E2, E3 and E5 of the architecture notes."""
    messages = (user("ping"), assistant("pong"))
    opened = '<|open|>message role="user"<|sep|>ping<|close|>message<|sep|><|end_of_msg|>'
    opened += '<|open|>message role="assistant"<|sep|><|open|>'

    def text(mode: sampling.Thinking, prompt_only: bool = True) -> str:
        return xtml.text_of(xtml.render(Sample("x", mode, messages), prompt_only))

    assert text("off") == opened + "response<|sep|>"
    assert text("on") == opened + "think<|sep|>"
    assert text("max").endswith(
        f"`thinking_effort=max`.<|close|>message<|sep|><|end_of_msg|>{text('on')}"
    )
    assert text("on", prompt_only=False) == (
        opened + "think<|sep|><|close|>think<|sep|><|open|>response<|sep|>pong"
        "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
    )


def test_only_what_the_model_writes_is_learned() -> None:
    sample = Sample("x", "on", (user("q"), assistant("a", "t"), user("r"), assistant("b", "s")))
    learned = xtml.text_of([f for f in xtml.render(sample) if f.learn])
    tail = "<|close|>message<|sep|><|end_of_msg|>"
    assert learned == (
        "t<|close|>think<|sep|><|open|>response<|sep|>a<|close|>response<|sep|>" + tail
        + "s<|close|>think<|sep|><|open|>response<|sep|>b<|close|>response<|sep|>" + tail
    )  # fmt: skip


def test_tool_calls_and_results_render_as_k3_does() -> None:
    call = Call("do", {"text": 'hi "there"', "count": 3, "ratio": 1.5, "flag": True, "no": None})
    answer = assistant("", "", (call,))
    result = Message("tool", "files", tool="do", index=1)
    sample = Sample("x", "off", (user("q"), answer, result, assistant("ok")))
    text = xtml.text_of(xtml.render(sample))
    assert (
        '<|open|>tools<|sep|><|open|>call tool="do" index="1"<|sep|>'
        '<|open|>argument key="text" type="string"<|sep|>hi "there"<|close|>argument<|sep|>'
        '<|open|>argument key="count" type="number"<|sep|>3<|close|>argument<|sep|>'
        '<|open|>argument key="ratio" type="number"<|sep|>1.5<|close|>argument<|sep|>'
        '<|open|>argument key="flag" type="boolean"<|sep|>true<|close|>argument<|sep|>'
        '<|open|>argument key="no" type="null"<|sep|>null<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>"
    ) in text
    assert '<|open|>message role="tool" tool="do" index="1"<|sep|>files<|close|>' in text


def test_tag_parts_are_fragments_of_their_own() -> None:
    first = [f.text for f in xtml.render(Sample("x", "off", (user("q"), assistant("a"))))][:7]
    assert first == ["<|open|>", "message", " role", '="', "user", '"', "<|sep|>"]


def test_a_request_carries_what_the_rendering_needs() -> None:
    names = {"off": "thinking", "max": "max"}
    case = sampling.held_out_samples(1, "tool_use", "max", 1)[0]
    body = evaluate.request_body(case, "m")
    assert body["reasoning_effort"] == names["max"] and body["tools"] == list(case.tools)
    plain = evaluate.request_body(dataclasses.replace(case, thinking="on", tools=()), "m")
    assert "reasoning_effort" not in plain and "tools" not in plain
    off = evaluate.request_body(dataclasses.replace(case, thinking="off"), "m")
    assert off["chat_template_kwargs"] == {"thinking": False}


def test_a_response_is_read_like_the_text_it_came_from() -> None:
    case = next(c for c in sampling.held_out_samples(1, "tool_use", "max", 12) if c.answer.calls)
    call = case.answer.calls[0]
    message = {
        "content": None,
        "reasoning_content": case.answer.think,
        "tool_calls": [evaluate._openai_call(0, call)],
    }
    reply = evaluate.read_choice({"message": message, "finish_reason": "tool_calls"})
    assert sampling.is_right(case, reply)
    assert not sampling.is_right(case, evaluate.read_choice({"message": {"content": "no"}}))


def test_every_conversation_ends_with_an_answer() -> None:
    rng = random.Random(0)
    for name in CONVERSATION:
        for _ in range(50):
            dialogue = CONVERSATION[name].make(rng)
            assert dialogue.messages[-1].role == "assistant"
            assert dialogue.messages[-1].content or dialogue.messages[-1].calls
