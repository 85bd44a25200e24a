#!/usr/bin/env bash
# cpp_example_gpu.sh VENV: installs the C++ library that the wheel with CUDA kernels was made of (build/wheel; no kernel is
# compiled again), then builds examples/cpp against it and runs decode_gpu: on the GPU, if there is one, and on the CPU.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$(realpath "${1:?usage: cpp_example_gpu.sh VENV}")
export PATH=$venv/bin:$PATH${CUDACXX:+:$(dirname "$CUDACXX")} # for cmake, ninja and nvcc
source tools/build_env.sh
build=$PWD/build/cpp-example-gpu

rm -rf "$build"
cmake --install build/wheel --component cpp --prefix "$build/install"

# A wheel built without an nvcc on the machine had PyPI's in an environment that is gone.
toolkit=()
if ! command -v nvcc >/dev/null; then
    packages=$(PYTHONPATH=tools/build_backend "$venv/bin/python" -c 'import pagetile_build; print(*pagetile_build.NVCC)')
    [ -f build/cuda-toolkit/.tools ] || tools/make_venv.sh build/cuda-toolkit $packages
    root=$(echo "$PWD"/build/cuda-toolkit/lib/python3*/site-packages/nvidia/cu13)
    # It has libcudart.so.13 without the plain name that CMake 4.4 looks for; the static one is linked.
    toolkit=(-DCUDAToolkit_ROOT="$root" -DCUDA_CUDART="$(echo "$root"/lib/libcudart.so.*)")
fi

cmake -G Ninja -S examples/cpp -B "$build" -DCMAKE_PREFIX_PATH="$build/install" -DCMAKE_BUILD_TYPE=Release "${toolkit[@]}"
cmake --build "$build"
"$build/decode_gpu"
"$build/decode_gpu" --cpu
