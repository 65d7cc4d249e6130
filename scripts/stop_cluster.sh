#!/usr/bin/env bash
# Ends what launch_cluster.sh started on this machine and nothing else: the service, which finishes its requests first,
# and Ray where it was started here. QUADRIGA_STATE: see cluster_state.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/cluster_state.sh"

if [ ! -f "$state/serve.pid" ] && [ ! -f "$state/ray.pid" ]; then
    say "nothing was launched here"
    exit
fi
# What the service gives its requests, and what ending it takes beside.
end serve "$(($(cat "$state/drain" 2>/dev/null || echo 30) + 60))"
end ray 45 # Ray itself waits 30 s for what else runs there
if [ -f "$state/folder" ]; then
    # Whatever of this Ray is left names its folder; the cleaner ends it and removes the folder.
    "${QUADRIGA_PYTHON:-python3}" "$root/driver/cleaner.py" "$(cat "$state/folder")" </dev/null
fi
rm -f "$state"/*.pid "$state/env" "$state/folder" "$state/drain"
say "stopped"
