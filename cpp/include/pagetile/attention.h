#pragma once

#include "pagetile/cache_write.h"
#include "pagetile/device.h"
#include "pagetile/dtype.h"

#include <cstdint>

namespace pagetile {

// Attention of a packed batch of queries over a paged KV cache. Strides are in elements; last
// dimensions are dense.
struct AttentionParams {
    // Sizes
    int64_t batch = 0;         // B
    int64_t total_q = 0;       // T, rows of q and out
    int64_t num_q_heads = 0;   // Hq, a multiple of num_kv_heads
    int64_t num_kv_heads = 0;  // Hkv
    int64_t head_dim = 0;      // D, of q and k: a multiple of 8, at most 256
    int64_t head_dim_v = 0;    // Dv, of v and out: likewise
    int64_t num_pages = 0;     // P
    int64_t page_size = 0;     // S
    int64_t max_pages = 0;     // width of block_table
    int64_t max_seqlen_q = 0;  // upper bounds known to the host; 0 is unknown
    int64_t max_seqlen_k = 0;

    // Types
    DType q_dtype = DType::kFloat32;    // fp32, fp16, bf16, or fp8 with q_scale
    DType kv_dtype = DType::kFloat32;   // q's type, or fp8
    DType out_dtype = DType::kFloat32;  // q's type; any 16- or 32-bit float for an fp8 q

    // Queries
    const void* q = nullptr;  // [T, Hq, D]
    int64_t q_row_stride = 0;
    int64_t q_head_stride = 0;
    const int32_t* cu_seqlens_q = nullptr;  // [B + 1]; null: one query a sequence

    // Keys and values
    CacheView k_cache;
    CacheView v_cache;
    const int32_t* block_table =
        nullptr;  // [B, max_pages]; null: K and V are packed rows, page_size 1, num_pages = total_k
    int64_t block_table_stride = 0;
    const int32_t* seqused_k = nullptr;     // [B]; may be null with cu_seqlens_k
    const int32_t* cu_seqlens_k = nullptr;  // [B + 1]; only for packed rows

    // Scores
    float softmax_scale = 1.0f;
    bool causal = true;        // bottom-right: query i sees key j iff j <= i + seqused_k - q_len
    int64_t window_left = -1;  // inclusive, -1 unlimited
    int64_t window_right = -1;
    float softcap =
        0.0f;  // 0 is off; score = softcap * tanh(score / softcap), before bias and mask
    const float* alibi_slopes = nullptr;  // [Hq] (batch stride 0) or [B, Hq]; may be null
    int64_t alibi_batch_stride = 0;
    int64_t alibi_head_stride = 0;
    const void* sinks = nullptr;  // [Hq] logits, natural units, unscaled; may be null
    DType sinks_dtype = DType::kFloat32;
    int64_t sinks_stride = 0;
    Scale q_scale;  // only for an fp8 q
    Scale k_scale;  // only for fp8 caches
    Scale v_scale;

    // Results
    void* out = nullptr;  // [T, Hq, Dv]; rows that no sequence covers are left alone
    int64_t out_row_stride = 0;
    int64_t out_head_stride = 0;
    float* softmax_lse = nullptr;  // [Hq, T], natural log, sink included; may be null
    int64_t lse_head_stride = 0;
    int64_t lse_row_stride = 0;

    // Schedule
    int64_t num_splits = 0;        // 0 chooses, 1 is off, n at most n
    bool batch_invariant = false;  // a sequence's bits depend on nothing but the sequence
    bool validate = false;         // read the metadata first and throw on what is out of range
    // Allows a kernel to multiply e4m3 with e4m3: q and the caches, which must be of that, as they are,
    // and the softmax's weights rounded to it. Less precise. What no kernel does so is multiplied as ever.
    bool fp8_products = false;
    // By make_plan for this step, with the same bounds max_seqlen_q and max_seqlen_k: they decide
    // which tiles there are. Null: planned in the call.
    const void* plan = nullptr;
    // At least workspace_size() bytes, zeroed before its first use; each call leaves it ready for
    // the next. Two calls at the same time need two. Null: one that the library keeps for each
    // stream. The CPU needs neither plan nor workspace.
    void* workspace = nullptr;
    int64_t workspace_bytes = 0;

    // Launch as a programmatic dependent of the kernel before it in the stream. The plan, lengths,
    // block table and scales are then read early: no kernel of the unbroken chain of such launches
    // before this one, nor the kernel that the chain follows, may write them. Queries, keys and
    // values wait. The CPU ignores it.
    bool pdl = false;

    Device device;
};

// Throws std::invalid_argument on sizes, types and (with validate) metadata it cannot take,
// NotBuiltError where the device has no kernel. Whatever the metadata holds, nothing outside the
// tensors is read or written: a page outside the pool reads as zeros, lengths are clamped to what
// the tensors can hold.
void paged_attention(const AttentionParams& params, Stream stream);

// A step of an engine, as far as the schedule of its attention depends on it.
struct PlanParams {
    int64_t batch = 0;  // B
    int64_t num_q_heads = 0;
    int64_t num_kv_heads = 0;
    int64_t head_dim = 0;
    int64_t head_dim_v = 0;
    int64_t max_seqlen_q = 0;  // upper bounds known to the host
    int64_t max_seqlen_k = 0;

    const int32_t* cu_seqlens_q = nullptr;  // [B + 1]; null: one query a sequence
    const int32_t* seqused_k = nullptr;     // [B]; may be null with cu_seqlens_k
    const int32_t* cu_seqlens_k = nullptr;  // [B + 1]; only for packed rows

    bool causal = true;
    int64_t window_left = -1;
    int64_t window_right = -1;
    int64_t num_splits = 0;
    bool batch_invariant = false;
    bool fp8_products = false;

    Device device;
};

// Bytes of a plan, and of a workspace for calls with such parameters. Neither depends on the
// lengths, so both hold for every step of a captured graph. Of cu_seqlens_q only counts whether it
// is null: one query a sequence.
int64_t plan_size(const PlanParams& params);
int64_t workspace_size(const PlanParams& params);

// Writes the schedule of a step into plan_size() bytes on the device, without a synchronisation:
// valid for every paged_attention with the same sizes and options and the same query lengths. Should
// the KV lengths differ, results stay right; only the balance suffers.
void make_plan(const PlanParams& params, void* plan, Stream stream);

// Two partial attentions of the same queries over disjoint keys, merged exactly.
struct MergeStatesParams {
    int64_t num_tokens = 0;      // T
    int64_t num_heads = 0;       // Hq
    int64_t head_dim = 0;        // Dv
    int64_t tokens_with_a = -1;  // tokens from here on take b alone; -1: none do

    DType dtype = DType::kFloat32;  // of out, out_a and out_b

    const void* out_a = nullptr;  // [T, Hq, Dv]
    int64_t a_row_stride = 0;
    int64_t a_head_stride = 0;
    const void* out_b = nullptr;  // [T, Hq, Dv]
    int64_t b_row_stride = 0;
    int64_t b_head_stride = 0;
    const float* lse_a =
        nullptr;  // [Hq, T]; either infinity: this side saw no key, and its values are ignored
    int64_t lse_a_head_stride = 0;
    int64_t lse_a_row_stride = 0;
    const float* lse_b = nullptr;  // [Hq, T]
    int64_t lse_b_head_stride = 0;
    int64_t lse_b_row_stride = 0;

    void* out = nullptr;  // [T, Hq, Dv]; may be out_a or out_b itself
    int64_t out_row_stride = 0;
    int64_t out_head_stride = 0;
    float* lse = nullptr;  // [Hq, T]; may be null, or lse_a or lse_b itself
    int64_t lse_head_stride = 0;
    int64_t lse_row_stride = 0;

    Device device;
};

void merge_states(const MergeStatesParams& params, Stream stream);

}  // namespace pagetile
