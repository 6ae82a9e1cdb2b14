#!/usr/bin/env bash
# Everything that needs a GPU, in one run of at most ten minutes; nothing is downloaded.
#
#   OUT=outputs/gpu_check bash scripts/gpu_check.sh [arguments of scripts.gpu_check]
#
# Set, all optional:
#   OUT      where results.json and results.md go (default: outputs/gpu_check)
#   PYTHON   interpreter with torch and triton (default: python3)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" -m scripts.gpu_check --out "${OUT:-outputs/gpu_check}" "$@"
