#pragma once

#include "pagetile/attention.h"
#include "pagetile/device.h"

#include <cstdint>
#include <string>

// The kernels that paged attention began with, for comparison and old callers: docs/legacy.md.
namespace pagetile {

inline constexpr int64_t kLegacyPartition = 512;  // keys

// Where the partitions of the second design leave their results; null: the first one. Dense.
struct LegacyScratch {
    float* exp_sums = nullptr;    // [B, Hq, partitions]
    float* max_logits = nullptr;  // [B, Hq, partitions]
    void* tmp_out = nullptr;      // [B, Hq, partitions, D], the type of the result
    int64_t partitions = 0;       // legacy_partitions() or more
};

// How many the call needs.
int64_t legacy_partitions(const AttentionParams& params);

// Attends with one query a sequence over caches of the legacy layout. Returns "", or what these kernels
// want and the call does not have: then nothing has been launched. On the CPU, as paged_attention does,
// without scratch.
std::string legacy_attention(
    const AttentionParams& params, const LegacyScratch& scratch, Stream stream
);

}  // namespace pagetile
