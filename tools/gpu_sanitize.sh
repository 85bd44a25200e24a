#!/usr/bin/env bash
# gpu_sanitize.sh WHEEL...: all kernels for GPUs under compute-sanitizer, on a machine with a GPU and no network.
#
# What it installs, and where results go: tools/gpu_steps.sh.
# STEPS picks some of: memcheck initcheck synccheck racecheck. EVERY=3 takes each third call of attention alone. The exit status
# counts failed steps. Attention has no racecheck here, and its WGMMA kernel no initcheck: these two name what is no fault
# (tests/sanitize_attention.py says why; tools/gpu_attention.sh runs them).
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
if [ $# -eq 0 ]; then
    echo "usage: gpu_sanitize.sh WHEEL..." >&2
    exit 2
fi
steps=${STEPS:-memcheck initcheck synccheck racecheck}
every=${EVERY:-1}
source tools/gpu_steps.sh

attention() { # NAME TOOL OPTIONS...
    local name=$1 tool=$2
    shift 2
    run "$name" 900 sanitizer.txt "${sanitizer[@]}" --tool "$tool" "$python" tests/sanitize_attention.py --every "$every" "$@"
}
writes() { # TOOL
    run "$1-write" 300 sanitizer.txt "${sanitizer[@]}" --tool "$1" "$python" tests/sanitize_cache_write.py
}

if wanted memcheck; then
    writes memcheck
fi
for tool in memcheck synccheck; do
    wanted "$tool" || continue
    attention "$tool-short" "$tool"
    attention "$tool-long" "$tool" --long
    attention "$tool-portable" "$tool" --long --prefill portable
done
if wanted initcheck; then
    attention initcheck-short initcheck --right
    attention initcheck-portable initcheck --long --right --prefill portable
fi
if wanted racecheck; then
    writes racecheck
fi

show_sanitizer
show_steps
exit "$failed"
