#!/usr/bin/env bash
# test_vllm.sh VENV [WHEEL]: runs tests/test_vllm.py over vLLM 0.26.0, in the virtual environment VENV of its own, which is
# made if it is not there (vLLM and its PyTorch 2.11 with CUDA: 4 GB to fetch, 8 GB on the disk, 3 minutes on 2 cores).
# No GPU is needed: without one, the layers run on CPU tensors. Without WHEEL, the CPU build of this tree is made and
# installed.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: test_vllm.sh VENV [WHEEL]}
wheel=${2:-}

mapfile -t runners < <(grep -oE '\b(pytest|hypothesis)==[0-9.]+' pyproject.toml)
[ -f "$venv/.tools" ] || tools/make_venv.sh "$venv" vllm==0.26.0 "${runners[@]}"
if [ -n "$wheel" ]; then
    "$venv/bin/python" -m pip install --quiet --force-reinstall --no-deps "$wheel"
    "$venv/bin/python" -m pip install --quiet "$wheel"
else
    PAGETILE_CUDA=OFF tools/install.sh "$venv" .pagetile-cuda-OFF
fi
"$venv/bin/python" -c 'from importlib.metadata import version; print("-- vllm", version("vllm"), "torch", version("torch"))'
"$venv/bin/python" -m pytest tests/test_vllm.py
