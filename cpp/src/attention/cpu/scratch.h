#pragma once

// The working memory of one tile. Part of the per-instruction-set kernels.

#include "common/cpu_kernels.h"
#include "common/vec.h"

namespace pagetile::PAGETILE_ISA {

// Where the parts of attend_scratch_bytes() stand. Row lengths are padded with zeros to whole
// vectors.
struct Scratch {
    float* q;         // [kTileM, d_padded]
    float* k;         // [kTileN, d_padded]
    float* v;         // [kTileN, dv_padded]
    float* out;       // [kTileM, dv_padded]
    float* scores;    // [kTileM, kTileN]
    float* row_max;   // [kTileM], log2 units
    float* row_sum;   // [kTileM]
    float* zero_row;  // [max(d_padded, dv_padded)]: what a page outside the pool holds
    int64_t d_padded;
    int64_t dv_padded;
};

inline Scratch lay_out(const AttentionParams& params, float* floats) {
    Scratch scratch;
    scratch.d_padded = round_up(params.head_dim, kLanes);
    scratch.dv_padded = round_up(params.head_dim_v, kLanes);
    const auto take = [&](int64_t count) {
        float* taken = floats;
        floats += count;
        return taken;
    };
    scratch.q = take(kTileM * scratch.d_padded);
    scratch.k = take(kTileN * scratch.d_padded);
    scratch.v = take(kTileN * scratch.dv_padded);
    scratch.out = take(kTileM * scratch.dv_padded);
    scratch.scores = take(kTileM * kTileN);
    scratch.row_max = take(kTileM);
    scratch.row_sum = take(kTileM);
    scratch.zero_row = take(larger(scratch.d_padded, scratch.dv_padded));
    return scratch;
}

inline void fill_zero(float* floats, int64_t count) {
    __builtin_memset(floats, 0, static_cast<size_t>(count) * sizeof(float));
}

// Clears the accumulators and the padding of every row, and no more: a tile may hold one key.
inline void clear(const AttentionParams& params, const Scratch& scratch, int64_t rows) {
    fill_zero(scratch.q, rows * scratch.d_padded);
    fill_zero(scratch.out, rows * scratch.dv_padded);
    fill_zero(scratch.zero_row, larger(scratch.d_padded, scratch.dv_padded));
    fill_zero(scratch.row_sum, rows);
    if (scratch.d_padded != params.head_dim) {
        fill_zero(scratch.k, kTileN * scratch.d_padded);
    }
    if (scratch.dv_padded != params.head_dim_v) {
        fill_zero(scratch.v, kTileN * scratch.dv_padded);
    }
}

}  // namespace pagetile::PAGETILE_ISA
