#!/usr/bin/env bash
# gpu_cache_write.sh WHEEL...: tests, checks and times the write kernels on a machine with a GPU and no network.
#
# Installs the wheels into .site, and unpacks vLLM's kernels from .peers/ if they are there. Every step has a time limit, and none
# stops the next one. Results go to $OUT (default build/gpu), eight files at most; short tables come last on the terminal.
# STEPS picks some of: tests memcheck racecheck bench variants. GPU_TESTS picks the tests. The exit status counts failed steps.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
if [ $# -eq 0 ]; then
    echo "usage: gpu_cache_write.sh WHEEL..." >&2
    exit 2
fi

mkdir -p "${OUT:-build/gpu}"
out=$(realpath "${OUT:-build/gpu}")
python=${PYTHON:-python3}
steps=${STEPS:-tests memcheck racecheck bench variants}
failed=0
summary=
rm -f "$out"/{log,tests,sanitizer,bench,variants}.txt

export PYTHONPATH=$PWD/.site PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export XLA_PYTHON_CLIENT_PREALLOCATE=false # JAX would take three quarters of the GPU's memory
export PATH=$PATH:/usr/local/cuda/bin      # for compute-sanitizer

# run NAME SECONDS LOG COMMAND...: a line on the terminal, the output in LOG. SIGINT comes first: pytest then still reports.
run() {
    local name=$1 limit=$2 log=$out/$3 start=$SECONDS status=0 line
    shift 3
    timeout --signal=INT --kill-after=15 "$limit" "$@" >>"$log" 2>&1 || status=$?
    [ "$status" -eq 0 ] || failed=$((failed + 1))
    line=$(printf '%-14s exit %3d after %3d s of %d' "$name" "$status" $((SECONDS - start)) "$limit")
    summary+=$line$'\n'
    echo "$line" | tee -a "$out/log.txt"
}

wanted() {
    [[ " $steps " == *" $1 "* ]]
}

# Install
run install 60 log.txt "$python" -m pip install --no-index --no-deps --no-compile --no-cache-dir --upgrade --target .site "$@"
run nvidia-smi 30 log.txt nvidia-smi
run show_config 60 log.txt "$python" -m pagetile
export PEERS_DIR=$PWD/.peers/run
peer=_C_stable_libtorch.abi3.so
if [ -f ".peers/$peer.xz" ] && [ ! -s "$PEERS_DIR/$peer" ]; then
    mkdir -p "$PEERS_DIR"
    # shellcheck disable=SC2016 # the inner shell expands them
    run unpack-peers 60 log.txt bash -c 'xz -dkc "$1" >"$2"' -- ".peers/$peer.xz" "$PEERS_DIR/$peer"
fi
[ -s "$PEERS_DIR/$peer" ] || PEERS_DIR=none

# Tests
shopt -s nullglob
write_tests=(tests/test_cache_write*.py tests/test_copy_pages*.py) # the sanitizer is slow: no module that imports JAX
pytest=("$python" -m pytest -q -m gpu -p no:cacheprovider)
sanitizer=(compute-sanitizer --error-exitcode 99 --report-api-errors no --print-limit 20)
if wanted tests; then
    # shellcheck disable=SC2086 # may be several files
    run tests 240 tests.txt "${pytest[@]}" --durations=8 --junitxml="$out/tests.xml" ${GPU_TESTS:-tests}
fi
if wanted memcheck; then
    writes="test_write and (bfloat16 or head_dim or source or page or slots)"
    copies="(page_sizes and uint8) or few_bytes or any_byte or outside_a_pool"
    run memcheck 75 sanitizer.txt "${sanitizer[@]}" --tool memcheck "${pytest[@]}" "${write_tests[@]}" \
        -k "odd_addresses or pdl_writes_the_same or $copies or ($writes)"
fi
if wanted racecheck; then
    run racecheck 45 sanitizer.txt "${sanitizer[@]}" --tool racecheck "${pytest[@]}" "${write_tests[@]}" \
        -k "any_byte or (test_write and (nhd_bfloat16 or hnd_float32 or head_dim46))"
fi

# Times
bench=("$python" bench/cache_write.py --peers "$PEERS_DIR")
if wanted bench; then
    run bench 120 bench.txt "${bench[@]}" --pdl --json "$out/bench.json"
fi
if wanted variants; then
    run variants 100 variants.txt "${bench[@]}" --layouts --copy-pages --json "$out/variants.json"
fi

# Short tables: what matters most comes last
heading() {
    [ -f "$out/$1" ] && echo "== $1"
}
heading variants.txt && sed -n '/^\[/p; /^case/p; /Error/p' "$out/variants.txt" | cut -c1-114
heading bench.txt && cut -c1-160 "$out/bench.txt"
heading sanitizer.txt && grep -E 'SUMMARY|========= +(Invalid|Error:|at )|passed|failed' "$out/sanitizer.txt" | tail -n 12 | cut -c1-160
heading tests.txt && grep -vE '^SKIPPED|^[.sxXFE]+ *(\[ *[0-9]+%\])?$' "$out/tests.txt" | tail -n 22 | cut -c1-160
echo "== steps"
printf '%s' "$summary"
exit "$failed"
