#!/usr/bin/env bash
# sanitize_cpu.sh VENV [PYTEST_ARGS...]: tests a CPU build with the address and undefined-behaviour sanitizers, put before the
# one installed in VENV. The first thing found ends the run.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$(realpath "${1:?usage: sanitize_cpu.sh VENV [PYTEST_ARGS...]}")
shift
out=$PWD/build/sanitize
source tools/build_env.sh
source tools/jax_headers.sh

rm -rf "$out/site"
mkdir -p "$out"
PAGETILE_CUDA=OFF "$venv/bin/python" -m pip install --quiet --no-deps --target "$out/site" \
    -Cbuild-dir="$out/obj" -Ccmake.define.PAGETILE_SANITIZE=ON .

# Python itself is built without them: their runtime comes first, and libstdc++, whose exceptions it watches. What Python
# and PyTorch leave behind at exit is not ours to look at. Some tests want a plain SIGSEGV, at forbidden pages. What is found
# is in $out/found.*: pytest would keep it to itself.
export PYTHONPATH=$out/site
export LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libstdc++.so)"
export ASAN_OPTIONS=detect_leaks=0:alloc_dealloc_mismatch=0:handle_segv=0:log_path=$out/found
export UBSAN_OPTIONS=print_stacktrace=1:log_path=$out/found
"$venv/bin/python" -m pytest -q -p no:cacheprovider "$@"
