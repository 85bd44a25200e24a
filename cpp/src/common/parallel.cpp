#include "common/parallel.h"

#include <exception>
#include <new>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

#ifdef _OPENMP
#include <omp.h>
#endif

namespace pagetile {
namespace {

bool in_forked_child = false;

[[maybe_unused]] const int fork_handler = [] {
#if defined(__unix__) || defined(__APPLE__)
    return pthread_atfork(nullptr, nullptr, [] { in_forked_child = true; });
#else
    return 0;
#endif
}();

}  // namespace

int max_threads() {
#ifdef _OPENMP
    return in_forked_child ? 1 : omp_get_max_threads();
#else
    return 1;
#endif
}

void parallel_for(
    int64_t count,
    int64_t grain,
    void (*body)(const void* context, int64_t index),
    const void* context
) {
#ifdef _OPENMP
    if (count > grain && max_threads() > 1) {
        std::exception_ptr failure;  // the first one; an exception must not leave a parallel region
#pragma omp parallel for schedule(dynamic, grain)
        for (int64_t i = 0; i < count; ++i) {
            try {
                body(context, i);
            } catch (...) {
#pragma omp critical(pagetile_failure)
                failure = failure ? failure : std::current_exception();
            }
        }
        if (failure) {
            std::rethrow_exception(failure);
        }
        return;
    }
#endif
    for (int64_t i = 0; i < count; ++i) {
        body(context, i);
    }
}

void* thread_scratch(size_t bytes) {
    constexpr std::align_val_t kAlignment{64};

    struct Buffer {
        void* data = nullptr;
        size_t size = 0;

        ~Buffer() { ::operator delete(data, kAlignment); }
    };

    thread_local Buffer buffer;
    if (buffer.size < bytes) {
        ::operator delete(buffer.data, kAlignment);
        buffer.data = nullptr;
        buffer.size = 0;
        buffer.data = ::operator new(bytes, kAlignment);
        buffer.size = bytes;
    }
    return buffer.data;
}

}  // namespace pagetile
