#include "attention/dispatch.h"

#include "attention/sm90/tile_shapes.h"

#include <algorithm>
#include <atomic>
#include <initializer_list>
#include <limits>

#if PAGETILE_HAS_CUDA
#include "common/cuda.h"
#endif

namespace pagetile {
namespace {

constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();
constexpr int64_t kAlign = 256;

std::atomic<PrefillChoice> prefill_choice = PrefillChoice::kBest;

#if PAGETILE_HAS_SM90
[[maybe_unused]] constexpr bool kHasSm90 = true;
#else
[[maybe_unused]] constexpr bool kHasSm90 = false;
#endif

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// KV heads are dealt out to `chains` workers that run side by side: as many as there are heads,
// which reads a page's heads at one time, unless that leaves too many multiprocessors without work.
int32_t num_chains(int64_t num_kv_heads, int num_sms) {
    static constexpr double kEnough = 0.95;
    int64_t best = 1;
    int64_t best_used = 0;
    for (int64_t chains = std::min<int64_t>(num_kv_heads, num_sms); chains >= 1; --chains) {
        if (num_kv_heads % chains != 0) {
            continue;
        }
        const int64_t lanes = std::min<int64_t>(num_sms / chains, kMaxLanes);
        const int64_t used = chains * lanes;
        if (static_cast<double>(used) >= kEnough * num_sms) {
            return static_cast<int32_t>(chains);
        }
        if (used > best_used) {
            best = chains;
            best_used = used;
        }
    }
    return static_cast<int32_t>(best);
}

// Tiles of 128 rows below which the multiprocessors have more of the split-KV kernel, which cuts the keys
// of every tile. A prefill kernel cuts few tiles or none, but has all rows of a tile for one reading of
// its keys. (H200, 8 KV heads, 8,192 keys: 16 tiles of 64 rows 41 us for 39, 32 57 for 65; 16 of 256 rows
// 43 for 64.)
int64_t least_tiles(int64_t rows, HeadDims dims, const Gpu& gpu) {
    const int64_t num_sms = gpu.num_sms;
    const bool cuts = gpu.has_wgmma && gpu.cuts_items && sm90::cuts_items(dims.v, false);
    if (rows > kLongRows) {
        return cuts && rows > 128 ? num_sms / 12 : num_sms / 6;
    }
    return cuts ? num_sms / 4 : num_sms * 2 / 3;
}

// Packed rows from which on sequences are the prefill kernel's; -1: none are. A single sequence is its,
// however short it turns out to be, so that no second kernel has to look for short ones. Neither that
// nor the number of tiles may count where bits must not depend on the batch.
//
// Where a batch has both, the others are most likely single tokens: shape.rows fits those, and what
// has more rows than they or a tile goes to the prefill kernel, too.
int32_t long_rows(
    const PlanParams& params,
    const PlanShape& shape,
    HeadDims dims,
    int64_t max_q_len,
    const Gpu& gpu
) {
    constexpr int32_t kMostHeads = 128;  // of a group, in a tile
    const int64_t rows = max_q_len * shape.group;
    const bool is_early = gpu.has_wgmma && !params.batch_invariant;
    // A single token is never long.
    const int32_t least = std::max(is_early ? kLongRowsWgmma : kLongRows, shape.group);
    const bool may_be_long = max_q_len <= 0 || rows > least;
    if (!gpu.has_prefill || !may_be_long || shape.group > kMostHeads) {
        return -1;
    }
    if (params.batch_invariant) {
        return least;
    }
    const int64_t most_tiles = params.batch * params.num_kv_heads * ((rows + 127) / 128);
    if (max_q_len > 0 && most_tiles < least_tiles(rows, dims, gpu)) {
        return -1;
    }
    if (params.batch == 1 && max_q_len > 0) {
        return 0;
    }
    return std::max(shape.rows, shape.group);
}

// What share_sms() needs to know (H200: a multiprocessor beside others that prefill reads 0.059 TB/s,
// one beside others that read multiplies at 5.4 TFLOP/s).
void set_times(PlanShape& shape, const PlanParams& params, const Gpu& gpu) {
    const int64_t width = params.head_dim + params.head_dim_v;
    shape.num_sms = gpu.num_sms;
    shape.unit_time = static_cast<int32_t>(kPlanKeys * width * 2 * 17);
    shape.pair_time = static_cast<int32_t>(
        std::min<int64_t>(2 * width * params.num_q_heads * 1000 / 5400, kMaxInt)
    );
}

// One sequence with one tile a KV head: the pieces of a tile meet in the shared memory of a cluster,
// not in the workspace (H200: 0.9 us less). 64 multiprocessors read what 128 do; with fewer heads
// there would be fewer still, and more than 15 clusters do not fit beside each other.
bool fits_clusters(const PlanParams& params, const PlanShape& shape, const Gpu& gpu) {
    const bool one_tile = params.batch == 1 && shape.heads_per_chain == 1 && shape.rows == 8;
    return gpu.has_clusters && one_tile && !params.batch_invariant &&
           shape.chains >= kClusterLanes && shape.chains <= 15 && shape.lanes >= kClusterLanes;
}

// For two pieces on each multiprocessor, in case that the WGMMA kernel runs and may cut items.
int64_t bytes_of_pieces(const PlanShape& shape, const Gpu& gpu, HeadDims dims) {
    const bool cuts = gpu.has_wgmma && shape.long_rows >= 0 && shape.piece_units == 0 &&
                      sm90::cuts_items(dims.v, false) && gpu.num_sms <= sm90::kMostCuts;
    return cuts ? 2 * gpu.num_sms *
                      sm90::piece_bytes(sm90::prefill_tile(dims.k, dims.v, false), dims.v)
                : 0;
}

}  // namespace

void choose_prefill(PrefillChoice choice) { prefill_choice.store(choice); }

Gpu gpu_of([[maybe_unused]] Device device) {
    const PrefillChoice choice = prefill_choice.load(std::memory_order_relaxed);
#if PAGETILE_HAS_CUDA
    if (device.kind == DeviceKind::kCuda) {
        constexpr const char* kFunction = "paged_attention";
        const int capability = capability_of(device, kFunction);
        return {
            .num_sms = num_sms_of(device, kFunction),
            .has_clusters = capability >= 90,
            .has_wgmma = kHasSm90 && capability == 90 && choice == PrefillChoice::kBest,
            .has_prefill = choice != PrefillChoice::kNone,
        };
    }
#endif
    return {
        .num_sms = 132,
        .has_clusters = true,
        .has_wgmma = choice == PrefillChoice::kBest,
        .has_prefill = choice != PrefillChoice::kNone,
    };
}

HeadDims built_head_dims(int64_t head_dim, int64_t head_dim_v) {
    const auto built = [](int64_t dim) {
        for (const int32_t width : {64, 96, 128, 192}) {
            if (dim <= width) {
                return width;
            }
        }
        return 256;
    };
    const HeadDims dims = {built(head_dim), built(head_dim_v)};
    if (dims.k == 192 && dims.v <= 128) {
        return {192, 128};
    }
    const int32_t widest = std::max(dims.k, dims.v);
    return {widest, widest};
}

bool transforms_scores(const AttentionParams& params) {
    return params.softcap != 0.0f || params.alibi_slopes != nullptr ||
           !(params.softmax_scale > 0.0f);
}

bool multiplies_e4m3(const AttentionParams& params) {
    const auto is_e4m3 = [](DType dtype) { return dtype == DType::kFloat8E4M3; };
    const HeadDims dims = built_head_dims(params.head_dim, params.head_dim_v);
    return params.fp8_products && is_e4m3(params.q_dtype) && is_e4m3(params.kv_dtype) &&
           (params.out_dtype == DType::kFloat16 || params.out_dtype == DType::kBFloat16) &&
           sm90::prefill_dims(dims) == HeadDims{128, 128} && !transforms_scores(params);
}

int32_t rows_per_tile(HeadDims dims, int64_t max_seqlen_q, int64_t group, bool batch_invariant) {
    // With another number of rows, keys are dealt to other warps, and sums have other bits.
    if (batch_invariant || max_seqlen_q <= 0 || max_seqlen_q > 16 || max_seqlen_q * group > 16) {
        return 32;
    }
    if (max_seqlen_q * group <= 8) {
        return 8;
    }
    return dims.k <= 128 ? 16 : 32;
}

PlanShape plan_shape(const PlanParams& params, const Gpu& gpu) {
    PlanShape shape;
    shape.batch = static_cast<int32_t>(params.batch);
    shape.group = static_cast<int32_t>(params.num_q_heads / params.num_kv_heads);
    const int64_t most_tokens = kMaxInt / shape.group;
    shape.max_q_len = static_cast<int32_t>(
        params.max_seqlen_q > 0 ? std::min(params.max_seqlen_q, most_tokens) : most_tokens
    );
    const int64_t max_q_len = params.cu_seqlens_q == nullptr ? 1 : params.max_seqlen_q;
    const HeadDims dims = built_head_dims(params.head_dim, params.head_dim_v);
    shape.rows = rows_per_tile(dims, 1, shape.group, params.batch_invariant);
    shape.long_rows = long_rows(params, shape, dims, max_q_len, gpu);
    if (shape.long_rows < 0) {
        shape.rows = rows_per_tile(dims, max_q_len, shape.group, params.batch_invariant);
    }
    if (shape.long_rows > 0 && gpu.has_wgmma) {
        set_times(shape, params, gpu);
    }
    shape.chains = num_chains(params.num_kv_heads, gpu.num_sms);
    shape.heads_per_chain = static_cast<int32_t>(params.num_kv_heads / shape.chains);
    shape.lanes =
        static_cast<int32_t>(std::clamp<int64_t>(gpu.num_sms / shape.chains, 1, kMaxLanes));
    shape.in_clusters = shape.long_rows < 0 && fits_clusters(params, shape, gpu);
    if (shape.in_clusters) {
        shape.lanes = kClusterLanes;
    }
    // A window at least as wide as the longest sequence is none.
    shape.window_left =
        static_cast<int32_t>(params.window_left > kMaxInt ? -1 : params.window_left);
    shape.window_right =
        static_cast<int32_t>(params.window_right > kMaxInt ? -1 : params.window_right);
    if (params.causal) {
        shape.window_right = 0;
    }
    shape.max_splits = static_cast<int32_t>(std::min<int64_t>(params.num_splits, kMaxLanes));
    if (params.batch_invariant) {
        shape.piece_units = kPieceUnits;
        const int64_t units =
            (std::max<int64_t>(params.max_seqlen_k, 1) + kPlanKeys - 1) / kPlanKeys;
        shape.max_pieces = static_cast<int32_t>((units + kPieceUnits - 1) / kPieceUnits);
    }
    // What a tile and a piece of a tile cost besides their keys, measured in keys of 512 bytes (K and
    // V of 128 in 16 bits): docs/kernels/attention_decode.md.
    const int64_t width = params.head_dim + params.head_dim_v;
    shape.tile_cost =
        static_cast<int32_t>(std::max<int64_t>(1, 2 * 256 / std::max<int64_t>(width, 1)));
    shape.split_cost = 3 * shape.tile_cost;
    return shape;
}

PlanParams plan_params(const AttentionParams& params) {
    return {
        .batch = params.batch,
        .num_q_heads = params.num_q_heads,
        .num_kv_heads = params.num_kv_heads,
        .head_dim = params.head_dim,
        .head_dim_v = params.head_dim_v,
        .max_seqlen_q = params.max_seqlen_q,
        .max_seqlen_k = params.max_seqlen_k,
        .cu_seqlens_q = params.cu_seqlens_q,
        .seqused_k = params.seqused_k,
        .cu_seqlens_k = params.cu_seqlens_k,
        .causal = params.causal,
        .window_left = params.window_left,
        .window_right = params.window_right,
        .num_splits = params.num_splits,
        .batch_invariant = params.batch_invariant,
        .fp8_products = params.fp8_products,
        .device = params.device,
    };
}

WorkspaceLayout workspace_layout(
    const PlanShape& shape,
    const Gpu& gpu,
    int64_t max_seqlen_q,
    int64_t head_dim,
    int64_t head_dim_v
) {
    constexpr int64_t kFloat = sizeof(float);
    const int64_t slots = slots_per_chain(shape) * shape.chains;
    const int64_t rows =
        max_seqlen_q > 0 ? std::min<int64_t>(round_up(max_seqlen_q * shape.group, 8), shape.rows)
                         : shape.rows;
    WorkspaceLayout layout;
    layout.slot_rows = static_cast<int32_t>(rows);
    layout.plan = kCounterBytes;
    // Of any plan: workspace_size() does not know the batch, which decides whether there is a tail.
    const int64_t most_plan_bytes = shape.lanes * static_cast<int64_t>(sizeof(LaneWork)) +
                                    static_cast<int64_t>(sizeof(PlanTail));
    layout.rows_max = layout.plan + most_plan_bytes;
    layout.rows_out = round_up(layout.rows_max + slots * rows * 2 * kFloat, kAlign);
    const HeadDims dims = built_head_dims(head_dim, head_dim_v);
    layout.pieces = round_up(layout.rows_out + slots * rows * dims.v * kFloat, kAlign);
    layout.piece_bytes = bytes_of_pieces(shape, gpu, sm90::prefill_dims(dims));
    layout.bytes = layout.pieces + layout.piece_bytes;
    return layout;
}

int64_t largest_workspace(PlanParams params, const Gpu& gpu) {
    params.batch = kMaxInt;
    const auto bytes_on = [&](const Gpu& one) {
        return workspace_layout(
                   plan_shape(params, one),
                   gpu,
                   params.max_seqlen_q,
                   params.head_dim,
                   params.head_dim_v
        )
            .bytes;
    };
    // In a small batch, or with a smaller bound, no query is the prefill kernel's, and tiles have more
    // rows.
    Gpu without_prefill = gpu;
    without_prefill.has_prefill = false;
    return std::max(bytes_on(gpu), bytes_on(without_prefill));
}

}  // namespace pagetile
