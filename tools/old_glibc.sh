#!/usr/bin/env bash
# old_glibc.sh FOLDER: link libraries in FOLDER/lib with which this machine's compiler makes a module for manylinux_2_28, and in
# FOLDER/openmp an OpenMP run time for it, which auditwheel puts into the wheel. Does nothing where glibc is 2.28 or older, as in
# a manylinux container, whose compiler has all this.
#
# A symbol gets its version when it is linked, from the libraries at hand: pthread_create of glibc 2.36 has one that 2.28 does not
# have. So glibc comes from Debian 11, through apt and its signatures: what it added since 2.28 is little, and auditwheel tells if
# any of it is used. libstdc++ is this machine's, with the versions that manylinux_2_28 promises; what the compiler's headers need
# beyond them is taken from its static library, as the compilers of manylinux containers do it.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:?usage: old_glibc.sh FOLDER}")

have=$(getconf GNU_LIBC_VERSION | sed 's/glibc //')
if [ "$(printf '%s\n' 2.28 "$have" | sort -V | tail -1)" = 2.28 ]; then
    echo "old_glibc: glibc is $have, nothing to do"
    exit 0
fi
[ ! -f "$out/.built" ] || exit 0
if [ "$(uname -m)" != x86_64 ] || ! command -v apt-get >/dev/null; then
    echo "old_glibc: needs apt on an x86-64 machine; or build in a manylinux_2_28 container," \
        "or say PAGETILE_PLATFORM=linux for a wheel of this machine" >&2
    exit 1
fi

rm -rf "$out"
mkdir -p "$out/apt/lists/partial" "$out/apt/cache" "$out/root" "$out/lib" "$out/openmp"
echo "deb ${DEBIAN_MIRROR:-http://deb.debian.org/debian} bullseye main" >"$out/apt/sources.list"
options=(
    -qq -o Dir::Etc::SourceList="$out/apt/sources.list" -o Dir::Etc::SourceParts=/dev/null
    -o Dir::State::status=/dev/null -o Dir::State::Lists="$out/apt/lists" -o Dir::Cache="$out/apt/cache"
    -o APT::Sandbox::User=root
)
apt-get "${options[@]}" update
(cd "$out/apt" && apt-get "${options[@]}" download libc6 libc6-dev libgomp1)
for package in "$out"/apt/*.deb; do
    dpkg -x "$package" "$out/root"
done

# The names that -l looks for. Debian's own are links to /lib.
for name in c.so.6 m.so.6 pthread.so.0 dl.so.2 rt.so.1; do
    cp -L "$out/root/lib/x86_64-linux-gnu/lib$name" "$out/lib/"
    ln -s "lib$name" "$out/lib/lib${name%.*}"
done
cp "$out/root/usr/lib/x86_64-linux-gnu/libc_nonshared.a" "$out/lib/"
rm "$out/lib/libc.so"
echo "GROUP(libc.so.6 libc_nonshared.a AS_NEEDED($out/root/lib/x86_64-linux-gnu/ld-2.31.so))" >"$out/lib/libc.so"
cp -L "$out/root/usr/lib/x86_64-linux-gnu/libgomp.so.1" "$out/openmp/" # apart from glibc: auditwheel has it on its path
ln -s ../openmp/libgomp.so.1 "$out/lib/libgomp.so"

"${PYTHON:-python3}" tools/old_libstdcxx.py "$out/lib/libstdc++.so"

# From glibc 2.32 on it says that no thread was started yet, and shared pointers do without atomic operations. 0: never.
echo '__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;' | gcc -x c -fPIC -c - -o "$out/single.o"
ar rcs "$out/lib/libsingle_threaded.a" "$out/single.o"
touch "$out/.built"
