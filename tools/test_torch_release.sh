#!/usr/bin/env bash
# test_torch_release.sh VENV VERSION [WHEEL]: runs tests/test_torch.py on PyTorch VERSION, in the virtual environment VENV of
# its own, which is made if it is not there (PyPI's PyTorch for Linux comes with CUDA: 3 GB to fetch, 5 GB on the disk).
# Without WHEEL, the CPU build of this tree is made and installed.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: test_torch_release.sh VENV VERSION [WHEEL]}
version=${2:?usage: test_torch_release.sh VENV VERSION [WHEEL]}
wheel=${3:-}

mapfile -t runners < <(grep -oE '\b(pytest|hypothesis)==[0-9.]+' pyproject.toml)
[ -f "$venv/.tools" ] || tools/make_venv.sh "$venv" "torch==$version" "${runners[@]}"
if [ -n "$wheel" ]; then
    "$venv/bin/python" -m pip install --quiet --force-reinstall --no-deps "$wheel"
    "$venv/bin/python" -m pip install --quiet "$wheel"
else
    PAGETILE_CUDA=OFF tools/install.sh "$venv" .pagetile-cuda-OFF
fi
"$venv/bin/python" -c 'import sys, torch; print("-- torch", torch.__version__); sys.exit(torch.__version__.split("+")[0] != sys.argv[1])' "$version"
"$venv/bin/python" -m pytest tests/test_torch.py
