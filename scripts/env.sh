# Sourced by launch/local.sh and scripts/test.sh: leaves a Python in $PYTHON that has k3serve
# installed with the extra in $EXTRAS. Uses the active virtual environment, else makes .venv here.
# Runs again in well under a second: it installs only when pyproject.toml or the extras changed.
set -eu
ROOT=$(cd "$(dirname "$0")/.." && pwd)

find_python() {
    for candidate in "${K3SERVE_PYTHON:-}" python3 python3.13 python3.12 python3.11 python; do
        [ -n "$candidate" ] || continue
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "k3serve needs Python 3.11 or newer: install it, or name it in K3SERVE_PYTHON" >&2
    exit 2
}

if [ -n "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ]; then
    PYTHON=${VIRTUAL_ENV:-$CONDA_PREFIX}/bin/python
    STAMP=${VIRTUAL_ENV:-$CONDA_PREFIX}/k3serve-$EXTRAS.stamp
else
    PYTHON=$ROOT/.venv/bin/python
    STAMP=$ROOT/.venv/k3serve-$EXTRAS.stamp
    if [ ! -x "$PYTHON" ]; then
        base=$(find_python)
        echo "k3serve: making a virtual environment in .venv with $base" >&2
        "$base" -m venv "$ROOT/.venv" || {
            echo "k3serve: $base cannot make virtual environments (on Debian: apt install python3-venv)" >&2
            exit 2
        }
    fi
fi
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "k3serve needs Python 3.11 or newer, and $PYTHON is older: use another environment" >&2
    exit 2
}

wanted=$(cd "$ROOT" && { pwd && cat pyproject.toml; } | cksum)
if [ "$(cat "$STAMP" 2>/dev/null || true)" != "$wanted" ]; then
    echo "k3serve: installing k3serve[$EXTRAS] and what it needs (a minute or two, once)" >&2
    "$PYTHON" -m pip install --quiet --disable-pip-version-check -e "$ROOT[$EXTRAS]"
    printf '%s' "$wanted" >"$STAMP"
fi
