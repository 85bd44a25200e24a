#!/usr/bin/env bash
# check_sdist.sh VENV: makes the source archive in dist/, builds the wheel for CPUs from it, outside of this checkout, installs it
# into an environment of its own and runs the example there.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: check_sdist.sh VENV}
source tools/build_env.sh
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

mkdir -p dist
rm -f dist/*.tar.gz
"$venv/bin/python" -m build --sdist --outdir dist .
archive=$(realpath dist/*.tar.gz)
python3 -m venv "$folder/venv"
cp examples/quickstart.py "$folder"
cd "$folder"
PAGETILE_CUDA=OFF PAGETILE_JAX=OFF venv/bin/python -m pip install --quiet "$archive" tqdm
venv/bin/python -m pagetile
venv/bin/python quickstart.py
echo "check_sdist: $(stat -c %s "$archive") bytes, $(tar tzf "$archive" | wc -l) files"
