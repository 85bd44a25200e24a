// Rows of K and V into their slots. Compiled once per instruction set.

#include "common/cpu_kernels.h"
#include "common/rows.h"
#include "common/vec.h"

namespace pagetile::PAGETILE_ISA {
namespace {

// x / scale as the cache's type, or x itself where the types agree (every bit is kept, NaN payloads
// too).
template <DType kFrom, DType kTo>
void write_chunk(const void* from, void* to, int64_t n, float scale) {
    const auto* source = static_cast<const typename Element<kFrom>::Storage*>(from);
    auto* target = static_cast<typename Element<kTo>::Storage*>(to);
    if constexpr (kFrom == kTo) {
        __builtin_memcpy(target, source, static_cast<size_t>(n) * sizeof(*target));
    } else {
        for_each_vector<kFrom>(source, n, [&](int64_t i, int64_t lanes, Vec x) {
            store_first<kTo>(target + i, lanes, x / scale);
        });
    }
}

using ChunkWriter = void (*)(const void* from, void* to, int64_t n, float scale);

ChunkWriter chunk_writer(DType from, DType to) {
    ChunkWriter writer = nullptr;
    dispatch_float(from, [&]<DType kFrom>() {
        if (to == DType::kFloat8E4M3) {
            writer = &write_chunk<kFrom, DType::kFloat8E4M3>;
        } else if (to == DType::kFloat8E5M2) {
            writer = &write_chunk<kFrom, DType::kFloat8E5M2>;
        } else {
            writer = &write_chunk<kFrom, kFrom>;
        }
    });
    return writer;
}

// All heads of one token, of K or of V.
struct TokenWriter {
    const NewRows& rows;
    const MutableCacheView& cache;
    const Scale& scale;
    ChunkWriter write;
    int64_t num_kv_heads;
    int64_t row_size;
    int64_t cache_size;

    void operator()(int64_t token, int64_t page, int64_t offset) const {
        for (int64_t head = 0; head < num_kv_heads; ++head) {
            const float divisor =
                scale.data == nullptr ? 1.0f : scale.data[head * scale.head_stride];
            const char* from = offset_bytes(
                rows.data, token * rows.row_stride + head * rows.head_stride, row_size
            );
            char* to = offset_bytes(
                cache.data,
                page * cache.page_stride + offset * cache.token_stride + head * cache.head_stride,
                cache_size
            );
            for (int64_t d = 0; d < rows.head_dim; d += cache.chunk) {
                write(from, to, smaller(cache.chunk, rows.head_dim - d), divisor);
                from += cache.chunk * row_size;
                to += cache.chunk_stride * cache_size;
            }
        }
    }
};

}  // namespace

void cache_write(const CacheWriteParams& params, int64_t token_begin, int64_t token_end) {
    const ChunkWriter write = chunk_writer(params.dtype, params.cache_dtype);
    const auto row_size = static_cast<int64_t>(dtype_size(params.dtype));
    const auto cache_size = static_cast<int64_t>(dtype_size(params.cache_dtype));
    const TokenWriter write_k = {
        params.k, params.k_cache, params.k_scale, write, params.num_kv_heads, row_size, cache_size
    };
    const TokenWriter write_v = {
        params.v, params.v_cache, params.v_scale, write, params.num_kv_heads, row_size, cache_size
    };
    for (int64_t token = token_begin; token < token_end; ++token) {
        const int64_t slot = params.slot_dtype == DType::kInt64
                                 ? static_cast<const int64_t*>(params.slot_mapping)[token]
                                 : static_cast<const int32_t*>(params.slot_mapping)[token];
        const int64_t page = slot / params.page_size;
        if (slot < 0 || page >= params.num_pages) {
            continue;
        }
        write_k(token, page, slot % params.page_size);
        write_v(token, page, slot % params.page_size);
    }
}

}  // namespace pagetile::PAGETILE_ISA
