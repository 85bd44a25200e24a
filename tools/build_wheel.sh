#!/usr/bin/env bash
# build_wheel.sh VENV: builds the wheel with the CUDA kernels into dist/ from nothing, so that build/wheel.log is complete.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: build_wheel.sh VENV}
source tools/build_env.sh

rm -rf build/wheel build/wheel.log dist
mkdir -p build dist
PAGETILE_CUDA=ON "$venv/bin/python" -m pip wheel --verbose --no-deps -Cbuild-dir=build/wheel -w dist . 2>&1 | tee build/wheel.log
touch dist/.built
