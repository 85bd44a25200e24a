#!/usr/bin/env bash
# gpu_cache_write.sh WHEEL...: tests, checks and times the write kernels on a machine with a GPU and no network.
#
# What it installs, and where results go: tools/gpu_steps.sh.
# STEPS picks some of: tests memcheck racecheck bench variants. GPU_TESTS picks the tests. The exit status counts failed steps.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
if [ $# -eq 0 ]; then
    echo "usage: gpu_cache_write.sh WHEEL..." >&2
    exit 2
fi

steps=${STEPS:-tests memcheck racecheck bench variants}
source tools/gpu_steps.sh
unpack _C_stable_libtorch.abi3.so
[ -s "$PEERS_DIR/_C_stable_libtorch.abi3.so" ] || PEERS_DIR=none

# Tests
write_tests=(tests/test_cache_write*.py tests/test_copy_pages*.py) # the sanitizer is slow: no module that imports JAX
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
bench=("$python" bench/cache_write.py)
if wanted bench; then
    run bench 120 bench.txt "${bench[@]}" --pdl --json "$out/bench.json"
fi
if wanted variants; then
    run variants 100 variants.txt "${bench[@]}" --layouts --copy-pages --json "$out/variants.json"
fi

heading variants.txt && sed -n '/^\[/p; /^case/p; /Error/p' "$out/variants.txt" | cut -c1-114
heading bench.txt && cut -c1-160 "$out/bench.txt"
show_sanitizer
show_tests
show_steps
exit "$failed"
