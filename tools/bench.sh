#!/usr/bin/env bash
# bench.sh VENV: runs every benchmark with its default arguments. bench/run_all.sh is for results that are kept.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: bench.sh VENV}

for script in bench/*.py; do
    case $script in
    bench/plot.py | bench/results_table.py) continue ;; # they measure nothing
    esac
    echo "== $script"
    "$venv/bin/python" "$script"
done
