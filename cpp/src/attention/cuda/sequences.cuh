#pragma once

// Where a sequence's queries and keys are, clamped to what the tensors hold: no metadata leads
// outside them.

#include "attention/cuda/kernel_params.h"
#include "attention/plan.h"

#include <cstdint>

namespace pagetile::gpu {

inline constexpr unsigned kWarp = 0xffffffffu;

struct Sequence {
    int32_t q_begin;
    int32_t q_len;
    int32_t kv_begin;  // packed rows
    int32_t kv_len;
};

// What metadata says of a sequence.
struct RawSequence {
    int32_t q_begin;
    int32_t q_end;
    int32_t kv_begin;
    int32_t kv_end;
    int32_t kv_len;
};

// Does not wait for the loads.
__device__ __forceinline__ RawSequence
fetch_sequence(const KernelParams& params, int32_t batch_idx) {
    RawSequence raw = {batch_idx, batch_idx + 1, 0, params.kv_capacity, params.kv_capacity};
    if (params.cu_seqlens_q != nullptr) {
        raw.q_begin = params.cu_seqlens_q[batch_idx];
        raw.q_end = params.cu_seqlens_q[batch_idx + 1];
    }
    if (params.cu_seqlens_k != nullptr) [[unlikely]] {
        raw.kv_begin = params.cu_seqlens_k[batch_idx];
        raw.kv_end = params.cu_seqlens_k[batch_idx + 1];
    }
    if (params.seqused_k != nullptr) {
        raw.kv_len = params.seqused_k[batch_idx];
    }
    return raw;
}

// Clamped to what the tensors hold.
__device__ __forceinline__ Sequence
make_sequence(const KernelParams& params, const RawSequence& raw) {
    const auto clamp = [](int32_t value, int32_t least, int32_t most) {
        return min(max(value, least), most);
    };
    Sequence sequence;
    sequence.q_begin = clamp(raw.q_begin, 0, params.total_q);
    sequence.q_len = clamp(raw.q_end, sequence.q_begin, params.total_q) - sequence.q_begin;
    sequence.kv_begin = clamp(raw.kv_begin, 0, params.kv_capacity);
    const int32_t kv_end = clamp(raw.kv_end, sequence.kv_begin, params.kv_capacity);
    sequence.kv_len = clamp(raw.kv_len, 0, kv_end - sequence.kv_begin);
    if (params.shape.piece_units > 0) [[unlikely]] {
        // No more pieces than the workspace has slots for.
        const int64_t most =
            static_cast<int64_t>(params.shape.max_pieces) * params.shape.piece_units * kPlanKeys;
        sequence.kv_len = static_cast<int32_t>(smaller_of(sequence.kv_len, most));
    }
    return sequence;
}

// Whether the prefill kernel takes its queries: as the plan has it, which does not know how many rows
// the tensors have.
__device__ __forceinline__ bool is_long(const KernelParams& params, const RawSequence& raw) {
    return is_long(params.shape, static_cast<int64_t>(raw.q_end) - max(raw.q_begin, 0));
}

// As the split-KV kernel has it: without queries, if they are the prefill kernel's.
__device__ __forceinline__ Sequence load_sequence(const KernelParams& params, int32_t batch_idx) {
    const RawSequence raw = fetch_sequence(params, batch_idx);
    Sequence sequence = make_sequence(params, raw);
    if (is_long(params, raw)) {
        sequence.q_len = 0;
    }
    return sequence;
}

// The token of a packed row; there are fewer than 2^31 rows.
__device__ __forceinline__ int32_t token_of(const KernelParams& params, int32_t row) {
    uint32_t in_group;
    return static_cast<int32_t>(params.group(in_group, static_cast<uint32_t>(max(row, 0))));
}

// Whether a page is in the pool.
__device__ __forceinline__ bool is_page(const KernelParams& params, int32_t page) {
    return static_cast<uint32_t>(page) < static_cast<uint32_t>(params.num_pages);
}

// The sequence that a lane of the warp has.
__device__ __forceinline__ Sequence take(const Sequence& of_lane, int lane) {
    return {
        __shfl_sync(kWarp, of_lane.q_begin, lane),
        __shfl_sync(kWarp, of_lane.q_len, lane),
        __shfl_sync(kWarp, of_lane.kv_begin, lane),
        __shfl_sync(kWarp, of_lane.kv_len, lane),
    };
}

}  // namespace pagetile::gpu
