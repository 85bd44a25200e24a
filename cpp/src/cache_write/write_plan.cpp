#include "cache_write/write_plan.h"

#include "pagetile/error.h"

#include <algorithm>

namespace pagetile {
namespace {

constexpr int64_t kMaxAccess = 16;      // bytes of the widest load and store
constexpr int kMaxConvertedVector = 8;  // elements, where the cache is fp8: a store of 8 bytes
constexpr int64_t kMaxItems = (1LL << 31) - WriteLaunch::kThreads;

bool is_aligned(const void* address, int64_t bytes) {
    return reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(bytes) == 0;
}

// Every vector of a source row starts at a multiple of `bytes`. A stride that is never stepped over
// does not count.
bool rows_allow(const CacheWriteParams& params, const NewRows& rows, int64_t bytes) {
    const auto size = static_cast<int64_t>(dtype_size(params.dtype));
    const auto steps = [&](int64_t count, int64_t stride) {
        return count <= 1 || stride * size % bytes == 0;
    };
    return is_aligned(rows.data, bytes) && steps(params.num_tokens, rows.row_stride) &&
           steps(params.num_kv_heads, rows.head_stride);
}

bool cache_allows(
    const CacheWriteParams& params, const MutableCacheView& cache, bool chunked, int64_t bytes
) {
    const auto size = static_cast<int64_t>(dtype_size(params.cache_dtype));
    const auto steps = [&](int64_t count, int64_t stride) {
        return count <= 1 || stride * size % bytes == 0;
    };
    return is_aligned(cache.data, bytes) && steps(params.num_pages, cache.page_stride) &&
           steps(params.page_size, cache.token_stride) &&
           steps(params.num_kv_heads, cache.head_stride) &&
           steps(chunked ? 2 : 1, cache.chunk_stride);
}

// The widest that divides the dense run and that every address of both sides allows.
int widest_vector(
    const CacheWriteParams& params, const NewRows& rows, const MutableCacheView& cache
) {
    const auto size = static_cast<int64_t>(dtype_size(params.dtype));
    const int64_t run = std::min(cache.chunk, rows.head_dim);
    int vector =
        is_float8(params.cache_dtype) ? kMaxConvertedVector : static_cast<int>(kMaxAccess / size);
    while (vector > 1 &&
           (run % vector != 0 || !rows_allow(params, rows, load_bytes(params, vector)) ||
            !cache_allows(params, cache, run < rows.head_dim, store_bytes(params, vector)))) {
        vector /= 2;
    }
    return vector;
}

int64_t chunks_of(const NewRows& rows, const MutableCacheView& cache) {
    return cache.chunk < rows.head_dim ? rows.head_dim / cache.chunk : 1;
}

// The chunks of all heads step through rows and cache as one dimension, and share one scale.
bool chunks_are_one_dimension(
    const CacheWriteParams& params,
    const NewRows& rows,
    const MutableCacheView& cache,
    const Scale& scale
) {
    return params.num_kv_heads == 1 ||
           (rows.head_stride == rows.head_dim &&
            cache.head_stride == chunks_of(rows, cache) * cache.chunk_stride &&
            scale.head_stride == 0);
}

WriteLaunch make_launch(const CacheWriteParams& params, bool has_k, bool has_v, int vector) {
    const auto run = [](const NewRows& rows, const MutableCacheView& cache) {
        return std::min(cache.chunk, rows.head_dim);
    };
    const int64_t longest = std::max(
        has_k ? run(params.k, params.k_cache) : 0, has_v ? run(params.v, params.v_cache) : 0
    );
    WriteLaunch launch = {
        .copies = params.dtype == params.cache_dtype,
        .has_k = has_k,
        .has_v = has_v,
        .vector = vector,
        .chunks_per_head = 1,
        .heads_per_launch = params.num_kv_heads,
        .items_per_head = longest / vector,
        .items_per_token = 0,
        .tokens_per_launch = 0,
    };
    if (has_k != has_v) {
        const NewRows& rows = has_k ? params.k : params.v;
        const MutableCacheView& cache = has_k ? params.k_cache : params.v_cache;
        launch.chunks_per_head = chunks_of(rows, cache);
        if (launch.chunks_per_head > 1 &&
            !chunks_are_one_dimension(
                params, rows, cache, has_k ? params.k_scale : params.v_scale
            )) {
            launch.heads_per_launch = 1;
        }
    }
    launch.items_per_token =
        launch.items_per_head * launch.chunks_per_head * launch.heads_per_launch;
    check(
        launch.items_per_token <= kMaxItems,
        "cache_write: a token must have fewer than 2^31 vectors of ",
        vector,
        " elements, got ",
        launch.items_per_token
    );
    launch.tokens_per_launch = kMaxItems / launch.items_per_token;
    return launch;
}

}  // namespace

int64_t load_bytes(const CacheWriteParams& params, int vector) {
    return std::min(kMaxAccess, vector * static_cast<int64_t>(dtype_size(params.dtype)));
}

int64_t store_bytes(const CacheWriteParams& params, int vector) {
    return vector * static_cast<int64_t>(dtype_size(params.cache_dtype));
}

WritePlan plan_cache_write(const CacheWriteParams& params) {
    WritePlan plan;
    if (params.num_tokens == 0 || params.num_pages == 0) {
        return plan;
    }
    const int k_vector = widest_vector(params, params.k, params.k_cache);
    const int v_vector = widest_vector(params, params.v, params.v_cache);
    const bool chunked =
        chunks_of(params.k, params.k_cache) > 1 || chunks_of(params.v, params.v_cache) > 1;
    if (k_vector == v_vector && !chunked) {
        plan.num_launches = 1;
        plan.launches[0] = make_launch(params, /*has_k=*/true, /*has_v=*/true, k_vector);
    } else {
        plan.num_launches = 2;
        plan.launches[0] = make_launch(params, /*has_k=*/true, /*has_v=*/false, k_vector);
        plan.launches[1] = make_launch(params, /*has_k=*/false, /*has_v=*/true, v_vector);
    }
    return plan;
}

}  // namespace pagetile
