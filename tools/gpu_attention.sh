#!/usr/bin/env bash
# gpu_attention.sh WHEEL...: tests, checks and times the attention kernels on a machine with a GPU and no network.
#
# What it installs, and where results go: tools/gpu_steps.sh.
# STEPS picks some of: tests portable memcheck synccheck racecheck initcheck bench sweeps. GPU_TESTS picks the tests, and SUITES
# the benchmarks. PEERS_BENCH names a harness that times other libraries beside (it gets --peers and --suite). The exit status
# counts failed steps.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
if [ $# -eq 0 ]; then
    echo "usage: gpu_attention.sh WHEEL..." >&2
    exit 2
fi
steps=${STEPS:-tests portable memcheck synccheck bench}
source tools/gpu_steps.sh
unpack _vllm_fa3_C.abi3.so

# Tests: what the best kernels do, then the same with the portable one for all long queries
attention_tests=(tests/test_attention*.py tests/test_prefill*.py tests/test_bugs.py tests/test_properties.py)
if wanted tests; then
    # shellcheck disable=SC2086 # may be several files
    run tests 400 tests.txt "${pytest[@]}" --durations=8 ${GPU_TESTS:-tests}
fi
if wanted portable; then
    PAGETILE_TEST_PREFILL=portable run portable 240 tests.txt "${pytest[@]}" "${attention_tests[@]}"
fi

# Checks. Pages have slots that nobody writes, and TMA copies whole pages: initcheck is for the portable kernel.
for tool in memcheck synccheck racecheck; do
    wanted "$tool" || continue
    for kernel in best portable; do
        run "$tool-$kernel" 120 sanitizer.txt "${sanitizer[@]}" --tool "$tool" "$python" tests/sanitize_attention.py \
            --long --prefill "$kernel" --every 3
    done
done
if wanted initcheck; then
    run initcheck-portable 120 sanitizer.txt "${sanitizer[@]}" --tool initcheck "$python" tests/sanitize_attention.py \
        --long --right --prefill portable --every 3
fi

# Times
bench=("$python" bench/attention.py)
if wanted bench; then
    # shellcheck disable=SC2086 # may be several suites
    run bench 240 bench.txt "${bench[@]}" ${SUITES:-prefill mixed prefill_fp8} --json "$out/bench.json"
    if [ -n "${PEERS_BENCH:-}" ]; then
        run peers 240 peers.txt "$python" "$PEERS_BENCH" --peers fa3,fa3_contig,pagetile --suite prefill,mixed,fp8
    fi
fi
if wanted sweeps; then
    run sweeps 240 sweeps.txt "${bench[@]}" prefill_pages prefill_qlen --json "$out/sweeps.json"
    run sweeps-portable 240 sweeps.txt "${bench[@]}" prefill prefill_pages --family sm80
fi

heading sweeps.txt && cut -c1-150 "$out/sweeps.txt"
heading bench.txt && cut -c1-150 "$out/bench.txt"
heading peers.txt && cut -c1-120 "$out/peers.txt"
show_sanitizer
show_tests
show_steps
exit "$failed"
