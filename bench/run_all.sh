#!/usr/bin/env bash
# run_all.sh NAME [WHEEL...]: measures all that bench/results/NAME.md shows, beside the peers that are here; writes its tables and plots.
#
# For a machine with a GPU; no network is needed. PYTHON (default: python3) has torch, and pagetile unless wheels are given: those
# are installed into .site. bench/peers/fetch.sh gets FlashAttention 3 and vLLM's write kernel, FlashInfer is used where it is
# installed. SECTIONS picks some of: decode prefill sweeps cache_write merge_states host_overhead. What they print and their JSON
# files go to $OUT (default: build/bench). Elsewhere the same page comes from such a folder:
#     python bench/results_table.py NAME --collect FOLDER && python bench/plot.py bench/results/NAME.json
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
name=${1:?usage: run_all.sh NAME [WHEEL...]}
shift
sections=${SECTIONS:-decode prefill sweeps cache_write merge_states host_overhead}
python=${PYTHON:-python3}
mkdir -p "${OUT:-build/bench}"
out=$(realpath "${OUT:-build/bench}")
failed=0

if [ $# -gt 0 ]; then
    "$python" -m pip install --quiet --no-index --no-deps --upgrade --target .site "$@" || exit 2
    export PYTHONPATH=$PWD/.site${PYTHONPATH:+:$PYTHONPATH}
fi
export PEERS_DIR=${PEERS_DIR:-$PWD/.peers/run} PYTHONUNBUFFERED=1
"$python" -c "import sys, torch; sys.exit(not torch.cuda.is_available())" || {
    echo "run_all.sh: $python sees no CUDA device: nothing is measured, and no page is touched" >&2
    exit 2
}
for packed in .peers/*.xz; do
    library=$PEERS_DIR/$(basename "$packed" .xz)
    if [ -f "$packed" ] && [ ! -s "$library" ]; then
        mkdir -p "$PEERS_DIR" && xz -dkc "$packed" >"$library"
    fi
done

# measure SECTION SCRIPT ARGS...
measure() {
    local section=$1 script=$2
    shift 2
    [[ " $sections " == *" $section "* ]] || return 0
    echo "== $section"
    "$python" "bench/$script.py" "$@" --json "$out/$section.json" | tee "$out/$section.txt" || failed=$((failed + 1))
}

measure decode attention decode spec fp8 uneven --peers fa3,flashinfer,flashinfer_xqa,sdpa,legacy
measure prefill attention prefill chunk mixed prefill_fp8 --peers fa3,fa3_contiguous,flashinfer,sdpa,sm80 --seconds 0.4
measure sweeps attention pages groups qlen prefill_pages --peers fa3
measure cache_write cache_write --pdl
measure merge_states merge_states
measure host_overhead host_overhead

"$python" bench/results_table.py "$name" --collect "$out" || failed=$((failed + 1))
if "$python" -c "import matplotlib" 2>/dev/null; then
    "$python" bench/plot.py "bench/results/$name.json" || failed=$((failed + 1))
else
    echo "no matplotlib here: plots are drawn where it is, from bench/results/$name.json"
fi
exit "$failed"
