#include "cache_write/cpu/cache_write_cpu.h"

#include "common/cpu_kernels.h"
#include "common/parallel.h"

#include <algorithm>

namespace pagetile::cpu {

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

}  // namespace pagetile::cpu
