"""Characters split over tokens (PC-16)."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from k3serve.text.utf8 import Utf8Decoder


@given(st.lists(st.binary(max_size=6) | st.text(max_size=3).map(str.encode)))
@example([b"\xe3\x81", b"\x96", b"!", b"\xf0\x9f"])
@example([b"\xff", b"abc", b"\xf0\x9f", b"\x91", b"a", b"\xed\xa0", b"\x80"])
def test_any_split_equals_one_decode(pieces: list[bytes]) -> None:
    decoder = Utf8Decoder()
    text = "".join(map(decoder.feed, pieces)) + decoder.flush()
    assert text == b"".join(pieces).decode("utf-8", "replace")


def test_a_bad_byte_does_not_stall() -> None:
    assert Utf8Decoder().feed(b"\xffa") == "\ufffda"


@pytest.mark.parametrize("tail", [b"\xe4", b"\xe4\xbd", b"\xf0\x9f\x91"])
def test_an_incomplete_tail_is_flushed_once(tail: bytes) -> None:
    decoder = Utf8Decoder()
    assert [decoder.feed(tail), decoder.flush(), decoder.flush()] == ["", "\ufffd", ""]
    assert decoder.feed(b"a") == "a"
