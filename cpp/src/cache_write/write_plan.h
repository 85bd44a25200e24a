#pragma once

#include "pagetile/cache_write.h"

#include <cstdint>

namespace pagetile {

// One kind of launch of the GPU's write kernel: a thread moves the same `vector` elements of K and
// of V. Decided on the host from sizes, strides and addresses alone.
struct WriteLaunch {
    static constexpr int kThreads = 256;
    static constexpr int kCtasPerSm = 8;  // 2,048 threads

    bool copies;  // rows and caches have one type
    bool has_k;
    bool has_v;
    int vector;               // elements a thread moves at once; divides the dense run of a row
    int64_t chunks_per_head;  // a head's row lies in so many dense runs (1 but for legacy layouts)
    int64_t
        heads_per_launch;  // all of them, or 1 where chunks of several heads cannot be one dimension
    int64_t items_per_head;     // vectors of a dense run, the longer of K's and V's
    int64_t items_per_token;    // times chunks and heads
    int64_t tokens_per_launch;  // so that an item's number fits in 31 bits

    // CTAs for this many tokens.
    int64_t grid(int64_t num_tokens) const {
        return (num_tokens * items_per_token + kThreads - 1) / kThreads;
    }

    // Two where one token each would take a second wave of CTAs, which two tokens each put into the
    // first: 8,192 x 8 heads x 64 in bf16 takes 11.05 us so, 11.55 otherwise. Within one wave, and
    // with conversion to fp8, two are slower (2,048 x 8 x 128: 6.3 us against 6.1; H200).
    int tokens_per_thread(int64_t num_tokens, int num_sms) const {
        const int64_t wave = static_cast<int64_t>(kCtasPerSm) * num_sms;
        const int64_t ctas = grid(num_tokens);
        return copies && ctas > wave && ctas <= 2 * wave ? 2 : 1;
    }
};

struct WritePlan {
    int num_launches = 0;
    WriteLaunch launches[2];
};

// K and V go together where the same vector suits both, else each has its own. Nothing to do: no launch.
WritePlan plan_cache_write(const CacheWriteParams& params);

// Bytes of one access of such a vector: 16 at most.
int64_t load_bytes(const CacheWriteParams& params, int vector);
int64_t store_bytes(const CacheWriteParams& params, int vector);

}  // namespace pagetile
