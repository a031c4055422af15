"""The `score` command's edges: what it refuses before it works, and how it reads its input."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from k3serve.__main__ import main
from k3serve.score_command import _read_lines
from tests.serving import TINY_CHAT


@pytest.fixture(autouse=True)
def as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX is up in this process: nothing of it is set up again."""
    for name in ("join", "use_compilation_cache"):
        monkeypatch.setattr(f"k3serve.score_command.{name}", lambda *_, **__: None)


def score(folder: Path, line: str, *flags: str, output: str = "out.npz") -> int:
    (folder / "in.jsonl").write_text(line, encoding="utf-8")
    named = ["--input", str(folder / "in.jsonl"), "--output", str(folder / output)]
    return main(["score", "--checkpoint", str(TINY_CHAT), *named, *flags])


def test_only_line_feeds_end_a_line(tmp_path: Path) -> None:
    """JSON allows these in strings as they are; str.splitlines() would cut there."""
    texts = ["a\u2028b", "a\u0085b", "a\u2029b"]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    path = tmp_path / "in.jsonl"
    path.write_bytes("\r\n".join([*lines, "", ""]).encode())
    assert [line["text"] for line in _read_lines(path)] == texts


@pytest.mark.parametrize(
    ("line", "flags", "output", "words"),
    [
        ('{"tokens": [1]}', (), "nowhere/out.npz", "cannot be written"),
        ('{"tokens": [1]}', (), "out.txt", "must end in .npz"),
        ('{"tokens": [1]}', ("--ranks", "0"), "out.npz", "--ranks 0"),
        ('{"text": "\\ud800"}', (), "out.npz", "lone surrogate"),
    ],
)
def test_refused_before_anything_is_scored(
    tmp_path: Path,
    line: str,
    flags: tuple[str, ...],
    output: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("k3serve.score._run", None)
    assert score(tmp_path, line, *flags, output=output) == 2
    assert words in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]


def test_an_output_folder_of_that_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out.npz").mkdir()
    assert score(tmp_path, '{"tokens": [1]}') == 2


def test_no_lines_give_an_empty_file(tmp_path: Path) -> None:
    assert score(tmp_path, "\n\n") == 0
    assert np.load(tmp_path / "out.npz").files == []
