#include "cache_write/cpu/cache_write_cpu.h"

#include "cache_write/copy_plan.h"
#include "common/cpu_kernels.h"
#include "common/parallel.h"

#include <algorithm>
#include <cstring>

namespace pagetile::cpu {
namespace {

int64_t page_at(const void* pages, DType dtype, int64_t i) {
    return dtype == DType::kInt64 ? static_cast<const int64_t*>(pages)[i]
                                  : static_cast<const int32_t*>(pages)[i];
}

// One page of one cache.
void copy_page(const CopyPagesParams& params, const PageRuns& runs, const char* src, char* dst) {
    const auto bytes = static_cast<size_t>(runs.length * params.element_size);
    for (int64_t run = 0; run < runs.count; ++run) {
        int64_t src_element = 0;
        int64_t dst_element = 0;
        int64_t rest = run;
        for (int i = 0; i < runs.num_dims; ++i) {
            const PageRuns::Dim& dim = runs.dims[i];
            src_element += rest % dim.size * dim.src_stride;
            dst_element += rest % dim.size * dim.dst_stride;
            rest /= dim.size;
        }
        std::memcpy(
            dst + dst_element * params.element_size, src + src_element * params.element_size, bytes
        );
    }
}

}  // namespace

void cache_write(const CacheWriteParams& params) {
    // Chunks of about 64 KB: enough to be worth a thread.
    const int64_t elements_per_token =
        std::max<int64_t>(params.num_kv_heads * (params.k.head_dim + params.v.head_dim), 1);
    const int64_t tokens_per_chunk = std::max<int64_t>((1 << 15) / elements_per_token, 1);
    const int64_t num_chunks = (params.num_tokens + tokens_per_chunk - 1) / tokens_per_chunk;
    parallel_for(num_chunks, 1, [&](int64_t chunk) {
        const int64_t begin = chunk * tokens_per_chunk;
        cpu_kernels().cache_write(
            params, begin, std::min(begin + tokens_per_chunk, params.num_tokens)
        );
    });
}

void copy_pages(const CopyPagesParams& params) {
    const PageRuns runs = page_runs(params);
    parallel_for(params.num_caches * params.num_pairs, 4, [&](int64_t i) {
        const int64_t cache = i / params.num_pairs;
        const int64_t pair = i % params.num_pairs;
        const int64_t src_page = page_at(params.src_pages, params.page_dtype, pair);
        const int64_t dst_page = page_at(params.dst_pages, params.page_dtype, pair);
        if (src_page < 0 || src_page >= params.src_num_pages || dst_page < 0 ||
            dst_page >= params.dst_num_pages) {
            return;
        }
        const int64_t src_byte = src_page * params.src_page_stride * params.element_size;
        const int64_t dst_byte = dst_page * params.dst_page_stride * params.element_size;
        copy_page(
            params,
            runs,
            static_cast<const char*>(params.src_caches[cache]) + src_byte,
            static_cast<char*>(params.dst_caches[cache]) + dst_byte
        );
    });
}

}  // namespace pagetile::cpu
