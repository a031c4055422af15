"""The golden tokenizer, loaded once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from k3serve.text.tokenizer import Tokenizer

DATA = Path(__file__).parent.parent / "data"


def goldens(name: str) -> list[dict[str, Any]]:
    return json.loads((DATA / name).read_text("utf-8"))


@pytest.fixture(scope="session")
def tiny() -> Tokenizer:
    return Tokenizer.load(DATA / "tokenizer_tiny")
