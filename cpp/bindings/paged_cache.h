#pragma once

#include "pagetile/cache_write.h"
#include "tensor.h"

#include <string>

namespace pagetile {

enum class CacheLayout : uint8_t {
    kNHD,     // [P, S, Hkv, D]
    kHND,     // [P, Hkv, S, D]
    kLegacy,  // K [P, Hkv, D / x, S, x], V [P, Hkv, D, S]
    kPacked,  // [total_k, Hkv, D]: no pages; each row is a page of one token
};

// "NHD", "HND" or "legacy"; else std::invalid_argument.
CacheLayout parse_layout(const char* function, const std::string& layout);

// What a cache tensor's shape and strides say.
struct PagedCache {
    int64_t num_pages;
    int64_t page_size;
    int64_t num_kv_heads;
    int64_t head_dim;
    MutableCacheView view;

    // is_key: the legacy layouts of K and V differ.
    PagedCache(const Tensor& tensor, CacheLayout layout, bool is_key);

    CacheView read_only() const;
};

// K and V must agree on everything but head_dim and strides.
void require_same_pages(
    const char* function,
    const PagedCache& k_cache,
    const PagedCache& v_cache,
    const Tensor& v_tensor
);

// fp32, of 1 element, [Hkv], or (batch > 0) [B, Hkv]. `scale` not given: none.
Scale parse_scale(const Tensor& scale, int64_t num_kv_heads, int64_t batch);

}  // namespace pagetile
