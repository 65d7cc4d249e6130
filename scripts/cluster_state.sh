# Sourced by launch_cluster.sh and stop_cluster.sh: what was started here is remembered in files of the folder `state`.
# QUADRIGA_STATE names another folder, for a second cluster on one machine.

state="${QUADRIGA_STATE:-$HOME/.cache/quadriga/cluster}"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

say() { echo "quadriga: $*" >&2; }

fail() {
    say "$1"
    exit "${2:-1}"
}

# When a process that lives started, in ticks since boot: with its number it names one process for good.
birth_of() { sed 's/.*) //; /^[ZX]/d' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20; }

# remember NAME PID
remember() { echo "$2 $(birth_of "$2")" >"$state/$1.pid"; }

# running NAME: prints the number of the remembered process, if it is still that one and lives.
running() {
    local pid birth
    [ -f "$state/$1.pid" ] && read -r pid birth <"$state/$1.pid" || return 1
    [ -n "$birth" ] && [ "$(birth_of "$pid")" = "$birth" ] && echo "$pid"
}

# background NAME COMMAND..: starts it in a session of its own, with its output in NAME.log.
background() {
    local name="$1"
    shift
    setsid nohup "$@" >"$state/$name.log" 2>&1 </dev/null &
    remember "$name" $!
}

# await NAME TEXT: shows NAME.log as it grows, until it has TEXT. Fails when the process ends before.
await() {
    local shown=0 total
    while :; do
        local alive=yes
        running "$1" >/dev/null || alive=
        total="$(wc -l <"$state/$1.log")"
        if [ "$total" -gt "$shown" ]; then
            sed -n "$((shown + 1)),${total}p" "$state/$1.log" | grep -v '^ *$' >&2 || true
            shown="$total"
        fi
        grep -qF "$2" "$state/$1.log" && return
        [ -n "$alive" ] || return 1
        sleep 0.3
    done
}

# drain_seconds OPTIONS..: what quadriga serve gives its running requests, for whoever ends it.
drain_seconds() {
    local seconds=30 before="" option
    for option in "$@"; do
        [ "$before" != --drain-seconds ] || seconds="$option"
        [ "${option#--drain-seconds=}" = "$option" ] || seconds="${option#*=}"
        before="$option"
    done
    printf '%.0f\n' "$seconds"
}

# end NAME SECONDS: SIGTERM, and SIGKILL after so long.
end() {
    local pid waited=0
    pid="$(running "$1")" || return 0
    kill -TERM "$pid" 2>/dev/null || return 0
    while [ "$(running "$1")" = "$pid" ]; do
        if [ "$waited" -ge "$(($2 * 5))" ]; then
            say "$1 (process $pid) has not ended within $2 s; killing it"
            kill -KILL "$pid" 2>/dev/null || true
            return 0
        fi
        waited=$((waited + 1))
        sleep 0.2
    done
}
