#pragma once

#include "pagetile/attention.h"
#include "pagetile/cache_write.h"

#include <cstddef>
#include <cstdint>

namespace pagetile {

// One piece of attention on the CPU: some packed query rows of one KV head of one sequence, over a
// range of its keys. Packed row r is query token r / group, query head kv_head * group + r % group.
struct AttentionTile {
    int64_t batch_idx;
    int64_t kv_head;
    int64_t q_begin;  // first row of the sequence in q and out
    int64_t q_len;
    int64_t kv_len;
    int64_t row_begin;  // packed rows [row_begin, row_end), at most kTileM
    int64_t row_end;
    int64_t key_begin;  // keys [key_begin, key_end): all of them, or one split's
    int64_t key_end;
    float* partial;  // null: finish the rows; else leave (max, sum, unscaled out) of each row here
};

inline constexpr int64_t kTileM = 32;  // packed query rows of a tile
inline constexpr int64_t kTileN = 64;  // keys of a tile; splits end at multiples of it

inline constexpr int64_t kMaxHeadDim = 256;

// Floats that a row leaves in AttentionTile::partial.
constexpr int64_t partial_row_size(const AttentionParams& params) { return params.head_dim_v + 2; }

// Bytes that attend() needs as scratch, aligned to 64.
constexpr size_t attend_scratch_bytes(const AttentionParams& params) {
    const auto pad = [](int64_t n) { return static_cast<size_t>((n + 15) / 16 * 16); };
    const size_t d = pad(params.head_dim);
    const size_t dv = pad(params.head_dim_v);
    const size_t floats =
        (kTileM + kTileN + 1) * d + (kTileM + kTileN + 1) * dv + kTileM * kTileN + 2 * kTileM;
    return floats * sizeof(float);
}

// The CPU kernels of one instruction set. The library holds several and picks one when it is first
// used.
struct CpuKernels {
    const char* isa;
    void (*attend)(const AttentionParams& params, const AttentionTile& tile, float* scratch);
    // partials: num_splits blocks, `stride` floats apart, each with the tile's rows.
    void (*combine)(
        const AttentionParams& params,
        const AttentionTile& tile,
        const float* partials,
        int64_t num_splits,
        int64_t stride
    );
    void (*merge_states)(const MergeStatesParams& params, int64_t token_begin, int64_t token_end);
    void (*cache_write)(const CacheWriteParams& params, int64_t token_begin, int64_t token_end);
};

// The best set that this CPU runs. PAGETILE_CPU_ISA=<name> asks for a lesser one (tests,
// measurements).
const CpuKernels& cpu_kernels();

}  // namespace pagetile
