#!/usr/bin/env bash
# bench.sh VENV: runs every benchmark with its default arguments. bench/run_all.sh is for results that are kept.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: bench.sh VENV}

for name in attention block_pool cache_write cpu_attention host_overhead merge_states; do
    echo "== bench/$name.py"
    "$venv/bin/python" "bench/$name.py"
done
