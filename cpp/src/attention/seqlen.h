#pragma once

#include "pagetile/attention.h"

#include <algorithm>
#include <cstdint>

namespace pagetile {

// Everything about one sequence that the metadata says, clamped to what the tensors hold: metadata
// on a device cannot be checked without a synchronisation, so no value of it may lead outside q,
// out, the block table or the pool.
struct SequenceLengths {
    int64_t q_begin;
    int64_t q_len;
    int64_t kv_len;
};

inline SequenceLengths sequence_lengths(const AttentionParams& params, int64_t batch_idx) {
    SequenceLengths lengths = {};
    if (params.cu_seqlens_q != nullptr) {
        lengths.q_begin = std::clamp<int64_t>(params.cu_seqlens_q[batch_idx], 0, params.total_q);
        lengths.q_len = std::clamp<int64_t>(
                            params.cu_seqlens_q[batch_idx + 1], lengths.q_begin, params.total_q
                        ) -
                        lengths.q_begin;
    } else {
        lengths.q_begin = batch_idx;
        lengths.q_len = 1;
    }
    int64_t capacity = params.max_pages * params.page_size;
    if (params.block_table == nullptr) {
        const int64_t begin =
            std::clamp<int64_t>(params.cu_seqlens_k[batch_idx], 0, params.num_pages);
        capacity =
            std::clamp<int64_t>(params.cu_seqlens_k[batch_idx + 1], begin, params.num_pages) -
            begin;
    }
    const int64_t used = params.seqused_k == nullptr ? capacity : params.seqused_k[batch_idx];
    lengths.kv_len = std::clamp<int64_t>(used, 0, capacity);
    return lengths;
}

}  // namespace pagetile
