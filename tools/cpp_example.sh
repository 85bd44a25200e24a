#!/usr/bin/env bash
# cpp_example.sh VENV: installs the C++ library (CPU only) under build/cpu, then builds and runs examples/cpp against it.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$(realpath "${1:?usage: cpp_example.sh VENV}")
export PATH=$venv/bin:$PATH # for cmake and ninja
source tools/build_env.sh

cmake --preset cpu
cmake --build --preset cpu
cmake --install build/cpu
cmake -G Ninja -S examples/cpp -B build/cpp-example -DCMAKE_PREFIX_PATH="$PWD/build/cpu/install" -DCMAKE_BUILD_TYPE=Release
cmake --build build/cpp-example
build/cpp-example/decode
