#pragma once

#include "pagetile/device.h"
#include "pagetile/dtype.h"

#include <cstdint>

namespace pagetile {

// One fp32 scale for all, or one for each KV head (and sequence, in attention). Null: 1. Strides in
// elements, 0 repeats.
struct Scale {
    const float* data = nullptr;
    int64_t batch_stride = 0;
    int64_t head_stride = 0;
};

// New rows: [T or more, num_kv_heads, head_dim], the last dimension dense. Strides in elements.
struct NewRows {
    const void* data = nullptr;
    int64_t row_stride = 0;
    int64_t head_stride = 0;
    int64_t head_dim = 0;
};

// A paged cache. Element (page, token, head, d) stands at
//     page * page_stride + token * token_stride + head * head_stride + (d / chunk) * chunk_stride +
// d % chunk. chunk == head_dim is the usual dense row (NHD, HND, packed [.., 2 * head_dim]: strides
// say which). The legacy layouts split the row: K [pages, heads, head_dim / x, page_size, x] has
// chunk x, V [pages, heads, head_dim, page_size] has chunk 1.
template <class Byte>
struct PagedView {
    Byte* data = nullptr;
    int64_t page_stride = 0;
    int64_t token_stride = 0;
    int64_t head_stride = 0;
    int64_t chunk = 0;
    int64_t chunk_stride = 0;
};

using CacheView = PagedView<const void>;
using MutableCacheView = PagedView<void>;

struct CacheWriteParams {
    // Sizes
    int64_t num_tokens = 0;  // T: the length of slot_mapping; k and v may have more rows
    int64_t num_kv_heads = 0;
    int64_t num_pages = 0;
    int64_t page_size = 0;

    // Types: a cache holds the rows' own type, or e4m3 or e5m2.
    DType dtype = DType::kFloat32;
    DType cache_dtype = DType::kFloat32;

    // Tensors
    NewRows k;
    NewRows v;
    MutableCacheView k_cache;
    MutableCacheView v_cache;
    // [T], int64 or int32: page * page_size + offset. Outside [0, num_pages * page_size): skipped
    const void* slot_mapping = nullptr;
    DType slot_dtype = DType::kInt64;
    Scale k_scale;  // 1 or num_kv_heads; stored = saturate(x / scale). Only for fp8 caches
    Scale v_scale;

    // Launch as a programmatic dependent of the kernel before it in the stream. Slots and scales
    // are then read early: no kernel of the unbroken chain of such launches before this one, nor
    // the kernel that the chain follows, may write them. Rows and caches wait. The CPU ignores it.
    bool pdl = false;

    Device device;
};

// Writes rows 0..T-1 of k and v into their slots.
// Throws std::invalid_argument on sizes and types it cannot take, NotBuiltError where the device
// has no kernel. Two tokens with one slot are a race, as in every cache-write kernel.
void cache_write(const CacheWriteParams& params, Stream stream);

}  // namespace pagetile
