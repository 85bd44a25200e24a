#!/usr/bin/env bash
# build_wheel.sh VENV: builds the wheel with the CUDA kernels into dist/ from nothing, so that build/wheel.log is complete.
# build/wheel.compiles.jsonl has what each compile took; CCACHE_RECACHE=1 makes ccache compile again.
#
# CUDAARCHS names other architectures than those of a release. 100f: its machine code serves 100 and 103. Plain 120, the newest:
# its PTX serves what comes after it.
# PAGETILE_PLATFORM is the platform of the wheel's tag, and auditwheel the judge of it; "linux" asks for no more than that the
# wheel works on this machine.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: build_wheel.sh VENV}
source tools/build_env.sh
platform=${PAGETILE_PLATFORM:-manylinux_2_28}
export CUDAARCHS=${CUDAARCHS-"80-real;86-real;89-real;90a;100f-real;120"}
export PATH=$PWD/$venv/bin:$PATH # its cmake knows family targets, which those of distributions may not

rm -rf build/wheel build/wheel.log build/wheel.compiles.jsonl build/wheel.plain dist
mkdir -p build dist
export PAGETILE_COMPILES=$PWD/build/wheel.compiles.jsonl
measure="$PWD/$venv/bin/python;$PWD/tools/measure_compile.py"
export CMAKE_CXX_COMPILER_LAUNCHER="$measure${CMAKE_CXX_COMPILER_LAUNCHER:+;$CMAKE_CXX_COMPILER_LAUNCHER}"
export CMAKE_CUDA_COMPILER_LAUNCHER="$measure${CMAKE_CUDA_COMPILER_LAUNCHER:+;$CMAKE_CUDA_COMPILER_LAUNCHER}"

# How to link, where this machine's glibc is newer than the platform's
old=$PWD/build/old_glibc
settings=()
if [ "$platform" != linux ]; then
    tools/old_glibc.sh "$old"
fi
if [ "$platform" != linux ] && [ -d "$old/lib" ]; then
    export LDFLAGS="-L$old/lib -Wl,-rpath-link,$old/lib -Wl,--exclude-libs,ALL ${LDFLAGS:-}"
    libraries="-lstdc++ -l:libstdc++.a -lsingle_threaded -lpthread -ldl -lrt"
    settings+=(-Ccmake.define.CMAKE_CXX_STANDARD_LIBRARIES="$libraries")
fi

PAGETILE_CUDA=ON "$venv/bin/python" -m pip wheel --verbose --no-deps -Cbuild-dir=build/wheel "${settings[@]}" -w build/wheel.plain . 2>&1 |
    tee build/wheel.log
if [ "$platform" = linux ]; then
    cp build/wheel.plain/*.whl dist/
else
    LD_LIBRARY_PATH=$old/openmp "$venv/bin/auditwheel" repair --only-plat --plat "${platform}_$(uname -m)" -w dist build/wheel.plain/*.whl
fi
touch dist/.built
