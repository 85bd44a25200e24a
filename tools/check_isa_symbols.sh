#!/usr/bin/env bash
# check_isa_symbols.sh BUILD_DIR: fails if a CPU kernel object above the baseline defines a function that the linker could pick
# for code that runs on every CPU.
#
# The CPU kernels are compiled once for each instruction set. An inline function or template that they share with the rest of the
# library is a weak symbol in every object that uses it, and the linker keeps any one of the copies: if that is the AVX-512 one,
# baseline code dies of an illegal instruction on an older CPU. So every global or weak symbol of such an object must carry the name
# of its instruction set (namespace pagetile::x86_64_v4). Check optimised builds: unoptimised ones inline nothing.
set -euo pipefail
build=${1:?usage: check_isa_symbols.sh BUILD_DIR}

checked=0
failed=0
for isa in x86_64_v3 x86_64_v4; do
    tag="${#isa}$isa" # as the Itanium C++ ABI writes a namespace
    while IFS= read -r object; do
        checked=$((checked + 1))
        # Upper-case types and u, v, w are visible to the linker; U is what the object asks for.
        symbols=$(nm --defined-only "$object" | awk '$2 ~ /^[A-Zuvw]$/ && $2 != "U" { print $3 }' | grep -v "$tag" || true)
        # Personality and unwind data that the compiler itself shares is no code.
        symbols=$(grep -vE '^(DW\.ref\.__gxx_personality_v0)?$' <<<"$symbols" || true)
        if [ -n "$symbols" ]; then
            failed=1
            echo "check_isa_symbols: $object:" >&2
            c++filt <<<"$symbols" | sed 's/^/    /' >&2
        fi
    done < <(find "$build" -path "*pagetile_cpu_$isa.dir*" -name '*.o' | sort)
done

if [ "$checked" -eq 0 ]; then
    echo "check_isa_symbols: no kernel object in $build, so nothing was checked" >&2
    exit 1
fi
[ "$failed" -eq 0 ] || exit 1
echo "check_isa_symbols: $checked objects; every symbol names its instruction set"
