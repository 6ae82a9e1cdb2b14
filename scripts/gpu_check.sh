#!/usr/bin/env bash
# Everything that needs a GPU, in one run of at most ten minutes; nothing is downloaded.
#
#   OUT=outputs/gpu_check bash scripts/gpu_check.sh [arguments of scripts.gpu_check]
#
# Set, all optional:
#   OUT      where results.json and results.md go (default: outputs/gpu_check)
#   PYTHON   interpreter with torch and triton (default: python3)
#   WHEELS   folder of wheels that PYTHON lacks or has in another version; used for this run alone.
#            On a machine with a network:
#              python -m pip download --no-deps --only-binary=:all: --python-version 3.12 -d FOLDER NAME
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON="${PYTHON:-python3}"
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
if [[ -n "${WHEELS:-}" ]]; then
  site="$(mktemp -d)"
  trap 'rm -rf "$site"' EXIT
  "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl
  export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
"$PYTHON" -m scripts.gpu_check --out "${OUT:-outputs/gpu_check}" "$@"
