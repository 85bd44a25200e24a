// Many pages of many caches in one launch.

#include "cache_write/copy_plan.h"
#include "cache_write/cuda/cache_write_gpu.h"
#include "common/cuda.h"

#include <cute/tensor.hpp>
#include <cutlass/fast_math.h>

#include <algorithm>

namespace pagetile::gpu {
namespace {

constexpr const char* kFunction = "copy_pages";
constexpr int kThreads = 256;
constexpr int kMaxCaches = 120;  // addresses that fit into 2 KB of kernel parameters
constexpr int64_t kMaxItems = (1LL << 31) - kThreads;

// Strides in vectors.
struct CopyPagesKernelParams {
    const void* src_caches[kMaxCaches];
    void* dst_caches[kMaxCaches];
    const void* src_pages;
    const void* dst_pages;
    int64_t src_num_pages;
    int64_t dst_num_pages;
    int64_t src_page_stride;
    int64_t dst_page_stride;
    int64_t src_strides[PageShape::kMaxDims];
    int64_t dst_strides[PageShape::kMaxDims];
    cutlass::FastDivmod
        sizes[PageShape::kMaxDims];  // runs of a page, the innermost dimension first
    cutlass::FastDivmod items_per_page;
    cutlass::FastDivmod items_per_run;
    int num_items;
    bool pages_are_64_bit;
};

__device__ __forceinline__ int64_t
page_at(const CopyPagesKernelParams& params, const void* pages, int i) {
    return params.pages_are_64_bit ? static_cast<const int64_t*>(pages)[i]
                                   : static_cast<const int32_t*>(pages)[i];
}

// grid: (one thread for each (pair, run, vector of the run), cache).
template <class Vector>
__global__ void __launch_bounds__(kThreads) copy_pages_kernel(
    const __grid_constant__ CopyPagesKernelParams params
) {
    const int item = blockIdx.x * kThreads + threadIdx.x;
    if (item >= params.num_items) {
        return;
    }
    int pair;
    int item_of_page;
    int run;
    int vec;
    params.items_per_page(pair, item_of_page, item);
    params.items_per_run(run, vec, item_of_page);
    int64_t src_vec = vec;
    int64_t dst_vec = vec;
    CUTE_UNROLL
    for (int i = 0; i < PageShape::kMaxDims; ++i) {
        int index;
        params.sizes[i](run, index, run);
        src_vec += index * params.src_strides[i];
        dst_vec += index * params.dst_strides[i];
    }
    const int64_t src_page = page_at(params, params.src_pages, pair);
    const int64_t dst_page = page_at(params, params.dst_pages, pair);
    if (static_cast<uint64_t>(src_page) >= static_cast<uint64_t>(params.src_num_pages) ||
        static_cast<uint64_t>(dst_page) >= static_cast<uint64_t>(params.dst_num_pages)) {
        return;
    }
    const auto* src = static_cast<const Vector*>(params.src_caches[blockIdx.y]);
    auto* dst = static_cast<Vector*>(params.dst_caches[blockIdx.y]);
    dst[dst_page * params.dst_page_stride + dst_vec] =
        src[src_page * params.src_page_stride + src_vec];
}

// The widest access that every address and stride of both sides allows.
int64_t vector_bytes(const CopyPagesParams& params, const PageRuns& runs) {
    const int64_t size = params.element_size;
    int64_t bytes = 16;
    const auto allowed = [&] {
        bool fits = runs.length * size % bytes == 0 && params.src_page_stride * size % bytes == 0 &&
                    params.dst_page_stride * size % bytes == 0;
        for (int i = 0; i < runs.num_dims; ++i) {
            fits = fits && runs.dims[i].src_stride * size % bytes == 0 &&
                   runs.dims[i].dst_stride * size % bytes == 0;
        }
        for (int64_t i = 0; i < params.num_caches; ++i) {
            fits = fits && reinterpret_cast<uintptr_t>(params.src_caches[i]) % bytes == 0 &&
                   reinterpret_cast<uintptr_t>(params.dst_caches[i]) % bytes == 0;
        }
        return fits;
    };
    while (bytes > size && !allowed()) {
        bytes /= 2;
    }
    return bytes;
}

using Kernel = void (*)(CopyPagesKernelParams);

Kernel instance(int64_t bytes) {
    switch (bytes) {
        case 16:
            return copy_pages_kernel<uint4>;
        case 8:
            return copy_pages_kernel<uint2>;
        case 4:
            return copy_pages_kernel<uint32_t>;
        case 2:
            return copy_pages_kernel<uint16_t>;
        default:
            return copy_pages_kernel<uint8_t>;
    }
}

}  // namespace

void copy_pages(const CopyPagesParams& params, Stream stream) {
    const DeviceGuard guard(params.device, kFunction);
    const PageRuns runs = page_runs(params);
    const int64_t bytes = vector_bytes(params, runs);
    const auto in_vectors = [&](int64_t elements) {
        return elements * params.element_size / bytes;
    };
    const int64_t items_per_run = in_vectors(runs.length);
    const int64_t items_per_page = items_per_run * runs.count;
    check(
        items_per_page <= kMaxItems,
        "copy_pages: a page must have fewer than 2^31 vectors of ",
        bytes,
        " bytes, got ",
        items_per_page
    );
    const int64_t pairs_per_launch = kMaxItems / items_per_page;
    const int64_t page_size = static_cast<int64_t>(dtype_size(params.page_dtype));

    CopyPagesKernelParams kernel_params = {};
    kernel_params.src_num_pages = params.src_num_pages;
    kernel_params.dst_num_pages = params.dst_num_pages;
    kernel_params.src_page_stride = in_vectors(params.src_page_stride);
    kernel_params.dst_page_stride = in_vectors(params.dst_page_stride);
    kernel_params.items_per_page = cutlass::FastDivmod(static_cast<int>(items_per_page));
    kernel_params.items_per_run = cutlass::FastDivmod(static_cast<int>(items_per_run));
    kernel_params.pages_are_64_bit = params.page_dtype == DType::kInt64;
    for (int i = 0; i < PageShape::kMaxDims; ++i) {
        const bool used = i < runs.num_dims;
        kernel_params.sizes[i] =
            cutlass::FastDivmod(used ? static_cast<int>(runs.dims[i].size) : 1);
        kernel_params.src_strides[i] = used ? in_vectors(runs.dims[i].src_stride) : 0;
        kernel_params.dst_strides[i] = used ? in_vectors(runs.dims[i].dst_stride) : 0;
    }
    for (int64_t first_cache = 0; first_cache < params.num_caches; first_cache += kMaxCaches) {
        const int64_t num_caches = std::min<int64_t>(kMaxCaches, params.num_caches - first_cache);
        std::copy_n(params.src_caches + first_cache, num_caches, kernel_params.src_caches);
        std::copy_n(params.dst_caches + first_cache, num_caches, kernel_params.dst_caches);
        for (int64_t pair = 0; pair < params.num_pairs; pair += pairs_per_launch) {
            const int64_t num_pairs = std::min(pairs_per_launch, params.num_pairs - pair);
            kernel_params.src_pages = static_cast<const char*>(params.src_pages) + pair * page_size;
            kernel_params.dst_pages = static_cast<const char*>(params.dst_pages) + pair * page_size;
            kernel_params.num_items = static_cast<int>(num_pairs * items_per_page);
            const dim3 grid(
                static_cast<unsigned>((kernel_params.num_items + kThreads - 1LL) / kThreads),
                static_cast<unsigned>(num_caches)
            );
            instance(bytes)<<<grid, kThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(
                kernel_params
            );
            check_launch(cudaGetLastError(), kFunction, params.device);
        }
    }
}

}  // namespace pagetile::gpu
