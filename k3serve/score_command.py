"""The `score` command: log-probabilities of the sequences in a file, without a server.

Rule: reads, checks and writes files; the scores come from score.py.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from k3serve.config import TargetConfig
from k3serve.errors import ConfigError
from k3serve.process import start_logging
from k3serve.runtime.mesh import HostGroup, join
from k3serve.startup import Progress, dtype_of, expert_format_of, use_compilation_cache
from k3serve.text.tokenizer import load_tokenizer

log = logging.getLogger("k3serve")


def score(
    *,
    checkpoint: Path,
    input: Path,
    output: Path,
    dtype: str,
    logits: bool,
    top: int,
    ranks: int | None,
) -> int:
    """The `score` command; see its --help."""
    from k3serve.score import score as score_lines

    start_logging()
    if ranks is not None and ranks < 1:
        raise ConfigError(f"--ranks {ranks}: must be at least 1")
    _check_output(output)
    join(HostGroup(num_hosts=1), cpu_ranks=ranks or 1)
    use_compilation_cache()
    target = TargetConfig.from_dir(checkpoint)
    on_cpu = jax.devices()[0].platform == "cpu"
    lines = _read_lines(input)
    tokenizer = load_tokenizer(checkpoint) if any("text" in line for line in lines) else None
    arrays = score_lines(
        checkpoint,
        lines,
        dtype=dtype_of(dtype, on_cpu),
        want_logits=logits,
        top=top,
        ranks=ranks or 1,
        expert_format=expert_format_of("auto", target, on_cpu),
        encode=_encode_as_served(tokenizer) if tokenizer is not None else None,
        progress=Progress("scoring lines"),
    )
    _write_npz(output, arrays)
    log.info("wrote %d sequences to %s", len(lines), output)
    return 0


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file; blank lines are skipped."""
    lines = []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--input {path}: cannot be read as UTF-8 text ({error})") from error
    for number, line in enumerate(text.split("\n"), start=1):  # U+2028 may stand in a string
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"--input {path}, line {number}: not JSON ({error})") from error
        if not isinstance(value, dict):
            raise ConfigError(f"--input {path}, line {number}: must be an object, is {line[:80]!r}")
        lines.append(value)
    return lines


def _encode_as_served(tokenizer: Any) -> Callable[[str], list[int]]:
    """As prompts of /v1/completions: special strings become ids, half a surrogate is refused."""
    from k3serve.text.tokenizer import check_text

    return lambda text: tokenizer.encode(check_text(text, "text"), allow_special=True)


def _check_output(path: Path) -> None:
    """Before hours of work, not after."""
    if path.suffix != ".npz":
        raise ConfigError(f"--output {path}: the name must end in .npz")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(
            f"--output {path}: cannot be written; name a file in a folder that exists and is yours"
        )


def _write_npz(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Whole or not at all: the file appears under its name when it is complete."""
    unfinished = path.with_name(path.name + ".part")
    try:
        with unfinished.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise ConfigError(f"--output {path}: cannot be written ({error})") from error
