#pragma once

// From sums to results: the last step of an item.

#include "attention/cuda/sinks.cuh"
#include "attention/sm90/rows.cuh"

#include <cstdint>

namespace pagetile::sm90 {

// The sink joins a row's sum of weights. What values are to be scaled by.
__device__ __forceinline__ float finish_row(
    const gpu::KernelParams& params, int32_t head, float& largest, float& sum
) {
    sum += __shfl_xor_sync(kWarp, sum, 1);
    sum += __shfl_xor_sync(kWarp, sum, 2);
    float scale = 1.0f;
    if (params.sinks != nullptr) [[unlikely]] {
        const float sink = kLog2e * gpu::read_sink(params, head);
        const float now = fmaxf(largest, sink);
        scale = ptx::exp2_approx(largest - now);
        sum = sum * scale + ptx::exp2_approx(sink - now);
        largest = now;
    }
    return sum == 0.0f ? 0.0f : scale * ptx::rcp_approx(sum);
}

// The eight elements of 16 bits that a thread holds of every 32 columns, gathered within its four
// lanes to eight in a row: lane t then has columns 8 t to 8 t + 7.
__device__ __forceinline__ uint4 gather_columns(uint32_t (&pairs)[4]) {
    const auto t = static_cast<int>(threadIdx.x % 4);
#pragma unroll
    for (int step = 1; step <= 2; step *= 2) {
        const bool upper = (t & step) != 0;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int low = step == 1 ? 2 * i : i;
            const int high = low + step;
            const uint32_t sent = upper ? pairs[low] : pairs[high];
            const uint32_t got = __shfl_xor_sync(kWarp, sent, step);
            pairs[low] = upper ? got : pairs[low];
            pairs[high] = upper ? pairs[high] : got;
        }
    }
    return {pairs[0], pairs[1], pairs[2], pairs[3]};
}

// Where rows do not begin at multiples of 16 bytes.
__device__ __noinline__ inline void store_apart(uint16_t* to, uint4 eight) {
    const uint32_t pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        to[i] = static_cast<uint16_t>(pairs[i / 2] >> i % 2 * 16);
    }
}

// Where registers lack, nothing of what follows is to begin before: ptxas moves nothing over this.
template <class Config>
__device__ __forceinline__ void finish_part() {
    if constexpr (Config::kWidens) {
        __syncwarp();
    }
}

template <class Config, bool kAligned>
__device__ __forceinline__ void store_row(
    typename Config::Element* to,
    int32_t row,  // of the thread's two
    bool is_there,
    int32_t head_dim,
    float scale,
    const float (&out)[Config::kHeadDimV / 2]
) {
    using Element = typename Config::Element;
    const auto t = static_cast<int32_t>(threadIdx.x % 4);
#pragma unroll
    for (int j = 0; j < Config::kHeadDimV / 32; ++j) {
        uint32_t pairs[4];
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const int first = (4 * j + q) * 4 + 2 * row;
            pairs[q] = pack(Element{}, out[first] * scale, out[first + 1] * scale);
        }
        const uint4 eight = gather_columns(pairs);
        finish_part<Config>();
        const int32_t column = 32 * j + 8 * t;
        if (is_there && column < head_dim) {
            if constexpr (kAligned) {
                *reinterpret_cast<uint4*>(to + column) = eight;
            } else {
                store_apart(reinterpret_cast<uint16_t*>(to + column), eight);
            }
        }
    }
}

template <class Config>
__device__ __forceinline__ void store_results(
    const gpu::KernelParams& params,
    const Item& item,
    int warpgroup,
    float (&largest)[2],
    float (&sum)[2],
    const float (&out)[Config::kHeadDimV / 2]
) {
    using Element = typename Config::Element;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        // What both rows need is worked out twice, for want of registers.
        asm volatile("" : "+r"(warpgroup)::"memory");
        const Rows rows(params, warpgroup);
        const bool is_there = rows.token[i] < item.num_tokens;
        const int32_t head = item.kv_head * params.shape.group + rows.head[i];
        const int64_t row = item.sequence.q_begin + item.first_token + rows.token[i];
        finish_part<Config>();
        float scale = finish_row(params, is_there ? head : 0, largest[i], sum[i]);
        if constexpr (Config::kIsFloat8) {
            scale *= item.v_scale;
        }
        if (params.softmax_lse != nullptr && threadIdx.x % 4 == 0 && is_there) {
            params.softmax_lse[head * params.lse_head_stride + row * params.lse_row_stride] =
                sum[i] == 0.0f ? -kInfinity : (largest[i] + __log2f(sum[i])) * kLn2;
        }
        auto* to = static_cast<Element*>(params.out) + row * params.out_row_stride +
                   head * params.out_head_stride;
        if (params.out_is_aligned) [[likely]] {
            store_row<Config, true>(to, i, is_there, params.head_dim_v, scale, out);
        } else {
            store_row<Config, false>(to, i, is_there, params.head_dim_v, scale, out);
        }
    }
}

}  // namespace pagetile::sm90
