#pragma once

// Which kernel and which schedule a call gets. Pure functions of what the host knows.

#include "attention/plan.h"
#include "pagetile/attention.h"

#include <cstdint>

namespace pagetile {

// What of a GPU a plan depends on.
struct Gpu {
    int num_sms;
    bool has_clusters;
    bool has_wgmma;           // and this build has kernels for it
    bool has_prefill = true;  // false: the split-KV kernel takes long queries, too
    bool cuts_items = true;   // for the call at hand; a plan does not know and says yes
};

// For the tests: every call goes to the portable prefill kernel where it would go to the WGMMA kernel,
// or to the split-KV kernel where it would go to either.
enum class PrefillChoice : int32_t { kBest, kPortable, kNone };

void choose_prefill(PrefillChoice choice);

// The CPU plans for an H200.
Gpu gpu_of(Device device);

// The head dimensions that kernels are built for and that hold these.
struct HeadDims {
    int32_t k;
    int32_t v;

    bool operator==(const HeadDims&) const = default;
};

HeadDims built_head_dims(int64_t head_dim, int64_t head_dim_v);

// Whether scores need more than a positive factor.
bool transforms_scores(const AttentionParams& params);

// Whether the WGMMA kernel, where it takes the tensors, multiplies queries, keys and values as the e4m3 that
// they are: fp8_products, and there is an instance for it.
bool multiplies_e4m3(const AttentionParams& params);

// Sequences of more packed rows than this, and more than one token, are the prefill kernel's.
inline constexpr int32_t kLongRows = 64;
// The same where the WGMMA kernel takes them, which then reads at the speed of the memory (H200, 32
// sequences of 64 rows: 262 us for 503).
inline constexpr int32_t kLongRowsWgmma = 32;

// Packed rows of a tile: 8, 16 or 32.
int32_t rows_per_tile(HeadDims dims, int64_t max_seqlen_q, int64_t group, bool batch_invariant);

PlanShape plan_shape(const PlanParams& params, const Gpu& gpu);

PlanParams plan_params(const AttentionParams& params);

// Counters come first, in the same place for every schedule, and are 0 between calls; the rest may
// hold anything.
inline constexpr int64_t kSplitKvCounterBytes = 32768;
inline constexpr int64_t kPrefillCounterBytes = 16384;  // the last of them is PrefillSchedule's
inline constexpr int64_t kCounterBytes = kSplitKvCounterBytes + kPrefillCounterBytes;
inline constexpr int32_t kCountersPerTile = 8;  // one a warp

struct WorkspaceLayout {
    int64_t plan;      // bytes from the beginning
    int64_t rows_max;  // float2 [slots, slot_rows]: largest score and sum of weights, log2 units
    int64_t rows_out;  // float [slots, slot_rows, head_dim_v]
    int64_t pieces;    // sm90::PieceSums; 0 bytes: items are not cut
    int64_t piece_bytes;
    int64_t bytes;
    int32_t slot_rows;
};

WorkspaceLayout workspace_layout(
    const PlanShape& shape,
    const Gpu& gpu,
    int64_t max_seqlen_q,
    int64_t head_dim,
    int64_t head_dim_v
);

// Of the workspace that is enough for every batch of sequences with such parameters, or with smaller
// bounds.
int64_t largest_workspace(PlanParams params, const Gpu& gpu);

// The slots, and the counters, of one chain.
PAGETILE_HOST_DEVICE int64_t slots_per_chain(const PlanShape& shape) {
    return 2 * static_cast<int64_t>(shape.lanes) * (shape.piece_units > 0 ? shape.max_pieces : 1);
}

}  // namespace pagetile
