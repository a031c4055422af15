"""Copies agree; any other size, header or training state does not."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from k3serve.checkpoint.fingerprint import fingerprints
from k3serve.errors import CheckpointError
from tests.serving import TINY_CHAT


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    shutil.copytree(TINY_CHAT, tmp_path / "copy")
    return tmp_path / "copy"


def test_a_copy_has_the_same_names_and_values(copied: Path) -> None:
    found = fingerprints(TINY_CHAT)
    assert found == fingerprints(copied)
    assert "config.json" in found and any(name.endswith(".safetensors") for name in found)


def test_a_further_training_step_is_seen(copied: Path) -> None:
    shard = next(copied.glob("*.safetensors"))
    tensors = {
        name: (value.astype(np.float32) * 1.001).astype(value.dtype)
        if value.dtype.kind == "f"
        else value
        for name, value in load_file(shard).items()
    }
    size = shard.stat().st_size
    save_file(tensors, shard)
    assert abs(shard.stat().st_size - size) < 4096
    changed = fingerprints(copied)
    assert {n for n, v in fingerprints(TINY_CHAT).items() if changed[n] != v} == {shard.name}


def test_an_empty_file_is_no_fault_of_this_check(copied: Path) -> None:
    (copied / "note.json").write_bytes(b"")
    assert len(fingerprints(copied)) == len(fingerprints(TINY_CHAT)) + 1


def test_an_unreadable_file_is_named(copied: Path) -> None:
    (copied / "broken.json").symlink_to(copied / "nowhere")
    with pytest.raises(CheckpointError, match=r"broken\.json: cannot be read"):
        fingerprints(copied)
