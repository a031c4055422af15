"""The golden tokenizer, loaded once, and how property tests run: the same examples every time, no
deadline (a busy machine is no bug). To search wider: HYPOTHESIS_EXAMPLES=5000 pytest tests/text
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from k3serve.text.tokenizer import Tokenizer

_EXAMPLES = os.environ.get("HYPOTHESIS_EXAMPLES")
settings.register_profile(
    "text",
    deadline=None,
    derandomize=_EXAMPLES is None,
    max_examples=int(_EXAMPLES or 100),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("text")

DATA = Path(__file__).parent.parent / "data"


def goldens(name: str) -> list[dict[str, Any]]:
    return json.loads((DATA / name).read_text("utf-8"))


@pytest.fixture(scope="session")
def tiny() -> Tokenizer:
    return Tokenizer.load(DATA / "tokenizer_tiny")
