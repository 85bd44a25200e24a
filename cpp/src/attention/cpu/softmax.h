#pragma once

// The online softmax, one row at a time. Part of the per-instruction-set kernels.

#include "common/cpu_kernels.h"
#include "common/vec.h"

namespace pagetile::PAGETILE_ISA {

inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

inline void scale_row(float* row, int64_t dim, float factor) {
    for (int64_t d = 0; d < dim; d += kLanes) {
        store_as(row + d, load(row + d) * factor);
    }
}

inline float log2_of(float x) { return __builtin_log2f(x); }

// How raw dot products of a row become scores in log2 units.
struct ScoreRule {
    float scale;    // times log2(e), or to softcap's own unit
    float softcap;  // times log2(e); 0 is off
    float slope;    // ALiBi, times log2(e)
    int64_t diagonal;
};

// One step of the online softmax on one row: scores -> weights of the keys [begin, end), counted
// from the tile's first. Returns the factor for what the row has summed so far.
inline float softmax_step(
    float* row,
    const ScoreRule& rule,
    int64_t first,
    int64_t begin,
    int64_t end,
    float& row_max,
    float& row_sum
) {
    const int64_t first_vec = begin / kLanes * kLanes;
    Vec largest = broadcast(-kInfinity);
    for (int64_t n = first_vec; n < end; n += kLanes) {
        Vec x = load(row + n) * rule.scale;
        if (rule.softcap != 0.0f) {
            x = rule.softcap * tanh(x);
        }
        const VecI position = lane_index() + static_cast<int32_t>(n);
        if (rule.slope != 0.0f) {
            const Vec distance =
                static_cast<float>(rule.diagonal - first) - __builtin_convertvector(position, Vec);
            x -= rule.slope * (distance < 0.0f ? -distance : distance);
        }
        const VecI seen =
            (position >= static_cast<int32_t>(begin)) & (position < static_cast<int32_t>(end));
        x = seen ? x : broadcast(-kInfinity);
        largest = vec_max(largest, x);
        store_as(row + n, x);
    }
    const float new_max = larger(row_max, reduce_max(largest));
    const float reference =
        new_max == -kInfinity ? 0.0f : new_max;  // no key seen so far: every weight is 2^-inf
    Vec sum = {};
    for (int64_t n = first_vec; n < end; n += kLanes) {
        const Vec weight = exp2(load(row + n) - reference);
        sum += weight;
        store_as(row + n, weight);
    }
    const float rescale = exp2(broadcast(row_max - reference))[0];
    row_sum = row_sum * rescale + reduce_add(sum);
    row_max = new_max;
    return rescale;
}

}  // namespace pagetile::PAGETILE_ISA
