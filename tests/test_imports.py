"""Imports point one way: the table of architecture, checked on every import statement."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "k3serve"

# a part may import parts of a lower rank, and itself; parts of one rank never import each other
RANKS = {
    "types": 0,
    "errors": 0,
    "wire": 0,
    "config": 0,
    "draft_config": 0,
    "sections": 0,
    "settings": 0,
    "metrics": 0,
    "process": 0,
    "link": 1,
    "model": 1,
    "text": 1,
    "checkpoint": 2,
    "scheduler": 2,
    "runtime": 3,
    "api": 3,
    "lockstep": 3,
    "score": 3,
    "local_hosts": 2,
    "chat_command": 3,
    "front": 4,
    "startup": 4,
    "app": 5,
    "score_command": 5,
    "__main__": 6,
}
RANK0_AMONG_THEMSELVES = {name for name, rank in RANKS.items() if rank == 0}
RANK0_PACKAGES = {"numpy", "prometheus_client"}  # beside the standard library
KERNEL_USERS = {"runtime", "checkpoint"}
NEVER_JAX = {
    "text",
    "api",
    "front",
    "link",
    "local_hosts",
    "scheduler",
    "lockstep",
    "chat_command",
    *RANK0_AMONG_THEMSELVES,
}


def imported(path: Path) -> set[str]:
    """Full names of the modules that a file imports, wherever the statement stands."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: use absolute imports"
            module = node.module or ""
            if module == "k3serve":
                found |= {f"k3serve.{alias.name}" for alias in node.names}
            else:
                found.add(module)
    return found


def part_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


FILES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    part = part_of(path)
    assert part in RANKS, f"{part}: give the new part a rank in the table"
    for name in imported(path):
        top = name.split(".")[0]
        if part in NEVER_JAX:
            assert top not in {"jax", "jaxlib", "flax", "orbax"}, f"{path} imports {name}"
        if RANKS[part] == 0:
            allowed = top in sys.stdlib_module_names | RANK0_PACKAGES | {"k3serve"}
            assert allowed, f"{path} imports {name}"
        if top != "k3serve" or name == "k3serve":
            continue
        other = name.split(".")[1]
        if other == "kernels":
            assert part in KERNEL_USERS, f"{path}: only {KERNEL_USERS} may use kernels"
        elif other != part and not {part, other} <= RANK0_AMONG_THEMSELVES:
            assert RANKS[other] < RANKS[part], f"{path} imports {name}"


@pytest.mark.parametrize(
    "path", sorted((ROOT / "kernels").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT))
)
def test_kernels_import_jax_and_themselves_only(path: Path) -> None:
    for name in imported(path):
        assert not name.startswith("k3serve.") or name.startswith("k3serve.kernels"), name


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys; print('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module",
    ["k3serve.api.server", "k3serve.text.chat", "k3serve.scheduler.scheduler",
     "k3serve.lockstep.leader", "k3serve.lockstep.follower", "k3serve.chat_command"],
)  # fmt: skip
def test_host_side_never_loads_jax(module: str) -> None:
    assert "jax" not in modules_after(f"import {module}")


def test_a_follower_loads_no_api_text_or_scheduler() -> None:
    loaded = modules_after("import k3serve.app, k3serve.lockstep.follower, k3serve.runtime.engine")
    for part in ("api", "text", "scheduler"):
        assert not any(m.startswith(f"k3serve.{part}") for m in loaded), part
