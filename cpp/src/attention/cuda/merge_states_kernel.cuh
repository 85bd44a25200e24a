#pragma once

#include "common/fast_divide.h"
#include "common/ptx.cuh"

#include <cute/config.hpp>
#include <cutlass/array.h>
#include <cutlass/functional.h>
#include <cutlass/numeric_conversion.h>

#include <cstdint>
#include <limits>

namespace pagetile::gpu {

// A tensor by token and head. Strides count T; one that is never stepped is 0.
template <class T>
struct MergeRows {
    T* data;
    int64_t token_stride;
    int64_t head_stride;

    __device__ __forceinline__ T* at(uint32_t token, uint32_t head) const {
        return data + (token * token_stride + head * head_stride);
    }
};

template <class Vector>
struct MergeKernelParams {
    MergeRows<const Vector> out_a;  // [T, Hq, vectors]
    MergeRows<const Vector> out_b;  // [T, Hq, vectors]
    MergeRows<Vector> out;          // [T, Hq, vectors]; may be out_a or out_b
    MergeRows<const float> lse_a;   // [T, Hq]
    MergeRows<const float> lse_b;   // [T, Hq]
    MergeRows<float> lse;           // [T, Hq]; null, or may be lse_a or lse_b
    FastDivide num_heads;
    uint32_t num_rows;  // tokens times heads
    uint32_t tokens_with_a;
    uint32_t vectors;     // of a row
    uint32_t lanes_log2;  // a row has 2^lanes_log2 threads, all in one warp
};

inline constexpr int kMergeThreads = 128;
inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

// What the sides of a row weigh. A side that saw no key weighs nothing: 0, or NaN where the other
// side's lse is NaN.
struct MergedRow {
    float weight_a;
    float weight_b;
    float lse;
};

__device__ __forceinline__ MergedRow merge_row(float lse_a, float lse_b) {
    constexpr float kLog2e = 1.4426950408889634f;
    constexpr float kLn2 = 0.6931471805599453f;
    const float largest = cutlass::maximum<float, /*PropagateNaN=*/true>{}(lse_a, lse_b);
    if (largest == -kInfinity) {
        return {0.0f, 0.0f, -kInfinity};
    }
    const float exp_a = ptx::exp2_approx((lse_a - largest) * kLog2e);
    const float exp_b = ptx::exp2_approx((lse_b - largest) * kLog2e);
    const float sum = exp_a + exp_b;  // from 1 to 2
    // Not divided: a division takes its slow path wherever a weight is 0. Exact for a sum of 1.
    const float estimate = ptx::rcp_approx(sum);
    const float inverse = fmaf(estimate, fmaf(-sum, estimate, 1.0f), estimate);
    return {exp_a * inverse, exp_b * inverse, largest + log2f(sum) * kLn2};
}

template <class Element, int kVector>
__device__ __forceinline__ cutlass::AlignedArray<Element, kVector> merge_vectors(
    const cutlass::AlignedArray<Element, kVector>& a,
    const cutlass::AlignedArray<Element, kVector>& b,
    const MergedRow& row
) {
    const auto values_a = cutlass::NumericArrayConverter<float, Element, kVector>{}(a);
    const auto values_b = cutlass::NumericArrayConverter<float, Element, kVector>{}(b);
    cutlass::Array<float, kVector> values;
    CUTE_UNROLL
    for (int i = 0; i < kVector; ++i) {
        // Spelt out, so that every width of vectors rounds alike.
        values[i] = fmaf(row.weight_a, values_a[i], row.weight_b * values_b[i]);
    }
    cutlass::AlignedArray<Element, kVector> merged;
    static_cast<cutlass::Array<Element, kVector>&>(merged) =
        cutlass::NumericArrayConverter<Element, float, kVector>{}(values);
    return merged;
}

// grid: 2^lanes_log2 threads for each (token, head). A thread takes one vector of the row, of a long
// row every 2^lanes_log2-th.
template <class Element, int kVector>
__global__ void __launch_bounds__(kMergeThreads) merge_states_kernel(
    const __grid_constant__ MergeKernelParams<cutlass::AlignedArray<Element, kVector>> params
) {
    using Vector = cutlass::AlignedArray<Element, kVector>;

    // This thread's row
    const uint32_t lanes = 1u << params.lanes_log2;
    const uint32_t lane = threadIdx.x & (lanes - 1);
    const uint32_t row =
        blockIdx.x * (kMergeThreads >> params.lanes_log2) + (threadIdx.x >> params.lanes_log2);
    if (row >= params.num_rows) {
        return;
    }
    uint32_t head;
    const uint32_t token = params.num_heads(head, row);
    const Vector* row_a = params.out_a.at(token, head);
    const Vector* row_b = params.out_b.at(token, head);
    Vector* row_out = params.out.at(token, head);

    // Loads: the first vectors do not wait for the lse
    bool has_a = token < params.tokens_with_a;
    bool has_b = true;
    Vector a;
    Vector b;
    const auto load = [&](uint32_t vec) {
        a.clear();
        b.clear();
        if (has_a && vec < params.vectors) {
            a = row_a[vec];
        }
        if (has_b && vec < params.vectors) {
            b = row_b[vec];
        }
    };
    float lse_a = -kInfinity;
    if (has_a) {
        lse_a = *params.lse_a.at(token, head);
    }
    float lse_b = *params.lse_b.at(token, head);
    load(lane);

    // Weights
    lse_a = lse_a == kInfinity ? -kInfinity : lse_a;  // FA2 writes +inf for no key
    lse_b = lse_b == kInfinity ? -kInfinity : lse_b;
    const MergedRow merged = merge_row(lse_a, lse_b);

    // Values. A side without keys may hold anything, NaN too: it is left out, not multiplied by 0
    has_a = lse_a != -kInfinity;
    has_b = lse_b != -kInfinity;
    if (!has_a) {
        a.clear();
    }
    if (!has_b) {
        b.clear();
    }
    for (uint32_t vec = lane; vec < params.vectors;) {
        row_out[vec] = merge_vectors<Element, kVector>(a, b, merged);
        vec += lanes;
        load(vec);
    }

    // The lse, which may lie where lse_a or lse_b did: all threads of the row have read those
    if (params.lse.data != nullptr) {
        __syncwarp();
        if (lane == 0) {
            *params.lse.at(token, head) = merged.lse;
        }
    }
}

}  // namespace pagetile::gpu
