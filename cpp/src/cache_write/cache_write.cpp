// The C++ entry point of the cache write: checks sizes and types, picks the backend.

#include "pagetile/cache_write.h"

#include "cache_write/cpu/cache_write_cpu.h"
#include "common/not_built.h"
#include "pagetile/error.h"

#if PAGETILE_HAS_CUDA
#include "cache_write/cuda/cache_write_gpu.h"
#endif

namespace pagetile {

void cache_write(const CacheWriteParams& params, Stream stream) {
    check(
        is_float(params.dtype),
        "cache_write: k must be float32, float16 or bfloat16, got ",
        dtype_name(params.dtype)
    );
    check(
        params.cache_dtype == params.dtype || is_float8(params.cache_dtype),
        "cache_write: k_cache and v_cache must be ",
        dtype_name(params.dtype),
        " like k, or fp8, got ",
        dtype_name(params.cache_dtype)
    );
    check(
        params.slot_dtype == DType::kInt64 || params.slot_dtype == DType::kInt32,
        "cache_write: slot_mapping must be int64 or int32, got ",
        dtype_name(params.slot_dtype)
    );
    check(
        params.k_scale.data == nullptr || is_float8(params.cache_dtype),
        "cache_write: k_scale needs an fp8 cache, got ",
        dtype_name(params.cache_dtype)
    );
    check(
        params.v_scale.data == nullptr || is_float8(params.cache_dtype),
        "cache_write: v_scale needs an fp8 cache, got ",
        dtype_name(params.cache_dtype)
    );
    check(params.num_tokens >= 0, "cache_write: num_tokens must be >= 0, got ", params.num_tokens);
    check(
        params.num_kv_heads > 0, "cache_write: num_kv_heads must be > 0, got ", params.num_kv_heads
    );
    check(params.num_pages >= 0, "cache_write: num_pages must be >= 0, got ", params.num_pages);
    check(params.page_size > 0, "cache_write: page_size must be > 0, got ", params.page_size);
    check(params.k.head_dim > 0, "cache_write: head_dim must be > 0, got ", params.k.head_dim);
    check(params.v.head_dim > 0, "cache_write: head_dim of v must be > 0, got ", params.v.head_dim);
    const auto fits = [](const NewRows& rows, const MutableCacheView& cache) {
        return cache.chunk > 0 &&
               (cache.chunk >= rows.head_dim || rows.head_dim % cache.chunk == 0);
    };
    check(
        fits(params.k, params.k_cache) && fits(params.v, params.v_cache),
        "cache_write: a cache's chunk must divide head_dim"
    );
    if (params.device.kind == DeviceKind::kCpu) {
        cpu::cache_write(params);
        return;
    }
#if PAGETILE_HAS_CUDA
    gpu::cache_write(params, stream);
#else
    static_cast<void>(stream);
    throw_not_built("cache_write", params.device);
#endif
}

}  // namespace pagetile
