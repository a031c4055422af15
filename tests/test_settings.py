"""Settings: every refusal names the flag, the value and what is allowed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from k3serve.errors import ConfigError
from k3serve.settings import ServeConfig

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"port": 70000}, ["--port 70000", "0 to 65535"]),
        ({"max_slots": 0}, ["--max-slots 0", "1 to"]),
        ({"page_tokens": 24}, ["--page-tokens 24", "multiple of 16"]),
        ({"context": 8}, ["--context 8"]),
        ({"dtype": "fp8"}, ["--dtype fp8", "float32"]),
        ({"tick_timeout_s": 0.0}, ["--tick-timeout 0.0", "1 to 86400"]),
        ({"tick_timeout_s": 0.1}, ["--tick-timeout 0.1", "1 to 86400"]),
        ({"tick_timeout_s": float("nan")}, ["--tick-timeout nan"]),
        ({"tick_timeout_s": 1e12}, ["--tick-timeout 1000000000000.0"]),
        ({"drain_timeout_s": float("inf")}, ["--drain-timeout inf", "0 to 86400"]),
        ({"connect_timeout_s": 10**11}, ["--connect-timeout", "1 to 86400"]),
        ({"host": " "}, ["--host", "0.0.0.0"]),
        ({"hosts": 2, "num_hosts": 2}, ["--hosts 2", "--num-hosts"]),
        ({"hosts": 2, "host_id": 0}, ["--hosts 2", "--host-id"]),
        ({"host_id": 1}, ["--num-hosts"]),
        ({"num_hosts": 1, "host_id": 1}, ["--host-id 1", "0 to 0"]),
        ({"num_hosts": 2, "host_id": 0}, ["--coordinator"]),
        ({"num_hosts": 2, "host_id": 0, "coordinator": "a"}, ["--coordinator a", "HOST:PORT"]),
        ({"num_hosts": 2, "host_id": 0, "coordinator": "a:b"}, ["--coordinator a:b"]),
        ({"num_hosts": 2, "host_id": 0, "coordinator": ":1"}, ["--coordinator :1"]),
        ({"num_hosts": 2, "host_id": 2, "coordinator": "a:1"}, ["--host-id 2", "0 to 1"]),
    ],
    ids=str,
)
def test_bad_settings_are_refused_by_name(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        ServeConfig(**settings)
    for word in words:
        assert word in str(caught.value)


def test_the_context_is_cut_into_pages() -> None:
    shape = ServeConfig(context=128, page_tokens=64, max_slots=3).tick_shape(2048)
    assert (shape.pages_per_slot, shape.num_pages, shape.max_context) == (2, 6, 128)


def test_a_slot_holds_no_more_than_was_asked_for_or_than_the_model_knows() -> None:
    with pytest.raises(ConfigError, match=r"--context 100.*--page-tokens 64; use 64"):
        ServeConfig(context=100).tick_shape(2048)
    assert ServeConfig().tick_shape(1000).max_context == 960
    with pytest.raises(ConfigError, match=r"--page-tokens 2048.*1000"):
        ServeConfig(page_tokens=2048).tick_shape(1000)


def test_a_context_beyond_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--context 4096.*2048"):
        ServeConfig(context=4096).tick_shape(2048)


def test_names_may_be_given_at_once_or_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from k3serve import __main__

    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(__main__, "_serve", lambda options: seen.append(options) or 0)
    assert __main__.main(["--api-key", "a,b", "--api-key", "c", "--served-model-name", "x"]) == 0
    assert __main__.main([]) == 0
    assert [options["api_keys"] for options in seen] == [("a", "b", "c"), ()]
    assert seen[0]["served_model_names"] == ("x",)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "k3serve", *arguments], capture_output=True, text=True, timeout=60
    )


def test_help_answers_without_loading_jax() -> None:
    code = "import sys, k3serve.__main__; assert 'jax' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    done = run("--help")
    assert done.returncode == 0 and "serve" in done.stdout and "score" in done.stdout
    assert "--max-slots" in run("serve", "--help").stdout


def test_a_bad_flag_is_one_line_and_status_2() -> None:
    done = run("--port", "99999")
    assert done.returncode == 2
    assert done.stderr.strip() == "k3serve: --port 99999: must be 0 to 65535"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--prot", "8000"), "--prot: serve knows no such flag or word; did you mean --port?"),
        (("--drain-timout=3",), "did you mean --drain-timeout?"),
        (("zebra",), "zebra: serve knows no such"),
        (("score", "--input", "a", "--output", "b", "--tpo"), "--tpo: score knows no such"),
    ],
)
def test_an_unknown_flag_is_one_line_that_names_what_was_meant(
    arguments: tuple[str, ...], said: str
) -> None:
    done = run(*arguments)
    assert done.returncode == 2 and said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_python_without_the_packages_is_told_what_to_do() -> None:
    command = [sys.executable, "-S", "-m", "k3serve"]  # -S: no site-packages
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 2 and "sh launch/local.sh" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("rows", [0, 3, 7, 9, -8])
def test_rows_that_vectors_split_unevenly_are_refused(rows: int) -> None:
    with pytest.raises(ConfigError, match=rf"--rows {rows}: use 1, 2, 4 or 8"):
        ServeConfig(rows=rows)


@pytest.mark.parametrize(
    ("slots", "rows", "on_cpu", "tile"),
    [(8, 8, True, 2), (8, 8, False, 8), (3, 8, True, 1), (12, 1, True, 4), (12, 8, False, 4),
     (24, 1, True, 24), (8, 1, True, 8), (1, 8, True, 1), (7, 1, False, 1)],
)  # fmt: skip
def test_tiles_are_whole_vectors_or_small_powers_of_two(
    slots: int, rows: int, on_cpu: bool, tile: int
) -> None:
    """Seven rows of two slots gave a slot other last bits beside another one."""
    config = ServeConfig(max_slots=slots, rows=rows)
    assert config.tick_shape(2048, 8 if rows > 1 else None, on_cpu).tile == tile


@pytest.mark.parametrize(("slots", "tile"), [(8, 3), (12, 6), (8, 16), (3, 2), (8, 0)])
def test_other_tiles_are_refused(slots: int, tile: int) -> None:
    with pytest.raises(ConfigError, match=f"--tile-slots {tile}: must divide --max-slots {slots}"):
        ServeConfig(max_slots=slots, tile_slots=tile)


def test_a_draft_needs_rows() -> None:
    with pytest.raises(ConfigError, match="--rows 1 leaves no room"):
        ServeConfig(draft="some/where", rows=1)
    with pytest.raises(ConfigError, match="use at most 4"):
        ServeConfig(rows=8).tick_shape(2048, 5)
    assert ServeConfig().tick_shape(2048, 5).rows == 4
    assert ServeConfig().tick_shape(2048).rows == 1
    assert ServeConfig(draft="none").tick_shape(2048).rows == 8
