#!/bin/sh
# Runs every check: lint, types, tests. Sets up what is missing. Arguments go to pytest:
#   sh scripts/test.sh                     everything
#   sh scripts/test.sh tests/text -k stop  part of the tests
EXTRAS=dev
. "$(dirname "$0")/env.sh"
cd "$ROOT"
# compiled programs are kept between runs
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$ROOT/.cache/jax}"
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.5
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check --quiet .
"$PYTHON" -m mypy
exec "$PYTHON" -m pytest "$@"
