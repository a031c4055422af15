"""A checkpoint folder in the Hugging Face layout: which tensor lies where, checked before any is
read.

Rule: opening reads headers only; `read` copies exactly the slice that is asked for. Every complaint
is a CheckpointError that names the tensor, the file, what was expected and what was found.

Try it: `Checkpoint.open("tests/data/k3_tiny", config).read("language_model.model.norm.weight")`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (lets safetensors return bfloat16 as numpy arrays)
import numpy as np
from safetensors import SafetensorError, safe_open

from k3serve.checkpoint.names import VISION_PREFIXES, Tensor, tensor_table
from k3serve.config import TargetConfig
from k3serve.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit


class Checkpoint:
    """The open files of a checkpoint. Build it with `open`."""

    def __init__(self, files: dict[str, Path], handles: dict[Path, Any]) -> None:
        self._files = files  # tensor name -> file
        self._handles = handles

    @staticmethod
    def open(path: str | Path, config: TargetConfig) -> Checkpoint:
        """Opens every file and checks each tensor's presence, shape and dtype. Raises
        CheckpointError.
        """
        return Checkpoint.of(path, tensor_table(config), ignored=VISION_PREFIXES)

    @staticmethod
    def of(
        path: str | Path,
        table: dict[str, Tensor],
        *,
        optional: Collection[str] = (),
        ignored: tuple[str, ...] = (),
    ) -> Checkpoint:
        """The same for any table of tensors: those named in `optional` may be missing (see `has`),
        names that begin with one of `ignored` are left alone. Raises CheckpointError.
        """
        folder = Path(path)
        table = {n: t for n, t in table.items() if not n.startswith(ignored)}
        files = _tensor_files(folder)
        table = {n: t for n, t in table.items() if n in files or n not in optional}
        missing = sorted(set(table) - set(files))
        if missing:
            raise CheckpointError(
                f"{missing[0]}: missing from {folder} ({len(missing)} tensors missing in all); "
                "the checkpoint is incomplete or does not belong to its config.json"
            )
        wanted = {name: files[name] for name in table}
        handles = {file: _open(file) for file in sorted(set(wanted.values()))}
        checkpoint = Checkpoint(wanted, handles)
        stored = {file: set(handle.keys()) for file, handle in handles.items()}
        for name, tensor in table.items():
            checkpoint._check(name, tensor, stored[wanted[name]])
        for file, names in stored.items():
            _refuse_extra(file, names - set(table), ignored)
        _refuse_extra(folder, set(files) - set(table), ignored)
        return checkpoint

    def _check(self, name: str, tensor: Tensor, stored: set[str]) -> None:
        file = self._files[name]
        if name not in stored:
            raise CheckpointError(f"{name}: {INDEX} places it in {file}, which does not hold it")
        found = self._handles[file].get_slice(name)
        shape, dtype = tuple(found.get_shape()), found.get_dtype()
        if not tensor.accepts(shape):
            raise CheckpointError(
                f"{name}: shape {list(shape)} in {file}, expected {list(tensor.shape)} "
                "by config.json"
            )
        if not tensor.accepts_dtype(dtype):
            expected = "U8" if tensor.dtype == "U8" else "BF16 or F32"
            raise CheckpointError(f"{name}: dtype {dtype} in {file}, expected {expected}")

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """The tensor, or its slice by leading dimensions, as stored (bfloat16, float32 or
        uint8).
        """
        try:
            stored = self._handles[self._files[name]].get_slice(name)
            return np.asarray(stored[index] if index else stored[:])
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{name}: cannot be read from {self._files[name]}: {error}"
            ) from None

    def has(self, name: str) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handles[self._files[name]].get_slice(name).get_shape())

    def file_of(self, name: str) -> Path:
        return self._files[name]


def _refuse_extra(where: Path, names: set[str], ignored: tuple[str, ...]) -> None:
    extra = sorted(n for n in names if not n.startswith(ignored))
    if extra:
        raise CheckpointError(
            f"{extra[0]}: found in {where}, but config.json describes no such tensor "
            f"({len(extra)} unexpected in all); found extra, expected none"
        )


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor: by the index, or all in the single file."""
    index = folder / INDEX
    if not index.exists():
        single = folder / SINGLE
        if not single.exists():
            raise CheckpointError(f"{folder}: neither {INDEX} nor {SINGLE} is there")
        return {name: single for name in _open(single).keys()}
    try:
        places = json.loads(index.read_text())["weight_map"]
        return {str(name): folder / str(file) for name, file in places.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: not a checkpoint index ({error!r})") from None


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="numpy")
    except FileNotFoundError:
        raise CheckpointError(f"{file}: named by {INDEX}, but there is no such file") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(_diagnose(file, str(error))) from None


def _diagnose(file: Path, complaint: str) -> str:
    """Says in the user's terms why the library refuses a file: which tensor is cut off, or that the
    header is not one.
    """
    size = file.stat().st_size
    with file.open("rb") as handle:
        head = handle.read(8)
        if len(head) < 8:
            return f"{file}: {size} bytes, expected a header of at least 8; the file is truncated"
        (length,) = struct.unpack("<Q", head)
        if length > MAX_HEADER_BYTES or 8 + length > size:
            return (
                f"{file}: the header claims {length} bytes, the file has {size}; "
                "corrupted header or truncated file"
            )
        try:
            header = json.loads(handle.read(length))
            ends = {
                name: 8 + length + int(entry["data_offsets"][1])
                for name, entry in header.items()
                if name != "__metadata__"
            }
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            return f"{file}: corrupted header ({error!r})"
    cut = [name for name, end in sorted(ends.items(), key=lambda item: item[1]) if end > size]
    if cut:
        return (
            f"{cut[0]}: truncated: ends at byte {ends[cut[0]]} of {file}, found only {size} bytes "
            f"({len(cut)} tensors cut off); download the file again"
        )
    return f"{file}: corrupted header ({complaint})"
