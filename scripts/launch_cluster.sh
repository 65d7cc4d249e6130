#!/usr/bin/env bash
# Starts or joins Ray, waits for enough devices, and starts a service. scripts/stop_cluster.sh undoes it.
#
#   scripts/launch_cluster.sh --tp N --model M [--nodes K] [--port P] [-- OPTIONS OF quadriga serve]
#       on the Ray cluster that runs here (or at RAY_ADDRESS); where there is none, on a new one
#   scripts/launch_cluster.sh --head --tp N --model M ...    on a new one, always
#   scripts/launch_cluster.sh --join ADDRESS                 on every other machine: adds it to the head's cluster
#
#   --nodes K          machines to wait for, this one included (1: Ray listens on the loopback address alone)
#   --port P           TCP port of the service's HTTP interface (8000)
#   --device D         auto, cpu or cuda (auto: GPUs where the cluster has any, else CPUs)
#   --wait-seconds S   how long to wait for nodes and devices (300)
#   --node-ip A        this machine's address for the other ones (Ray's choice)
#   --dashboard-port P port of Ray's jobs interface, on the loopback address (8265)
#   --ray-options "O"  more options for ray start, such as "--port 6380 --num-cpus 4"
#   --dry-run          only print the commands
#
# QUADRIGA_PYTHON names a Python that has the dependencies; otherwise .venv is made. QUADRIGA_STATE: see cluster_state.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/cluster_state.sh"

usage() { sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

tp="" model="" mode=auto join="" nodes=1 port=8000 device=auto wait_seconds=300 dry=""
node_ip="" dashboard_port=8265 ray_options=""
while [ $# -gt 0 ]; do
    case "$1" in
    --head) mode=head ;;
    --dry-run) dry=yes ;;
    -h | --help) usage && exit ;;
    --) shift && break ;;
    --tp | --model | --join | --nodes | --port | --device | --wait-seconds | --node-ip | --dashboard-port | \
        --ray-options)
        [ $# -gt 1 ] || fail "$1 needs a value" 2
        name="${1#--}"
        printf -v "${name//-/_}" %s "$2"
        shift
        ;;
    *) fail "unknown option $1; options of quadriga serve go after --" 2 ;;
    esac
    shift
done
for number in "${tp:-1}" "$nodes"; do
    [[ "$number" =~ ^[1-9][0-9]*$ ]] || fail "--tp and --nodes must be positive numbers, got $number" 2
done
for number in "$port" "$dashboard_port"; do
    [[ "$number" =~ ^[0-9]{1,5}$ ]] && [ "$number" -le 65535 ] || fail "ports go from 0 to 65535, got $number" 2
done
[[ "$wait_seconds" =~ ^[0-9]+([.][0-9]+)?$ ]] || fail "--wait-seconds must be a number, got $wait_seconds" 2
[[ "$device" =~ ^(auto|cpu|cuda)$ ]] || fail "--device must be auto, cpu or cuda, got $device" 2
if [ -n "$join" ]; then
    [ "$mode" = auto ] || fail "--head and --join exclude each other" 2
    mode=join
elif [ -z "$tp" ] || [ -z "$model" ]; then
    usage >&2
    fail "--tp and --model are needed" 2
fi

# run COMMAND.. / start NAME COMMAND..: prints it instead in a dry run.
run() { if [ -n "$dry" ]; then printf '%q ' "$@" && echo; else "$@"; fi; }
# set_variable NAME VALUE: for this script and all that it starts.
set_variable() { export "$1=$2" && if [ -n "$dry" ]; then printf 'export %s=%q\n' "$1" "$2"; fi; }
start() { if [ -n "$dry" ]; then run "${@:2}"; else background "$@"; fi; }

set_up() {
    if [ -n "${QUADRIGA_PYTHON:-}" ]; then
        python="$QUADRIGA_PYTHON"
    elif [ -n "$dry" ]; then
        python="${QUADRIGA_VENV:-$root/.venv}/bin/python"
    else
        source "$root/scripts/environment.sh"
        prepare_environment gguf
        python="$venv/bin/python"
    fi
    ray="$(dirname "$python")/ray"
    set_variable PYTHONPATH "$root${PYTHONPATH:+:$PYTHONPATH}"
    export PATH="$(dirname "$python"):$PATH"
    [ -n "$dry" ] && return
    for name in serve ray; do
        running "$name" >/dev/null && fail "$name was launched already; scripts/stop_cluster.sh first" 2
    done
    mkdir -p "$state"
    rm -f "$state"/*.pid "$state"/*.log "$state/env" "$state/folder"
}

# Ray's jobs interface refuses whoever has no token; every machine of a cluster needs the same.
set_up_token() {
    set_variable RAY_AUTH_MODE "${RAY_AUTH_MODE:-token}"
    [ "$RAY_AUTH_MODE" = token ] || return 0
    if [ -n "${RAY_AUTH_TOKEN:-}" ] || [ -f "${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}" ]; then
        return
    fi
    if [ "$mode" = join ]; then
        [ -n "$dry" ] || fail "no token: copy ~/.ray/auth_token from the head to this machine, or set RAY_AUTH_TOKEN" 2
    else
        if [ -n "$dry" ]; then run "$ray" get-auth-token --generate; else "$ray" get-auth-token --generate >/dev/null; fi
    fi
}

# start_ray OPTIONS..: in a folder of its own, whose path is short enough for Ray's sockets.
start_ray() {
    local folder="/tmp/quadriga-XXXXXX"
    if [ -z "$dry" ]; then
        folder="$(mktemp -d "$folder")"
        echo "$folder" >"$state/folder"
    fi
    # shellcheck disable=SC2086 # several options in one string
    start ray "$ray" start "$@" --temp-dir "$folder" --disable-usage-stats --block $ray_options
    [ -n "$dry" ] && return
    # Its many lines stay in the log, unless it fails.
    await ray "Ray runtime started" 2>/dev/null || { cat "$state/ray.log" >&2 && fail "Ray could not start"; }
}

start_head() {
    local ip="$node_ip"
    if [ -z "$ip" ] && [ "$nodes" = 1 ]; then
        ip=127.0.0.1
        # Without this, Ray on Linux replaces the loopback address by one that others can reach.
        set_variable RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER 0
    fi
    if [ "$nodes" != 1 ]; then
        # A lost machine's ranks are made anew elsewhere once Ray knows that it is lost: by default after 15 to 65 s.
        set_variable RAY_health_check_period_ms "${RAY_health_check_period_ms:-1000}"
        set_variable RAY_health_check_timeout_ms "${RAY_health_check_timeout_ms:-3000}"
        set_variable RAY_health_check_failure_threshold "${RAY_health_check_failure_threshold:-3}"
    fi
    say "starting Ray's head on ${ip:-this machine}"
    start_ray --head --dashboard-port "$dashboard_port" ${ip:+--node-ip-address "$ip"}
    [ -n "$dry" ] || RAY_ADDRESS="$(cat "$(cat "$state/folder")/ray_current_cluster")"
    set_variable RAY_ADDRESS "${RAY_ADDRESS:-${ip:-THIS-MACHINE}:6379}"
    [ "$nodes" = 1 ] || say "on each of the other machines ($((nodes - 1))): scripts/launch_cluster.sh --join $RAY_ADDRESS"
}

write_environment() {
    local name
    for name in RAY_AUTH_MODE RAY_ADDRESS RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER; do
        [ -z "${!name:-}" ] || echo "export $name=${!name}"
    done >"$state/env"
}

say_how_to_reach() {
    local url
    url="$(sed -n "s/.* is ready at //p" "$state/serve.log" | tail -n 1)"
    cat >&2 <<TEXT

The service runs. Its log: $state/serve.log
  HTTP      curl $url/health
  Python    source $state/env, then: from quadriga import Client; client = Client.connect()
  Jobs      source $state/env, then:
            ray job submit --address http://127.0.0.1:$dashboard_port --working-dir $root -- \\
                python -m quadriga serve --model $model --tp $tp --name another --port $((port + 1))
  The end   ${QUADRIGA_STATE:+QUADRIGA_STATE=$state }bash $root/scripts/stop_cluster.sh
TEXT
}

undo() { QUADRIGA_STATE="$state" QUADRIGA_PYTHON="$python" bash "$root/scripts/stop_cluster.sh"; }

set_up
set_up_token
[ -n "$dry" ] || trap '[ $? = 0 ] || undo' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# ask FUNCTION ARGUMENTS..: what a function of ours says of Ray; nothing where there is no Python yet.
ask() {
    local code='import importlib, sys; m, f = sys.argv[1].split(":"); '
    code+='print(getattr(importlib.import_module(m), f)(*sys.argv[2:]) or "")'
    [ ! -x "$python" ] || timeout 60 "$python" -c "$code" "$@"
}

if [ "$mode" = join ]; then
    [ -n "$dry" ] || trouble="$(ask driver.launch:unreachable "$join")"
    [ -z "${trouble:-}" ] || fail "$trouble" 2
    start_ray --address "$join" ${node_ip:+--node-ip-address "$node_ip"}
    say "this machine ${dry:+would have }joined the Ray cluster at $join; scripts/stop_cluster.sh takes it out again"
    exit
fi
if [ "$mode" = auto ] && [ -z "${RAY_ADDRESS:-}" ]; then
    found="$(ask driver.cluster:joinable)"
    if [ -n "$found" ]; then set_variable RAY_ADDRESS "$found"; else mode=head; fi
fi
if [ "$mode" = head ]; then
    unset RAY_ADDRESS
    start_head
else
    say "joining the Ray cluster ${RAY_ADDRESS:-that runs here}"
fi
run "$python" -m quadriga wait-for-devices --tp "$tp" --nodes "$nodes" --device "$device" --wait-seconds "$wait_seconds"
start serve "$python" -m quadriga serve --model "$model" --tp "$tp" --executor ray --device "$device" --port "$port" "$@"
[ -n "$dry" ] && exit
drain_seconds "$@" >"$state/drain"
await serve "is ready at" || fail "the service could not start; what was started here ends again"
write_environment
say_how_to_reach
