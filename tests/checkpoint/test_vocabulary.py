"""The sampling mask: named tokens yes, reserved ones no, mismatched files refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from k3serve.checkpoint.vocabulary import sampling_mask
from k3serve.errors import CheckpointError
from tests.serving import DATA, TINY_CHAT


def test_unnamed_reserved_ids_are_masked() -> None:
    mask = sampling_mask(TINY_CHAT, 1792)
    assert mask[:1536].all()
    assert mask[1536:].sum() == 16
    assert mask[1538]  # <|end_of_msg|>


def test_without_a_tokenizer_all_ids_are_allowed() -> None:
    np.testing.assert_array_equal(sampling_mask(DATA / "k3_tiny", 640), np.ones(640, bool))


def test_ids_beyond_the_tokenizer_are_masked() -> None:
    assert not sampling_mask(TINY_CHAT, 2000)[1792:].any()


def test_files_of_another_model_are_refused() -> None:
    with pytest.raises(CheckpointError, match="different models"):
        sampling_mask(TINY_CHAT, 1600)


def test_a_broken_tokenizer_config_is_named(tmp_path: Path) -> None:
    shutil.copy(TINY_CHAT / "tiktoken.model", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json.*added_tokens_decoder"):
        sampling_mask(tmp_path, 1792)
