#!/usr/bin/env bash
# check_wheel.sh WHEEL: fails if the extension in WHEEL needs a shared library beyond the C, C++ and OpenMP run times.
# A CUDA library among them would mean that the package no longer imports on a machine without a GPU.
set -euo pipefail
wheel=${1:?usage: check_wheel.sh WHEEL}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

python3 -m zipfile -e "$wheel" "$folder"
needed=$(readelf --dynamic --wide "$folder"/pagetile/_C.abi3.so | sed -nE 's/.*\(NEEDED\).*\[(.*)\]/\1/p')
foreign=$(grep -vE '^(ld-linux-.*|lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+|gomp)\.so.*)$' <<<"$needed" || true)
if [ -n "$foreign" ]; then
    echo "check_wheel: $wheel needs" $foreign >&2
    exit 1
fi
echo "check_wheel: needs only" $needed
