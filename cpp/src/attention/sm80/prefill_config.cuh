#pragma once

// What one instance of the portable prefill kernel is, and which packed rows its warps have.

#include "attention/cuda/prefill_items.cuh"
#include "attention/sm80/fragments.cuh"
#include "attention/sm80/prefill_shapes.h"
#include "attention/sm80/queries.cuh"

#include <cstdint>

namespace pagetile::sm80 {

using gpu::PrefillItem;
using gpu::PrefillItems;
using gpu::PrefillSchedule;

// Stored is Math, or an fp8 type with fp16 as Math.
template <class Math_, class Stored_, int kHeadDim_, int kHeadDimV_, int kArch>
struct PrefillConfig {
    using Math = Math_;
    using Stored = Stored_;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kHeadDimV = kHeadDimV_;
    static constexpr int kElementBytes = sizeof(Stored);
    static constexpr bool kFloat8 = kElementBytes == 1;
    static constexpr PrefillTile kTile = prefill_tile(kHeadDim, kHeadDimV, kElementBytes, kArch);
    static constexpr int kKeys = kTile.keys;
    static constexpr int kRowSteps = kTile.row_steps;
    static constexpr int kRowsOfWarp = 16 * kRowSteps;
    // Weighed at once, before their products. (32 with 16 rows a warp: 4 % more time; 64 with 32 rows: 2 %
    // more at head_dim 64, and fp8 spills.)
    static constexpr int kKeysAtOnce = kRowSteps == 2 ? 32 : 16;
    static constexpr int kThreads = kTile.num_threads();
    static_assert(kTile.warps > 0 && kRowsOfWarp * kTile.warps == kPrefillRows);
    using QLayout = RowLayout<kPrefillRows, kHeadDim * 2>;
    using KLayout = RowLayout<kKeys, kHeadDim * kElementBytes>;
    using VLayout = RowLayout<kKeys, kHeadDimV * kElementBytes>;
};

// Lane (g, t) has rows g and g + 8 of each 16 of its warp: row 8 * half of step n.
template <class Config>
__device__ __forceinline__ int row_of_lane(int n, int half) {
    const int warp = static_cast<int>(threadIdx.x / 32);
    const int lane = static_cast<int>(threadIdx.x % 32);
    return warp * Config::kRowsOfWarp + n * 16 + half * 8 + lane / 4;
}

// A row of a tile: a token of the sequence and a query head. Rows behind the last one are taken for
// it; whatever they compute is dropped.
__device__ __forceinline__ Row
find_row_of_tile(const KernelParams& params, const PrefillItem& item, int row) {
    const int last = item.num_tokens * params.shape.group - 1;
    uint32_t in_group;
    const uint32_t token = params.group(in_group, static_cast<uint32_t>(min(row, last)));
    return {
        item.first_token + static_cast<int32_t>(token),
        item.kv_head * params.shape.group + static_cast<int32_t>(in_group),
    };
}

}  // namespace pagetile::sm80
