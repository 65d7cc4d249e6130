#!/usr/bin/env bash
# One command that checks the CUDA path on a machine with one GPU and torch, within 8 minutes, without installing or
# fetching anything; results go to $OUT (default: gpu-check), as gpu_check.json and, with matplotlib, as pictures.
#   bash scripts/gpu_check.sh
#   bash scripts/gpu_check.sh --cpu      # the reduced form that the tests run: no GPU, stand-ins for its kernels
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}"
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" scripts/gpu_check.py "$@"
