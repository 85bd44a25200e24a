#pragma once

#include "pagetile/device.h"
#include "pagetile/dtype.h"

#include <cstdint>

namespace pagetile {

// What one page of one cache looks like: up to kMaxDims dimensions, the last one innermost.
// Strides in elements.
struct PageShape {
    static constexpr int kMaxDims = 4;

    int num_dims = 0;
    int64_t sizes[kMaxDims] = {};
    int64_t src_strides[kMaxDims] = {};
    int64_t dst_strides[kMaxDims] = {};
};

// Page dst_pages[i] of every destination := page src_pages[i] of the matching source.
struct CopyPagesParams {
    // Caches: all sources look alike, and so do all destinations.
    int64_t num_caches = 0;
    const void* const* src_caches = nullptr;  // [num_caches] addresses, an array on the host
    void* const* dst_caches = nullptr;        // [num_caches]
    int64_t element_size = 0;                 // bytes: 1, 2 or 4
    int64_t src_num_pages = 0;
    int64_t dst_num_pages = 0;
    int64_t src_page_stride = 0;
    int64_t dst_page_stride = 0;
    PageShape page;

    // Pages: a pair with a page outside its cache is skipped.
    int64_t num_pairs = 0;
    const void* src_pages = nullptr;  // [num_pairs], int32 or int64, on the device of the caches
    const void* dst_pages = nullptr;  // [num_pairs]
    DType page_dtype = DType::kInt32;

    Device device;
};

// No page may be both a source and a destination, and no destination may come twice: the copies
// run in any order. Throws std::invalid_argument on sizes it cannot take, NotBuiltError where the
// device has no kernel.
void copy_pages(const CopyPagesParams& params, Stream stream);

}  // namespace pagetile
