"""Four virtual CPU devices, as in tests/model: whichever folder is collected first starts the
backend.
"""

from __future__ import annotations

import jax

jax.config.update("jax_num_cpu_devices", 4)
