#pragma once

// The last steps of a row: the sink, the sum of weights, the log-sum-exp, the type of the result.

#include "attention/cuda/sinks.cuh"
#include "attention/sm80/fragments.cuh"
#include "attention/sm80/softmax.cuh"
#include "common/ptx.cuh"

#include <cstdint>

namespace pagetile::sm80 {

inline constexpr float kLn2 = 0.6931471805599453f;

// Of a row and some keys: the largest score in log2 units, -inf if there were none; the sum of
// weights relative to it.
using RowSum = float2;

__device__ __forceinline__ float weight_of(const RowSum& part, float largest) {
    return part.x == -kInfinity ? 0.0f : ptx::exp2_approx(part.x - largest);
}

// Adds the head's sink to a row's sum. Returns what the row's sum of values must be multiplied with.
__device__ __forceinline__ float finish_row(const KernelParams& params, int head, RowSum& sum) {
    float factor = 1.0f;
    if (params.sinks != nullptr) {
        const float sink = gpu::read_sink(params, head) * kLog2e;
        const float largest = fmaxf(sum.x, sink);
        if (largest != -kInfinity) {
            factor = weight_of(sum, largest);
            sum.y = sum.y * factor + ptx::exp2_approx(sink - largest);
            sum.x = largest;
        }
    }
    return sum.y == 0.0f ? 0.0f : factor / sum.y;
}

// Of a finished row: natural log.
__device__ __forceinline__ float lse_of(const RowSum& sum) {
    return sum.y == 0.0f ? -kInfinity : (sum.x + log2f(sum.y)) * kLn2;
}

// Four elements of 16 bits.
__device__ __forceinline__ void write_words(
    const KernelParams& params, int64_t at, const uint2& four
) {
    auto* to = static_cast<uint16_t*>(params.out) + at;
    if (params.out_is_aligned) {
        *reinterpret_cast<uint2*>(to) = four;
        return;
    }
    to[0] = static_cast<uint16_t>(four.x);
    to[1] = static_cast<uint16_t>(four.x >> 16);
    to[2] = static_cast<uint16_t>(four.y);
    to[3] = static_cast<uint16_t>(four.y >> 16);
}

template <class Element>
__device__ __forceinline__ uint2 pack_four(const float (&values)[4]) {
    return make_uint2(
        MathType<Element>::pack(values[0], values[1]), MathType<Element>::pack(values[2], values[3])
    );
}

// Four elements of a result. Queries of 16 bits over pages like them have results like them.
template <class Config>
__device__ __forceinline__ void write_four(
    const KernelParams& params, int64_t at, const float (&values)[4]
) {
    if constexpr (Config::kElementBytes == 2) {
        write_words(params, at, pack_four<typename Config::Math>(values));
    } else if (params.out_dtype == DType::kBFloat16) {
        write_words(params, at, pack_four<cutlass::bfloat16_t>(values));
    } else if (params.out_dtype == DType::kFloat16) {
        write_words(params, at, pack_four<cutlass::half_t>(values));
    } else {
        auto* to = static_cast<float*>(params.out) + at;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            to[i] = values[i];
        }
    }
}

}  // namespace pagetile::sm80
