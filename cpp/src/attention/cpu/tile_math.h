#pragma once

// The two matrix products of a tile, over fp32 rows found by pointer. Every sum is built in an
// order that depends on the row and the key alone, never on the rows computed beside it: that is
// what makes results independent of batch and chunk.

#include "common/cpu_kernels.h"
#include "common/vec.h"

#include <utility>

namespace pagetile::PAGETILE_ISA {

using LaneSequence = std::make_integer_sequence<int, kLanes>;

// Lane of the pair (a, b) that lane `i` of add_halves<kWidth>(a, b) adds to the lane kWidth after
// it.
template <int kWidth>
constexpr int half_source(int i) {
    const int vec = i / (kLanes / 2);
    const int group = i % (kLanes / 2) / kWidth;
    return vec * kLanes + group * 2 * kWidth + i % kWidth;
}

template <int kWidth, int... kIndex>
[[gnu::always_inline]] inline Vec add_halves(Vec a, Vec b, std::integer_sequence<int, kIndex...>) {
    return __builtin_shufflevector(a, b, half_source<kWidth>(kIndex)...) +
           __builtin_shufflevector(a, b, (half_source<kWidth>(kIndex) + kWidth)...);
}

// kLanes vectors -> one vector whose lane i is the sum of vector i: the tree of reduce_add(), all
// of them at once.
template <int kWidth>
[[gnu::always_inline]] inline Vec reduce_all(Vec (&sums)[kLanes]) {
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) {
        sums[i] = add_halves<kWidth>(sums[2 * i], sums[2 * i + 1], LaneSequence{});
    }
    if constexpr (kWidth > 1) {
        return reduce_all<kWidth / 2>(sums);
    } else {
        return sums[0];
    }
}

// scores[r][n] = q_rows[r] . keys[n] for kRows rows and kLanes / kRows keys: one accumulator for
// each pair.
template <int kRows>
[[gnu::always_inline]] inline void dot_block(
    const float* q_rows, int64_t dim, const float* const* keys, float* scores
) {
    constexpr int kKeys = kLanes / kRows;
    Vec sums[kLanes] = {};
    for (int64_t d = 0; d < dim; d += kLanes) {
        Vec q[kRows];
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
            q[r] = load(q_rows + r * dim + d);
        }
#pragma GCC unroll 16
        for (int n = 0; n < kKeys; ++n) {
            const Vec key = load(keys[n] + d);
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) {
                sums[r * kKeys + n] += q[r] * key;
            }
        }
    }
    float flat[kLanes];
    store_as(flat, reduce_all<kLanes / 2>(sums));
    for (int r = 0; r < kRows; ++r) {
        __builtin_memcpy(scores + r * kTileN, flat + r * kKeys, kKeys * sizeof(float));
    }
}

// Scores of kRows rows against keys [begin, end) of the tile. begin and end are rounded outwards to
// the block of keys.
template <int kRows>
inline void score_rows(
    const float* q_rows,
    int64_t dim,
    const float* const* keys,
    int64_t begin,
    int64_t end,
    float* scores
) {
    constexpr int64_t kKeys = kLanes / kRows;
    for (int64_t n = begin / kKeys * kKeys; n < end; n += kKeys) {
        dot_block<kRows>(q_rows, dim, keys + n, scores + n);
    }
}

// out[r] += sum over n in [begin, end) of weights[r][n] * values[n], keys in ascending order, kVecs
// vectors of columns at d.
template <int kRows, int kVecs>
[[gnu::always_inline]] inline void weigh_block(
    const float* weights,
    const float* const* values,
    int64_t begin,
    int64_t end,
    int64_t dim,
    int64_t d,
    float* out
) {
    Vec sums[kRows][kVecs];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) {
            sums[r][v] = load(out + r * dim + d + v * kLanes);
        }
    }
    for (int64_t n = begin; n < end; ++n) {
        const float* value = values[n] + d;
        Vec columns[kVecs];
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) {
            columns[v] = load(value + v * kLanes);
        }
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
            const Vec weight = broadcast(weights[r * kTileN + n]);
#pragma GCC unroll 4
            for (int v = 0; v < kVecs; ++v) {
                sums[r][v] += weight * columns[v];
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) {
            store_as(out + r * dim + d + v * kLanes, sums[r][v]);
        }
    }
}

template <int kRows>
inline void weigh_rows(
    const float* weights,
    const float* const* values,
    int64_t begin,
    int64_t end,
    int64_t dim,
    float* out
) {
    if (begin >= end) {
        return;
    }
    constexpr int kVecs = kLanes == 16 ? 4 : 2;  // with 4 rows: 16 of 32 registers, or 8 of 16
    int64_t d = 0;
    for (; d + kVecs * kLanes <= dim; d += kVecs * kLanes) {
        weigh_block<kRows, kVecs>(weights, values, begin, end, dim, d, out);
    }
    for (; d < dim; d += kLanes) {
        weigh_block<kRows, 1>(weights, values, begin, end, dim, d, out);
    }
}

}  // namespace pagetile::PAGETILE_ISA
