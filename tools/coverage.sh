#!/usr/bin/env bash
# coverage.sh VENV: tests an instrumented CPU build, put before the one installed in VENV.
# Fails under 95 % of lines: of the Python package, and of cpp/src without what needs a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$(realpath "${1:?usage: coverage.sh VENV}")
out=$PWD/build/coverage
source tools/build_env.sh
source tools/jax_headers.sh

rm -rf "$out/site"
mkdir -p "$out"
find "$out" -name '*.gcda' -delete
PAGETILE_CUDA=OFF "$venv/bin/python" -m pip install --quiet --no-deps --target "$out/site" \
    -Cbuild-dir="$out/obj" -Ccmake.define.PAGETILE_COVERAGE=ON .

export PYTHONPATH=$out/site
for isa in x86_64_v1 x86_64_v3; do # what older CPUs run counts too; a machine that has no such kernels repeats its own
    PAGETILE_CPU_ISA=$isa "$venv/bin/python" -m pytest -q tests/test_attention.py tests/test_cache_write.py tests/test_merge.py
done
# test_prefill_gpu.py: on a CPU, nothing but more and longer problems of the same kind.
"$venv/bin/python" -m pytest -q --ignore=tests/test_prefill_gpu.py --cov=pagetile --cov-report=term-missing --cov-fail-under=95

# Inner loops do run more than 2^32 times, which gcovr would take for a fault of gcov's.
# The library's objects alone. Their templates exist once a type and instruction set; a line counts if any of them ran.
"$venv/bin/gcovr" --root . --merge-lines --gcov-suspicious-hits-threshold 0 --filter 'cpp/src/' --exclude '.*/sm[0-9]+/' --fail-under-line 95 \
    "$out/obj/cpp/CMakeFiles"
