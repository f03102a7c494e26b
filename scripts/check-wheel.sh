#!/bin/sh
# Build the wheel, install it beside anyio alone, and import it from there.
# What is tested is what users get, not the tree.
set -eu
cd "$(dirname "$0")/.."
root=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
say() { "$@" >"$work/log" 2>&1 || { tail -n 20 "$work/log" >&2; echo "check-wheel: failed: $*" >&2; exit 1; }; }

say .venv/bin/python -m pip wheel --quiet --no-deps \
  --build-constraint constraints/tested.txt --wheel-dir "$work" .
say .venv/bin/python -m venv --without-pip "$work/venv"
say .venv/bin/python -m pip --python "$work/venv/bin/python" install \
  --constraint constraints/tested.txt "$work"/*.whl
cd "$work"
"$work/venv/bin/python" -I "$root/scripts/smoke.py"
