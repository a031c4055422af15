"""How every k3serve process logs and ends.

Rule: standard library only, so that it costs nothing to import.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import NoReturn

FLUSH_S = 2.0  # a full pipe of a log that nobody reads must not hold the end


def exit_now(status: int) -> NoReturn:
    """Ends the process past all clean-up. What was logged is written, if somebody still reads."""
    unread = threading.Timer(FLUSH_S, os._exit, (status or 1,))
    unread.daemon = True
    unread.start()
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
