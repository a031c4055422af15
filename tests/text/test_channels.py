"""The channel parser: what models emit, rightly and wrongly, cut in every way."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3serve.text.channels import MAX_HEADER_BYTES, ChannelParser, Delta, Kind
from k3serve.text.chat import encode_chat, open_channel, render
from k3serve.text.tokenizer import Tokenizer, TokenizerLike
from tests.text.byte_tokenizer import ByteTokenizer

BYTES = ByteTokenizer()
O, C, S, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"  # noqa: E741
OPEN_TOOLS = f"{O}tools{S}"
DONE = f"{C}message{S}{END}"


def tag(header: str) -> str:
    return f"{O}{header}{S}"


def end(name: str) -> str:
    return f"{C}{name}{S}"


def channel(name: str, body: str) -> str:
    return tag(name) + body + end(name)


def argument(key: str, type_name: str, value: str) -> str:
    return tag(f'argument key="{key}" type="{type_name}"') + value + end("argument")


def call(name: str, *arguments: str, index: int = 1) -> str:
    return tag(f'call tool="{name}" index="{index}"') + "".join(arguments) + end("call")


@dataclass
class Reply:
    """What a client has after all deltas."""

    reasoning: str = ""
    content: str = ""
    names: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        if delta.kind is Kind.REASONING:
            self.reasoning += delta.text
        elif delta.kind is Kind.CONTENT:
            self.content += delta.text
        elif delta.kind is Kind.CALL_START:
            assert delta.index == len(self.names)
            self.names.append(delta.name)
            self.ids.append(delta.id)
            self.arguments.append("")
        elif delta.kind is Kind.CALL_ARGUMENTS:
            assert delta.index == len(self.names) - 1 and delta.index not in self.ended
            self.arguments[delta.index] += delta.text
        else:
            assert delta.index == len(self.names) - 1
            self.ended.append(delta.index)


def collect(deltas: Iterable[Delta]) -> Reply:
    reply = Reply()
    for delta in deltas:
        reply.add(delta)
    return reply


def joined(deltas: Iterable[Delta]) -> list[Delta]:
    """The deltas in order, neighbouring text of one kind made one."""
    out: list[Delta] = []
    for delta in deltas:
        if out and delta.text and (out[-1].kind, out[-1].index) == (delta.kind, delta.index):
            out[-1] = replace(out[-1], text=out[-1].text + delta.text)
        else:
            out.append(delta)
    return out


def parse(
    ids: Sequence[int],
    at: str | None = "think",
    cuts: Iterable[int] = (),
    tokenizer: TokenizerLike = BYTES,
    **options: Any,
) -> tuple[list[Delta], ChannelParser]:
    """All deltas of ids that come in pieces, cut at the given places."""
    parser = ChannelParser(
        tokenizer, thinking_open=at == "think", response_open=at == "response", **options
    )
    places = [0, *sorted(cuts), len(ids)]
    deltas = [d for a, b in pairwise(places) for d in parser.feed(ids[a:b])]
    return deltas + parser.finish(), parser


def read(script: str, at: str | None = "think") -> tuple[Reply, ChannelParser]:
    deltas, parser = parse(BYTES.encode(script, allow_special=True), at)
    return collect(deltas), parser


CALLS = (
    "why"
    + end("think")
    + channel("response", "héllo 👋")
    + OPEN_TOOLS
    + call(
        "my-tool",
        argument("s", "string", 'a "b" &\n\\ é'),
        argument("n", "number", "1.50"),
        argument("o", "object", '{"k": [1, null]}'),
        argument("bad", "number", "one"),
        argument("k&amp;&quot;", "boolean", "true"),
    )
    + call("none", index=2)
    + end("tools")
    + DONE
)
CALL_ARGUMENTS = {
    "s": 'a "b" &\n\\ é',
    "n": 1.5,
    "o": {"k": [1, None]},
    "bad": "one",
    'k&"': True,
}


# ------------------------------------------------------------ well-formed replies


@pytest.mark.parametrize("per_feed", [1, 2, 7, 64, 10_000])
def test_all_channels(tiny: Tokenizer, per_feed: int) -> None:
    for tokenizer in (BYTES, tiny):
        ids = tokenizer.encode(CALLS, allow_special=True)
        deltas, parser = parse(ids, cuts=range(per_feed, len(ids), per_feed), tokenizer=tokenizer)
        reply = collect(deltas)
        assert (reply.reasoning, reply.content) == ("why", "héllo 👋")
        assert reply.names == ["my-tool", "none"]
        assert reply.ids == ["functions.my-tool:0", "functions.none:1"]
        assert json.loads(reply.arguments[0]) == CALL_ARGUMENTS
        assert list(json.loads(reply.arguments[0])) == list(CALL_ARGUMENTS)
        assert '"n": 1.50' in reply.arguments[0]  # numbers as the model wrote them
        assert reply.arguments[1] == "{}"
        assert reply.ended == [0, 1] and not parser.open_call
        assert parser.calls == 2


def test_neighbouring_text_is_one_delta() -> None:
    deltas, _ = parse(BYTES.encode("why" + end("think") + "well", allow_special=True))
    assert deltas == [Delta(Kind.REASONING, "why"), Delta(Kind.CONTENT, "well")]


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
MARKED = st.lists(TEXT | st.sampled_from([O, C, S, END, end("argument"), "[EOS]"])).map("".join)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | MARKED,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(MARKED, inner, max_size=3),
    max_leaves=6,
)
PAST_CALLS = st.lists(
    st.tuples(MARKED.filter(bool), st.dictionaries(MARKED, JSON, max_size=4)), max_size=3
)


@given(MARKED, MARKED, PAST_CALLS, st.booleans(), st.data())
def test_a_rendered_turn_is_read_back(
    tiny: Tokenizer,
    reasoning: str,
    content: str,
    calls: list[tuple[str, dict[str, Any]]],
    thinking: bool,
    data: st.DataObject,
) -> None:
    """Rendering and parsing agree, also about text that spells markers."""
    user = {"role": "user", "content": "go"}
    turn = {
        "role": "assistant",
        "content": content,
        "reasoning_content": reasoning,
        "tool_calls": [{"function": {"name": n, "arguments": a}} for n, a in calls],
    }
    prompt = render([user], thinking=thinking)
    whole = render([user, turn], thinking=thinking, add_generation_prompt=False)
    ids = encode_chat(tiny, whole)[len(encode_chat(tiny, prompt)) :]
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=8))
    deltas, parser = parse(ids, open_channel(prompt), cuts, tiny)
    reply = collect(deltas)
    assert reply.reasoning == (reasoning if thinking else "")
    assert reply.content == content
    assert reply.names == [n for n, _ in calls]
    assert [json.loads(a) for a in reply.arguments] == [a for _, a in calls]
    assert reply.ended == list(range(len(calls))) and not parser.open_call


# ------------------------------------------------------------ any ids at all

PIECES = st.sampled_from(
    [O, C, S, END, "[EOS]", "[BOS]", " ", "\n", "x", "é", "👋"]
    + [tag(n) for n in ("think", "response", "tools", "json", "other", "call", 'message role="a"')]
    + [tag('call tool="f" index="1"'), tag('argument key="k" type="string"')]
    + [tag('argument key="n" type="number"'), tag('argument type="string"'), tag(" odd")]
    + [end(n) for n in ("think", "response", "tools", "json", "call", "argument", "message")]
    + [end("other"), "think", 'call tool="', "argument", '"a": 1', '{"a": 1}', "12"]
)
IDS = st.lists(
    PIECES.map(lambda p: BYTES.encode(p, allow_special=True))
    | st.lists(st.integers(0, 271), max_size=3),
    max_size=25,
).map(lambda lists: [i for ids in lists for i in ids])
AT = st.sampled_from(["think", "response", None])


@given(IDS, AT, st.lists(st.integers(0, 200), max_size=10), st.booleans())
def test_any_chunking_gives_the_same(
    ids: list[int], at: str | None, cuts: list[int], raw: bool
) -> None:
    whole, parser = parse(ids, at, raw=raw)
    pieces, piecewise = parse(ids, at, [c for c in cuts if c < len(ids)], raw=raw)
    single, _ = parse(ids, at, range(1, len(ids)), raw=raw)
    assert joined(pieces) == joined(whole) == joined(single)
    assert piecewise.reasoning_tokens == parser.reasoning_tokens <= len(ids)
    assert piecewise.open_call == parser.open_call


@given(IDS, AT)
def test_closed_calls_have_arguments_that_are_an_object(ids: list[int], at: str | None) -> None:
    deltas, parser = parse(ids, at)
    reply = collect(deltas)
    for index in reply.ended:
        assert isinstance(json.loads(reply.arguments[index]), dict)
    assert parser.open_call or len(reply.ended) == len(reply.names)


@given(st.lists(st.integers(0, 271)))
def test_raw_is_plain_decoding(ids: list[int]) -> None:
    for skip in (True, False):
        deltas, parser = parse(ids, None, raw=True, skip_special=skip)
        assert collect(deltas) == Reply(content=BYTES.decode(ids, skip_special=skip))
        assert parser.reasoning_tokens == 0


@given(st.lists(st.integers(0, 255)), st.sampled_from(["think", "response"]))
def test_text_without_tags_is_kept_to_the_byte(ids: list[int], at: str) -> None:
    reply = collect(parse(ids, at)[0])
    text = BYTES.decode(ids)
    assert reply == (Reply(reasoning=text) if at == "think" else Reply(content=text))


# ------------------------------------------------------------ what models do wrong, and where

T = OPEN_TOOLS
F = tag('call tool="f" index="1"')
A = tag('argument key="a" type="string"')
NO_TOOL = tag('call tool=""')
NO_KEY = tag('argument type="string"')
RESPONSE, END_THINK, END_TOOLS = tag("response"), end("think"), end("tools")
END_CALL, END_ARGUMENT = end("call"), end("argument")


@pytest.mark.parametrize(
    ("script", "reasoning", "content", "arguments"),
    [
        # PC-26: think is never closed, or by the next channel only
        (f"r{T}{call('f', argument('a', 'string', 'x'))}{END_TOOLS}", "r", "", ['{"a": "x"}']),
        (f"r{RESPONSE}c{end('response')}{DONE}", "r", "c", []),
        (f"r{END}", "r", "", []),
        ("r", "r", "", []),
        (f"r{DONE}", "r", "", []),
        (f"{tag('think')}r{END_THINK}c", "r", "c", []),
        (f"{END_THINK}c{END}", "", "c", []),
        (f"r{END_THINK}c{tag('think')}s{END_THINK}d", "rs", "cd", []),
        # openers and closers left out
        (f"r{END_THINK}c{end('response')}{DONE}", "r", "c", []),
        (f"r{END_THINK}{call('f')}{END_TOOLS}", "r", "", ["{}"]),
        (f"r{END_THINK}{T}{F}{A}x{END_CALL}", "r", "", ['{"a": "x"}']),
        (f"r{END_THINK}{T}{F}{A}x{A}y{END_TOOLS}", "r", "", ['{"a": "x", "a": "y"}']),
        (f"r{T}{F}{F}{END_TOOLS}", "r", "", ["{}", "{}"]),
        (f"r{T}{F}{A}x{RESPONSE}c", "r", "c", ['{"a": "x"}']),
        (f"r{T}{F}{A}x{DONE}", "r", "", ['{"a": "x"}']),
        # text between and after channels; white space alone is none
        (f"r{END_THINK}\n{channel('response', ' c ')}\n {END}", "r", " c ", []),
        (f"r{END_THINK}\n x \n{RESPONSE}c", "r", "\n x \nc", []),
        (f"r{END_THINK}{channel('response', 'c')}{DONE}more", "r", "cmore", []),
        (f"r{T} oops {call('f')} {END_TOOLS}", "r", " oops ", ["{}"]),
        (f"r{T}{F}\n{A}x{END_ARGUMENT}\n{END_CALL}", "r", "", ['{"a": "x"}']),
        # unknown channels, dropped calls
        (f"r{channel('answer', '42')}{DONE}", "r", "42", []),
        (f"r{T}{channel('answer', '42')}{END_TOOLS}", "r", channel("answer", "42"), []),
        (f"r{T}{tag('call')}{A}x{END_ARGUMENT}{END_CALL}{call('f')}", "r", "", ["{}"]),
        (f"r{T}{NO_TOOL}y{tag('z')}{END_CALL}", "r", "", []),
        # no tags after all: text as it stands
        (f"a{O}b c{S}d", f"a{O}b c{S}d", "", []),
        (f"a{S}b", f"a{S}b", "", []),
        (f"a{O}b{O}think{S}c", f"a{O}bc", "", []),
        (f'a{C}think x="1"{S}b', f'a{C}think x="1"{S}b', "", []),
        (f"a{A}b{END_ARGUMENT}c", f"a{A}b{END_ARGUMENT}c", "", []),
        (f"a{O}nothing known", f"a{O}nothing known", "", []),
        (f"a{O}th x", f"a{O}th x", "", []),
        (f"r{T}{F}{NO_KEY}x{END_CALL}", "r", f"{NO_KEY}x", ["{}"]),
        # a tag that the end cuts off
        (f"a{O}{END}", "a", "", []),
        (f"a{O}respon", "a", "", []),
        (f"a{C}think", "a", "", []),
        # special ids inside a string argument that end nothing there
        (
            f"r{T}{F}{A}x{tag('b')}y{END_THINK}{S}{END_ARGUMENT}{END_CALL}",
            "r",
            "",
            [json.dumps({"a": f"x{tag('b')}y{END_THINK}{S}"})],
        ),
        # other specials are no text
        ("a[BOS]b[EOT]", "ab", "", []),
        (f"a{O}th[BOS]ink{S}b", "ab", "", []),
    ],
)
def test_odd_replies(script: str, reasoning: str, content: str, arguments: list[str]) -> None:
    reply, _ = read(script)
    assert (reply.reasoning, reply.content, reply.arguments) == (reasoning, content, arguments)


@pytest.mark.parametrize(
    ("value", "type_name", "expected"),
    [
        ("", "string", '""'),
        ("", "number", '""'),
        ("NaN", "number", '"NaN"'),
        ("1e5", "number", "1e5"),
        ("9" * 5000, "number", '"' + "9" * 5000 + '"'),
        ("[" * 9999, "array", '"' + "[" * 9999 + '"'),
        ('{"a": 1,}', "object", '"{\\"a\\": 1,}"'),
        ("true", "null", "true"),
        ('"s"', "odd", '"s"'),
    ],
    ids=str,
)
def test_values_by_type(value: str, type_name: str, expected: str) -> None:
    reply, _ = read(OPEN_TOOLS + call("f", argument("k", type_name, value)))
    assert reply.arguments == ['{"k": ' + expected + "}"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (channel("json", '{"a": [1]}'), '{"a": [1]}'),
        (channel("json", "not json"), '{"json": "not json"}'),
        (channel("json", "[1]"), '{"json": [1]}'),
        (channel("json", '{"a": 1}') + argument("b", "number", "2"), '{"json": {"a": 1}, "b": 2}'),
        (argument("b", "number", "2") + channel("json", '{"a": 1}'), '{"b": 2, "json": {"a": 1}}'),
    ],
)
def test_a_json_block_is_the_whole_object(body: str, expected: str) -> None:
    body = body.replace(tag("json"), tag('json type="object"'))
    assert read(OPEN_TOOLS + call("f", body))[0].arguments == [expected]


def test_literal_markers_are_text(tiny: Tokenizer) -> None:
    text = f"see {end('think')} and {OPEN_TOOLS}"
    for tokenizer in (BYTES, tiny):
        deltas, _ = parse(tokenizer.encode(text), tokenizer=tokenizer)
        assert collect(deltas) == Reply(reasoning=text)


def test_an_endless_header_becomes_text() -> None:
    ids = BYTES.encode(O, allow_special=True) + [ord("a")] * (MAX_HEADER_BYTES + 1)
    parser = ChannelParser(BYTES, thinking_open=False, response_open=True)
    assert collect(parser.feed(ids)).content == O + "a" * (MAX_HEADER_BYTES + 1)


def test_split_characters_come_whole_and_a_broken_tail_once() -> None:
    """PC-16."""
    parser = ChannelParser(BYTES, thinking_open=False, response_open=True)
    out = [collect(parser.feed([b])).content for b in b"\xe3\x81\x96!\xff\xf0\x9f"]
    assert out == ["", "", "ざ", "!", "\ufffd", "", ""]
    assert [collect(parser.finish()).content, collect(parser.finish()).content] == ["\ufffd", ""]


def test_a_tag_ends_a_broken_character() -> None:
    ids = [0xE3, 0x81, *BYTES.encode(end("think"), allow_special=True), 0x96, ord("c")]
    assert collect(parse(ids)[0]) == Reply(reasoning="\ufffd", content="\ufffdc")


# ------------------------------------------------------------ the state of a request (PC-35)


@pytest.mark.parametrize("last", ["user", "tool", "assistant"])
@pytest.mark.parametrize("thinking", [True, False])
def test_the_state_follows_the_prompt(last: str, thinking: bool) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "u"}]
    if last == "tool":
        calls = [{"id": "i", "function": {"name": "f", "arguments": "{}"}}]
        messages += [
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "content": "r", "tool_call_id": "i"},
        ]
    if last == "assistant":
        messages += [{"role": "assistant", "content": "", "reasoning_content": "so "}]
    prompt = render(messages, thinking=thinking, continue_final=last == "assistant")
    script = ("r" + end("think") + tag("response") if thinking else "") + "c" + end("response")
    reply, parser = read(script, open_channel(prompt))
    assert reply == Reply(reasoning="r" if thinking else "", content="c")
    assert parser.reasoning_tokens == int(thinking)


def test_reasoning_tokens_count_reasoning_text_alone() -> None:
    _, parser = read(f"ab{O}x y{S}" + end("think") + tag("response") + "cd" + DONE)
    assert parser.reasoning_tokens == 2 + 1 + 3 + 1


# ------------------------------------------------------------ truncation and flow (PC-20, -25, -29)


def test_at_every_cut_the_parser_knows_whether_calls_closed() -> None:
    ids = BYTES.encode(CALLS, allow_special=True)
    states = set()
    for length in range(len(ids)):
        deltas, parser = parse(ids[:length])
        reply = collect(deltas)
        states.add((len(reply.names), len(reply.ended)))
        assert parser.open_call == (len(reply.ended) < len(reply.names))
        assert O not in reply.content and C not in reply.content
    assert states == {(0, 0), (1, 0), (1, 1), (2, 1), (2, 2)}


JSON_BLOCK = tag('json type="object"') + '{"a": [1, 2, 3]}' + end("json")


@pytest.mark.parametrize(
    "values",
    [
        (argument("s", "string", 'a "b" 👋'), argument("o", "object", '{"k": [1]}')),
        (argument("s", "string", "a long one"), JSON_BLOCK),
        (JSON_BLOCK,),
    ],
    ids=["arguments", "argument and block", "block"],
)
def test_what_a_cut_call_has_is_the_beginning_of_its_arguments(values: tuple[str, ...]) -> None:
    ids = BYTES.encode(OPEN_TOOLS + call("f", *values), allow_special=True)
    whole = collect(parse(ids)[0]).arguments[0]
    seen = []
    for length in range(len(ids)):
        for part in collect(parse(ids[:length])[0]).arguments:
            assert whole.startswith(part.rstrip("\ufffd"))
            seen.append(part)
    assert len(set(seen)) > 10
    if values == (JSON_BLOCK,):
        assert seen[-1] == whole  # all is there, though the call is not closed


def test_an_end_token_inside_a_call_leaves_it_open() -> None:
    reply, parser = read(f"r{OPEN_TOOLS}{F}{A}x{END}")
    assert (reply.arguments, reply.ended, parser.open_call) == (['{"a": "x'], [], True)


def test_string_arguments_flow_token_by_token(tiny: Tokenizer) -> None:
    head = tiny.encode(f"{OPEN_TOOLS}{F}{A}", allow_special=True)
    value = tiny.encode('The teacher said "open" the green door.\n' * 200)
    parser = ChannelParser(tiny, thinking_open=True, response_open=False)
    parser.feed(head)
    for token_id in value:
        (delta,) = parser.feed([token_id])
        assert delta.kind is Kind.CALL_ARGUMENTS
        assert json.loads(f'"{delta.text}"') == tiny.token_text(token_id)


@pytest.mark.parametrize("per_feed", [1, 2, 7, 64])
def test_several_large_calls_in_bundles(tiny: Tokenizer, per_feed: int) -> None:
    large = "line of text\n" * 1_600  # 20 KB
    script = "before" + OPEN_TOOLS + "".join(
        call("my-tool", argument("text", "string", f"{i}{large}"), index=i + 1) for i in range(3)
    ) + end("tools")  # fmt: skip
    ids = tiny.encode(script, allow_special=True)
    deltas, _ = parse(ids, "response", range(per_feed, len(ids), per_feed), tiny)
    reply = collect(deltas)
    assert reply.content == "before"
    assert reply.ids == [f"functions.my-tool:{i}" for i in range(3)]
    assert [json.loads(a) for a in reply.arguments] == [{"text": f"{i}{large}"} for i in range(3)]
    assert reply.ended == [0, 1, 2]
