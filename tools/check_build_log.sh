#!/usr/bin/env bash
# check_build_log.sh LOG: fails if the log of a CUDA build shows a spill, local memory, a stack frame, an ignored
# register budget (C7508) or serialised WGMMA ("Performance Loss"), or if it compiled no .cu file at all.
set -euo pipefail
log=${1:?usage: check_build_log.sh LOG}

compiled=$(grep -cE 'Building CUDA object' "$log" || true)
if [ "$compiled" -eq 0 ]; then
    echo "check_build_log: $log compiled no CUDA file, so it proves nothing" >&2
    exit 1
fi

# First drop what is harmless: ptxas options on echoed command lines, and counts of zero.
findings=$(
    sed -E -e 's/-+warn-on-[a-z-]+//g' -e 's/(^|[^0-9])0 bytes (stack frame|spill stores|spill loads|lmem|cumulative stack size)/\1/g' "$log" |
        grep -niE 'C7508|performance loss|spill|local memory|[0-9]+ bytes (stack frame|lmem)' || true
)
if [ -n "$findings" ]; then
    echo "check_build_log: $log:" >&2
    echo "$findings" >&2
    exit 1
fi
echo "check_build_log: $compiled CUDA objects; no spill, no local memory, no C7508, no performance loss"
