#pragma once

// Operands of the tensor cores. Keys are the 16 rows of an instruction and packed query rows its 8
// columns: S^T = K Q^T, then O^T = V^T P^T. So a decode step of 4 or 8 heads wastes nothing.
//
// In an accumulator of 16 x 8, lane 4 g + t holds [0] (g, 2t), [1] (g, 2t + 1), [2] (g + 8, 2t),
// [3] (g + 8, 2t + 1).

#include "attention/cuda/widen.cuh"
#include "attention/sm80/kv_ring.cuh"
#include "common/ptx.cuh"

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/mma_sm80.hpp>
#include <cutlass/numeric_types.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

namespace pagetile::sm80 {

using gpu::widen;
using gpu::widen_in_turn;

// What the tensor cores multiply: fp16 or bf16, two to a register.
template <class Math>
struct MathType;

template <>
struct MathType<cutlass::half_t> {
    using Mma = cute::SM80_16x8x16_F32F16F16F32_TN;
    static constexpr uint32_t kExponents = 0x7c007c00;  // all ones: infinity or NaN

    static __device__ uint32_t pack(float low, float high) {
        const __half2 pair = __floats2half2_rn(low, high);
        return reinterpret_cast<const uint32_t&>(pair);
    }

    static __device__ float2 unpack(uint32_t pair) {
        return __half22float2(reinterpret_cast<const __half2&>(pair));
    }
};

template <>
struct MathType<cutlass::bfloat16_t> {
    using Mma = cute::SM80_16x8x16_F32BF16BF16F32_TN;
    static constexpr uint32_t kExponents = 0x7f807f80;

    static __device__ uint32_t pack(float low, float high) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        return reinterpret_cast<const uint32_t&>(pair);
    }

    static __device__ float2 unpack(uint32_t pair) {
        return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair));
    }
};

template <class Config>
struct Fragments {
    using Math = MathType<typename Config::Math>;
    using Stored = typename Config::Stored;
    using KLayout = typename Config::KLayout;
    using VLayout = typename Config::VLayout;
    static constexpr bool kFloat8 = Config::kElementBytes == 1;
    static constexpr int kKSteps = Config::kHeadDim / 16;  // of 16 of the head dimension
    static constexpr int kVSteps = Config::kHeadDimV / 16;
    // 16 bytes of an fp8 row are 16 elements: what ldmatrix reads for two steps, two steps use.
    static constexpr int kStepsPerLoad = kFloat8 ? 2 : 1;

    // Where this lane reads the first 16 bytes of a tile's keys or values, in shared memory, if the tile
    // is at `tile` there.
    static __device__ __forceinline__ int first_of_keys(int tile) {
        const int lane = static_cast<int>(threadIdx.x % 32);
        return tile + KLayout::offset(lane % 16, lane / 16);
    }

    static __device__ __forceinline__ int first_of_values(int tile) {
        const int lane = static_cast<int>(threadIdx.x % 32);
        return tile + (kFloat8 ? VLayout::offset(lane % 16, lane / 16)
                               : VLayout::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2));
    }

    // Accumulates the scores of 16 keys, `key` and following, with 8 rows.
    template <int kRowSteps>
    static __device__ __forceinline__ void multiply_keys(
        float (&scores)[kRowSteps][4],
        int first_of_keys,
        int key,
        const uint32_t (&q)[kRowSteps][kKSteps][2]
    ) {
        float odd[kRowSteps][4] = {};  // two chains of sums, for the latency of one
#pragma unroll
        for (int k = 0; k < kKSteps; k += kStepsPerLoad) {
            uint32_t a[4];
            load_matrices<false>(
                a, KLayout::offset_from(first_of_keys, key, 2 * k / kStepsPerLoad)
            );
            if constexpr (kFloat8) {
                // Lane (g, t) has elements 4t..4t+3 of a chunk where the instruction wants 2t, 2t + 1,
                // 2t + 8, 2t + 9: the order of the head dimension is free, Q is loaded in the same.
                uint32_t first[4];
                uint32_t second[4];
                widen<Stored>(first[0], first[2], a[0]);
                widen<Stored>(first[1], first[3], a[1]);
                widen<Stored>(second[0], second[2], a[2]);
                widen<Stored>(second[1], second[3], a[3]);
#pragma unroll
                for (int n = 0; n < kRowSteps; ++n) {
                    multiply(scores[n], first, q[n][k]);
                    multiply(odd[n], second, q[n][k + 1]);
                }
            } else {
#pragma unroll
                for (int n = 0; n < kRowSteps; ++n) {
                    multiply(k % 2 == 0 ? scores[n] : odd[n], a, q[n][k]);
                }
            }
        }
#pragma unroll
        for (int n = 0; n < kRowSteps; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                scores[n][i] += odd[n][i];
            }
        }
    }

    // Weights of 16 keys x 8 rows, from an accumulator's layout to an operand's.
    static __device__ __forceinline__ void turn_weights(
        uint32_t (&weights)[2], const float (&accumulator)[4]
    ) {
        const uint32_t upper = Math::pack(accumulator[0], accumulator[1]);
        const uint32_t lower = Math::pack(accumulator[2], accumulator[3]);
        cute::SM75_U32x1_MOVM_T::copy(upper, weights[0]);
        cute::SM75_U32x1_MOVM_T::copy(lower, weights[1]);
    }

    // Calls use(step, a) with the operand of every 16 of V's head dimension and 16 keys.
    template <class Use>
    static __device__ __forceinline__ void for_each_value(
        int first_of_values, int key, const Use& use
    ) {
#pragma unroll
        for (int step = 0; step < kVSteps; step += kStepsPerLoad) {
            uint32_t a[4];
            load_matrices<true>(
                a, VLayout::offset_from(first_of_values, key, 2 * step / kStepsPerLoad)
            );
            if constexpr (kFloat8) {
                // Transposed in pairs: an even and an odd element of two keys. The even ones of 16
                // are the instruction's upper eight rows, the odd ones its lower eight.
                static constexpr uint32_t kByElement = 0x3120;
                uint32_t first[4];
                uint32_t second[4];
                widen<Stored>(first[0], first[1], __byte_perm(a[0], 0, kByElement));
                widen<Stored>(first[2], first[3], __byte_perm(a[1], 0, kByElement));
                widen<Stored>(second[0], second[1], __byte_perm(a[2], 0, kByElement));
                widen<Stored>(second[2], second[3], __byte_perm(a[3], 0, kByElement));
                use(step, first);
                use(step + 1, second);
            } else {
                use(step, a);
            }
        }
    }

    // The elements of V's head dimension that accumulators [0], [1] and [2], [3] of a step stand for.
    static __device__ int upper_element(int step, int lane) {
        return step * 16 + (kFloat8 ? lane / 4 * 2 : lane / 4);
    }

    static __device__ int lower_element(int step, int lane) {
        return upper_element(step, lane) + (kFloat8 ? 1 : 8);
    }

    static __device__ __forceinline__ void multiply(
        float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]
    ) {
        Math::Mma::fma(
            d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3], b[0], b[1], d[0], d[1], d[2], d[3]
        );
    }

private:
    template <bool kTransposed>
    static __device__ __forceinline__ void load_matrices(uint32_t (&a)[4], int from) {
        const auto& rows = in_shared_memory<const cute::uint128_t>(from);
        if constexpr (kTransposed) {
            cute::SM75_U16x8_LDSM_T::copy(rows, a[0], a[1], a[2], a[3]);
        } else {
            cute::SM75_U32x4_LDSM_N::copy(rows, a[0], a[1], a[2], a[3]);
        }
    }
};

}  // namespace pagetile::sm80
