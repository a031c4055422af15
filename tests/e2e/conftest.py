"""K3-nano behind a real server, started as a user would; one for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serving import Server


@pytest.fixture(scope="session")
def nano() -> Iterator[Server]:
    with Server() as server:
        yield server
        compiled = [
            line
            for line in server.text("/metrics").splitlines()
            if line.startswith("k3serve_compilations_after_ready_total")
        ]
        assert server.stop() == 0, "".join(server.log[-20:])
    # invariant 4: whatever the tests above asked for, nothing was compiled after "ready"
    assert [line.split()[-1] for line in compiled] == ["0.0"]
