#!/usr/bin/env bash
# try_wheel.sh FOLDER WHEEL: installs WHEEL into a new environment in FOLDER, with nothing but NumPy beside it, and uses it there:
# the example, and tests/test_wheel.py (what the wheel holds, what an import loads and how long it takes).
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(realpath -m "${1:?usage: try_wheel.sh FOLDER WHEEL}")
wheel=$(realpath "${2:?usage: try_wheel.sh FOLDER WHEEL}")

rm -rf "$folder"
mkdir -p "$folder"
cp examples/quickstart.py tests/test_wheel.py "$folder"
python3 -m venv "$folder/venv"
cd "$folder"
venv/bin/python -m pip install --quiet "$wheel" tqdm pytest
venv/bin/python -m pagetile
venv/bin/python quickstart.py
venv/bin/python -m pytest -q -p no:cacheprovider test_wheel.py
