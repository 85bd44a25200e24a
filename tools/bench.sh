#!/usr/bin/env bash
# bench.sh VENV: runs every benchmark with its default arguments.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: bench.sh VENV}

for script in bench/*.py; do
    echo "== $script"
    "$venv/bin/python" "$script"
done
