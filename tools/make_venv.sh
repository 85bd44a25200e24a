#!/usr/bin/env bash
# make_venv.sh VENV ARGS...: makes the virtual environment VENV, if it is not there, and pip installs ARGS into it.
set -euo pipefail
venv=${1:?usage: make_venv.sh VENV ARGS...}
shift

echo "-- $venv: installing $*"
"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet 'pip>=25.1' # the first that knows --group
"$venv/bin/python" -m pip install --quiet "$@"
touch "$venv/.tools"
