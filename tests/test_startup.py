"""The start: the tick is compiled while the weights are read, and either may end it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from k3serve import startup
from k3serve.errors import CheckpointError, ConfigError, HostFailure
from k3serve.runtime.compiling import Compiling, is_compiling
from k3serve.runtime.decode import ModelWeights
from tests.checkpoint import files


class Endless:
    """A checkpoint.load.Source whose weights never end."""

    def load(self, mesh: Any, progress: Callable[[int, int], None]) -> NoReturn:
        while True:
            progress(1, 2)


def fails() -> NoReturn:
    raise MemoryError("no room")


@pytest.fixture
def stuck() -> Any:
    """A compilation that goes on until the test is over."""
    release = threading.Event()
    compiling = Compiling(release.wait)
    yield compiling
    release.set()
    assert compiling.result() is True and not is_compiling()


def test_what_was_compiled_is_given_and_its_thread_ends() -> None:
    assert Compiling(lambda: "program").result() == "program"
    assert not is_compiling()


def test_a_failed_compilation_ends_the_reading_of_weights() -> None:
    with pytest.raises(ConfigError, match=r"cannot be compiled .*no room.*--max-slots"):
        startup._read(ModelWeights(target=Endless()), None, Compiling(fails))  # type: ignore[arg-type]


def test_a_settings_error_found_by_the_compiler_keeps_its_words() -> None:
    def refuses() -> NoReturn:
        raise ConfigError("3 ranks do not divide the heads")

    with pytest.raises(ConfigError, match=r"^3 ranks do not divide the heads$"):
        Compiling(refuses).result()


def test_another_hosts_failure_ends_the_wait_for_the_compiler(stuck: Compiling) -> None:
    def tells() -> NoReturn:
        raise HostFailure("host 1 could not start: disk full")

    with pytest.raises(HostFailure, match="host 1 could not start"):
        stuck.result(tells)


def test_an_error_of_the_weights_ends_the_reading_at_once(stuck: Compiling) -> None:
    class Damaged:
        def load(self, mesh: Any, progress: Any) -> NoReturn:
            raise CheckpointError("bad scale")

    with pytest.raises(CheckpointError, match="bad scale"):
        startup._read(ModelWeights(target=Damaged()), None, stuck)  # type: ignore[arg-type]
    assert is_compiling()


def test_damaged_weights_end_a_server_that_is_compiling(tmp_path: Path) -> None:
    """With one line and status 2: Python itself would abort while XLA compiles."""
    folder = files.copy("k3_tiny_chat", tmp_path)
    name = "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight_scale"
    files.edit(folder, name, lambda tensors: tensors[name].fill(255))
    command = [sys.executable, "-m", "k3serve", "--checkpoint", str(folder), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert "compiling the tick" in done.stderr
    assert name in done.stderr.splitlines()[-1]
