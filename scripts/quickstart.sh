#!/usr/bin/env bash
# Generates text with SmolLM2-135M-Instruct on three Ray workers. Arguments go to `quadriga generate`:
#   bash scripts/quickstart.sh --tp 1 --prompt "Once upon a time" --max-tokens 40
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment gguf

prompt=(--chat --prompt "Why does a chariot with four horses need one driver?")
for argument in "$@"; do
    case "$argument" in
    --prompt | --prompt=* | --prompt-file | --prompt-file=* | -h | --help) prompt=() ;;
    esac
done
exec "$venv/bin/python" -m quadriga generate --model smollm2 --tp 3 --max-tokens 64 "${prompt[@]}" "$@"
