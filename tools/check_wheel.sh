#!/usr/bin/env bash
# check_wheel.sh WHEEL: fails if the extension in WHEEL needs a shared library beyond the C, C++ and OpenMP run times, or a symbol
# whose version the linker did not know, if it has no OpenMP, if it is not stripped, or if the wheel is larger than 30 MB. A CUDA
# library among those needed would mean that the package no longer imports on a machine without a GPU.
set -euo pipefail
wheel=${1:?usage: check_wheel.sh WHEEL}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
failed=0

complain() {
    echo "check_wheel: $wheel $*" >&2
    failed=1
}

python3 -m zipfile -e "$wheel" "$folder"
module=$folder/pagetile/_C.abi3.so
needed=$(readelf --dynamic --wide "$module" | sed -nE 's/.*\(NEEDED\).*\[(.*)\]/\1/p')
# auditwheel gives the OpenMP run time that it brings along a name of its own.
foreign=$(grep -vE '^(ld-linux-.*|lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+)\.so.*|libgomp(-[0-9a-f]+)?\.so.*)$' <<<"$needed" || true)
[ -z "$foreign" ] || complain "needs" $foreign
grep -q '^libgomp' <<<"$needed" || complain "was built without OpenMP: its CPU kernels run on one thread"

# Python's own symbols have none. Weak ones are looked for and may be missing.
unversioned=$(nm --dynamic --undefined-only "$module" | awk '$1 == "U" && $2 !~ /@|^_?Py/ { print $2 }')
[ -z "$unversioned" ] || complain "needs symbols of no version:" $unversioned
nm "$module" 2>&1 | grep -q 'no symbols' || complain "is not stripped"

size=$(stat -c %s "$wheel")
[ "$size" -le 30000000 ] || complain "has $size bytes, more than 30 MB"
[ "$failed" -eq 0 ] || exit 1
echo "check_wheel: $size bytes; needs only" $needed
