#!/usr/bin/env bash
# Lint, format check and the whole test suite, in two processes. Arguments go to pytest, in one then:
#   bash scripts/test.sh tests/scheduler
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment gguf,plots,test

cd "$root"
"$venv/bin/ruff" check .
"$venv/bin/ruff" format --check .
# Threads of both that wait must not keep the cores from those that work.
export OMP_WAIT_POLICY=passive
[ $# -gt 0 ] || set -- -n 2 --dist loadfile --no-loadscope-reorder
exec "$venv/bin/python" -m pytest "$@"
