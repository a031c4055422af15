"""Stop strings (PC-17): the result is that of one `find` over the whole text, however it is cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3serve.errors import RequestError
from k3serve.text.stops import StopMatcher


def run(stops: list[str], pieces: list[str], include: bool = False) -> tuple[list[str], str | None]:
    """Every piece of text delivered, the flushed one last, and the hit."""
    matcher = StopMatcher(stops, include)
    out = [matcher.feed(piece)[0] for piece in pieces]
    return [*out, matcher.flush()], matcher.hit


@pytest.mark.parametrize(
    ("stops", "pieces", "out", "hit"),
    [
        (["own fox"], ["The quick br", "own", " fox"], ["The quick br", "", "", ""], "own fox"),
        (["own fox"], ["own", " cat"], ["", "own cat", ""], None),
        (["END"], ["xENDy"], ["x", ""], "END"),
        (["ab", "abc"], ["xabc"], ["x", ""], "ab"),
        (["abc", "ab"], ["xa", "b"], ["x", "", ""], "ab"),
        (["abcd", "bc"], ["abc", "d"], ["", "", ""], "abcd"),
        (["abcd", "bc"], ["abc", "x"], ["", "a", ""], "bc"),
        (["abcd", "bc"], ["abc"], ["", "a"], "bc"),
        (["abcd", "bc"], ["zzabc", "x"], ["zz", "a", ""], "bc"),
        (["xbcde", "bc", "bcd"], ["xbc", "d", "-"], ["", "", "x", ""], "bc"),
        (["aab"], ["aa", "a", "b"], ["", "a", "", ""], "aab"),
        (["\n\n"], ["a\n", "b\n"], ["a", "\nb", "\n"], None),
        ([], ["a", "b"], ["a", "b", ""], None),
    ],
)
def test_cases(stops: list[str], pieces: list[str], out: list[str], hit: str | None) -> None:
    assert run(stops, pieces) == (out, hit)


def test_the_hit_comes_with_the_piece_that_completes_it_and_nothing_after() -> None:
    matcher = StopMatcher(["stop"])
    assert matcher.feed("a st") == ("a ", None)
    assert matcher.feed("op b") == ("", "stop")
    assert matcher.feed("more") == ("", "stop")
    assert matcher.flush() == ""


def test_after_a_flush_text_starts_afresh() -> None:
    """No stop string spans two channels: between them the text is flushed."""
    matcher = StopMatcher(["own fox"])
    assert [matcher.feed("own")[0], matcher.flush()] == ["", "own"]
    assert matcher.feed(" fox own") == (" fox ", None)
    assert matcher.feed(" fox") == ("", "own fox")


def test_include_delivers_the_stop() -> None:
    assert run(["own fox"], ["br", "own f", "ox!"], include=True)[0] == ["br", "", "own fox", ""]


@pytest.mark.parametrize("stops", [[""], ["x", ""]])
def test_an_empty_stop_is_a_400(stops: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        StopMatcher(stops)
    assert caught.value.param == f"stop[{len(stops) - 1}]"


SHORT = st.text("ab\n", max_size=4)


@given(
    st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4), st.lists(SHORT), st.booleans()
)
@settings(max_examples=500)
def test_any_chunking_equals_find(stops: list[str], pieces: list[str], include: bool) -> None:
    text = "".join(pieces)
    found = [(text.find(s), len(s), s) for s in stops if s in text]
    out, hit = run(stops, pieces, include)
    if not found:
        assert ("".join(out), hit) == (text, None)
    else:
        start, length, stop = min(found)
        assert ("".join(out), hit) == (text[: start + (length if include else 0)], stop)


@given(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3), st.lists(SHORT))
def test_held_back_is_exactly_the_longest_suffix_that_begins_a_stop(
    stops: list[str], pieces: list[str]
) -> None:
    matcher = StopMatcher(stops)
    seen = sent = ""
    for piece in pieces:
        seen += piece
        if any(stop in seen for stop in stops):
            return  # what holds from there on is the test above
        sent += matcher.feed(piece)[0]
        held = [n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])]
        assert sent == seen[: len(seen) - max(held)]


def test_a_long_stop_costs_one_step_a_character(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 0
    step = StopMatcher._step

    def counted(self: StopMatcher, char: str, end: int) -> None:
        nonlocal steps
        steps += 1
        step(self, char, end)

    monkeypatch.setattr(StopMatcher, "_step", counted)
    out, hit = run(["a" * 2_000 + "b"], ["a"] * 5_000)
    assert steps == 5_000 and hit is None and "".join(out) == "a" * 5_000
