"""What the peer comparison says of answers that differ, and where the peer is missing."""

import pytest

from scripts.bench_peer import NEAR, differences, prompts, require_peer


def test_the_first_place_that_differs_is_named_with_the_peers_gap_there():
    theirs = {"answers": [[1, 2, 3], [4, 5, 6], [7, 8, 9]],
              "gaps": [[1.0, 1.0, 1.0], [0.5, NEAR / 2, 0.25], [2.0, 2.0, 2.0]]}  # fmt: skip
    assert differences([[1, 2, 3], [4, 9, 9], [0, 8, 9]], theirs) == [(1, NEAR / 2), (0, 2.0)]


def test_both_sides_get_the_same_prompts_and_each_of_a_batch_its_own():
    assert prompts(3, 50) == prompts(3, 50)
    assert prompts(2, 50) == prompts(3, 50)[:2]
    assert len({tuple(p) for p in prompts(3, 50)}) == 3


def test_a_missing_peer_is_named_with_the_remedy(tmp_path):
    with pytest.raises(SystemExit, match=r"no-python: No such file.*pip install torch"):
        require_peer(str(tmp_path / "no-python"))
    lacking = tmp_path / "python"
    lacking.write_text("#!/bin/sh\necho 'No module named torch' >&2\nexit 1\n")
    lacking.chmod(0o755)
    with pytest.raises(SystemExit, match=r"No module named torch.*--peer-python"):
        require_peer(str(lacking))
