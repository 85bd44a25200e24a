#!/usr/bin/env bash
# install.sh VENV STAMP: builds the package and installs it into VENV; PAGETILE_CUDA says with or without the CUDA kernels.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: install.sh VENV STAMP}
stamp=${2:?usage: install.sh VENV STAMP}
source tools/build_env.sh
source tools/jax_headers.sh

echo "-- $venv: building and installing pagetile (PAGETILE_CUDA=${PAGETILE_CUDA:-OFF})"
rm -f "$venv"/.pagetile-cuda-*
PAGETILE_CUDA=${PAGETILE_CUDA:-OFF} "$venv/bin/python" -m pip install --quiet -Cbuild-dir="build/cuda-${PAGETILE_CUDA:-OFF}" .
touch "$venv/$stamp"
