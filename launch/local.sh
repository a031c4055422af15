#!/bin/sh
# Serves on this machine: sets up what is missing, then becomes `python -m k3serve "$@"`.
#   sh launch/local.sh                     K3-nano on http://127.0.0.1:8000
#   sh launch/local.sh --hosts 2           the same on two hosts in lockstep
#   sh launch/local.sh --hosts 2 --restart --resume    and starts them again when one fails
#   sh launch/local.sh serve --help        all flags
#   sh launch/local.sh chat                talk to it, from another terminal
EXTRAS=${K3SERVE_EXTRAS:-serve} # tpu on a TPU host
. "$(dirname "$0")/../scripts/env.sh"
# this checkout's k3serve, not one in the folder where the command was given
export PYTHONSAFEPATH=1
exec "$PYTHON" -m k3serve "$@"
