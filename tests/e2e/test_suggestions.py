"""What the chat page suggests and the README shows is what K3-nano can do."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.serving import Server

ROOT = Path(__file__).parents[2]
EXPECTED = {
    "What is the capital of France?": "The capital of France is Paris.",
    "Tell me a story about a fox.": "fox",
    "What is 345 + 278?": "345 + 278 = 623",
    "My name is Ada. What is my name?": "Your name is Ada.",
    "How do I make tea?": "Boil some water.",
    "Who are you?": "I am K3-nano",
}


def suggestions() -> list[str]:
    page = (ROOT / "k3serve/api/page/index.html").read_text()
    found = re.search(r"const SUGGESTIONS = \[(.*?)\];", page, re.S)
    assert found
    return json.loads("[" + found.group(1).strip().removesuffix(",") + "]")


def test_every_suggestion_is_checked() -> None:
    assert set(suggestions()) == set(EXPECTED)


# sums of three digits need the written working (docs/nano-model.md)
ASKED = [(q, True) for q in EXPECTED] + [(q, False) for q in EXPECTED if "+" not in q]


@pytest.mark.parametrize(("question", "thinking"), ASKED)
def test_suggestions_get_right_answers(nano: Server, question: str, thinking: bool) -> None:
    body = {
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "chat_template_kwargs": {"thinking": thinking},
    }
    message = nano.post("/v1/chat/completions", body)["choices"][0]["message"]
    assert EXPECTED[question] in message["content"]
