# Sourced by the scripts that test and time kernels on a machine with a GPU and no network: `source tools/gpu_steps.sh WHEEL...`
# installs the wheels into .site and unpacks the peers' kernels from .peers/ if they are there. Every step has a time limit, and
# none stops the next one. Results go to $OUT (default build/gpu), eight files at most.
mkdir -p "${OUT:-build/gpu}"
out=$(realpath "${OUT:-build/gpu}")
python=${PYTHON:-python3}
failed=0
summary=
rm -f "$out"/*.txt

export PYTHONPATH=$PWD/.site PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export XLA_PYTHON_CLIENT_PREALLOCATE=false # JAX would take three quarters of the GPU's memory
export PATH=$PATH:/usr/local/cuda/bin      # for compute-sanitizer

# run NAME SECONDS LOG COMMAND...: a line on the terminal, the output in LOG. SIGINT comes first: pytest then still reports.
run() {
    local name=$1 limit=$2 log=$out/$3 start=$SECONDS status=0 line
    shift 3
    timeout --signal=INT --kill-after=15 "$limit" "$@" >>"$log" 2>&1 || status=$?
    [ "$status" -eq 0 ] || failed=$((failed + 1))
    line=$(printf '%-18s exit %3d after %3d s of %d' "$name" "$status" $((SECONDS - start)) "$limit")
    summary+=$line$'\n'
    echo "$line" | tee -a "$out/log.txt"
}

wanted() {
    [[ " $steps " == *" $1 "* ]]
}

# unpack FILE: .peers/FILE.xz into $PEERS_DIR, once.
unpack() {
    if [ -f ".peers/$1.xz" ] && [ ! -s "$PEERS_DIR/$1" ]; then
        mkdir -p "$(dirname "$PEERS_DIR/$1")"
        # shellcheck disable=SC2016 # the inner shell expands them
        run unpack-peers 60 log.txt bash -c 'xz -dkc "$1" >"$2"' -- ".peers/$1.xz" "$PEERS_DIR/$1"
    fi
}

# Short tables come last on the terminal, what matters most at the very end.
heading() {
    [ -f "$out/$1" ] && echo "== $1"
}
show_sanitizer() {
    heading sanitizer.txt &&
        grep -E 'SUMMARY|========= +(Invalid|Error:|at )|passed|failed|^OK' "$out/sanitizer.txt" | tail -n 12 | cut -c1-160
}
show_tests() {
    heading tests.txt &&
        grep -vE '^SKIPPED|^[.sxXFE]+ *(\[ *[0-9]+%\])?$' "$out/tests.txt" | tail -n 22 | cut -c1-160
}
show_steps() {
    echo "== steps"
    printf '%s' "$summary"
}

run install 60 log.txt "$python" -m pip install --no-index --no-deps --no-compile --no-cache-dir --upgrade --target .site "$@"
run nvidia-smi 30 log.txt nvidia-smi
run show_config 60 log.txt "$python" -m pagetile
export PEERS_DIR=$PWD/.peers/run
shopt -s nullglob
pytest=("$python" -m pytest -q -m gpu -p no:cacheprovider)
sanitizer=(compute-sanitizer --error-exitcode 99 --report-api-errors no --print-limit 20)
