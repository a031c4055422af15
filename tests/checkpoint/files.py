"""Damaged copies of the golden checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import ml_dtypes  # noqa: F401  (bfloat16 for numpy)
import numpy as np
from safetensors.numpy import load_file, save_file

DATA = Path(__file__).parents[1] / "data"
Tensors = dict[str, np.ndarray]


def copy(name: str, to: Path) -> Path:
    folder = to / name
    shutil.copytree(DATA / name, folder, ignore=shutil.ignore_patterns("*.npz"))
    return folder


def file_of(folder: Path, tensor: str) -> Path:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return folder / "model.safetensors"
    return folder / json.loads(index.read_text())["weight_map"][tensor]


def edit(folder: Path, tensor: str, change: Callable[[Tensors], None]) -> Path:
    """Rewrites the file that holds the tensor."""
    file = file_of(folder, tensor)
    tensors = load_file(file)
    change(tensors)
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, file)
    return file


def edit_index(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))
