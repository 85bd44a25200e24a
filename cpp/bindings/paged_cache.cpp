#include "paged_cache.h"

namespace pagetile {

CacheLayout parse_layout(const char* function, const std::string& layout) {
    if (layout == "NHD") {
        return CacheLayout::kNHD;
    }
    if (layout == "HND") {
        return CacheLayout::kHND;
    }
    check(
        layout == "legacy",
        function,
        ": layout must be 'NHD', 'HND' or 'legacy', got '",
        layout,
        "'"
    );
    return CacheLayout::kLegacy;
}

PagedCache::PagedCache(const Tensor& tensor, CacheLayout layout, bool is_key) {
    view = {.data = tensor.data(), .page_stride = tensor.ndim() > 0 ? tensor.stride(0) : 0};
    switch (layout) {
        case CacheLayout::kNHD:
        case CacheLayout::kHND: {
            const bool nhd = layout == CacheLayout::kNHD;
            tensor.require_ndim(4, nhd ? "[P, S, Hkv, D]" : "[P, Hkv, S, D]");
            tensor.require_dense_last_dim();
            const int token_dim = nhd ? 1 : 2;
            const int head_dim_index = nhd ? 2 : 1;
            page_size = tensor.size(token_dim);
            num_kv_heads = tensor.size(head_dim_index);
            head_dim = tensor.size(3);
            view.token_stride = tensor.stride(token_dim);
            view.head_stride = tensor.stride(head_dim_index);
            view.chunk = head_dim;
            break;
        }
        case CacheLayout::kLegacy:
            tensor.require_ndim(
                is_key ? 5 : 4, is_key ? "[P, Hkv, D / x, S, x]" : "[P, Hkv, D, S]"
            );
            page_size = tensor.size(3);
            num_kv_heads = tensor.size(1);
            head_dim = is_key ? tensor.size(2) * tensor.size(4) : tensor.size(2);
            view.token_stride = tensor.stride(3);
            view.head_stride = tensor.stride(1);
            view.chunk = is_key ? tensor.size(4) : 1;
            view.chunk_stride = tensor.stride(2);
            if (is_key) {
                tensor.require_dense_last_dim();
            }
            break;
        case CacheLayout::kPacked:
            tensor.require_ndim(3, "[total_k, Hkv, D]");
            tensor.require_dense_last_dim();
            page_size = 1;
            num_kv_heads = tensor.size(1);
            head_dim = tensor.size(2);
            view.head_stride = tensor.stride(1);
            view.chunk = head_dim;
            break;
    }
    num_pages = tensor.size(0);
}

CacheView PagedCache::read_only() const {
    return {
        .data = view.data,
        .page_stride = view.page_stride,
        .token_stride = view.token_stride,
        .head_stride = view.head_stride,
        .chunk = view.chunk,
        .chunk_stride = view.chunk_stride,
    };
}

void require_same_pages(
    const char* function,
    const PagedCache& k_cache,
    const PagedCache& v_cache,
    const Tensor& v_tensor
) {
    check(
        v_cache.num_pages == k_cache.num_pages && v_cache.page_size == k_cache.page_size &&
            v_cache.num_kv_heads == k_cache.num_kv_heads,
        function,
        ": ",
        v_tensor.name(),
        " must have the ",
        k_cache.num_pages,
        " pages of ",
        k_cache.page_size,
        " tokens and ",
        k_cache.num_kv_heads,
        " heads of k_cache, got ",
        v_cache.num_pages,
        " pages of ",
        v_cache.page_size,
        " tokens and ",
        v_cache.num_kv_heads,
        " heads"
    );
}

Scale parse_scale(const Tensor& scale, int64_t num_kv_heads, int64_t batch) {
    if (!scale.given()) {
        return {};
    }
    scale.require_dtype({DType::kFloat32});
    Scale result = {.data = scale.data_as<const float>()};
    if (scale.numel() == 1) {
        return result;
    }
    if (batch > 0 && scale.ndim() == 2) {
        scale.require_shape({batch, num_kv_heads}, "(B, Hkv)");
        result.batch_stride = scale.stride(0);
        result.head_stride = scale.stride(1);
        return result;
    }
    scale.require_shape({num_kv_heads}, "(1,) or (Hkv,)");
    result.head_stride = scale.stride(0);
    return result;
}

}  // namespace pagetile
