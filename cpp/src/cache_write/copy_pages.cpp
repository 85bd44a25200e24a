// The C++ entry point of the page copy: checks sizes, joins the dimensions of a page, picks the backend.

#include "pagetile/copy_pages.h"

#include "cache_write/copy_plan.h"
#include "cache_write/cpu/cache_write_cpu.h"
#include "common/not_built.h"
#include "pagetile/error.h"

#if PAGETILE_HAS_CUDA
#include "cache_write/cuda/cache_write_gpu.h"
#endif

namespace pagetile {

PageRuns page_runs(const CopyPagesParams& params) {
    // Join each dimension with the one inside it where both sides step through the two as one.
    PageShape joined;
    for (int i = params.page.num_dims - 1; i >= 0; --i) {
        const int64_t size = params.page.sizes[i];
        const int64_t src_stride = params.page.src_strides[i];
        const int64_t dst_stride = params.page.dst_strides[i];
        if (size == 1) {
            continue;
        }
        const int last = joined.num_dims - 1;
        if (last >= 0 && src_stride == joined.sizes[last] * joined.src_strides[last] &&
            dst_stride == joined.sizes[last] * joined.dst_strides[last]) {
            joined.sizes[last] *= size;
            continue;
        }
        joined.sizes[joined.num_dims] = size;
        joined.src_strides[joined.num_dims] = src_stride;
        joined.dst_strides[joined.num_dims] = dst_stride;
        ++joined.num_dims;
    }

    // The innermost dimension is the run where it is dense on both sides; else a run is an element.
    PageRuns runs;
    int first = 0;
    if (joined.num_dims > 0 && joined.src_strides[0] == 1 && joined.dst_strides[0] == 1) {
        runs.length = joined.sizes[0];
        first = 1;
    }
    for (int i = first; i < joined.num_dims; ++i) {
        runs.dims[runs.num_dims++] = {
            .size = joined.sizes[i],
            .src_stride = joined.src_strides[i],
            .dst_stride = joined.dst_strides[i],
        };
        runs.count *= joined.sizes[i];
    }
    return runs;
}

void copy_pages(const CopyPagesParams& params, Stream stream) {
    check(params.num_caches >= 0, "copy_pages: num_caches must be >= 0, got ", params.num_caches);
    check(params.num_pairs >= 0, "copy_pages: num_pairs must be >= 0, got ", params.num_pairs);
    check(
        params.element_size == 1 || params.element_size == 2 || params.element_size == 4,
        "copy_pages: element_size must be 1, 2 or 4, got ",
        params.element_size
    );
    check(
        params.page.num_dims >= 0 && params.page.num_dims <= PageShape::kMaxDims,
        "copy_pages: a page must have at most ",
        PageShape::kMaxDims,
        " dimensions, got ",
        params.page.num_dims
    );
    check(
        params.page_dtype == DType::kInt32 || params.page_dtype == DType::kInt64,
        "copy_pages: src_pages must be int32 or int64, got ",
        dtype_name(params.page_dtype)
    );
    for (int i = 0; i < params.page.num_dims; ++i) {
        if (params.page.sizes[i] == 0) {
            return;
        }
    }
    if (params.num_caches == 0 || params.num_pairs == 0) {
        return;
    }
    if (params.device.kind == DeviceKind::kCpu) {
        cpu::copy_pages(params);
        return;
    }
#if PAGETILE_HAS_CUDA
    gpu::copy_pages(params, stream);
#else
    static_cast<void>(stream);
    throw_not_built("copy_pages", params.device);
#endif
}

}  // namespace pagetile
