#!/usr/bin/env bash
# cross_arm.sh VENV: compiles the C++ library for 64-bit Arm, without CUDA and Python, and the C++ example with it, which is
# run in an emulator. Needs a cross compiler and qemu (Debian: g++-aarch64-linux-gnu, qemu-user-static).
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$(realpath "${1:?usage: cross_arm.sh VENV}")
export PATH=$venv/bin:$PATH # for cmake and ninja
source tools/build_env.sh
build=$PWD/build/aarch64

for program in aarch64-linux-gnu-g++ qemu-aarch64-static; do
    command -v $program >/dev/null || { echo "cross_arm: no $program" >&2 && exit 1; }
done
rm -rf "$build"
cross=(
    -G Ninja -DCMAKE_BUILD_TYPE=Release
    -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++
)
cmake -S . -B "$build/library" "${cross[@]}" -DPAGETILE_CUDA=OFF -DPAGETILE_BUILD_PYTHON=OFF -DPAGETILE_WERROR=ON
cmake --build "$build/library"
cmake --install "$build/library" --component cpp --prefix "$build/install"
cmake -S examples/cpp -B "$build/example" "${cross[@]}" -DCMAKE_PREFIX_PATH="$build/install"
cmake --build "$build/example"
qemu-aarch64-static -L /usr/aarch64-linux-gnu "$build/example/decode"
