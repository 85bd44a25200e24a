# Sourced by the scripts that compile: as many jobs as there are cores, and free memory of 2 GB for each: a compile takes at most
# a third of that (docs/build.md). And ccache, where there is one.
if [ -z "${CMAKE_BUILD_PARALLEL_LEVEL:-}" ]; then
    jobs=$(awk '/^MemAvailable:/ { print int($2 / (2 * 1024 * 1024)) }' /proc/meminfo)
    jobs=$((jobs < $(nproc) ? jobs : $(nproc)))
    export CMAKE_BUILD_PARALLEL_LEVEL=$((jobs > 0 ? jobs : 1))
fi
if command -v ccache >/dev/null; then
    export CMAKE_CXX_COMPILER_LAUNCHER=${CMAKE_CXX_COMPILER_LAUNCHER:-ccache}
    export CMAKE_CUDA_COMPILER_LAUNCHER=${CMAKE_CUDA_COMPILER_LAUNCHER:-ccache}
fi
