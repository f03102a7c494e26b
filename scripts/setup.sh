#!/bin/sh
# Make .venv, or bring it up to date; with the argument "docs", add what the
# documentation needs. Quiet when all goes well: pip's words go to .venv/setup.log.
set -u
cd "$(dirname "$0")/.." || exit 1

extras='engine'
space_mib=3072
log=.venv/setup.log
pins=.venv/constraints.txt

fail() {
    for line in "$@"; do echo "setup: $line" >&2; done
    exit 1
}

# --- one set-up at a time -----------------------------------------------------
# The lock is on this script, which is always there and is never removed.
exec 9<"scripts/setup.sh"
if command -v flock >/dev/null && ! flock -n 9; then
    echo "setup: waits for another make, which sets up .venv" >&2
    flock 9
fi

# --- an interpreter that will do ------------------------------------------------
new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

python=
for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
    if command -v "$candidate" >/dev/null && new_enough "$candidate"; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    found=$("${PYTHON:-python3}" --version 2>&1) || found="no ${PYTHON:-python3}"
    fail "Python 3.11 or newer is needed, and here is $found" \
        "install one (Debian 12 and Ubuntu 23.04 on: apt install python3 python3-venv)," \
        "or name one: make PYTHON=/path/to/python3.12 ..."
fi
"$python" -c 'import ensurepip, venv' 2>/dev/null || fail \
    "$("$python" --version) has no venv module, which Debian and Ubuntu package apart" \
    "install it: apt install python3-venv"

# --- what is there already ----------------------------------------------------
stamp=.venv/.${1:-ready}
version() {
    "$1" -c 'import sys; print(sys.implementation.name, sys.version_info[:3])'
}
# Whether .venv has a Python that will do: that of PYTHON, where it is named.
fits() {
    new_enough .venv/bin/python || return 1
    [ -z "${PYTHON:-}" ] || [ "$(version .venv/bin/python)" = "$(version "$python")" ]
}
current() {
    [ -e "$stamp" ] && fits || return 1
    for input in pyproject.toml constraints/tested.txt scripts/setup.sh; do
        [ "$input" -nt "$stamp" ] && return 1
    done
    return 0
}
# Another make may have done the work while this one waited for the lock.
if current; then exit 0; fi

if [ ! -e .venv/.ready ]; then
    free_mib=$(df -Pm . | awk 'NR == 2 { print $4 }')
    [ "$free_mib" -ge "$space_mib" ] || fail \
        "there is too little space in $PWD: about 3 GB are needed, $free_mib MiB are free" \
        "(twice that where pip brings a torch with CUDA); make room, or use a larger disk"
fi

# --- steps, each with a sign of life ----------------------------------------------
give_reason() {
    tail -n 12 "$log" | sed 's/^/    /' >&2
    if grep -q 'No space left on device' "$log"; then
        echo "setup: the disk is full; about 3 GB are needed here," \
            "twice that where pip brings a torch with CUDA, and room in ${TMPDIR:-/tmp}" >&2
    elif grep -qE 'NewConnectionError|Temporary failure in name|timed out|No matching distribution' "$log"; then
        echo "setup: pip could not fetch a package: check the network and pip's own configuration" >&2
    fi
    fail "$1 failed; the whole story is in $log"
}

step() { # step WHAT COMMAND...: run it in the background, tell how long it takes
    what=$1
    shift
    echo "--- $what: $*" >>"$log"
    "$@" >>"$log" 2>&1 9<&- &
    pid=$!
    trap 'kill "$pid" 2>/dev/null; echo; fail "interrupted; run make again to go on"' INT TERM HUP
    while kill -0 "$pid" 2>/dev/null; do
        now=$(($(date +%s) - began))
        if [ -t 2 ]; then
            printf '\r\033[K.venv: %s, %s s' "$what" "$now" >&2
        elif [ "$now" -ge "$next_line" ]; then
            echo ".venv: $what, $now s so far" >&2
            next_line=$((now + 30))
        fi
        sleep 0.5
    done
    trap - INT TERM HUP
    if [ -t 2 ]; then printf '\r\033[K' >&2; fi
    wait "$pid" || give_reason "$what"
}

began=$(date +%s)
next_line=30

if [ "${1:-}" = docs ]; then
    step 'installing the documentation tools' \
        .venv/bin/python -m pip install --constraint "$pins" --group docs
    touch "$stamp"
    exit 0
fi

# A CUDA torch that is already there is used and never touched: the venv sees the
# packages of the interpreter it is made from, and pip may not change that one.
base=$("$python" -c 'import sys; print(sys._base_executable)')
cuda_torch=$("$base" - 2>/dev/null <<'PYTHON'
import importlib.util
if importlib.util.find_spec("torch"):
    import torch
    if torch.version.cuda:
        print(torch.__version__)
PYTHON
)
site=
if [ -n "$cuda_torch" ]; then site=--system-site-packages; fi

rm -f "$stamp"
if ! fits; then
    echo "Setting up .venv, once: a few minutes and some gigabytes, most of it torch" >&2
    rm -rf .venv
fi
mkdir -p .venv
: >"$log"
if [ ! -e .venv/bin/python ]; then
    step 'making the environment' "$python" -m venv $site .venv
fi
# Exact versions, except of a torch that is there.
if [ -n "$cuda_torch" ]; then
    { grep -v '^torch==' constraints/tested.txt; echo "torch==$cuda_torch"; } >"$pins"
else
    cp constraints/tested.txt "$pins"
fi
# The pip of Debian 12 knows no dependency groups.
step 'updating pip' .venv/bin/python -m pip install --upgrade --constraint "$pins" pip
step 'installing packages' .venv/bin/python -m pip install \
    --constraint "$pins" --build-constraint "$pins" \
    --editable ".[$extras]" --group test --group lint
touch "$stamp"
echo ".venv is ready ($(($(date +%s) - began)) s)" >&2
