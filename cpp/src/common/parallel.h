#pragma once

#include <cstddef>
#include <cstdint>

namespace pagetile {

// Threads that parallel_for() uses: OpenMP's own setting (OMP_NUM_THREADS, the CPUs this process
// may use). 1 in a child of fork(): GNU's OpenMP cannot start threads there once the parent has.
int max_threads();

// Calls body(context, index) for every index in [0, count), on up to max_threads() threads, in
// chunks of `grain`. An exception (the first, if several) reaches the caller when the others have
// ended.
void parallel_for(
    int64_t count,
    int64_t grain,
    void (*body)(const void* context, int64_t index),
    const void* context
);

template <class Body>
void parallel_for(int64_t count, int64_t grain, const Body& body) {
    parallel_for(
        count,
        grain,
        [](const void* context, int64_t index) { (*static_cast<const Body*>(context))(index); },
        &body
    );
}

// At least `bytes` bytes, aligned to 64, that belong to the calling thread until its next call.
// Kept between calls.
void* thread_scratch(size_t bytes);

}  // namespace pagetile
