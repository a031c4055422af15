"""Finding the other hosts: only a platform that knows of several makes a run of several."""

from __future__ import annotations

import pytest
from jax._src.clusters import ClusterEnv

from k3serve.runtime import mesh


def platform(*, present: bool = True, count: int | None = 1, opt_in: bool = False) -> type:
    """A stand-in for one of JAX's cluster kinds; count None: it cannot tell."""

    class Platform:
        opt_in_only_method = opt_in

        @staticmethod
        def is_env_present() -> bool:
            return present

        @staticmethod
        def get_process_count() -> int:
            if count is None:
                raise RuntimeError("no job set")
            return count

    return Platform


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ([], False),
        ([platform(present=False, count=4)], False),
        ([platform(count=4, opt_in=True)], False),  # mpi4py is installed, say
        ([platform(count=1)], False),
        ([platform(count=None)], False),
        ([platform(present=False), platform(count=4)], True),
    ],
    ids=["none", "absent", "opt-in", "one-host", "cannot-tell", "four-hosts"],
)
def test_a_platform_with_several_processes_is_a_pod(
    monkeypatch: pytest.MonkeyPatch, kinds: list[type], expected: bool
) -> None:
    monkeypatch.setattr(ClusterEnv, "_cluster_types", kinds)
    assert mesh._on_pod() is expected
