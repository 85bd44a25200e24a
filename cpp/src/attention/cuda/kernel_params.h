#pragma once

#include "attention/plan.h"
#include "common/fast_divide.h"
#include "pagetile/cache_write.h"
#include "pagetile/dtype.h"

#include <cuda.h>
#include <vector_types.h>

#include <cstdint>

namespace pagetile::gpu {

inline constexpr int32_t kNoChunks = 30;  // chunk_log2 of a row in one piece

// K or V. Strides in bytes.
struct KvSide {
    const char* data;
    int64_t page_stride;
    int64_t token_stride;
    int64_t head_stride;
    int64_t chunk_stride;  // a row is cut into chunks of 2^chunk_log2 elements
    int32_t chunk_log2;
    int32_t row_bytes;
};

// For rows whose place has 32 bits: KernelParams::copies_by_places.
PAGETILE_HOST_DEVICE uint32_t in_chunks(int64_t bytes) { return static_cast<uint32_t>(bytes >> 4); }

// The pages for TMA, on Hopper. K: {head_dim, token, KV head, page}, a box 64 elements of 16 keys. V:
// {64, token, 64 elements each, KV head, page}, a box all elements of 16 keys.
struct PageBoxes {
    CUtensorMap k;
    CUtensorMap v;
};

// In the order in which the kernel first needs them: every launch finds its parameters outside the
// constant cache.
struct KernelParams {
    // Schedule
    bool plan_waits;   // the plan is written by a kernel before this one
    bool pdl;          // or only queries, keys and values are
    bool in_clusters;  // as the plan's shape says
    bool joins;        // started beside the kernel before: ends after it
    FastDivide chains;
    const LaneWork* plan;     // [shape.lanes]
    uint32_t batch_per_lane;  // in 1/256, to guess by

    // Sequences
    const int32_t* cu_seqlens_q;
    const int32_t* seqused_k;
    const int32_t* cu_seqlens_k;
    int32_t total_q;
    int32_t kv_capacity;  // of a sequence's pages, or of all packed rows
    PlanShape shape;
    bool is_dealt;  // a chain has one KV head, and an item is all that a lane has of a tile

    // Keys and values
    const int32_t* block_table;
    int64_t block_table_stride;
    FastDivide page_size;
    int32_t num_pages;
    int32_t granule_log2;   // so many keys in a row always lie on one page; at most 16
    KvSide kv[2];           // K, V
    bool copies_16_bytes;   // strides and bases allow it, and rows are whole
    bool copies_by_places;  // besides, a row's place in its pool has 32 bits, counted in 16 bytes
    // Besides copies_16_bytes: rows are as long as the kernel's, 16 keys on a page, strides of 32 bits.
    bool copies_whole_rows;

    // Queries. Strides in bytes.
    bool q_is_aligned;  // rows begin and end at multiples of 16 bytes
    DType q_dtype;
    int32_t head_dim;
    FastDivide group;
    const char* q;
    int64_t q_row_stride;
    int64_t q_head_stride;

    // Scores, in log2 units
    float scale;      // times log2(e)
    bool transforms;  // scores need more than a positive factor
    float softcap;    // times log2(e); 0 is off
    float softcap_inverse;
    Scale q_scale;
    Scale k_scale;
    const float* alibi_slopes;
    int64_t alibi_batch_stride;
    int64_t alibi_head_stride;

    // Pieces of tiles
    uint32_t* counters;  // [2 * lanes * chains * kCountersPerTile], 0 between launches
    float2* rows_max;    // [slots, slot_rows]
    float* rows_out;     // [slots, slot_rows, head_dim_v]
    int32_t slot_rows;

    // Results. Strides in elements.
    int32_t head_dim_v;
    DType out_dtype;
    bool out_is_aligned;  // to four elements
    void* out;
    int64_t out_row_stride;
    int64_t out_head_stride;
    float* softmax_lse;
    int64_t lse_head_stride;
    int64_t lse_row_stride;
    const void* sinks;
    DType sinks_dtype;
    int64_t sinks_stride;
    Scale v_scale;
};

}  // namespace pagetile::gpu
