// What the legacy kernels can take, told before anything is launched.

#include "attention/legacy/legacy.h"

#include "attention/check_call.h"
#include "common/not_built.h"
#include "pagetile/error.h"

#include <algorithm>

#if PAGETILE_HAS_CUDA
#include "attention/legacy/legacy_gpu.h"
#endif

namespace pagetile {
namespace {

// The longest sequence that the call may have.
int64_t longest_of(const AttentionParams& params) {
    const int64_t capacity = params.max_pages * params.page_size;
    return params.max_seqlen_k > 0 ? std::min(params.max_seqlen_k, capacity) : capacity;
}

bool is_aligned(const CacheView& cache, int64_t element_bytes, int64_t bytes) {
    const auto allows = [&](int64_t stride) { return stride * element_bytes % bytes == 0; };
    return reinterpret_cast<uintptr_t>(cache.data) % static_cast<uintptr_t>(bytes) == 0 &&
           allows(cache.page_stride) && allows(cache.head_stride) && allows(cache.chunk_stride);
}

std::string find_refusal(const AttentionParams& params) {
    const auto element_bytes = static_cast<int64_t>(dtype_size(params.kv_dtype));
    const int64_t chunk = 16 / element_bytes;
    if (params.q_dtype != DType::kFloat16 && params.q_dtype != DType::kBFloat16) {
        return message("float16 or bfloat16 queries, got ", dtype_name(params.q_dtype));
    }
    if (params.page_size != 8 && params.page_size != 16 && params.page_size != 32) {
        return message("pages of 8, 16 or 32 tokens, got ", params.page_size);
    }
    if (params.head_dim != params.head_dim_v || params.head_dim % chunk != 0) {
        return message(
            "one head_dim for K and V, a multiple of ",
            chunk,
            " over such caches, got ",
            params.head_dim,
            " and ",
            params.head_dim_v
        );
    }
    // 16 bytes of a key and 8 tokens of an element of V are read at a time.
    const bool is_legacy = params.k_cache.chunk == chunk && params.k_cache.token_stride == chunk &&
                           params.v_cache.token_stride == 1 &&
                           is_aligned(params.k_cache, element_bytes, 16) &&
                           is_aligned(params.v_cache, element_bytes, 8 * element_bytes);
    if (!is_legacy) {
        return message(
            "dense pages of k_cache [P, Hkv, D / ",
            chunk,
            ", S, ",
            chunk,
            "] and v_cache [P, Hkv, D, S] at multiples of 16 bytes"
        );
    }
    constexpr int64_t kMostInGrid = 65535;
    if (params.num_q_heads > kMostInGrid || legacy_partitions(params) > kMostInGrid) {
        return message("at most ", kMostInGrid, " query heads, and partitions");
    }
    return "";
}

}  // namespace

int64_t legacy_partitions(const AttentionParams& params) {
    return (longest_of(params) + kLegacyPartition - 1) / kLegacyPartition;
}

std::string legacy_attention(
    const AttentionParams& params,
    [[maybe_unused]] const LegacyScratch& scratch,
    [[maybe_unused]] Stream stream
) {
    if (params.device.kind == DeviceKind::kCpu) {
        paged_attention(params, stream);
        return "";
    }
    check_call(params, stream);
    std::string refusal = find_refusal(params);
    if (!refusal.empty()) {
        return refusal;
    }
#if PAGETILE_HAS_CUDA
    return gpu::legacy_attention(params, scratch, longest_of(params), stream);
#else
    throw_not_built("paged_attention", params.device);
#endif
}

}  // namespace pagetile
