"""Some of tests/api/test_fuzz.py against K3-nano: what passes the checks reaches the engine."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.api import fuzzing
from tests.serving import Server

KNOWN = {"prompt": [300, 301, 302], "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def known(nano: Server) -> Iterator[str]:
    text = nano.post("/v1/completions", KNOWN)["choices"][0]["text"]
    yield text
    assert nano.get("/health") is None


def send(server: Server, data: bytes, known: str) -> None:
    """A closed sending side counts as gone, so an answer may be missing; a wrong one may not."""
    port = urlsplit(server.url).port or 0
    fuzzing.check(fuzzing.exchange(port, data, may_be_cut=True))
    assert server.post("/v1/completions", KNOWN)["choices"][0]["text"] == known


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@fuzzing.fuzz(0.3)
@given(data=st.data())
def test_bodies(nano: Server, known: str, path: str, data: st.DataObject) -> None:
    body = data.draw(fuzzing.bodies(path, last='"max_tokens":4'))
    send(nano, fuzzing.post(path, body), known)


@fuzzing.fuzz(0.3)
@given(data=fuzzing.conversations())
def test_conversations(nano: Server, known: str, data: bytes) -> None:
    send(nano, data, known)
