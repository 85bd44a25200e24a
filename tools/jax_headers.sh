# Sourced by the scripts that build for one environment, $venv: pagetile.jax is built for the JAX in it, from its headers,
# or not at all. The build would else fetch a jaxlib for them (tools/build_backend), as it does for a wheel that is to serve
# every JAX.
if [ -z "${PAGETILE_JAX:-}${XLA_FFI_ROOT:-}" ]; then
    headers=$(echo "$venv"/lib/python*/site-packages/jaxlib/include)
    if [ -d "$headers" ]; then
        export XLA_FFI_ROOT=$(realpath "$headers")
    else
        export PAGETILE_JAX=OFF
    fi
fi
