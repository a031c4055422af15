"""Rendering of chats: goldens, malformed messages, and text that looks like markup."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from k3serve.errors import RequestError
from k3serve.text.chat import EFFORTS, encode_chat, open_channel, render, text_of
from k3serve.text.tokenizer import Tokenizer
from k3serve.text.xtml import escape, parse_header, unescape
from tests.text.byte_tokenizer import ByteTokenizer
from tests.text.conftest import goldens

XTML = goldens("tokenizer_tiny/xtml_goldens.json")
CHATS = goldens("k3_tiny_chat/chat_goldens.json")
RENAMED = {"thinking_effort": "effort"}


def _rendered(golden: dict[str, Any]) -> list[Any]:
    return render(allow_images=True, **{RENAMED.get(k, k): v for k, v in golden["input"].items()})


@pytest.mark.parametrize("golden", XTML, ids=lambda g: g["name"])
def test_goldens(tiny: Tokenizer, golden: dict[str, Any]) -> None:
    fragments = _rendered(golden)
    assert text_of(fragments) == golden["text"]
    assert [["s" if f.special else "t", f.text] for f in fragments] == golden["fragments"]
    assert encode_chat(tiny, fragments) == golden["ids"]
    assert tiny.decode(golden["ids"]) == golden["text"]  # no spaces around markers (PC-28)


@pytest.mark.parametrize("chat", CHATS, ids=lambda g: g["name"])
def test_prompts_and_answers_of_the_tiny_model(tiny: Tokenizer, chat: dict[str, Any]) -> None:
    golden = next(g for g in XTML if g["name"] == chat["name"])
    assert encode_chat(tiny, _rendered(golden)) == chat["prompt_ids"]
    assert tiny.decode(chat["greedy_ids"]) == chat["text"]


# ------------------------------------------------------------ user text stays text (PC-30, -32)

USER: dict[str, Any] = {"role": "user", "content": "hi"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {}}}
MARKERS = st.sampled_from(
    ["<|open|>", "<|close|>message<|sep|>", "<|end_of_msg|>", "[BOS]", "[EOS]", "<|im_start|>"]
)
TEXT = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | MARKERS).map(
    "".join
)


@given(TEXT, TEXT, TEXT.filter(bool))
def test_no_text_of_a_request_yields_a_special_id(
    tiny: Tokenizer, text: str, other: str, name: str
) -> None:
    call = {"id": other, "function": {"name": name, "arguments": {text + "_": other, "n": [text]}}}
    tool = {"type": "function", "function": {"name": name, "description": text}}
    fragments = render(
        [
            {"role": "system", "content": text, "name": name},
            {"role": "user", "content": [{"type": "text", "text": other}]},
            {"role": "assistant", "content": text, "reasoning": other, "tool_calls": [call]},
            {"role": "tool", "content": text, "tool_call_id": other},
            {"role": "system", "tools": [tool]},
        ],
        tools=[tool],
        response_format={"type": "json_schema", "json_schema": {"schema": {"title": text}}},
    )
    ids = encode_chat(tiny, fragments)
    markers = [tiny.special_id(f.text) for f in fragments if f.special]
    assert [i for i in ids if i >= 1536] == markers
    plain = render(
        [
            {"role": "system", "content": "t", "name": "n"},
            {"role": "user", "content": "t"},
            {
                "role": "assistant",
                "content": "t",
                "tool_calls": [{"function": {"name": "n", "arguments": {"a": "t", "n": []}}}],
            },
            {"role": "tool", "content": "t", "tool_call_id": "n:0"},
            {"role": "system", "tools": [TOOL]},
        ],
        tools=[TOOL],
        response_format={"type": "json_schema", "json_schema": {"schema": {}}},
    )
    assert [f.text for f in fragments if f.special] == [f.text for f in plain if f.special]
    assert tiny.decode(ids) == text_of(fragments)


@given(TEXT)
@example("a&quot;b&amp;")
def test_attributes_survive_escaping(value: str) -> None:
    assert unescape(escape(value)) == value
    assert parse_header(f'call tool="{escape(value)}" index="1"') == (
        "call",
        {"tool": value, "index": "1"},
    )


@pytest.mark.parametrize(
    "text", ["", " ", "think ", " think", 'a b="c', "a b=c", 'a  b="c"', "a\n"]
)
def test_headers_that_are_no_tags(text: str) -> None:
    assert parse_header(text) is None


# ------------------------------------------------------------ thinking, effort, choice (PC-34)


@pytest.mark.parametrize("effort", EFFORTS)
def test_effort_is_stated_only_when_thinking(effort: str) -> None:
    assert f"thinking_effort={effort}`" in text_of(render([USER], effort=effort))
    assert text_of(render([USER], effort=effort, thinking=False)) == text_of(
        render([USER], thinking=False)
    )


def test_effort_none_turns_thinking_off() -> None:
    assert render([USER], effort="none") == render([USER], thinking=False)


@pytest.mark.parametrize("effort", ["medium", "", "MAX", 7, True, ["max"]])
def test_other_efforts_are_a_400_that_lists_the_allowed(effort: Any) -> None:
    with pytest.raises(RequestError, match="low, high, max, none") as caught:
        render([USER], effort=effort)
    assert caught.value.param == "reasoning_effort" and caught.value.status == 400


def test_a_named_choice_declares_that_tool_alone_and_requires_a_call() -> None:
    other = {"type": "function", "function": {"name": "g"}}
    named = {"type": "function", "function": {"name": "g"}}
    assert render([USER], tools=[TOOL, other], tool_choice=named) == render(
        [USER], tools=[other], tool_choice="required"
    )


def test_a_named_choice_may_be_a_tool_that_was_declared_later() -> None:
    messages = [{"role": "system", "tools": [TOOL]}, USER]
    other = {"type": "function", "function": {"name": "g"}}
    named = {"type": "function", "function": {"name": "f"}}
    assert render(messages, tools=[other], tool_choice=named) == render(
        messages, tool_choice="required"
    )


def test_auto_choice_no_tools_and_plain_text_format_add_nothing() -> None:
    assert render([USER], tools=[], tool_choice="auto", response_format={"type": "text"}) == render(
        [USER]
    )


@pytest.mark.parametrize(
    "schema_format",
    [
        {"json_schema": {"schema": {"b": 1, "a": "é"}}},
        {"json_schema": {"json_schema": {"b": 1, "a": "é"}}},
        {"response_schema": {"b": 1, "a": "é"}, "json_schema": {"schema": {}}},
    ],
)
def test_where_the_schema_is_found(schema_format: dict[str, Any]) -> None:
    text = text_of(render([USER], response_format={"type": "json_schema", **schema_format}))
    assert '```json\n{"a":"é","b":1}\n```' in text


# ------------------------------------------------------------ the open end of a prompt (PC-35)

CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}],
}
RESULT = {"role": "tool", "content": "r", "tool_call_id": "c"}


@pytest.mark.parametrize("end", [[USER], [USER, CALLED, RESULT]], ids=["user", "tool"])
def test_a_new_turn_opens_think_or_response(end: list[dict[str, Any]]) -> None:
    assert open_channel(render(end)) == "think"
    assert open_channel(render(end, thinking=False)) == "response"
    assert open_channel(render(end, add_generation_prompt=False)) is None
    finished = [*end, {"role": "assistant", "content": "a"}]
    assert open_channel(render(finished, add_generation_prompt=False)) is None


@pytest.mark.parametrize(
    ("thinking", "message", "end", "channel"),
    [
        (
            True,
            {"content": "Hel", "reasoning_content": "r"},
            "<|open|>think<|sep|>r<|close|>think<|sep|><|open|>response<|sep|>Hel",
            "response",
        ),
        (True, {"reasoning_content": "so f"}, "<|open|>think<|sep|>so f", "think"),
        (True, {"content": ""}, "<|open|>think<|sep|>", "think"),
        (False, {"content": "Hel"}, "<|open|>response<|sep|>Hel", "response"),
        (False, {}, "<|open|>response<|sep|>", "response"),
    ],
)
def test_a_continued_turn_stays_open(
    thinking: bool, message: dict[str, Any], end: str, channel: str
) -> None:
    fragments = render(
        [USER, {"role": "assistant", **message}], thinking=thinking, continue_final=True
    )
    assert text_of(fragments).endswith(f'<|open|>message role="assistant"<|sep|>{end}')
    assert open_channel(fragments) == channel


def test_instructions_stand_before_a_continued_turn() -> None:
    text = text_of(
        render(
            [USER, {"role": "assistant", "content": "{"}],
            continue_final=True,
            response_format={"type": "json_object"},
        )
    )
    assert text.index("response_format=json_object") < text.index('role="assistant"')
    assert text.endswith("<|open|>response<|sep|>{")


# ------------------------------------------------------------ tool results


def _calls(*pairs: tuple[str | None, str]) -> dict[str, Any]:
    calls = [{"id": i, "function": {"name": n, "arguments": "{}"}} for i, n in pairs]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def _results(text: str) -> list[str]:
    head = '<|open|>message role="tool" tool='
    return [part.split("<|close|>")[0] for part in text.split(head)[1:]]


def test_results_follow_the_calls_of_the_last_turn_only() -> None:
    messages = [
        USER,
        _calls(("a", "f"), ("b", "g")),
        {"role": "tool", "content": "1", "tool_call_id": "b"},
        {"role": "tool", "content": "2", "tool_call_id": "a"},
        _calls(("b", "h"), (None, "f")),
        {"role": "tool", "content": "3", "tool_call_id": "functions.f:1"},
        {"role": "tool", "content": "4", "tool_call_id": "b"},
    ]
    assert _results(text_of(render(messages))) == [
        '"f" index="1"<|sep|>2',
        '"g" index="2"<|sep|>1',
        '"h" index="1"<|sep|>4',
        '"f" index="2"<|sep|>3',
    ]


def test_a_run_with_an_unmatched_result_stays_as_given() -> None:
    messages = [
        _calls(("a", "f"), ("b", "g")),
        {"role": "tool", "content": "1", "tool_call_id": "b"},
        {"role": "tool", "content": "2", "tool_call_id": "zzz", "name": "mine"},
        {"role": "tool", "content": "3", "tool_call_id": "a"},
    ]
    assert _results(text_of(render(messages))) == [
        '"g" index="2"<|sep|>1',
        '"mine" index="2"<|sep|>2',
        '"f" index="1"<|sep|>3',
    ]


def test_non_ascii_in_arguments_is_kept() -> None:
    call = {"function": {"name": "f", "arguments": '{"o": {"k": "\\u00e9"}, "s": "é"}'}}
    text = text_of(render([{"role": "assistant", "content": "", "tool_calls": [call]}]))
    assert 'type="object"<|sep|>{"k": "é"}<|close|>' in text
    assert 'type="string"<|sep|>é<|close|>' in text


@pytest.mark.parametrize("arguments", ["", "[1]", '"x"', '{"a": ' + "9" * 5000 + "}", "[" * 9999])
def test_arguments_that_are_no_object_stay_one_raw_block(arguments: str) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    text = text_of(render([{"role": "assistant", "content": "", "tool_calls": [call]}]))
    assert f'<|open|>json type="object"<|sep|>{arguments}<|close|>json<|sep|>' in text


# ------------------------------------------------------------ malformed messages


def _nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"x": value}
    return value


def _called(**function: Any) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": "", "tool_calls": [{"function": function}]}]


MALFORMED: list[tuple[Any, str]] = [
    (None, "messages"),
    ("hi", "messages"),
    ([], "messages"),
    ([None], "messages[0]"),
    ([USER, "x"], "messages[1]"),
    ([{"content": "x"}], "messages[0].role"),
    ([USER, {"role": "function", "content": "x"}], "messages[1].role"),
    ([{"role": ["user"], "content": "x"}], "messages[0].role"),
    ([{"role": "user", "content": "x", "name": 3}], "messages[0].name"),
    ([{"role": "user", "content": "x", "name": "\ud83d"}], "messages[0].name"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"role": "user", "content": None}], "messages[0].content"),
    ([{"role": "user", "content": 3}], "messages[0].content"),
    ([{"role": "user", "content": "x\ud83d"}], "messages[0].content"),
    ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
    ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0]"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    (
        [{"role": "user", "content": [{"type": "text", "text": "\udc00"}]}],
        "messages[0].content[0].text",
    ),
    (
        [{"role": "user", "content": [{"type": "image_url", "size": [1, 1]}]}],
        "messages[0].content[0]",
    ),
    ([{"role": "system", "content": None}], "messages[0].content"),
    ([{"role": "system", "content": "x", "tools": [TOOL]}], "messages[0].content"),
    ([{"role": "system", "tools": "f"}], "messages[0].tools"),
    ([{"role": "user", "content": "x", "tools": [TOOL]}], "messages[0].tools"),
    ([{"role": "assistant", "content": 3}], "messages[0].content"),
    ([{"role": "assistant", "content": "", "reasoning": 3}], "messages[0].reasoning"),
    (
        [{"role": "assistant", "content": "", "reasoning_content": "\ud83d"}],
        "messages[0].reasoning_content",
    ),
    ([{"role": "assistant", "content": "", "tool_calls": {}}], "messages[0].tool_calls"),
    ([{"role": "assistant", "content": "", "tool_calls": [3]}], "messages[0].tool_calls[0]"),
    (
        [{"role": "assistant", "content": "", "tool_calls": [{"type": "function"}]}],
        "messages[0].tool_calls[0].function",
    ),
    ([{"role": "assistant", "content": "", "function_call": {}}], "messages[0].function_call"),
    (_called(arguments="{}"), "messages[0].tool_calls[0].function.name"),
    (_called(name="", arguments="{}"), "messages[0].tool_calls[0].function.name"),
    (_called(name="\ud83d", arguments="{}"), "messages[0].tool_calls[0].function.name"),
    (_called(name="f", arguments=[1]), "messages[0].tool_calls[0].function.arguments"),
    (_called(name="f", arguments='{"\\ud83d": 1}'), "messages[0].tool_calls[0].function.arguments"),
    (
        _called(name="f", arguments='{"a": "\\ud83d"}'),
        "messages[0].tool_calls[0].function.arguments",
    ),
    (
        _called(name="f", arguments={"a": _nested(9999)}),
        "messages[0].tool_calls[0].function.arguments",
    ),
    ([USER, {"role": "tool", "content": "x"}], "messages[1].tool_call_id"),
    ([CALLED, {"role": "tool", "content": "x", "tool_call_id": "q"}], "messages[1].tool_call_id"),
    ([CALLED, {"role": "tool", "content": "x", "tool_call_id": 3}], "messages[1].tool_call_id"),
    ([CALLED, {"role": "tool", "tool_call_id": "c"}], "messages[1].content"),
]


@pytest.mark.parametrize(("messages", "param"), MALFORMED)
@pytest.mark.parametrize("thinking", [True, False])
def test_malformed_messages_are_a_400_that_names_the_field(
    messages: Any, param: str, thinking: bool
) -> None:
    with pytest.raises(RequestError) as caught:
        render(messages, thinking=thinking)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param in caught.value.message and len(caught.value.message) < 400
    caught.value.message.encode("utf-8")


MALFORMED_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"tools": {}}, "tools"),
    ({"tools": [3]}, "tools[0]"),
    ({"tools": [TOOL, {"type": "retrieval"}]}, "tools[1]"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]},
        "tools[0].function.parameters",
    ),
    ({"tools": [{**TOOL, "x": "\ud83d"}]}, "tools"),
    ({"tools": [{**TOOL, "x": _nested(9999)}]}, "tools"),
    ({"tools": [{**TOOL, "x": float("nan")}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "any", "tools": [TOOL]}, "tool_choice"),
    ({"tool_choice": {"type": "function"}, "tools": [TOOL]}, "tool_choice"),
    ({"tool_choice": {"function": {"name": "g"}}, "tools": [TOOL]}, "tool_choice"),
    ({"response_format": "json"}, "response_format.type"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
        "response_format.json_schema.schema",
    ),
    ({"continue_final": True}, "messages[0].role"),
]


@pytest.mark.parametrize(("options", "param"), MALFORMED_OPTIONS)
def test_malformed_options_are_a_400_that_names_the_field(
    options: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError) as caught:
        render([USER], **options)
    assert (caught.value.status, caught.value.param) == (400, param)
    caught.value.message.encode("utf-8")


def test_a_turn_with_calls_cannot_be_continued() -> None:
    with pytest.raises(RequestError) as caught:
        render([USER, CALLED], continue_final=True)
    assert caught.value.param == "messages[1].tool_calls"


def test_a_tokenizer_without_the_markers_cannot_chat() -> None:
    double = ByteTokenizer()
    double.named_special_ids = {"[EOS]": 257}
    with pytest.raises(RequestError, match="cannot chat"):
        encode_chat(double, render([USER]))


def test_rendering_does_not_change_the_messages() -> None:
    messages = [USER, CALLED, RESULT]
    before = json.dumps(messages)
    render(messages, tools=[TOOL], tool_choice="required")
    assert json.dumps(messages) == before
