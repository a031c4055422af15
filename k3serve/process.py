"""How every k3serve process logs and ends.

Rule: standard library only, so that it costs nothing to import.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn


def exit_now(status: int) -> NoReturn:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def start_logging() -> None:
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    for noisy in ("jax", "absl"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
